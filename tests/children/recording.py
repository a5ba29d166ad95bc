"""All that is logged, at the lowest level, and what must never be in it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from child import Context

_FORMAT = "%(levelname)s %(name)s %(message)s %(args)r"


class Everything(logging.Handler):
    """Records as text, with their tracebacks and arguments."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(logging.Formatter(_FORMAT))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def record(ctx: Context) -> None:
    handler = ctx.values["everything"] = Everything()
    for name in ("", "ucxkv"):
        logging.getLogger(name).setLevel(logging.DEBUG)
    logging.getLogger().addHandler(handler)


def recorded(ctx: Context) -> list[str]:
    return list(ctx.values["everything"].lines)


def _shapes(value: int | bytes) -> list[str]:
    """How a value would show."""
    if isinstance(value, int):
        return [str(value), f"{value:x}", f"{value:X}"]
    return [repr(value)[2:-1], value.hex()]


def sensitive(ctx: Context) -> dict[str, list[str]]:
    """What must not be logged, by what it is, in every shape that it might have."""
    running = ctx.engine._running
    native = running.native
    found: dict[str, list[Any]] = {
        "word": [native.word0, native.words_address],
        "key": [native.words_rkey],
        "address": [native.rma_address, native.worker_address(0)],
        "token": [],
    }
    for info in ctx.engine.links():
        link = running.links.lookup(info.cluster_id)
        found["token"].append(link.native.token)
        for entry in link.remote.values():
            found["word"].append(entry.generation)
    for entry in running.catalogue.snapshot():
        addresses, _, rkeys = entry.native.export()
        found["word"].append(entry.native.generation)
        found["key"] += rkeys
        found["address"] += [
            int.from_bytes(addresses[place : place + 8], "little")
            for place in range(0, len(addresses), 8)
        ]
    return {
        kind: [shape for value in values if value for shape in _shapes(value)]
        for kind, values in found.items()
    }


def hold(ctx: Context, name: str) -> str:
    """The token of a new hold."""
    return str(ctx.engine.hold(ctx.caches[name], None, 60_000).token)


def pull_held(ctx: Context, name: str, cluster_id: int, cache_id: int, token: str) -> None:
    import ucxkv

    ctx.engine.pull_kv_cache(
        ucxkv.CacheIndex(cluster_id, cache_id),
        ctx.caches[name],
        timeout_ms=5000,
        hold=token,
        notice=b"all here",
    )


def break_protocol(ctx: Context, cluster_id: int) -> None:
    """Say what no peer may, over a link that is up."""
    from ucxkv import wire

    table = ctx.engine._running.links
    link = table.lookup(cluster_id)
    table.post(link._connection.send, wire.Synced(1 << 40))


def fail_inside(ctx: Context, cluster_id: int) -> None:
    """Have a bug of our own show in the log, with its traceback."""
    link = ctx.engine._running.links.lookup(cluster_id)

    def fail(message: Any) -> None:
        raise RuntimeError("a bug")

    link._handle = fail

"""Actions that fork a child with an engine in it."""

from __future__ import annotations

import gc
import os
import pickle
import warnings
from typing import TYPE_CHECKING

import child
from children import actions

if TYPE_CHECKING:
    from child import Context


def fork(
    ctx: Context, way: str, cluster_id: int, cache_id: int
) -> tuple[list[tuple[str, str, str]], int]:
    """Fork; let the copy try the engine and end in one `way`: what it was told, and its status."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.close(reader)
        said: list[tuple[str, str, str]] = []
        try:
            if way in ("exit", "finalize", "collect"):
                said = try_engine(ctx, cluster_id, cache_id)
            if way == "finalize":
                ctx.engine.finalize()
            elif way == "collect":
                ctx.engine = None
                ctx.caches.clear()
                ctx.values.clear()
                gc.collect()
            os.write(writer, pickle.dumps(said))
        except BaseException as error:
            os.write(writer, pickle.dumps([(way, "ok", f"{type(error).__name__}: {error}")]))
            os._exit(3)
        os.close(writer)
        if way == "_exit":
            os._exit(0)
        if way == "exec":
            os.execv("/bin/true", ["true"])
        raise child.ForkedExit(0)
    os.close(writer)
    data = b""
    while piece := os.read(reader, 65536):
        data += piece
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    return (pickle.loads(data) if data else [], os.waitstatus_to_exitcode(status))


def try_engine(ctx: Context, cluster_id: int, cache_id: int) -> list[tuple[str, str, str]]:
    import ucxkv

    engine = ctx.engine
    calls = {
        "pull": lambda: actions.pull(ctx, "kv", cluster_id, cache_id),
        "links": lambda: actions.attempt(engine.links),
        "link": lambda: actions.try_link(ctx, [(9, ("127.0.0.1", 9))]),
        "register": lambda: actions.attempt(lambda: actions.make_cache(ctx, "forked", 1, (1, 10))),
        "unregister": lambda: actions.attempt(
            lambda: engine.unregister_kv_cache(ctx.caches["kv"].cache_id)
        ),
        "another engine": lambda: actions.attempt(ucxkv.LlmDataDist(77).initialize),
    }
    said = []
    for name, call in calls.items():
        outcome = call()
        said.append((name, outcome.kind, outcome.message))
    return said

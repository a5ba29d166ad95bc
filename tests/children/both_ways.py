"""Mixed traffic between two engines, from several threads in each, every byte of it checked.

Each thread is a lane.  It has caches of its own to pull into (its sinks), and at the peer caches of
its own to push into (its inboxes), and of all of them an image: what they must hold, guard bytes
included.  What the peer's application has to do for a lane (register, hold, quiesce) is asked over
a socket that the two processes share.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import random
import socket
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np

import model
from children import actions
from children.actions import ALL
from model import Arena, Bytes

if TYPE_CHECKING:
    from child import Context

LAYERS = 3
PER_LAYER = 2
TENSORS = LAYERS * PER_LAYER
# Blocks, and bytes of each.  A slot of "small" is six blocks of "pages".
KINDS = {"small": (16, 3000), "pages": (48, 500), "wide": (2, 300_000)}
PATIENT_MS = 20_000
Patch = tuple[int, int, Bytes]


class Wrong(Exception):
    """A lane has found something that must not be."""


class WrongBytes(Wrong):
    """Bytes that nothing may have written, or that have not come."""


class Gone(Exception):
    """The other process has closed the wire."""


class Wire:
    """Calls to the other process and from it, over the socket that the two share."""

    def __init__(self, fd: int, serve: Callable[..., Any]) -> None:
        self._connection = Connection(fd)
        self._serve = serve
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._over = False
        self._pool = ThreadPoolExecutor(4, "served")
        # All of its threads exist from the start, so that they can be counted.
        barrier = threading.Barrier(5)
        for _ in range(4):
            self._pool.submit(barrier.wait)
        barrier.wait()
        self._reader = threading.Thread(target=self._read, name="wire", daemon=True)
        self._reader.start()

    def _send(self, message: tuple[Any, ...]) -> None:
        with self._lock:
            self._connection.send(message)

    def _read(self) -> None:
        try:
            while True:
                number, what, value = self._connection.recv()
                if what == "answer":
                    self._waiting.pop(number).set_result(value)
                elif what == "error":
                    self._waiting.pop(number).set_exception(Wrong(value))
                else:
                    self._pool.submit(self._handle, number, what, value)
        except (EOFError, OSError):
            self._over = True
        for number in list(self._waiting):
            future = self._waiting.pop(number, None)
            if future is not None:
                future.set_exception(Gone())

    def _handle(self, number: int, what: str, args: tuple[Any, ...]) -> None:
        try:
            answer = number, "answer", self._serve(what, *args)
        except Exception as error:
            answer = number, "error", f"{what}: {type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            self._send(answer)

    def begin(self, what: str, *args: Any) -> Future[Any]:
        number = next(self._numbers)
        future: Future[Any] = Future()
        self._waiting[number] = future
        try:
            self._send((number, what, args))
        except OSError:
            self._over = True
        if self._over and self._waiting.pop(number, None):
            future.set_exception(Gone())
        return future

    def ask(self, what: str, *args: Any) -> Any:
        return self.begin(what, *args).result(60)

    def close(self) -> None:
        self._pool.shutdown()
        # Closing a descriptor does not end a read of it.
        end = socket.socket(fileno=os.dup(self._connection.fileno()))
        with end, contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._connection.close()


class Owned:
    """A cache of ours."""

    def __init__(self, ctx: Context, kind: str, access: str, data: Sequence[Bytes] | None) -> None:
        self.ctx = ctx
        self.kind = kind
        self.arena = Arena(TENSORS, int(np.prod(KINDS[kind])))
        self.tensors = [raw.reshape(KINDS[kind]) for raw in self.arena.raws()]
        for number, tensor in enumerate(self.tensors):
            tensor[:] = 0 if data is None else data[number]
        self.cache = actions.register_arena(ctx, self.arena, KINDS[kind], access=access)

    def drop(self, timeout_ms: int) -> None:
        """Unregister; the memory is used for something else at once."""
        self.ctx.engine.unregister_kv_cache(self.cache.cache_id, timeout_ms=timeout_ms)
        for tensor in self.tensors:
            tensor[:] = 0xEE

    def digests(self) -> list[int]:
        return [zlib.crc32(tensor) for tensor in self.tensors]


class Image:
    """What a cache must hold."""

    def __init__(self, kind: str, arena: Arena | None = None) -> None:
        if arena is None:
            # Not np.zeros, whose memory would come into being later, like a leak.
            self.tensors = [np.full(KINDS[kind], 0, np.uint8) for _ in range(TENSORS)]
            return
        self.buffer = arena.buffer.copy()
        self.tensors = [
            self.buffer[offset : offset + arena.nbytes].reshape(KINDS[kind])
            for offset in arena.offsets
        ]

    def apply(self, patches: Sequence[Patch]) -> None:
        for tensor, block, data in patches:
            self.tensors[tensor][block, : data.size] = data

    def digests(self) -> list[int]:
        return [zlib.crc32(tensor) for tensor in self.tensors]


@dataclass
class Move:
    """A transfer from one cache to another: its arguments, and the bytes that it must leave."""

    src_slot: int
    dst_slot: int
    size: int
    src_blocks: list[int] | None
    dst_blocks: list[int] | None
    src_layers: tuple[int, int]
    dst_layers: tuple[int, int]
    patches: list[Patch]

    @property
    def bytes(self) -> int:
        return sum(data.size for _, _, data in self.patches)

    @property
    def targets(self) -> list[int]:
        return [self.dst_slot] if self.dst_blocks is None else self.dst_blocks

    def ext(self) -> Any:
        import ucxkv

        return ucxkv.KvCacheExtParam(self.src_layers, self.dst_layers, PER_LAYER)


def some_layers(rng: random.Random) -> tuple[tuple[int, int], tuple[int, int]]:
    if rng.random() < 0.5:
        return ALL, ALL
    count = rng.randint(1, LAYERS)
    first, other = rng.randint(0, LAYERS - count), rng.randint(0, LAYERS - count)
    return (first, first + count - 1), (other, other + count - 1)


def layers_of(move: Move) -> tuple[int, int]:
    """The first tensor of its destination, and the number of its layers."""
    first = min(tensor for tensor, _, _ in move.patches)
    last = max(tensor for tensor, _, _ in move.patches)
    return first, (last - first + 1) // PER_LAYER


def some_move(
    rng: random.Random,
    data: dict[str, list[Bytes]],
    kind: str,
    form: str,
    *,
    push: bool = False,
    dst_slot: int | None = None,
) -> tuple[str, Move]:
    """A move into a cache of `kind`, and the kind of its source, whose bytes are in `data`."""
    blocks, length = KINDS[kind]
    src_layers, dst_layers = some_layers(rng)
    src_slot, size = 0, -1
    src_blocks = dst_blocks = None
    source = kind
    if form == "continuous":
        kind, source = "pages", "small"
        blocks, length = KINDS[kind]
        # A push names no slot of its source.
        src_slot = 0 if push else rng.randrange(KINDS[source][0])
        dst_blocks = rng.sample(range(blocks), rng.randint(1, KINDS[source][1] // length))
        pieces = [(src_slot, place * length, block) for place, block in enumerate(dst_blocks)]
    elif form == "paged":
        count = rng.randint(1, blocks)
        src_blocks = [rng.randrange(blocks) for _ in range(count)]
        if rng.random() < 0.3:
            src_blocks.sort()
        dst_blocks = rng.sample(range(blocks), count)
        pieces = [(one, 0, other) for one, other in zip(src_blocks, dst_blocks, strict=True)]
    else:
        src_slot = rng.randrange(blocks)
        dst_slot = rng.randrange(blocks) if dst_slot is None else dst_slot
        if rng.random() < 0.5:
            size = length = rng.randint(1, length)
        pieces = [(src_slot, 0, dst_slot)]
    first, last = (0, LAYERS - 1) if src_layers == ALL else src_layers
    shift = (0 if dst_layers == ALL else dst_layers[0]) - first
    patches = [
        (
            tensor + shift * PER_LAYER,
            block,
            data[source][tensor][slot, start : start + length].copy(),
        )
        for tensor in range(first * PER_LAYER, (last + 1) * PER_LAYER)
        for slot, start, block in pieces
    ]
    move = Move(
        src_slot, dst_slot or 0, size, src_blocks, dst_blocks, src_layers, dst_layers, patches
    )
    return source, move


class Station:
    """What one process has: its caches, its lanes, and what it does for the other's lanes."""

    def __init__(
        self, ctx: Context, other: int, lanes: int, seeds: tuple[int, int], wire: int
    ) -> None:
        self.ctx = ctx
        self.engine = ctx.engine
        self.other = other
        self.near = source_data(seeds[0])
        self.far = source_data(seeds[1])
        self.sources = {kind: Owned(ctx, kind, "r", self.near[kind]) for kind in KINDS}
        self.private = {kind: Owned(ctx, kind, "", self.near[kind]) for kind in KINDS}
        self.inboxes = [
            {kind: Owned(ctx, kind, "rw", None) for kind in KINDS} for _ in range(lanes)
        ]
        self.extra: dict[int, Owned] = {}
        self.holds: dict[int, Any] = {}
        self.keys = itertools.count(1)
        self.notices: list[bytes] = []
        self.wire = Wire(wire, self.serve)
        self.lanes: list[Lane] = []

    def ids(self) -> dict[str, Any]:
        return {
            "sources": {kind: owned.cache.cache_id for kind, owned in self.sources.items()},
            "inboxes": [
                {kind: owned.cache.cache_id for kind, owned in inbox.items()}
                for inbox in self.inboxes
            ],
        }

    # What the other's lanes ask for

    def serve(self, what: str, *args: Any) -> Any:
        return getattr(self, f"serve_{what}")(*args)

    def serve_reuse(self, lane: int, kind: str, blocks: list[int], value: int) -> None:
        inbox = self.inboxes[lane][kind]
        self.engine.quiesce(inbox.cache, blocks, timeout_ms=PATIENT_MS)
        for tensor in inbox.tensors:
            tensor[blocks] = value

    def serve_register(self, kind: str, mask: int) -> tuple[int, int]:
        key = next(self.keys)
        data = [tensor ^ np.uint8(mask) for tensor in self.near[kind]]
        self.extra[key] = Owned(self.ctx, kind, "r", data)
        return key, self.extra[key].cache.cache_id

    def serve_drop(self, key: int, timeout_ms: int) -> None:
        self.extra.pop(key).drop(timeout_ms)

    def serve_hold(self, key: int, kind: str, ttl_ms: float) -> tuple[int, str]:
        """Hold a source, or an extra cache where `key` names one."""
        owned = self.extra[key] if key else self.sources[kind]
        hold = self.engine.hold(owned.cache, None, ttl_ms)
        number = next(self.keys)
        self.holds[number] = hold
        return number, hold.token

    def serve_recycle(self, number: int, key: int) -> None:
        """End a hold and give its memory another use; the cache stays registered."""
        self.holds[number].release()
        for tensor in self.extra[key].tensors:
            tensor[:] = 0xEE

    def serve_outcome(self, number: int) -> str | None:
        return self.holds.pop(number).outcome

    # Its own traffic

    def traffic(self, seconds: float, seed: int) -> dict[str, Any]:
        stop = threading.Event()
        drain = threading.Thread(target=self.drain, args=(stop,))
        drain.start()
        end = time.monotonic() + seconds
        threads = [threading.Thread(target=lane.run, args=(end, seed)) for lane in self.lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stop.set()
        drain.join()
        done: Counter[str] = Counter()
        for lane in self.lanes:
            done.update(lane.done)
            lane.done.clear()
        return {
            "problems": [problem for lane in self.lanes for problem in lane.problems],
            "done": dict(done),
        }

    def drain(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self.notices += [notice.data for notice in self.engine.notices(50)]

    def settled(self) -> dict[str, Any]:
        """What is left when both sides have finished."""
        self.notices += [notice.data for notice in self.engine.notices(100)]
        link = self.engine._running.links.lookup(self.other).native
        stats = self.engine.stats()
        return {
            "running": (link.pulls, link.serving, stats.holds, stats.notices_queued),
            "caches": len(self.engine._running.catalogue.snapshot()),
            "extra": (len(self.extra), len(self.holds)),
        }

    def wrong(self) -> list[str]:
        """What has changed that should not have."""
        found = []
        owned = [*self.sources.values(), *self.private.values()]
        for one in owned:
            if any(
                not np.array_equal(tensor, data)
                for tensor, data in zip(one.tensors, self.near[one.kind], strict=True)
            ):
                found.append(f"a source has changed: {one.kind}")
        for one in [*owned, *(box for inbox in self.inboxes for box in inbox.values())]:
            if not one.arena.guards_intact():
                found.append(f"guard bytes have changed: {one.kind}")
        for lane in self.lanes:
            for kind in KINDS:
                lane.check(kind, found.append)
        return found


@functools.cache
def source_data(seed: int) -> dict[str, list[Bytes]]:
    return {
        kind: [
            model.pattern(seed * 1000 + tensor, 0, blocks * length).reshape(blocks, length)
            for tensor in range(TENSORS)
        ]
        for kind, (blocks, length) in KINDS.items()
    }


class Lane:
    """One thread's part of the traffic."""

    def __init__(self, station: Station, number: int, peers: dict[str, Any]) -> None:
        self.station = station
        self.engine = station.engine
        self.other = station.other
        self.number = number
        self.source_ids: dict[str, int] = peers["sources"]
        self.inbox_ids: dict[str, int] = peers["inboxes"][number]
        self.sinks = {kind: Owned(station.ctx, kind, "", None) for kind in KINDS}
        self.images = {kind: Image(kind, self.sinks[kind].arena) for kind in KINDS}
        self.inboxes = {kind: Image(kind) for kind in KINDS}
        self.rng = random.Random()
        self.values = itertools.cycle(range(1, 250))
        self.count = 0
        self.done: Counter[str] = Counter()
        self.problems: list[str] = []
        # Notices of pulls that have succeeded, and of others.
        self.told: list[bytes] = []
        self.perhaps_told: list[bytes] = []

    def run(self, end: float, seed: int) -> None:
        self.rng.seed(f"{seed} {self.number}")
        name = ""
        try:
            while time.monotonic() < end and not self.problems:
                name = self.rng.choices(list(WORK), WORK.values())[0]
                getattr(self, name)()
                self.done[name] += 1
        except Exception as error:
            self.problems.append(
                f"lane {self.number}, {name}, {self.count}: {type(error).__name__}: {error}"
            )

    # Parts of what follows

    def kind(self) -> str:
        return self.rng.choice(["small", "small", "small", "pages", "wide"])

    def form(self) -> str:
        return self.rng.choice(["slots", "paged", "continuous"])

    def index(self, cache_id: int, slot: int = 0) -> Any:
        import ucxkv

        return ucxkv.CacheIndex(self.other, cache_id, slot)

    def pulling(
        self, kind: str, cache_id: int, move: Move, *, wait: bool = False, **more: Any
    ) -> Any:
        """Start a pull into the sink of a kind; its Transfer, or its report if it is waited for."""
        more = {"timeout_ms": PATIENT_MS, **more}
        cache = self.sinks[kind].cache
        index = self.index(cache_id, move.src_slot)
        self.count += 1
        if move.dst_blocks is None:
            function = self.engine.pull_kv_cache if wait else self.engine.pull_kv_cache_async
            return function(index, cache, move.dst_slot, move.size, move.ext(), **more)
        function = self.engine.pull_kv_blocks if wait else self.engine.pull_kv_blocks_async
        return function(index, cache, move.src_blocks, move.dst_blocks, move.ext(), **more)

    def pushing(
        self, source: str, kind: str, move: Move, *, wait: bool = False, **more: Any
    ) -> Any:
        more = {"timeout_ms": PATIENT_MS, **more}
        station = self.station
        owned = station.private if self.rng.random() < 0.2 else station.sources
        cache = owned[source].cache
        index = self.index(self.inbox_ids[kind], move.dst_slot)
        self.count += 1
        if move.dst_blocks is None:
            function = self.engine.push_kv_cache if wait else self.engine.push_kv_cache_async
            return function(cache, index, move.src_slot, move.size, move.ext(), **more)
        function = self.engine.push_kv_blocks if wait else self.engine.push_kv_blocks_async
        return function(cache, index, move.src_blocks, move.dst_blocks, move.ext(), **more)

    def outcome(self, name: str, allowed: tuple[str, ...], call: Callable[[], Any]) -> bool:
        """Whether the call succeeds; it may fail in the ways that are allowed."""
        import ucxkv

        try:
            call()
        except ucxkv.LlmError as error:
            if type(error).__name__ not in allowed:
                raise
            self.done[f"{name}: {type(error).__name__}"] += 1
            return False
        self.done[f"{name}: ok"] += 1
        return True

    def landed(self, kind: str, patches: Sequence[Patch]) -> None:
        """A pull into a sink has succeeded."""
        self.images[kind].apply(patches)
        self.check(kind)

    def failed(self, kind: str, patches: Sequence[Patch]) -> None:
        """A pull has failed: its spans are ours again, and whatever is written later shows."""
        value = next(self.values)
        painted = [
            (tensor, block, np.full(data.size, value, np.uint8)) for tensor, block, data in patches
        ]
        for tensor, block, data in painted:
            self.sinks[kind].tensors[tensor][block, : data.size] = data
        self.landed(kind, painted)

    def check(self, kind: str, tell: Callable[[str], None] | None = None) -> None:
        buffer, image = self.sinks[kind].arena.buffer, self.images[kind].buffer
        if np.array_equal(buffer, image):
            return
        places = np.flatnonzero(buffer != image)
        text = f"{len(places)} wrong bytes from {places[0]} on in sink {kind} of {self.number}"
        if tell is None:
            raise WrongBytes(text)
        tell(text)

    def reuse(self, kind: str, blocks: list[int]) -> None:
        """Have blocks of an inbox quiesced and used for something else by their owner."""
        value = next(self.values)
        self.station.wire.ask("reuse", self.number, kind, blocks, value)
        self.reused(kind, blocks, value)

    def reused(self, kind: str, blocks: list[int], value: int) -> None:
        for tensor in self.inboxes[kind].tensors:
            tensor[blocks] = value

    def short(self) -> float:
        """A time in ms that may be too short for a transfer."""
        return 0.05 * 100 ** self.rng.random()

    # The work

    def pull(self) -> None:
        """From the peer's source, or of what we have pushed."""
        form, kind = self.form(), self.kind()
        pushed = form != "continuous" and self.rng.random() < 0.4
        images = {one: image.tensors for one, image in self.inboxes.items()}
        data = images if pushed else self.station.far
        source, move = some_move(self.rng, data, kind, form)
        kind = "pages" if form == "continuous" else kind
        cache_id = (self.inbox_ids if pushed else self.source_ids)[source]
        if self.rng.random() < 0.5:
            report = self.pulling(kind, cache_id, move, wait=True)
        else:
            report = self.pulling(kind, cache_id, move).result()
        if report.bytes != move.bytes:
            raise Wrong(f"reported {report.bytes} bytes instead of {move.bytes}")
        self.landed(kind, move.patches)

    def burst(self) -> None:
        """Several pulls at once."""
        kind = self.rng.choice(["small", "pages"])
        moves = [
            some_move(self.rng, self.station.far, kind, "slots", dst_slot=slot)[1]
            for slot in self.rng.sample(range(KINDS[kind][0]), self.rng.randint(2, 8))
        ]
        running = [self.pulling(kind, self.source_ids[kind], move) for move in moves]
        self.rng.shuffle(running)
        for transfer in running:
            transfer.result()
        self.landed(kind, [patch for move in moves for patch in move.patches])

    def awaited(self) -> None:
        source, move = some_move(self.rng, self.station.far, "wide", "slots")

        async def one() -> None:
            await self.pulling("wide", self.source_ids[source], move)

        asyncio.run(one())
        self.landed("wide", move.patches)

    def layers(self) -> None:
        """Each layer is right as soon as it is reported."""
        kind = self.kind()
        source, move = some_move(self.rng, self.station.far, kind, self.rng.choice(FORMS))
        transfer = self.pulling(kind, self.source_ids[source], move)
        first, layers = layers_of(move)
        for layer in self.reported(transfer, layers):
            begin = first + layer * PER_LAYER
            for tensor, block, data in move.patches:
                if begin <= tensor < begin + PER_LAYER and not np.array_equal(
                    self.sinks[kind].tensors[tensor][block, : data.size], data
                ):
                    raise WrongBytes(f"layer {layer} was reported before it was there")
        transfer.result()
        self.landed(kind, move.patches)

    def reported(self, transfer: Any, layers: int) -> Iterator[int]:
        if self.rng.random() < 0.5:
            found = 0
            for layer in transfer.layers():
                yield layer
                found += 1
            if found != layers:
                raise Wrong(f"{found} layers instead of {layers}")
            return
        for layer in range(layers):
            transfer.wait_layer(layer, timeout_ms=PATIENT_MS)
            yield layer

    def short_pull(self) -> None:
        kind = self.rng.choice(["small", "wide", "wide"])
        source, move = some_move(self.rng, self.station.far, kind, self.rng.choice(FORMS))
        timeout_ms = self.short()
        ok = self.outcome(
            "short pull",
            ("LlmTimeout",),
            lambda: self.pulling(
                kind, self.source_ids[source], move, wait=True, timeout_ms=timeout_ms
            ),
        )
        (self.landed if ok else self.failed)(kind, move.patches)

    def cancelled_pull(self) -> None:
        kind = self.rng.choice(["small", "wide", "wide"])
        source, move = some_move(self.rng, self.station.far, kind, self.rng.choice(FORMS))
        transfer = self.pulling(kind, self.source_ids[source], move)
        time.sleep(self.short() / 1e3)
        stopped = transfer.cancel()
        ok = self.outcome("cancelled pull", ("LlmError",), transfer.result)
        if stopped is ok:
            raise Wrong(f"cancel returned {stopped}")
        (self.landed if ok else self.failed)(kind, move.patches)

    def push(self) -> None:
        form, kind = self.form(), self.kind()
        source, move = some_move(self.rng, self.station.near, kind, form, push=True)
        kind = "pages" if form == "continuous" else kind
        if self.rng.random() < 0.5:
            report = self.pushing(source, kind, move, wait=True)
        else:
            report = self.pushing(source, kind, move).result()
        if report.bytes != move.bytes:
            raise Wrong(f"reported {report.bytes} bytes instead of {move.bytes}")
        self.inboxes[kind].apply(move.patches)

    def short_push(self) -> None:
        """The receiver may go on with a push that has failed, until it quiesces."""
        kind = self.rng.choice(["small", "wide", "wide"])
        source, move = some_move(self.rng, self.station.near, kind, self.rng.choice(FORMS))
        if self.rng.random() < 0.5:
            timeout_ms = self.short()
            ok = self.outcome(
                "short push",
                ("LlmTimeout",),
                lambda: self.pushing(source, kind, move, wait=True, timeout_ms=timeout_ms),
            )
        else:
            transfer = self.pushing(source, kind, move)
            time.sleep(self.short() / 1e3)
            transfer.cancel()
            ok = self.outcome("cancelled push", ("LlmError",), transfer.result)
        if ok:
            self.inboxes[kind].apply(move.patches)
        else:
            self.reuse(kind, move.targets)

    def layered_push(self) -> None:
        """Layers become ready in any order; some pushes are given up before their last one."""
        form, kind = self.form(), self.kind()
        source, move = some_move(self.rng, self.station.near, kind, form, push=True)
        kind = "pages" if form == "continuous" else kind
        asked = self.rng.random() < 0.5
        ready: set[int] = set()
        transfer = self.pushing(
            source, kind, move, layer_ready=ready.__contains__ if asked else True
        )
        tell = ready.add if asked else transfer.layer_ready
        _, layers = layers_of(move)
        order = self.rng.sample(range(layers), layers)
        left_out = order.pop() if self.rng.random() < 0.3 else None
        for layer in order:
            tell(layer)
            if self.rng.random() < 0.5:
                transfer.wait_layer(layer, timeout_ms=PATIENT_MS)
        if left_out is not None:
            transfer.cancel()
        if self.outcome("layered push", ("LlmError",), transfer.result):
            if left_out is not None:
                raise Wrong(f"layer {left_out} of a push has landed before it was ready")
            self.inboxes[kind].apply(move.patches)
        elif left_out is None:
            raise Wrong(f"all layers were ready: {transfer.layer_results()}")
        else:
            self.reuse(kind, move.targets)

    def quiesced_push(self) -> None:
        """What the receiver has quiesced is its own, whatever becomes of the push."""
        kind = self.rng.choice(["small", "wide"])
        source, move = some_move(self.rng, self.station.near, kind, self.rng.choice(FORMS))
        transfer = self.pushing(source, kind, move)
        value = next(self.values)
        self.station.wire.ask("reuse", self.number, kind, move.targets, value)
        self.outcome("quiesced push", ("LlmError",), transfer.result)
        self.reused(kind, move.targets, value)

    def copy(self) -> None:
        """From one slot or block of a sink to another."""
        kind = self.kind()
        owned, tensors = self.sinks[kind].cache, self.images[kind].tensors
        one, other = self.rng.sample(range(KINDS[kind][0]), 2)
        if self.rng.random() < 0.5:
            self.engine.copy_kv_cache(owned, owned, one, other)
        else:
            self.engine.copy_kv_blocks(owned, owned, [one], [other])
        self.landed(
            kind, [(number, other, tensor[one].copy()) for number, tensor in enumerate(tensors)]
        )

    def notice(self, *, hold: str | None = None, short: bool = False) -> bool:
        kind = self.rng.choice(["small", "wide"])
        source, move = some_move(self.rng, self.station.far, kind, self.rng.choice(FORMS))
        text = f"{self.number}:{self.count}".encode()
        timeout_ms = self.short() if short else PATIENT_MS
        # Should this raise what it must not, it is known at least what to look for.
        self.perhaps_told.append(text)
        ok = self.outcome(
            "short notice" if short else "notice",
            ("LlmTimeout",) if short else (),
            lambda: self.pulling(
                kind,
                self.source_ids[source],
                move,
                wait=True,
                timeout_ms=timeout_ms,
                notice=text,
                hold=hold,
            ),
        )
        if ok:
            self.told.append(self.perhaps_told.pop())
        (self.landed if ok else self.failed)(kind, move.patches)
        return ok

    def short_notice(self) -> None:
        self.notice(short=True)

    def held(self) -> None:
        """A hold ends by the notice of the pull that names it."""
        import ucxkv

        kind = self.rng.choice(["small", "wide"])
        number, token = self.station.wire.ask("hold", 0, kind, 60_000)
        source, move = some_move(self.rng, self.station.far, kind, self.rng.choice(FORMS))
        text = f"{self.number}:{self.count}".encode()
        self.pulling(kind, self.source_ids[source], move, wait=True, notice=text, hold=token)
        self.told.append(text)
        self.landed(kind, move.patches)
        found = self.station.wire.ask("outcome", number)
        if found != "noticed":
            raise Wrong(f"a hold whose pull has completed is {found}")
        try:
            self.pulling(kind, self.source_ids[source], move, wait=True, hold=token)
        except ucxkv.HoldEnded:
            self.failed(kind, move.patches)
        else:
            raise Wrong("a pull has succeeded whose hold had ended")

    def recycled(self) -> None:
        """A hold ends, and its memory is used again, while it is being pulled."""
        key, cache_id, data = self.further("wide")
        number, token = self.station.wire.ask("hold", key, "wide", 60_000)
        _, move = some_move(self.rng, data, "wide", self.rng.choice(FORMS))
        transfer = self.pulling("wide", cache_id, move, hold=token)
        time.sleep(self.rng.choice([0.0, 0.0005, 0.002]))
        self.station.wire.ask("recycle", number, key)
        ok = self.outcome("recycled", ("HoldEnded",), transfer.result)
        (self.landed if ok else self.failed)("wide", move.patches)
        found = self.station.wire.ask("outcome", number)
        if found != "released":
            raise Wrong(f"a released hold is {found}")
        self.station.wire.ask("drop", key, 1000)

    def further(self, kind: str) -> tuple[int, int, dict[str, list[Bytes]]]:
        """Another cache at the peer: its key, its id and its bytes."""
        mask = self.rng.randrange(1, 256)
        key, cache_id = self.station.wire.ask("register", kind, mask)
        return key, cache_id, {kind: [tensor ^ np.uint8(mask) for tensor in self.station.far[kind]]}

    def dropped_source(self) -> None:
        """Pulled while its owner unregisters it."""
        kind = self.rng.choice(["small", "wide"])
        key, cache_id, data = self.further(kind)
        _, move = some_move(self.rng, data, kind, self.rng.choice(FORMS))
        transfer = self.pulling(kind, cache_id, move)
        time.sleep(self.rng.choice([0.0, 0.0, 0.0005, 0.002]))
        self.station.wire.ask("drop", key, self.rng.choice([1, 1000]))
        ok = self.outcome("dropped source", ("KvCacheNotExist",), transfer.result)
        (self.landed if ok else self.failed)(kind, move.patches)

    def dropped_sink(self) -> None:
        """A destination that is unregistered while it is pulled into, and used again."""
        kind = self.rng.choice(["small", "wide"])
        source, move = some_move(self.rng, self.station.far, kind, self.rng.choice(FORMS))
        sink, image = self.sinks[kind], self.images[kind]
        transfer = self.pulling(kind, self.source_ids[source], move)
        time.sleep(self.rng.choice([0.0, 0.0, 0.0005, 0.002]))
        sink.drop(1000)
        for tensor in image.tensors:
            tensor[:] = 0xEE
        self.outcome("dropped sink", ("KvCacheNotExist",), transfer.result)
        self.check(kind)
        sink.cache = actions.register_arena(self.station.ctx, sink.arena, KINDS[kind], access="")

    def look(self) -> None:
        if [info.state for info in self.engine.links()] not in (["up"], ["repairing"]):
            raise Wrong(f"links {self.engine.links()}")
        self.engine.stats()


FORMS = ("slots", "paged")
WORK = {
    "pull": 10,
    "burst": 3,
    "awaited": 1,
    "layers": 4,
    "short_pull": 3,
    "cancelled_pull": 2,
    "push": 8,
    "short_push": 3,
    "layered_push": 4,
    "quiesced_push": 2,
    "copy": 2,
    "notice": 3,
    "short_notice": 2,
    "held": 2,
    "recycled": 1,
    "dropped_source": 1,
    "dropped_sink": 1,
    "look": 1,
}


def check_notices(
    found: Sequence[bytes], certain: Sequence[bytes], possible: Sequence[bytes], lanes: int
) -> str:
    """What is wrong with the notices that have come: they come once each, all of pulls that have
    succeeded, and in the order in which each lane pulled."""
    counts = Counter(found)
    twice = [text for text, count in counts.items() if count > 1]
    missing = set(certain) - counts.keys()
    strange = counts.keys() - {*certain, *possible}
    if twice or missing or strange:
        return f"notices: twice {twice}, missing {missing}, never sent {strange}"
    for lane in range(lanes):
        numbers = [int(text.partition(b":")[2]) for text in found if text.startswith(b"%d:" % lane)]
        if numbers != sorted(numbers):
            return f"notices of lane {lane} out of order: {numbers}"
    return ""


# What the test calls


def open_station(ctx: Context, other: int, lanes: int, seeds: tuple[int, int]) -> dict[str, Any]:
    ctx.values["station"] = Station(ctx, other, lanes, seeds, ctx.fds["wire"])
    return ctx.values["station"].ids()


def open_lanes(ctx: Context, lanes: int, peers: dict[str, Any]) -> None:
    station = ctx.values["station"]
    station.lanes = [Lane(station, number, peers) for number in range(lanes)]


def traffic(ctx: Context, seconds: float, seed: int) -> dict[str, Any]:
    return ctx.values["station"].traffic(seconds, seed)


def settled(ctx: Context) -> dict[str, Any]:
    return ctx.values["station"].settled()


def wrong(ctx: Context) -> list[str]:
    return ctx.values["station"].wrong()


def inbox_digests(ctx: Context) -> list[dict[str, list[int]]]:
    """Of what has been pushed here."""
    return [
        {kind: box.digests() for kind, box in inbox.items()}
        for inbox in ctx.values["station"].inboxes
    ]


def pushed_digests(ctx: Context) -> list[dict[str, list[int]]]:
    """Of what the peer's inboxes must hold."""
    return [
        {kind: image.digests() for kind, image in lane.inboxes.items()}
        for lane in ctx.values["station"].lanes
    ]


def notices(ctx: Context) -> list[bytes]:
    return ctx.values["station"].notices


def told(ctx: Context) -> tuple[list[bytes], list[bytes]]:
    """Notices of pulls that have succeeded, and of those that have failed."""
    lanes = ctx.values["station"].lanes
    return (
        [text for lane in lanes for text in lane.told],
        [text for lane in lanes for text in lane.perhaps_told],
    )


def close_station(ctx: Context) -> None:
    ctx.values.pop("station").wire.close()

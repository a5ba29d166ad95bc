"""Two engines in one process whose every call is made from many threads, in random order."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from children import actions, ending

if TYPE_CHECKING:
    from child import Context

DESC = (2, (3, 20_000))


class Jostle:
    """What the threads share.  Engine 1 owns, engine 2 pulls; either may be closed at any time."""

    def __init__(self, path: str, seconds: float) -> None:
        self.engines = {
            number: actions.build_engine(number, ending.options_for(path)) for number in (1, 2)
        }
        self.end = time.monotonic() + seconds
        self.sources: list[tuple[int, int]] = []  # cache id, and what its bytes are
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []

    def desc(self) -> Any:
        import ucxkv

        return ucxkv.CacheDesc(DESC[0], DESC[1], ucxkv.DataType.UINT8)

    def register(self, rng: random.Random) -> None:
        value = rng.randrange(1, 250)
        arrays = [np.full(DESC[1], value, np.uint8) for _ in range(DESC[0])]
        cache = self.engines[1].register_kv_cache(self.desc(), arrays)
        self.sources.append((cache.cache_id, value))

    def unregister(self, rng: random.Random) -> None:
        if self.sources:
            with contextlib.suppress(IndexError):
                cache_id, _ = self.sources.pop(rng.randrange(len(self.sources)))
                self.engines[1].unregister_kv_cache(cache_id, timeout_ms=rng.choice([1, 1000]))

    def link(self, rng: random.Random) -> None:
        mine, other = rng.sample((1, 2), 2)
        target = actions.cluster(other, self.engines[other].listen_address)
        self.engines[mine].link_llm_clusters([target], timeout_ms=3000)

    def unlink(self, rng: random.Random) -> None:
        mine, other = rng.sample((1, 2), 2)
        target = actions.cluster(other, ("127.0.0.1", 1))
        force = rng.random() < 0.5
        self.engines[mine].unlink_llm_clusters([target], timeout_ms=500, force=force)

    def pull(self, rng: random.Random) -> None:
        import ucxkv

        if not self.sources:
            return
        cache_id, value = rng.choice(list(self.sources))
        arrays = [np.zeros(DESC[1], np.uint8) for _ in range(DESC[0])]
        sink = self.engines[2].register_kv_cache(self.desc(), arrays, access="")
        try:
            index = ucxkv.CacheIndex(1, cache_id, 1)
            timeout = rng.choice([1, 1000, 1000])
            self.engines[2].pull_kv_cache(index, sink, 2, timeout_ms=timeout)
            if not all((array[2] == value).all() for array in arrays):
                self.problems.append(f"wrong bytes of cache {cache_id}")
        finally:
            self.engines[2].unregister_kv_cache(sink.cache_id)
        if any(array[:2].any() for array in arrays):
            self.problems.append(f"other slots were written, pulling cache {cache_id}")

    def look(self, rng: random.Random) -> None:
        engine = self.engines[rng.choice((1, 2))]
        engine.links()
        engine.stats()

    def reopen(self, rng: random.Random) -> None:
        number = rng.choice((1, 2))
        if number == 1:
            self.sources.clear()
        self.engines[number].finalize()
        self.engines[number].initialize()

    def run(self, seed: int) -> None:
        import ucxkv

        rng = random.Random(seed)
        work = {
            self.register: 4,
            self.unregister: 3,
            self.link: 4,
            self.unlink: 1,
            self.pull: 12,
            self.look: 1,
            self.reopen: 0.3,
        }
        while time.monotonic() < self.end and not self.problems:
            (one,) = rng.choices(list(work), list(work.values()))
            try:
                one(rng)
                self.outcomes[one.__name__] += 1
            except ucxkv.LlmError as error:
                self.outcomes[f"{one.__name__}: {type(error).__name__}"] += 1
            except Exception as error:
                self.problems.append(f"{one.__name__}: {type(error).__name__}: {error}")


def jostle(ctx: Context, path: str, threads: int, seconds: float, seed: int) -> dict[str, Any]:
    one = Jostle(path, seconds)
    running = [threading.Thread(target=one.run, args=(seed * 100 + k,)) for k in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(seconds + 20)
        if thread.is_alive():
            one.problems.append("a thread hangs")
    for engine in one.engines.values():
        engine.finalize()
    return {"problems": one.problems[:5], "outcomes": dict(one.outcomes)}

"""Actions that interrupt their own process."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from children import actions

if TYPE_CHECKING:
    from child import Context


def interrupt_pulls(
    ctx: Context, name: str, cluster_id: int, cache_id: int, count: int
) -> dict[str, Any]:
    """Pulls that would take seconds, each interrupted a random moment after it was called."""
    rng = random.Random(5)
    kinds: list[str] = []
    written: list[int] = []
    interrupted = 0
    for number in range(count):
        delay = rng.uniform(0, 0.001) if number % 2 else rng.uniform(0, 0.02)
        go = threading.Event()

        def interrupt(delay: float = delay, go: threading.Event = go) -> None:
            go.wait()
            time.sleep(delay)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            go.set()
            outcome = actions.pull(ctx, name, cluster_id, cache_id, timeout_ms=20000)
            kinds.append(outcome.kind)
            thread.join()
            interrupted += outcome.kind == "KeyboardInterrupt"
        except KeyboardInterrupt:
            # Before or behind the call: no pull may be running in either case.
            thread.join()
        actions.paint(ctx, name, 0x5A)
        time.sleep(0.005)
        if not actions.painted(ctx, name, 0x5A):
            written.append(number)
    return {"kinds": sorted(set(kinds)), "written after": written, "interrupted": interrupted}


def unlink(ctx: Context, cluster_id: int, timeout_ms: int) -> actions.Outcome:
    return actions.attempt(lambda: actions.unlink(ctx, cluster_id, timeout_ms))


def drop_cache(ctx: Context, name: str, timeout_ms: int) -> actions.Outcome:
    return actions.attempt(lambda: actions.drop_cache(ctx, name, timeout_ms))

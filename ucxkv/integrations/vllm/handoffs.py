"""The prefill side of a worker: whose blocks are held, and until when."""

from __future__ import annotations

import time

from ucxkv import Cache, Hold, LlmDataDist
from ucxkv.integrations.vllm.figures import Figures

# Ten years: a hand-off's time is counted from its request's end, not from its hold's making.
_UNUSED_MS = 3.2e11


class HandOffs:
    """Requests whose blocks wait for a decode engine.

    A token has to be in a request's output, which the scheduler writes before any worker hears that
    the request has ended.  So holds are made beforehand, for no blocks in particular, and their
    tokens are the scheduler's to give out.  A pull that names one fails once it has ended.
    """

    def __init__(self, engine: LlmDataDist, cache: Cache, figures: Figures) -> None:
        self._engine = engine
        self._cache = cache
        self._figures = figures
        self._unused: dict[str, Hold] = {}
        self._waiting: dict[str, tuple[Hold, float]] = {}

    def issue(self, count: int) -> list[str]:
        """The tokens of `count` new holds."""
        holds = [self._engine.hold(self._cache, [], _UNUSED_MS) for _ in range(count)]
        self._unused.update((hold.token, hold) for hold in holds)
        return [hold.token for hold in holds]

    def begin(self, request_id: str, token: str, seconds: float) -> None:
        """The blocks of a request are held from now on, by the hold of that token."""
        self._waiting[request_id] = (self._unused.pop(token), time.monotonic() + seconds)
        self._figures.handed_off += 1

    def ended(self) -> set[str]:
        """Requests that decode has given notice of, or whose time is over, since the last call.

        Their blocks may be used again: whoever pulls them now gets HoldEnded.
        """
        for _ in self._engine.notices(timeout_ms=0):
            pass  # Each has ended its hold; they are taken so that the queue does not fill.
        now = time.monotonic()
        over: set[str] = set()
        for request_id, (hold, deadline) in self._waiting.items():
            if hold.active and now < deadline:
                continue
            hold.release()
            if hold.outcome == "noticed":
                self._figures.noticed += 1
            else:
                self._figures.expired_holds += 1
            over.add(request_id)
        for request_id in over:
            del self._waiting[request_id]
        return over

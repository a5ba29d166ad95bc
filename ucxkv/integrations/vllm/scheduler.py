"""The connector in the scheduler: which requests pull, which are held, which are let go."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ucxkv.integrations.vllm.metadata import NewHolds, StepMetadata, WorkerInfo
from ucxkv.integrations.vllm.params import (
    RankSource,
    RemoteRequest,
    Source,
    read_params,
    wants_prefill_only,
    was_prefilled,
    write_params,
)
from ucxkv.integrations.vllm.pulls import Load

logger = logging.getLogger("vllm.ucxkv.scheduler")

# The requests whose blocks are good to hand over: those that were computed to their end.
_COMPLETE = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


class SchedulerSide:
    """Decides, and tells workers by `step_metadata`; it never touches a byte itself."""

    def __init__(self, engine_id: str, block_size: int, layerwise: bool) -> None:
        self._engine_id = engine_id
        self._block_size = block_size
        self._layerwise = layerwise
        self._workers: tuple[WorkerInfo, ...] = ()
        self._holds: dict[int, deque[str]] = {}
        self._step = StepMetadata()
        #: Requests whose remote blocks have been dealt with: a second look finds nothing.
        self._begun: set[str] = set()
        #: Requests of which workers are to say when their pulls are over.
        self._loading: set[str] = set()

    # -- workers ----------------------------------------------------------------------------------

    def introduce(self, workers: Mapping[int, WorkerInfo]) -> None:
        """The workers of this engine, by rank."""
        self._workers = tuple(workers[rank] for rank in sorted(workers))
        self._holds = {rank: deque(worker.holds) for rank, worker in workers.items()}

    def heard(self, finished_pulls: set[str] | None, holds: NewHolds | None) -> None:
        """What workers have said with the output of a step."""
        self._loading.difference_update(finished_pulls or ())
        if holds is not None:
            for rank, tokens in holds.holds.items():
                self._holds.setdefault(rank, deque()).extend(tokens)

    def step_metadata(self) -> StepMetadata:
        """All that workers have to know since the last call."""
        step, self._step = self._step, StepMetadata()
        return step

    # -- decode -----------------------------------------------------------------------------------

    def matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        """Tokens beyond the first `computed` that can be pulled, and whether between steps."""
        remote = self._remote(request)
        if remote is None:
            return 0, False
        count = self._useful_tokens(request, remote) - computed
        return (count, not self._layerwise) if count > 0 else (0, False)

    def allocated(self, request: Any, blocks: Sequence[int], tokens: int) -> None:
        """`blocks` are all of a request; its last `tokens` computed ones are to be pulled."""
        remote = self._remote(request)
        if remote is None:
            return
        self._begun.add(request.request_id)
        if tokens == 0:
            self._step.released.append(remote.source)
            return
        end = self._useful_tokens(request, remote)
        first, last = (end - tokens) // self._block_size, -(-end // self._block_size)
        load = Load(
            request_id=request.request_id,
            source=remote.source,
            remote_blocks=remote.blocks[first:last],
            local_blocks=tuple(blocks[first:last]),
            layerwise=self._layerwise,
        )
        self._step.loads.append(load)
        if not self._layerwise:
            self._loading.add(request.request_id)

    def _remote(self, request: Any) -> RemoteRequest | None:
        """The blocks of a request in another engine, unless they were dealt with already."""
        if not was_prefilled(request.kv_transfer_params) or request.request_id in self._begun:
            return None
        try:
            return read_params(request.kv_transfer_params)
        except ValueError as error:
            logger.warning("Request %s is computed here: %s", request.request_id, error)
            self._begun.add(request.request_id)
            return None

    def _useful_tokens(self, request: Any, remote: RemoteRequest) -> int:
        """How far the remote blocks reach into the prompt."""
        prompt = int(request.num_prompt_tokens)
        held = min(remote.tokens, len(remote.blocks) * self._block_size, prompt)
        if not self._layerwise:
            return held
        # A step writes the keys of its own tokens before it waits for a layer: the blocks that they
        # go to cannot be pulled in the same step.
        return min(held, prompt - 1) // self._block_size * self._block_size

    # -- ends -------------------------------------------------------------------------------------

    def finished(self, request: Any, blocks: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks of a request have to be kept, and the parameters of its output."""
        params = request.kv_transfer_params
        if was_prefilled(params):
            self._finished_decode(request)
        if wants_prefill_only(params) and request.status.name in _COMPLETE and blocks:
            return self._hand_off(request, blocks)
        return False, None

    def _finished_decode(self, request: Any) -> None:
        remote = self._remote(request)
        if remote is not None:
            # It was never scheduled; prefill need not wait any longer.
            self._step.released.append(remote.source)
        if request.request_id in self._loading:
            self._step.cancelled.append(request.request_id)
        self._begun.discard(request.request_id)
        self._loading.discard(request.request_id)

    def _hand_off(self, request: Any, blocks: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        reason = self._no_hand_off()
        if reason is not None:
            logger.error("Request %s is not handed over: %s", request.request_id, reason)
            return False, None
        holds = tuple(self._holds[rank].popleft() for rank in range(len(self._workers)))
        self._step.handed_off[request.request_id] = holds
        first = self._workers[0]
        source = Source(
            request_id=request.request_id,
            compatibility=first.compatibility,
            factors=first.factors,
            ranks=tuple(
                RankSource(worker.cluster, worker.host, worker.port or 0, worker.cache, hold)
                for worker, hold in zip(self._workers, holds, strict=True)
            ),
        )
        remote = RemoteRequest(source, tuple(blocks), request.num_computed_tokens)
        return True, write_params(remote, self._engine_id)

    def _no_hand_off(self) -> str | None:
        """Why no request can be handed over; None if one can."""
        if not self._workers or any(worker.port is None for worker in self._workers):
            return "this engine does not listen (its kv_role is kv_consumer)"
        if not all(self._holds.get(rank) for rank in range(len(self._workers))):
            return "too many requests wait for decode: no hold is left"
        return None

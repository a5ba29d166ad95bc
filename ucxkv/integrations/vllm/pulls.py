"""The decode side of a worker: pulls of requests' blocks."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from queue import SimpleQueue

from ucxkv import (
    AlreadyLink,
    Cache,
    CacheIndex,
    ClusterInfo,
    HoldEnded,
    IpInfo,
    KvCacheExtParam,
    LinkFailed,
    LlmDataDist,
    LlmError,
    LlmTimeout,
    NotYetLink,
    Status,
    Transfer,
)
from ucxkv.integrations.vllm.compatibility import difference
from ucxkv.integrations.vllm.figures import Figures
from ucxkv.integrations.vllm.layout import CacheMemory
from ucxkv.integrations.vllm.params import RankSource, Source
from ucxkv.integrations.vllm.settings import ConnectorSettings

logger = logging.getLogger("vllm.ucxkv.pulls")

_NOTICE_BYTES = 4096
# In a vLLM cache a layer is one tensor: keys and values lie in one block.
_LAYERS = KvCacheExtParam(tensor_num_per_layer=1)


@dataclass(frozen=True)
class Load:
    """A request's blocks to be pulled: `remote_blocks[i]` goes to `local_blocks[i]`.

    A `layerwise` one is waited for in the step that it begins in.
    """

    request_id: str
    source: Source
    remote_blocks: tuple[int, ...]
    local_blocks: tuple[int, ...]
    layerwise: bool = False


def landed_blocks(landed: int, tensors: int, block_bytes: int, blocks: int) -> int:
    """How many of a pull's blocks are complete when its first `landed` bytes are.

    Bytes come tensor after tensor, so a block is complete when its part of the last one is.
    """
    last = landed - (tensors - 1) * blocks * block_bytes
    return max(0, last) // block_bytes


class Links:
    """Links to prefill engines, made when they are first needed, never in the caller's thread."""

    def __init__(self, engine: LlmDataDist, seconds: float) -> None:
        self._engine = engine
        self._seconds = seconds
        self._linked: dict[int, Future[None]] = {}
        self._pool = ThreadPoolExecutor(4, "ucxkv-link")

    def to(self, rank: RankSource) -> Future[None]:
        """The link to a worker; the future has LinkFailed if it cannot be reached."""
        future = self._linked.get(rank.cluster)
        if future is None or (future.done() and not self._stands(rank, future)):
            future = self._linked[rank.cluster] = self._pool.submit(self._link, rank)
        return future

    def _stands(self, rank: RankSource, linked: Future[None]) -> bool:
        if linked.exception() is not None:
            return False
        links = self._engine.links()
        return any(link.cluster_id == rank.cluster and link.state != "down" for link in links)

    def close(self) -> None:
        """Return when no thread is left."""
        self._pool.shutdown(cancel_futures=True)

    def _link(self, rank: RankSource) -> None:
        cluster = ClusterInfo(rank.cluster, [IpInfo(rank.host, rank.port)])
        try:
            self._engine.link_llm_clusters([cluster], timeout_ms=self._seconds * 1e3)
        except AlreadyLink:
            return
        except LinkFailed as error:
            if all(result.status is Status.ALREADY_LINK for result in error.results):
                return
            raise


class _Pull:
    """One request's pull: first its link, then as many transfers as it has pieces."""

    def __init__(self, load: Load, rank: RankSource, link: Future[None], deadline: float) -> None:
        self.load = load
        self.rank = rank
        self.link = link
        self.deadline = deadline
        self.begun = time.monotonic()
        self.pieces: list[tuple[tuple[int, ...], Transfer]] = []
        #: Blocks whose transfer could not even begin.
        self.refused: list[int] = []
        #: The first thing that went wrong.
        self.cause: BaseException | None = None
        self.submitted = False

    def done(self) -> bool:
        return self.submitted and all(transfer.done() for _, transfer in self.pieces)


class Pulls:
    """All pulls into the cache of one rank.  Not thread-safe: a worker calls it from its steps.

    `compatibility` and `factors` are this engine's.
    """

    def __init__(
        self,
        engine: LlmDataDist,
        cache: Cache,
        memory: CacheMemory,
        rank: int,
        settings: ConnectorSettings,
        compatibility: str,
        factors: dict[str, object],
        figures: Figures,
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._memory = memory
        self._rank = rank
        self._settings = settings
        self._compatibility = compatibility
        self._factors = factors
        self._figures = figures
        self._links = Links(engine, settings.link_seconds)
        self._pulls: dict[str, _Pull] = {}
        self._over: set[str] = set()
        self._failed_blocks: set[int] = set()
        #: Notices that were sent, or the reason why not.
        self._notices: SimpleQueue[tuple[str, Transfer | LlmError]] = SimpleQueue()

    # -- what a step asks for ---------------------------------------------------------------------

    def begin(self, load: Load) -> None:
        """Start to pull; whatever is wrong with it comes out as failed blocks."""
        reason = self._refusal(load.source)
        if reason is not None:
            self._give_up(load, reason)
            return
        rank = load.source.ranks[self._rank]
        deadline = time.monotonic() + self._settings.pull_seconds
        pull = _Pull(load, rank, self._links.to(rank), deadline)
        self._pulls[load.request_id] = pull
        self._advance(pull)

    def cancel(self, request_id: str) -> None:
        """End a pull now: when this returns nothing is written to its blocks, and none has failed.

        It counts as over, and prefill is told that its blocks are not wanted any more.
        """
        pull = self._pulls.pop(request_id, None)
        if pull is None:
            return
        for _, transfer in pull.pieces:
            transfer.cancel()
        self._figures.cancelled_pulls += 1
        self._over.add(request_id)
        self.release(pull.load.source)

    def release(self, source: Source) -> None:
        """Tell prefill, by a notice, that a request's blocks are not needed any more."""
        if self._rank < len(source.ranks):
            link = self._links.to(source.ranks[self._rank])
            link.add_done_callback(lambda link: self._notify(source, link))

    # -- what a step waits for --------------------------------------------------------------------

    def wait_layer(self, layer: int) -> None:
        """Wait until layer `layer` of all layerwise pulls has landed, or has failed."""
        for pull in self._layerwise():
            self._wait_link(pull)
            for _, transfer in pull.pieces:
                try:
                    transfer.wait_layer(layer)
                except LlmError:
                    continue  # Its blocks are found out when the pull is over.

    def wait_layerwise(self) -> None:
        """Wait for the end of all layerwise pulls, good or bad: their step is over."""
        for pull in self._layerwise():
            self._wait_link(pull)
            self._settle(pull)

    def _layerwise(self) -> list[_Pull]:
        return [pull for pull in self._pulls.values() if pull.load.layerwise]

    def _wait_link(self, pull: _Pull) -> None:
        if not pull.submitted:
            wait([pull.link], pull.deadline - time.monotonic())
            self._advance(pull)

    # -- what has happened ------------------------------------------------------------------------

    def poll(self) -> set[str]:
        """Requests whose pulls have ended since the last call, well or not."""
        for pull in list(self._pulls.values()):
            self._advance(pull)
            if pull.done():
                self._settle(pull)
        self._look_at_notices()
        over, self._over = self._over, set()
        return over

    def take_failed_blocks(self) -> set[int]:
        """Local blocks that were to be filled, and are not, since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def close(self) -> None:
        """End all pulls, fenced."""
        for pull in self._pulls.values():
            for _, transfer in pull.pieces:
                transfer.cancel()
        self._pulls.clear()
        self._links.close()

    # -- one pull ---------------------------------------------------------------------------------

    def _refusal(self, source: Source) -> str | None:
        """Why nothing of that engine can be pulled into this one; None if it can."""
        if source.compatibility != self._compatibility:
            differ = difference(self._factors, source.factors) or "how, its parameters do not tell"
            return f"the engines' blocks are not compatible: {differ}"
        if self._rank >= len(source.ranks):
            return f"prefill has {len(source.ranks)} ranks, this is rank {self._rank}"
        return None

    def _advance(self, pull: _Pull) -> None:
        """Submit the transfers of a pull as soon as its link is up."""
        if pull.submitted or not (pull.link.done() or time.monotonic() > pull.deadline):
            return
        pull.submitted = True
        error = pull.link.exception() if pull.link.done() else LlmTimeout("no link in time")
        if error is not None:
            self._figures.failed_links += 1
            pull.cause = error
            pull.refused.extend(pull.load.local_blocks)
            return
        step = self._settings.blocks_per_pull
        for first in range(0, len(pull.load.local_blocks), step):
            theirs = pull.load.remote_blocks[first : first + step]
            ours = pull.load.local_blocks[first : first + step]
            try:
                pull.pieces.append((ours, self._transfer(pull, theirs, ours)))
            except LlmError as refusal:
                pull.cause = refusal
                pull.refused.extend(ours)

    def _transfer(self, pull: _Pull, theirs: tuple[int, ...], ours: tuple[int, ...]) -> Transfer:
        return self._engine.pull_kv_blocks_async(
            CacheIndex(pull.rank.cluster, pull.rank.cache),
            self._cache,
            theirs,
            ours,
            _LAYERS,
            timeout_ms=max(1.0, (pull.deadline - time.monotonic()) * 1e3),
            hold=pull.rank.hold,
        )

    def _settle(self, pull: _Pull) -> None:
        """Book a pull that has ended, or is about to."""
        del self._pulls[pull.load.request_id]
        moved = 0
        failed = list(pull.refused)
        # What has failed is not asked for again, but where prefill is gone there is nobody to tell.
        reached = bool(pull.pieces)
        for blocks, transfer in pull.pieces:
            try:
                moved += transfer.result().bytes
            except LlmError as error:
                pull.cause = pull.cause or error
                reached = reached and not isinstance(error, (NotYetLink, HoldEnded))
                good = landed_blocks(
                    transfer.bytes_done,
                    len(self._memory.addresses),
                    self._memory.block_bytes,
                    len(blocks),
                )
                failed.extend(blocks[good:])
        if failed:
            logger.warning(
                "Request %s lacks %d of the %d blocks it was to pull: %s",
                pull.load.request_id,
                len(failed),
                len(pull.load.local_blocks),
                pull.cause,
            )
            self._book_failure(failed)
        else:
            self._figures.pull_seconds.append(time.monotonic() - pull.begun)
            self._figures.pull_bytes.append(moved)
        if not pull.load.layerwise:
            self._over.add(pull.load.request_id)
        if reached:
            self.release(pull.load.source)

    def _give_up(self, load: Load, reason: str) -> None:
        logger.error("Request %s pulls nothing: %s", load.request_id, reason)
        self._book_failure(load.local_blocks)
        if not load.layerwise:
            self._over.add(load.request_id)
        self.release(load.source)

    def _book_failure(self, blocks: list[int] | tuple[int, ...]) -> None:
        self._figures.failed_pulls += 1
        self._figures.failed_blocks += len(blocks)
        self._failed_blocks.update(blocks)

    # -- notices ----------------------------------------------------------------------------------

    def _notify(self, source: Source, link: Future[None]) -> None:
        """Send the notice, with a pull of no blocks: it ends the hold.

        Called when the link is up, by its thread: there may be no further step to do it in.
        """
        if link.cancelled():
            return
        rank = source.ranks[self._rank]
        try:
            link.result()
            sent: Transfer | LlmError = self._engine.pull_kv_blocks_async(
                CacheIndex(rank.cluster, rank.cache),
                self._cache,
                (),
                (),
                _LAYERS,
                hold=rank.hold,
                notice=source.request_id.encode()[:_NOTICE_BYTES],
            )
        except LlmError as error:
            sent = error
        self._notices.put((source.request_id, sent))

    def _look_at_notices(self) -> None:
        """What has become of those that were sent."""
        for _ in range(self._notices.qsize()):
            request_id, sent = self._notices.get_nowait()
            if isinstance(sent, Transfer):
                if not sent.done():
                    self._notices.put((request_id, sent))
                    continue
                try:
                    sent.result()
                    continue
                except LlmError as error:
                    sent = error
            # Prefill lets go of the blocks when the time of their hold is over.
            self._figures.failed_notices += 1
            logger.warning("No notice for request %s: %s", request_id, sent)

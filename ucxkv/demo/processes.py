"""What the demo's three processes do, and what they tell the process that started them.

`prefill` computes the prompt and lends out its cache; `decode` pulls that cache and generates;
`reference` does both by itself, as the measure of right and of slow.  `child` runs each of them.

The caches of the first two are slots, or with `Job.block_tokens` pools of blocks.  Then prefill
holds the prompt's blocks until decode's notice tells that they have been pulled, and reuses them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from ucxkv import (
    Cache,
    CacheIndex,
    ClusterInfo,
    IpInfo,
    LlmDataDist,
    LlmRole,
    Options,
    Transfer,
    TransferReport,
)
from ucxkv.demo.caches import BlockTable, CachedSequence, KvCache, PagedKvCache, Slot
from ucxkv.demo.model import ModelConfig, Transformer

PREFILL_CLUSTER, DECODE_CLUSTER = 1, 2
# The caches are laid out differently on purpose: a pull goes from any slot to any slot.
PREFILL_SLOTS, PREFILL_SLOT = 2, 1
DECODE_SLOTS, DECODE_SLOT = 1, 0
PREFILL_PARITY, DECODE_PARITY = 1, 0

_NOTICE = b"request-1"
_TELL_EVERY = 0.1


@dataclass(frozen=True)
class Job:
    """What the processes are asked for; the same for all of them.

    `block_tokens` is None unless the caches are paged.
    """

    config: ModelConfig
    prompt: bytes
    tokens: int
    path: str
    block_tokens: int | None
    secret: str
    timeout: float


@dataclass(frozen=True)
class Handoff:
    """What prefill tells decode through a pipe, as a scheduler would.

    `blocks` and `hold`, a token, say where the prompt is in a paged cache, `slot` in another.
    """

    host: str
    port: int
    cache_id: int
    prompt: bytes
    first_token: int
    slot: int = 0
    blocks: tuple[int, ...] = ()
    hold: str = ""


@dataclass(frozen=True)
class Held:
    """A hold that decode's notice has ended, `seconds` after it began; the blocks it was on have
    been written over since."""

    blocks: tuple[int, ...]
    notice: str
    outcome: str
    seconds: float


@dataclass(frozen=True)
class Prefilled:
    """`held` is None unless the cache is paged."""

    pid: int
    address: str
    seconds: float
    digest: str
    held: Held | None


@dataclass(frozen=True)
class Decoded:
    """`started_*` tell how far the pull was when layer 0 began, `first_token_seconds` runs from
    the start of the pull to the first token that decode has made.  `blocks` are those of the
    prompt, none unless the cache is paged."""

    pid: int
    tokens: tuple[int, ...]
    report: TransferReport
    transports: tuple[str, ...]
    link_seconds: float
    started_seconds: float
    started_bytes: int
    first_token_seconds: float
    digest: str
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Alone:
    """`first_token_seconds` runs from the prompt to the same token as in Decoded."""

    tokens: tuple[int, ...]
    first_token_seconds: float


@dataclass(frozen=True)
class Progress:
    what: str
    done: int
    total: int


@dataclass(frozen=True)
class Done:
    result: Any


@dataclass(frozen=True)
class Failed:
    """`follows`: only because another process of the demo went away first."""

    summary: str
    trace: str
    follows: bool = False


class PartnerGone(Exception):
    """The process at the other end of a pipe has ended."""


class Teller:
    """Reports to the parent; often enough to be a sign of life, seldom enough to cost nothing."""

    def __init__(self, parent: Connection) -> None:
        self.parent = parent
        self._told = 0.0

    def about(self, what: str) -> Callable[[int, int], None]:
        def told(done: int, total: int) -> None:
            now = time.monotonic()
            if done == total or now >= self._told + _TELL_EVERY:
                self._told = now
                self.parent.send(Progress(what, done, total))

        return told


def child(work: Callable[..., object], job: Job, parent: Connection, *pipes: Connection) -> None:
    """Run `work(job, teller, *pipes)` in a spawned process and send home what came of it."""
    # Ctrl-C reaches the whole process group; the parent decides what becomes of its children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    faulthandler.enable()
    message: Done | Failed
    try:
        message = Done(work(job, Teller(parent), *pipes))
    except Exception as error:
        follows = isinstance(error, (PartnerGone, BrokenPipeError))
        message = Failed(f"{type(error).__name__}: {error}", traceback.format_exc(), follows)
    with contextlib.suppress(BrokenPipeError):
        parent.send(message)


def prefill(job: Job, teller: Teller, pipe: Connection) -> Prefilled:
    """Compute the prompt, register the cache, and stay until decode has what it wants."""
    model = _model(job, teller)
    cache, sequence = _sequence(job, PREFILL_SLOTS, PREFILL_SLOT, PREFILL_PARITY)
    start = time.perf_counter()
    first_token = model.prefill(job.prompt, sequence, teller.about("prefill"))
    seconds = time.perf_counter() - start
    seen = _digest(sequence, len(job.prompt), job.config, teller)

    options = Options(listen="127.0.0.1:0", secret=job.secret, path=job.path)
    with LlmDataDist(PREFILL_CLUSTER, LlmRole.PROMPT, options) as engine:
        registered = engine.register_kv_cache(None, cache.tensors)
        address = engine.listen_address
        if address is None:
            raise RuntimeError("the engine does not listen")
        host, port = address
        handoff = Handoff(host, port, registered.cache_id, job.prompt, first_token)
        # A hold's time should not run while decode is still making its weights.
        _receive(pipe, teller.parent)
        held = None
        if isinstance(sequence, Slot):
            pipe.send(replace(handoff, slot=sequence.index))
        else:
            held = _hold(engine, registered, sequence, handoff, pipe, teller, job)
            for tensor in cache.tensors:
                tensor[sequence.blocks] = np.nan
        # From here to decode's farewell this process only sleeps: the pull needs none of it.
        _receive(pipe, teller.parent)
        engine.unregister_kv_cache(registered.cache_id)
    return Prefilled(os.getpid(), f"{host}:{port}", seconds, seen, held)


def _hold(
    engine: LlmDataDist,
    registered: Cache,
    sequence: BlockTable,
    handoff: Handoff,
    pipe: Connection,
    teller: Teller,
    job: Job,
) -> Held:
    """Hand the prompt's blocks to decode under a hold, and sleep until its notice has come."""
    blocks = tuple(sequence.blocks)
    start = time.perf_counter()
    hold = engine.hold(registered, blocks, round(job.timeout * 1000))
    pipe.send(replace(handoff, blocks=blocks, hold=hold.token))
    notices = engine.notices()
    told = notices.fileno()
    if told not in wait([told, pipe, teller.parent]):
        raise PartnerGone("decode has ended without a notice")
    notice = next(notices)
    seconds = time.perf_counter() - start
    if hold.outcome != "noticed" or (notice.cluster_id, notice.data) != (DECODE_CLUSTER, _NOTICE):
        raise RuntimeError(f"the hold is {hold.outcome or 'active'} after {notice}")
    return Held(blocks, notice.data.decode(), hold.outcome, seconds)


def decode(job: Job, teller: Teller, pipe: Connection) -> Decoded:
    """Pull the prompt's cache from prefill and generate from it."""
    model = _model(job, teller)
    cache, sequence = _sequence(job, DECODE_SLOTS, DECODE_SLOT, DECODE_PARITY)
    options = Options(secret=job.secret, path=job.path)
    with LlmDataDist(DECODE_CLUSTER, LlmRole.DECODER, options) as engine:
        registered = engine.register_kv_cache(None, cache.tensors)
        pipe.send(None)
        handoff: Handoff = _receive(pipe, teller.parent)
        position = len(handoff.prompt)

        start = time.perf_counter()
        prefill_engine = ClusterInfo(PREFILL_CLUSTER, [IpInfo(handoff.host, handoff.port)])
        engine.link_llm_clusters([prefill_engine], timeout_ms=round(job.timeout * 1000))
        link_seconds = time.perf_counter() - start

        told = teller.about("pull")
        start = time.perf_counter()
        transfer = _pull(engine, registered, sequence, handoff, job)
        blocks = tuple(sequence.blocks) if isinstance(sequence, BlockTable) else ()
        landed: list[tuple[float, int]] = []

        def wait_layer(layer: int) -> None:
            transfer.wait_layer(layer)
            landed.append((time.perf_counter() - start, transfer.bytes_done))
            told(layer + 1, job.config.layers)

        token = model.decode(handoff.first_token, position, sequence, wait_layer)
        first_token_seconds = time.perf_counter() - start
        report = transfer.result(job.timeout)
        started_seconds, started_bytes = landed[0]
        transports = engine.links()[0].transports
        tokens = [handoff.first_token, token]
        _generate(model, tokens, position + 1, sequence, job.tokens, teller)
        digest = _digest(sequence, position, job.config, teller)
        pipe.send(None)
    return Decoded(
        os.getpid(),
        tuple(tokens),
        report,
        transports,
        link_seconds,
        started_seconds,
        started_bytes,
        first_token_seconds,
        digest,
        blocks,
    )


def _pull(
    engine: LlmDataDist,
    registered: Cache,
    sequence: Slot | BlockTable,
    handoff: Handoff,
    job: Job,
) -> Transfer:
    """Begin to pull the prompt's keys and values into `sequence`."""
    source = CacheIndex(PREFILL_CLUSTER, handoff.cache_id, handoff.slot)
    timeout_ms = round(job.timeout * 1000)
    if isinstance(sequence, Slot):
        # A slot holds its tokens one after the other, so these are the first bytes of it.
        size = len(handoff.prompt) * job.config.token_bytes
        return engine.pull_kv_cache_async(
            source, registered, sequence.index, size=size, timeout_ms=timeout_ms
        )
    sequence.reserve(len(handoff.prompt))
    return engine.pull_kv_blocks_async(
        source,
        registered,
        handoff.blocks,
        sequence.blocks,
        timeout_ms=timeout_ms,
        hold=handoff.hold,
        notice=_NOTICE,
    )


def reference(job: Job, teller: Teller) -> Alone:
    """The same prompt and the same tokens in one process, without this library or any blocks."""
    model = _model(job, teller)
    sequence = KvCache(job.config, DECODE_SLOTS).slot(DECODE_SLOT)
    position = len(job.prompt)
    start = time.perf_counter()
    tokens = [model.prefill(job.prompt, sequence, teller.about("recompute"))]
    tokens.append(model.decode(tokens[0], position, sequence))
    first_token_seconds = time.perf_counter() - start
    _generate(model, tokens, position + 1, sequence, job.tokens, teller)
    return Alone(tuple(tokens), first_token_seconds)


def _sequence(
    job: Job, slots: int, slot: int, parity: int
) -> tuple[KvCache | PagedKvCache, Slot | BlockTable]:
    """A cache of the kind that the job is about, and where in it the prompt goes."""
    if job.block_tokens is None:
        cache = KvCache(job.config, slots)
        return cache, cache.slot(slot)
    paged = PagedKvCache(job.config, job.block_tokens, parity)
    return paged, paged.sequence()


def _model(job: Job, teller: Teller) -> Transformer:
    model = Transformer(job.config, teller.about("weights"))
    model.warm_up()
    return model


def _generate(
    model: Transformer,
    tokens: list[int],
    position: int,
    sequence: CachedSequence,
    wanted: int,
    teller: Teller,
) -> None:
    """Extend `tokens`, whose last one belongs at `position`, by the most likely ones."""
    told = teller.about("generate")
    while len(tokens) < wanted:
        tokens.append(model.decode(tokens[-1], position, sequence))
        position += 1
        told(len(tokens), wanted)


def _digest(sequence: CachedSequence, tokens: int, config: ModelConfig, teller: Teller) -> str:
    told = teller.about("digest")
    digest = hashlib.blake2b(digest_size=16)
    for layer in range(config.layers):
        for loaded in sequence.load(layer, tokens):
            digest.update(loaded.data)
        told(layer + 1, config.layers)
    return digest.hexdigest()


def _receive(pipe: Connection, parent: Connection) -> Any:
    """The next message from the partner.

    It may take as long as the partner's computation does; the parent watches that it goes on, and
    it never writes, so that anything at its end means that it is gone.
    """
    ready: Sequence[object] = wait([pipe, parent])
    if pipe not in ready:
        raise PartnerGone("the demo's main process has ended")
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError) as error:
        raise PartnerGone("the partner's process has ended") from error

"""What the demo's three processes do, and what they tell the process that started them.

`prefill` computes the prompt and lends out its cache; `decode` pulls that cache and generates;
`reference` does both by itself, as the measure of right and of slow.  `child` runs each of them.
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
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from ucxkv import (
    CacheIndex,
    ClusterInfo,
    IpInfo,
    LlmDataDist,
    LlmRole,
    Options,
    TransferReport,
)
from ucxkv.demo.model import KvCache, ModelConfig, Transformer

PREFILL_CLUSTER, DECODE_CLUSTER = 1, 2
# The caches are laid out differently on purpose: a pull goes from any slot to any slot.
PREFILL_SLOTS, PREFILL_SLOT = 2, 1
DECODE_SLOTS, DECODE_SLOT = 1, 0

_TELL_EVERY = 0.1


@dataclass(frozen=True)
class Job:
    """What the processes are asked for; the same for all of them."""

    config: ModelConfig
    prompt: bytes
    tokens: int
    path: str
    secret: str
    timeout: float


@dataclass(frozen=True)
class Handoff:
    """What prefill tells decode through a pipe, as a scheduler would."""

    host: str
    port: int
    cache_id: int
    slot: int
    prompt: bytes
    first_token: int


@dataclass(frozen=True)
class Prefilled:
    pid: int
    address: str
    seconds: float
    digest: str


@dataclass(frozen=True)
class Decoded:
    """`started_*` tell how far the pull was when layer 0 began, `first_token_seconds` runs from
    the start of the pull to the first token that decode has made."""

    pid: int
    tokens: tuple[int, ...]
    report: TransferReport
    transports: tuple[str, ...]
    link_seconds: float
    started_seconds: float
    started_bytes: int
    first_token_seconds: float
    digest: str


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
    cache = KvCache(job.config, PREFILL_SLOTS)
    start = time.perf_counter()
    first_token = model.prefill(job.prompt, cache, PREFILL_SLOT, teller.about("prefill"))
    seconds = time.perf_counter() - start
    seen = _digest(cache, PREFILL_SLOT, len(job.prompt), teller)

    options = Options(listen="127.0.0.1:0", secret=job.secret, path=job.path)
    with LlmDataDist(PREFILL_CLUSTER, LlmRole.PROMPT, options) as engine:
        registered = engine.register_kv_cache(None, cache.tensors)
        address = engine.listen_address
        if address is None:
            raise RuntimeError("the engine does not listen")
        host, port = address
        pipe.send(Handoff(host, port, registered.cache_id, PREFILL_SLOT, job.prompt, first_token))
        # From here to decode's farewell this process only sleeps: the pull needs none of it.
        _receive(pipe, teller.parent)
        engine.unregister_kv_cache(registered.cache_id)
    return Prefilled(os.getpid(), f"{host}:{port}", seconds, seen)


def decode(job: Job, teller: Teller, pipe: Connection) -> Decoded:
    """Pull the prompt's cache from prefill and generate from it."""
    model = _model(job, teller)
    cache = KvCache(job.config, DECODE_SLOTS)
    options = Options(secret=job.secret, path=job.path)
    with LlmDataDist(DECODE_CLUSTER, LlmRole.DECODER, options) as engine:
        registered = engine.register_kv_cache(None, cache.tensors)
        handoff: Handoff = _receive(pipe, teller.parent)
        timeout_ms = round(job.timeout * 1000)

        start = time.perf_counter()
        prefill_engine = ClusterInfo(PREFILL_CLUSTER, [IpInfo(handoff.host, handoff.port)])
        engine.link_llm_clusters([prefill_engine], timeout_ms=timeout_ms)
        link_seconds = time.perf_counter() - start

        told = teller.about("pull")
        start = time.perf_counter()
        transfer = engine.pull_kv_cache_async(
            CacheIndex(PREFILL_CLUSTER, handoff.cache_id, handoff.slot),
            registered,
            DECODE_SLOT,
            # A slot holds its tokens one after the other, so these are the first bytes of it.
            size=len(handoff.prompt) * job.config.token_bytes,
            timeout_ms=timeout_ms,
        )
        landed: list[tuple[float, int]] = []

        def wait_layer(layer: int) -> None:
            transfer.wait_layer(layer)
            landed.append((time.perf_counter() - start, transfer.bytes_done))
            told(layer + 1, job.config.layers)

        position = len(handoff.prompt)
        token = model.decode(handoff.first_token, position, cache, DECODE_SLOT, wait_layer)
        first_token_seconds = time.perf_counter() - start
        report = transfer.result(job.timeout)
        started_seconds, started_bytes = landed[0]
        transports = engine.links()[0].transports
        tokens = [handoff.first_token, token]
        _generate(model, tokens, position + 1, cache, DECODE_SLOT, job.tokens, teller)
        digest = _digest(cache, DECODE_SLOT, position, teller)
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
    )


def reference(job: Job, teller: Teller) -> Alone:
    """The same prompt and the same tokens in one process, without this library."""
    model = _model(job, teller)
    cache = KvCache(job.config, DECODE_SLOTS)
    position = len(job.prompt)
    start = time.perf_counter()
    tokens = [model.prefill(job.prompt, cache, DECODE_SLOT, teller.about("recompute"))]
    tokens.append(model.decode(tokens[0], position, cache, DECODE_SLOT))
    first_token_seconds = time.perf_counter() - start
    _generate(model, tokens, position + 1, cache, DECODE_SLOT, job.tokens, teller)
    return Alone(tuple(tokens), first_token_seconds)


def _model(job: Job, teller: Teller) -> Transformer:
    model = Transformer(job.config, teller.about("weights"))
    model.warm_up()
    return model


def _generate(
    model: Transformer,
    tokens: list[int],
    position: int,
    cache: KvCache,
    slot: int,
    wanted: int,
    teller: Teller,
) -> None:
    """Extend `tokens`, whose last one belongs at `position`, by the most likely ones."""
    told = teller.about("generate")
    while len(tokens) < wanted:
        tokens.append(model.decode(tokens[-1], position, cache, slot))
        position += 1
        told(len(tokens), wanted)


def _digest(cache: KvCache, slot: int, tokens: int, teller: Teller) -> str:
    told = teller.about("digest")
    digest = hashlib.blake2b(digest_size=16)
    for number, tensor in enumerate(cache.tensors, 1):
        digest.update(tensor[slot, :tokens].data)
        told(number, len(cache.tensors))
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

"""Starts the demo's processes, watches over them, and compares what they generated."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

from ucxkv.demo import processes
from ucxkv.demo.model import ITEM_BYTES, ModelConfig
from ucxkv.demo.processes import Alone, Decoded, Done, Failed, Job, Prefilled, Progress

# A child's own deadlines end first, since they can say what was being waited for.
_GRACE = 5.0
_ENDING = 2.0
_BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_MOST_BLAS_THREADS = 8

Watcher = Callable[[str, Progress], None]


class DemoError(Exception):
    """The demo could not be run to its end; `details` has the tracebacks of its processes."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


@dataclass(frozen=True)
class Outcome:
    """What the demo found out."""

    job: Job
    prefilled: Prefilled
    decoded: Decoded
    alone: Alone
    blas_threads: str

    @property
    def tokens_equal(self) -> bool:
        return self.decoded.tokens == self.alone.tokens

    @property
    def bytes_equal(self) -> bool:
        """Whether decode's cache held, for the prompt, exactly what prefill's did."""
        return self.decoded.digest == self.prefilled.digest

    @property
    def exit_code(self) -> int:
        return 0 if self.tokens_equal and self.bytes_equal else 1

    def as_dict(self) -> dict[str, Any]:
        """For --json: plain values, seconds and bytes."""
        decoded, report = self.decoded, self.decoded.report
        return {
            "tokens_equal": self.tokens_equal,
            "bytes_equal": self.bytes_equal,
            "tokens": list(decoded.tokens),
            "single_process_tokens": list(self.alone.tokens),
            "model": {**asdict(self.job.config), "weights": self.job.config.weights},
            "prompt_tokens": len(self.job.prompt),
            "blas_threads": self.blas_threads,
            "pull": {
                "bytes": report.bytes,
                "spans": report.spans,
                "seconds": report.seconds,
                "gigabytes_per_second": gigabytes_per_second(self.decoded),
                "path": report.path,
                "transports": list(decoded.transports),
                "layer_0_began_after_seconds": decoded.started_seconds,
                "layer_0_began_after_bytes": decoded.started_bytes,
            },
            "paged": self._paged(),
            "seconds": {
                "prefill": self.prefilled.seconds,
                "link": decoded.link_seconds,
                "first_token_pulled": decoded.first_token_seconds,
                "first_token_recomputed": self.alone.first_token_seconds,
            },
        }

    def _paged(self) -> dict[str, Any] | None:
        held = self.prefilled.held
        if held is None:
            return None
        return {
            "block_tokens": self.job.block_tokens,
            "source_blocks": list(held.blocks),
            "destination_blocks": list(self.decoded.blocks),
            "hold": held.outcome,
            "notice": held.notice,
            "held_seconds": held.seconds,
        }


def gigabytes_per_second(decoded: Decoded) -> float:
    return decoded.report.bytes / max(decoded.report.seconds, 1e-9) / 1e9


def run(
    config: ModelConfig,
    prompt: bytes,
    *,
    tokens: int,
    path: str = "auto",
    block_tokens: int | None = None,
    timeout: float = 60.0,
    watcher: Watcher | None = None,
) -> Outcome:
    """Run the demo; raises DemoError if a process fails, dies, or makes no progress for `timeout`.

    `watcher(process, progress)` hears how far each process is.  `tokens` counts the first one,
    which prefill makes.  With `block_tokens` the caches are paged, in blocks of so many tokens.
    """
    if block_tokens is not None:
        rounded = -(-config.max_tokens // block_tokens) * block_tokens
        config = replace(config, max_tokens=rounded)
    needed = 2 * (config.weights * ITEM_BYTES + config.cache_bytes(processes.PREFILL_SLOTS))
    free = psutil.virtual_memory().available
    if needed > free:
        raise DemoError(
            f"this would take about {needed / 1e9:.1f} GB of memory, but only {free / 1e9:.1f} GB"
            " are free; choose a shorter prompt or a smaller model"
        )
    job = Job(config, prompt, tokens, path, block_tokens, secrets.token_hex(16), timeout)
    watcher = watcher or (lambda _process, _progress: None)
    with contextlib.closing(_Crew(job, watcher)) as crew:
        to_prefill, to_decode = multiprocessing.Pipe()
        with to_prefill, to_decode:
            crew.start("prefill", processes.prefill, to_prefill)
            crew.start("decode", processes.decode, to_decode)
        results = crew.results()
        # Not before the others have ended: its time is compared with theirs.
        crew.start("reference", processes.reference)
        results.update(crew.results())
    threads = _threads_set() or str(_usual_threads())
    return Outcome(job, results["prefill"], results["decode"], results["reference"], threads)


class _Crew:
    """The child processes; none outlives `close`."""

    def __init__(self, job: Job, watcher: Watcher) -> None:
        self._job = job
        self._watcher = watcher
        self._context = multiprocessing.get_context("spawn")
        self._members: dict[str, tuple[BaseProcess, Connection]] = {}
        self._awaited: set[str] = set()

    def close(self) -> None:
        for process, _connection in self._members.values():
            if process.is_alive():
                process.terminate()
        for process, connection in self._members.values():
            process.join(_ENDING)
            if process.is_alive():
                process.kill()
                process.join(_ENDING)
            connection.close()

    def start(self, name: str, work: Callable[..., object], *pipes: Connection) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=processes.child, args=(work, self._job, theirs, *pipes), name=name, daemon=True
        )
        with theirs, _for_children():
            process.start()
            self._members[name] = process, ours
        self._awaited.add(name)

    def results(self) -> dict[str, Any]:
        """What each process started since the last call has come to."""
        results: dict[str, Any] = {}
        deadline = self._deadline()
        while self._awaited:
            heard = self._listen(deadline - time.monotonic())
            if not heard:
                names = " and ".join(sorted(self._awaited))
                raise DemoError(
                    f"no progress for {self._job.timeout + _GRACE:.0f} s; still running: {names}"
                )
            failures = []
            for name, message in heard:
                if isinstance(message, Progress):
                    self._watcher(name, message)
                    deadline = self._deadline()
                    continue
                self._awaited.discard(name)
                if isinstance(message, Done):
                    results[name] = message.result
                    deadline = self._deadline()
                else:
                    failures.append((name, message))
            if failures:
                raise self._explain(failures)
        for process, _connection in self._members.values():
            process.join(_ENDING)
        return results

    def _deadline(self) -> float:
        return time.monotonic() + self._job.timeout + _GRACE

    def _listen(self, timeout: float) -> list[tuple[str, Progress | Done | Failed]]:
        """Messages that have come from processes still awaited, or the news that one has died."""
        awaited = {name: self._members[name] for name in self._awaited}
        ready = set(wait([connection for _, connection in awaited.values()], max(timeout, 0)))
        heard: list[tuple[str, Progress | Done | Failed]] = []
        for name, (process, connection) in awaited.items():
            if connection not in ready:
                continue
            try:
                heard.append((name, connection.recv()))
            except (EOFError, ConnectionResetError):
                process.join(_ENDING)
                heard.append((name, Failed(_how_it_died(process.exitcode), "")))
        return heard

    def _explain(self, failures: list[tuple[str, Failed]]) -> DemoError:
        """One error for them all; the cause may be heard after what followed from it."""
        until = time.monotonic() + 1
        while self._awaited and (left := until - time.monotonic()) > 0:
            for name, message in self._listen(left):
                if isinstance(message, Progress):
                    continue
                self._awaited.discard(name)
                if isinstance(message, Failed):
                    failures.append((name, message))
        failures.sort(key=lambda failure: failure[1].follows)
        name, first = failures[0]
        details = [
            f"In the {name} process:\n{failure.trace}"
            for name, failure in failures
            if failure.trace and (failure is first or not failure.follows)
        ]
        return DemoError(f"the {name} process failed: {first.summary}", "\n".join(details))


def _how_it_died(exit_code: int | None) -> str:
    if exit_code is None:
        return "it closed its pipe but did not end"
    if exit_code < 0:
        return f"it was killed by signal {-exit_code} ({signal.strsignal(-exit_code)})"
    return f"it ended without a word, with exit code {exit_code}"


def _threads_set() -> str | None:
    """What the user has set the number of BLAS threads to, if at all."""
    return next((os.environ[name] for name in _BLAS_THREADS if name in os.environ), None)


def _usual_threads() -> int:
    # BLAS threads wait for each other by spinning: on cores that they have to share they are slower
    # together than one of them is by itself.
    return max(1, min(len(os.sched_getaffinity(0)) - 1, _MOST_BLAS_THREADS))


@contextlib.contextmanager
def _for_children() -> Iterator[None]:
    """What a child inherits: as many BLAS threads as every other, and no Ctrl-C while it starts.

    The number of threads decides in which order BLAS adds, and so the last bits of a sum.
    """
    # Starting it unblocks SIGINT, so that it must not wait for the first child to need it.
    resource_tracker.ensure_running()
    changed = {} if _threads_set() else dict.fromkeys(_BLAS_THREADS, str(_usual_threads()))
    os.environ.update(changed)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for name in changed:
            del os.environ[name]

"""vLLM engines in processes of their own, stepped one by one and looked into by tests.

What vLLM runs as a core process and its worker is one process here: a test stops, slows and kills
exactly that.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

CONNECTOR = "ucxkv.integrations.vllm"


@dataclass
class Answer:
    """A finished request."""

    tokens: list[int]
    reason: str | None
    params: dict[str, Any] | None
    at: float


@dataclass(frozen=True)
class Launch:
    """How an engine is started."""

    model: str
    role: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    policy: str = "recompute"
    blocks: int = 256
    block_size: int = 32
    environment: Mapping[str, str] = field(default_factory=dict)
    connector: str = "UcxKvConnector"
    module: str = CONNECTOR
    prefix_caching: bool = True
    max_batched_tokens: int = 2048
    max_model_len: int = 2048


def _engine(launch: Launch) -> Any:
    """In the child: vLLM is imported here, with the environment that is meant for it."""
    os.environ.update(
        {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **launch.environment,
        }
    )
    from vllm import EngineArgs, LLMEngine
    from vllm.config import KVTransferConfig

    transfer = None
    if launch.role is not None:
        transfer = KVTransferConfig(
            kv_connector=launch.connector,
            kv_connector_module_path=launch.module,
            kv_role=launch.role,
            kv_connector_extra_config={"host": "127.0.0.1", **launch.extra},
            kv_load_failure_policy=launch.policy,
        )
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=launch.model,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            block_size=launch.block_size,
            num_gpu_blocks_override=launch.blocks,
            max_model_len=launch.max_model_len,
            max_num_seqs=16,
            max_num_batched_tokens=launch.max_batched_tokens,
            enable_prefix_caching=launch.prefix_caching,
            distributed_executor_backend="uni",
            kv_transfer_config=transfer,
        )
    )


def _serve(pipe: Connection, launch: Launch, log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        engine = _engine(launch)
    except BaseException:
        pipe.send(("failed", "", traceback.format_exc()))
        raise
    pipe.send(("ready", "", None))
    core = engine.engine_core.engine_core
    while True:
        if not core.scheduler.has_requests():
            pipe.poll(0.05)
        while pipe.poll(0):
            if not _command(pipe, engine, pipe.recv()):
                return
        if not core.scheduler.has_requests():
            continue
        answers = engine.step()
        for output in answers:
            if output.finished:
                first = output.outputs[0]
                answer = Answer(
                    list(first.token_ids),
                    first.finish_reason,
                    output.kv_transfer_params,
                    time.monotonic(),
                )
                pipe.send(("answer", output.request_id, answer))
        if not core.scheduler.running:
            time.sleep(0.001)


def _command(pipe: Connection, engine: Any, command: tuple[Any, ...]) -> bool:
    kind, name, *given = command
    if kind == "add":
        from vllm import SamplingParams

        prompt, tokens, params = given
        sampling = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    elif kind == "abort":
        engine.abort_request([name])
    elif kind == "call":
        function, arguments = given
        try:
            pipe.send(("result", name, function(engine, *arguments)))
        except Exception:
            pipe.send(("error", name, traceback.format_exc()))
    else:
        connector = engine.engine_core.engine_core.scheduler.connector
        engine.engine_core.shutdown()
        del connector
        return False
    return True


class Engine:
    """The test's end of an engine."""

    def __init__(self, launch: Launch, log: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.log = log
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, launch, str(log)), daemon=True)
        self.process.start()
        theirs.close()
        self.answers: dict[str, Answer] = {}
        self._results: dict[str, tuple[str, Any]] = {}
        self._calls = 0
        self._ready = False

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def ready(self, timeout: float = 240) -> Engine:
        """Wait until it takes requests."""
        self._until(lambda: self._ready, timeout)
        return self

    def add(
        self, name: str, prompt: list[int], tokens: int, params: dict[str, Any] | None = None
    ) -> None:
        """Submit a request."""
        self._pipe.send(("add", name, prompt, tokens, params))

    def abort(self, name: str) -> None:
        """Abort a request."""
        self._pipe.send(("abort", name))

    def answer(self, name: str, timeout: float = 60) -> Answer:
        """Wait for the end of a request."""
        self._until(lambda: name in self.answers, timeout)
        return self.answers[name]

    def call(self, function: Callable[..., Any], *arguments: Any, timeout: float = 60) -> Any:
        """`function(engine, *arguments)` in the engine's process, between two steps."""
        self._calls += 1
        name = str(self._calls)
        self._pipe.send(("call", name, function, arguments))
        self._until(lambda: name in self._results, timeout)
        kind, value = self._results.pop(name)
        if kind == "error":
            raise AssertionError(value)
        return value

    def wait_for(self, function: Callable[..., Any], *arguments: Any, timeout: float = 20) -> float:
        """Ask until `function` is true; the seconds that it took."""
        begun = time.monotonic()
        while not self.call(function, *arguments):
            assert time.monotonic() < begun + timeout, f"{function.__name__} not in {timeout} s"
            time.sleep(0.005)
        return time.monotonic() - begun

    def poll(self) -> None:
        """Take what has come."""
        while self._pipe.poll(0):
            self._take()

    def _until(self, condition: Callable[[], bool], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            left = deadline - time.monotonic()
            if left <= 0 or not self._pipe.poll(left):
                raise AssertionError(f"nothing within {timeout} s; its log:\n{self.tail()}")
            self._take()

    def _take(self) -> None:
        try:
            kind, name, value = self._pipe.recv()
        except EOFError:
            raise AssertionError(f"the engine has died; its log:\n{self.tail()}") from None
        if kind == "ready":
            self._ready = True
        elif kind == "failed":
            raise AssertionError(f"the engine did not start:\n{value}\n{self.tail()}")
        elif kind == "answer":
            self.answers[name] = value
        else:
            self._results[name] = (kind, value)

    def tail(self, size: int = 6000) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-size:] if self.log.exists() else ""

    def stop(self) -> None:
        """Stop the process, all threads of it."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def slowed(self, running: float = 0.003, stopped: float = 0.03) -> Iterator[None]:
        """Stop it again and again, so that it serves pulls slowly."""
        over = threading.Event()

        def alternate() -> None:
            while not over.is_set():
                self.stop()
                time.sleep(stopped)
                self.resume()
                time.sleep(running)

        thread = threading.Thread(target=alternate)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.resume()

    def kill(self) -> None:
        """End it at once, without a word."""
        self.process.kill()
        self.process.join()

    def close(self, timeout: float = 30) -> None:
        """Shut it down; whoever does not end in time is killed, which is an error."""
        if not self.process.is_alive():
            return
        self.resume()
        self._pipe.send(("close", ""))
        self.process.join(timeout)
        late = self.process.is_alive()
        if late:
            self.kill()
        assert not late, "the engine did not shut down"


# -- what tests ask of an engine, by Engine.call ---------------------------------------------------


def _core(engine: Any) -> Any:
    return engine.engine_core.engine_core


def free_blocks(engine: Any) -> int:
    return int(_core(engine).scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def is_idle(engine: Any) -> bool:
    """Whether no request is left, none that waits for decode either."""
    return not _core(engine).scheduler.has_requests()


def worker_side(engine: Any) -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker


def link_paths(engine: Any) -> list[str]:
    """Path and state of each link."""
    return [f"{link.path} {link.state}" for link in worker_side(engine).engine.links()]


def bytes_landed(engine: Any) -> dict[str, int]:
    """Bytes that each running pull has moved."""
    pulls = worker_side(engine)._pulls._pulls
    return {
        name: sum(transfer.bytes_done for _, transfer in pull.pieces)
        for name, pull in pulls.items()
    }


def is_pulling(engine: Any, pulls: int) -> bool:
    """Whether so many pulls have begun."""
    return len(worker_side(engine)._pulls._pulls) == pulls


def transfers(engine: Any) -> dict[str, int]:
    """Totals of the worker's engine."""
    stats = worker_side(engine).engine.stats()
    return {
        "get": stats.bytes_get,
        "stream": stats.bytes_stream,
        "served": stats.bytes_served,
        "holds": stats.holds,
        "notices": stats.notices_received,
        "failures": sum(stats.failures.values()),
    }


def blocks_of(engine: Any, name: str) -> list[int]:
    """The blocks of a request; its name is what the test has given it."""
    scheduler = _core(engine).scheduler
    for request_id in scheduler.requests:
        if request_id.startswith(f"{name}-"):
            return list(scheduler.kv_cache_manager.get_block_ids(request_id)[0])
    return []


def digest_of_blocks(engine: Any, blocks: list[int]) -> str:
    """What is in these blocks, in all layers."""
    import hashlib

    digest = hashlib.sha256()
    for tensor in _core(engine).model_executor.driver_worker.worker.model_runner.kv_caches:
        digest.update(tensor[blocks].contiguous().numpy().tobytes())
    return digest.hexdigest()

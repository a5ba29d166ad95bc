"""Two real processes, each with an engine, driven by a test that has none of its own.

    with Peer(1, path="get") as owner, Peer(2, path="get") as puller:
        puller.link(owner)
        owner.call(actions.make_cache, "kv", 4, (8, 100))

A peer is an engine in an interpreter of its own (see interpreters.py).  An exception in the child
is raised in the test with the child's traceback.  A call that takes too long shows the stacks of
the child's threads and kills it, well before the test's own time is up.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import psutil
import pytest

from children import actions
from interpreters import PATIENCE, Interpreter, Pending
from ucxkv import _load, settings

SCALE = float(os.environ.get("UCXKV_TEST_SCALE", "1"))


def rounds(default: int) -> int:
    """Number of rounds of a test that repeats itself, scaled by UCXKV_TEST_SCALE."""
    return max(1, round(default * SCALE))


@dataclass
class Sample:
    """Resources of a process at one moment."""

    fds: int
    threads: int
    maps: int
    rss: int
    sockets: int


def sample(pid: int) -> Sample:
    process = psutil.Process(pid)
    links = []
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/{pid}/fd/{entry}"))
    with open(f"/proc/{pid}/maps") as maps:
        count = sum(1 for _ in maps)
    return Sample(
        fds=len(links),
        threads=process.num_threads(),
        maps=count,
        rss=process.memory_info().rss,
        sockets=sum(link.startswith("socket:") for link in links),
    )


def thread_states(pid: int) -> set[str]:
    states = set()
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/stat") as stat:
            states.add(stat.read().rpartition(")")[2].split()[0])
    return states


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def wait_until(condition: Callable[[], Any], timeout: float = 10.0, step: float = 0.02) -> Any:
    """The first true value of `condition`; AssertionError when there is none in time."""
    end = time.monotonic() + timeout * PATIENCE
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout} s: {condition}, last value {value!r}")
        time.sleep(step)


class Peer:
    """A child process, by default with an initialized engine in it.

    `path`: "stream" is TCP alone, "get" is GET through CMA, "emulated" forces UCX's emulated GET
    over TCP.  `options` are more arguments of ucxkv.Options; `listen=False` makes a client only.
    `fds` are descriptors that the child inherits, by name.  `allow` is a pattern of output lines
    that are no trouble in this test.  A test that changes or counts something of the process
    itself asks for one that is `fresh` and ends with the peer.  `network` names the network
    namespace that the child lives in.
    """

    def __init__(
        self,
        cluster_id: int,
        *,
        path: str = "stream",
        listen: bool | str = True,
        options: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        engine: bool = True,
        fds: Mapping[str, int] | None = None,
        name: str | None = None,
        allow: str | None = None,
        finalize: bool = True,
        fresh: bool = False,
        network: str | None = None,
    ) -> None:
        self.cluster_id = cluster_id
        self.path = path
        self.name = name or f"peer {cluster_id}"
        self.allow = re.compile(allow) if allow else None
        self.engine = engine
        self.finalize = finalize
        # What ends without finalize is of no use to others.
        self.fresh = fresh or bool(fds) or not finalize
        self.options: dict[str, Any] = dict(options or {})
        if listen:
            self.options.setdefault("listen", listen if isinstance(listen, str) else "127.0.0.1:0")
        if path in ("get", "emulated"):
            self.options.setdefault("path", "get")
        self._address: tuple[str, int] | None = None
        self._starting: Pending | None = None
        self._fds = dict(fds or {})
        self._network = network
        self._env = environment(path, env)
        self._start()

    def _start(self) -> None:
        if self.fresh:
            self.interpreter = Interpreter(self._env, self._fds, self._network)
        else:
            self.interpreter = Interpreter.lend(self._env, self._network)
        self.interpreter.name = self.name
        if self.engine:
            # Several peers in a row start at the same time: the first to be used is waited for.
            self._starting = self.interpreter.post(
                "main", actions.start_engine, self.cluster_id, self.options
            )

    def ready(self) -> None:
        """Wait until the engine runs; raise what it has raised."""
        starting, self._starting = self._starting, None
        if starting is not None:
            self._address = starting.result(60)

    @property
    def address(self) -> tuple[str, int] | None:
        """Where the engine listens."""
        self.ready()
        return self._address

    @address.setter
    def address(self, address: tuple[str, int] | None) -> None:
        self.ready()
        self._address = address

    @property
    def pid(self) -> int:
        return self.interpreter.process.pid

    @property
    def killed(self) -> bool:
        return self.interpreter.killed

    def _send(self, lane: str, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Pending:
        self.ready()
        return self.interpreter.post(lane, func, *args, **kwargs)

    def call(
        self, func: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Run `func(ctx, *args)` in the child's main thread and return its result."""
        return self._send("main", func, *args, **kwargs).result(timeout)

    def side(
        self, func: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Like call(), in the thread that reads the commands: the main thread may be busy."""
        return self._send("side", func, *args, **kwargs).result(timeout)

    def start(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Pending:
        """Run `func` in a new thread of the child; do not wait."""
        return self._send("thread", func, *args, **kwargs)

    def start_main(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Pending:
        """Run `func` in the child's main thread; do not wait."""
        return self._send("main", func, *args, **kwargs)

    def link(
        self, other: Peer, *, address: tuple[str, int] | None = None, timeout_ms: int = 5000
    ) -> None:
        self.call(actions.link, other.cluster_id, address or other.address, timeout_ms)

    def unlink(self, other: Peer, *, timeout_ms: int = 1000, force: bool = False) -> None:
        self.call(actions.unlink, other.cluster_id, timeout_ms, force)

    def stop(self) -> None:
        """Stop the process; returns when every thread of it stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_until(lambda: thread_states(self.pid) == {"T"}, step=0.0005)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self.resume()

    def interrupt(self) -> float:
        """Send SIGINT; the time (monotonic, the same clock in every process) at which."""
        now = time.monotonic()
        os.kill(self.pid, signal.SIGINT)
        return now

    def kill(self) -> None:
        self.interpreter.kill()

    def restart(self) -> None:
        """A new process with the same arguments, on the port the old one had."""
        if self._address is not None:
            self.options["listen"] = f"{self._address[0]}:{self._address[1]}"
        self._start()

    def sample(self) -> Sample:
        return sample(self.pid)

    def close(self) -> None:
        """Finalize the engine, and look at what the process has printed."""
        try:
            if not self.killed:
                if self.engine and self.finalize:
                    self.call(actions.finalize, timeout=15)
                if self.fresh:
                    self.interpreter.end(self.allow)
                else:
                    self.interpreter.give_back(self.allow)
            else:
                self.interpreter.check(self.allow)
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        if not self.killed:
            self.interpreter.kill()
        text = self.interpreter.output()
        if text:
            print(f"---- output of {self.name} ----\n{text[-20000:]}\n----")

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()


def needs_get(*, emulated: bool = False) -> None:
    """Skip the test where processes of one host have no GET: before UCX 1.19, unless by RDMA.

    On 1.18 links have not passed the trial of an emulated one either; why has not been looked into.
    """
    if _load.loaded().version >= settings.NATIVE_CMA or (settings.rdma_usable() and not emulated):
        return
    pytest.skip(f"UCX {_load.loaded().version_text} has no GET of its own on one host")


def environment(path: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child: the test's own, with the settings of a path and no others."""
    env = {
        key: value
        for key, value in os.environ.items()
        # pytest puts the name of the test there, and an interpreter outlives it; sanitizers need
        # UCX's hooks to be off.
        if not (key.startswith(("UCX_", "PYTEST_")) and not key.startswith("UCX_MEM_"))
        and key != "UCXKV_PATH"
    }
    if "UCXKV_TEST_RDMA" in os.environ:
        # What soft RoCE needs (see tests/rdma/lab.py).
        env.update((key, value) for key, value in os.environ.items() if key.startswith("UCX_"))
    env["PYTHONDEVMODE"] = "1"
    env["PYTHONFAULTHANDLER"] = "1"
    # Its threads come and go, with forks for instance, and are none of ours.
    env["OPENBLAS_NUM_THREADS"] = "1"
    if path in ("stream", "emulated"):
        env["UCX_TLS"] = "tcp,self"
    elif path not in ("get", "auto"):
        raise ValueError(path)
    if path in ("get", "emulated"):
        needs_get(emulated=path == "emulated")
    env.update(more or {})
    return env


class Proxy:
    """A TCP relay in front of a listener: it records, cuts and refuses connections, and turns over
    bit 0 of the byte `alter` of what a dialler sends."""

    def __init__(self, target: tuple[str, int], *, alter: int | None = None) -> None:
        self.target = target
        self.alter = alter
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self.listener.getsockname()[:2]
        self.refusing = False
        self.accepted = 0
        self.recorded: list[bytearray] = []  # what each dialler sent
        self.answered: list[bytearray] = []  # what it was answered
        self._other: dict[socket.socket, socket.socket] = {}
        self._log: dict[socket.socket, bytearray] = {}
        self._todo: queue.SimpleQueue[tuple[bool, Future[int]] | None] = queue.SimpleQueue()
        self._wake_r, self._wake_w = os.pipe()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            ready = select.select([self.listener, self._wake_r, *self._other], [], [])[0]
            for end in ready:
                if end is self.listener:
                    self._accept()
                elif end == self._wake_r:
                    os.read(self._wake_r, 1)
                    request = self._todo.get()
                    if request is None:
                        self._cut(False)
                        return
                    reset, done = request
                    done.set_result(self._cut(reset))
                elif end in self._other:
                    self._relay(end)

    def _accept(self) -> None:
        near, _ = self.listener.accept()
        self.accepted += 1
        if self.refusing:
            near.close()
            return
        try:
            far = socket.create_connection(self.target, timeout=2)
        except OSError:
            near.close()
            return
        for end in (near, far):
            end.settimeout(2)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._other[near], self._other[far] = far, near
        for end, logs in ((near, self.recorded), (far, self.answered)):
            self._log[end] = bytearray()
            logs.append(self._log[end])

    def _relay(self, end: socket.socket) -> None:
        other = self._other[end]
        try:
            data = end.recv(65536)
            if data:
                log = self._log[end]
                log += data
                place = -1 if self.alter is None else self.alter - (len(log) - len(data))
                if 0 <= place < len(data) and any(log is one for one in self.recorded):
                    data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
                other.sendall(data)
                return
        except OSError:
            pass
        for side in (end, other):
            del self._other[side]
            side.close()

    def _cut(self, reset: bool) -> int:
        ends = list(self._other)
        self._other.clear()
        for end in ends:
            if reset:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.close()
        return len(ends) // 2

    @property
    def connections(self) -> int:
        """Number of connections that stand."""
        return len(self._other) // 2

    def cut(self, *, reset: bool = False) -> int:
        """End every connection that stands, by FIN or by RST; their number."""
        done: Future[int] = Future()
        self._todo.put((reset, done))
        os.write(self._wake_w, b"x")
        return done.result(5)

    def close(self) -> None:
        self._todo.put(None)
        os.write(self._wake_w, b"x")
        self._thread.join(5)
        self.listener.close()
        os.close(self._wake_r)
        os.close(self._wake_w)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]

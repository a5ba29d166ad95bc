"""Fixtures for all tests: the two paths, a linked pair, and a check that no child is left."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import psutil
import pytest

from harness import Peer
from interpreters import Interpreter
from sleeper import Sleeper

PATHS = ("stream", "get")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than a few seconds")
    config.addinivalue_line("markers", "vllm: needs vLLM, and takes minutes")
    config.addinivalue_line("markers", "rdma: wants RDMA devices (see tests/rdma/lab.py)")
    # A shell starts what runs in its background with SIGINT ignored, and children inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_child_left() -> Iterator[None]:
    """Every process that a test has started ends with it, but for those that can be lent again."""
    yield
    known = {interpreter.process.pid for interpreter in Interpreter.live}
    left = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            family = {process.pid, *(parent.pid for parent in process.parents())}
            if not family & known and process.status() != psutil.STATUS_ZOMBIE:
                left.append(" ".join(process.cmdline()))
                process.kill()
    assert not left, f"processes left behind: {left}"


@pytest.fixture(autouse=True, scope="session")
def idle_interpreters_end() -> Iterator[None]:
    yield
    Interpreter.end_idle()


@pytest.fixture
def sleeper() -> Iterator[Sleeper]:
    """Beside the test: bounds of time allow for its lateness, which is that of the machine."""
    with Sleeper() as running:
        yield running


@pytest.fixture(params=PATHS, scope="module")
def path(request: pytest.FixtureRequest) -> str:
    """Each test runs once over TCP alone and once with GET through CMA."""
    return str(request.param)


@pytest.fixture(scope="module")
def pair(path: str) -> Iterator[tuple[Peer, Peer]]:
    """(owner, puller), linked, shared by the tests of a module that leave them healthy."""
    with (
        Peer(1, path=path, name="owner") as owner,
        Peer(2, path=path, name="puller", listen=False) as puller,
    ):
        puller.link(owner)
        yield owner, puller

"""Engines for the tests of the vLLM connector.

Without vLLM they are skipped, unless UCXKV_TEST_VLLM=required.  With it, they want its CPU build,
torch, and this project importable: ``python -m pytest tests/integration/vllm_engines``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parent
# For the tests, and for the processes that they start; behind what is installed.
sys.path.append(str(HERE.parents[2] / "examples"))

HAVE_VLLM = importlib.util.find_spec("vllm") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents:
            continue
        # Engines take most of a minute to start, and warn of things that are not ours.
        item.add_marker(pytest.mark.timeout(600))
        item.add_marker(pytest.mark.filterwarnings("default"))
        if item.get_closest_marker("vllm") and not HAVE_VLLM:
            if os.environ.get("UCXKV_TEST_VLLM") == "required":
                raise pytest.UsageError("UCXKV_TEST_VLLM=required, but vLLM cannot be imported")
            item.add_marker(pytest.mark.skip(reason="VLLM CONNECTOR NOT TESTED: no vLLM here"))


@pytest.fixture(autouse=True)
def no_child_left() -> None:
    """In the place of the one for all tests: engines outlive a test, and end with their module."""


@pytest.fixture(scope="module", autouse=True)
def no_engine_left() -> Iterator[None]:
    """Every process that a module has started ends with it."""
    from interpreters import Interpreter

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    # Those of other tests can be lent again.
    before |= {interpreter.process.pid for interpreter in Interpreter.live}
    left = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            tracker = "resource_tracker" in " ".join(process.cmdline())
            if process.pid not in before and not tracker:
                left.append(" ".join(process.cmdline()))
                process.kill()
    assert not left, f"processes left behind: {left}"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tiny_llama import make_model

    return str(make_model(tmp_path_factory.mktemp("model"), layers=6, heads=8))


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., object]]:
    """Starts an engine, as `start(Launch(...))`; all of them end with the module."""
    from engines import Engine, Launch

    logs = tmp_path_factory.mktemp("logs")
    started: list[Engine] = []

    def begin(launch: Launch) -> Engine:
        engine = Engine(launch, logs / f"{len(started)}.log")
        started.append(engine)
        return engine

    yield begin
    failures = []
    for engine in started:
        try:
            engine.close()
        except AssertionError as error:
            failures.append(error)
    assert not failures, failures


@pytest.fixture(scope="session")
def reference(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The tokens of the requests in `prompts(32, 1000)`, by one engine without any connector."""
    from engines import Engine, Launch
    from tiny_llama import prompts

    engine = Engine(Launch(model), tmp_path_factory.mktemp("reference") / "log").ready()
    for number, prompt in enumerate(prompts(32, 1000)):
        engine.add(str(number), prompt, 16)
    tokens = [engine.answer(str(number)).tokens for number in range(32)]
    engine.close()
    return tokens

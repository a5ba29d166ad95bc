"""An owner and a puller at the two ends of the wire in the guest."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from children import actions
from harness import Peer, wait_until
from rdma import wire

# Random cases are made by the tests of pairs.
sys.path.append(str(Path(__file__).parents[1] / "pair"))

OWNER, PULLER = 0, 1
TRANSPORT = os.environ.get("UCXKV_TEST_RDMA")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what wants the devices only where they are."""
    for item in items:
        needed = item.get_closest_marker("rdma")
        if needed is not None and TRANSPORT not in needed.args:
            reason = f"in the guest only: python -m tests.rdma.lab --transport {needed.args[0]}"
            item.add_marker(pytest.mark.skip(reason=reason))


class End(Peer):
    """A peer whose RDMA goes over one end of the wire."""

    def __init__(self, number: int, *, path: str = "get", **more: object) -> None:
        env = {"UCX_NET_DEVICES": f"{wire.DEVICES[number]}:1,lo"}
        # Streams go over TCP, so a device that fails is heard of by its own messages.
        super().__init__(
            number + 1,
            path=path,
            name=("owner", "puller")[number],
            env=env,
            allow=r"UCX +(WARN|ERROR|DIAG)",
            **more,  # type: ignore[arg-type]
        )


def link(puller: Peer, owner: Peer, path: str = "get") -> str:
    """Link them, wait for the path and say by which transports they are linked."""
    puller.link(owner, timeout_ms=60_000)
    wait_until(lambda: f"path='{path}'" in puller.call(actions.links_text))
    text = str(puller.call(actions.links_text))
    found = re.search(r"transports=\(.*?\)", text)
    print(f"{puller.name} to {owner.name}: path {path}, {found[0] if found else text}", flush=True)
    return text


@pytest.fixture(scope="module")
def ends() -> Iterator[tuple[End, End]]:
    """(owner, puller), linked over rc_verbs."""
    with End(OWNER) as owner, End(PULLER) as puller:
        text = link(puller, owner)
        assert f"rc_verbs/{wire.DEVICES[PULLER]}" in text
        yield owner, puller


@pytest.fixture
def mended() -> Iterator[None]:
    """The wire is mended however the test has left it."""
    yield
    wire.mend()

"""An application's own message overtakes the catalogue: what was registered or linked a moment
ago can be pulled at once."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from children import racing
from harness import Peer, rounds

ROUNDS = rounds(1000)


@pytest.fixture
def wired(path: str) -> Iterator[tuple[Peer, Peer]]:
    """An owner and a puller that share a socket of their own, not linked yet."""
    with ExitStack() as stack:
        ours, theirs = socket.socketpair()
        stack.enter_context(ours)
        stack.enter_context(theirs)
        owner = stack.enter_context(Peer(1, path=path, name="owner", fds={"wire": ours.fileno()}))
        puller = stack.enter_context(
            Peer(2, path=path, name="puller", fds={"wire": theirs.fileno()})
        )
        yield owner, puller


@pytest.mark.timeout(180)
def test_register_then_pull(wired: tuple[Peer, Peer]) -> None:
    owner, puller = wired
    puller.link(owner)
    pulls = puller.start(racing.pull_announced, 1, ROUNDS)
    owner.call(racing.announce, ROUNDS, timeout=120)
    problems = pulls.result()
    assert not problems, f"{len(problems)} of {ROUNDS}: {problems[:3]}"


@pytest.mark.timeout(180)
def test_link_then_pull_from_the_other_side(wired: tuple[Peer, Peer]) -> None:
    """The side that dials tells the other one, which then pulls from it."""
    owner, puller = wired
    assert puller.address
    pulls = puller.start(racing.pull_announced, 1, ROUNDS)
    owner.call(racing.link_and_announce, 2, puller.address, ROUNDS, timeout=120)
    problems = pulls.result()
    assert not problems, f"{len(problems)} of {ROUNDS}: {problems[:3]}"

"""A shared secret keeps strangers out, and what was overheard does not let them in."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from children import actions
from harness import Peer, Proxy

SECRET = {"secret": "open sesame"}
LINK_FAILED = 0x5010B009


@pytest.fixture
def owner() -> Iterator[Peer]:
    with Peer(1, name="owner", options=SECRET) as peer:
        yield peer


def refused(outcome: actions.Outcome) -> None:
    assert outcome.kind == "LinkFailed", outcome
    assert outcome.status == LINK_FAILED
    assert [result[:2] for result in outcome.extra["results"]] == [(1, LINK_FAILED)]


def test_right_secret(owner: Peer) -> None:
    cache_id = owner.call(actions.make_cache, "kv", 2, (1, 1000), seed=1)
    # Text and bytes are the same secret.
    with Peer(2, listen=False, options={"secret": b"open sesame"}) as friend:
        friend.link(owner)
        friend.call(actions.make_cache, "kv", 2, (1, 1000), access="")
        outcome = friend.call(actions.pull_checked, "kv", 1, cache_id, 1, timeout_ms=5000)
        assert outcome.ok, outcome
        assert outcome.extra["wrong"] == []


@pytest.mark.parametrize("options", [{"secret": "open barley"}, {}], ids=["wrong", "none"])
def test_wrong_secret(owner: Peer, options: dict[str, str]) -> None:
    with Peer(2, listen=False, options=options) as stranger:
        outcome = stranger.call(actions.try_link, [(1, owner.address)])
        refused(outcome)
        assert outcome.seconds < 5
        assert "up" not in stranger.call(actions.links).values()
        message = outcome.extra["results"][0][2]
        assert "secret" in message, message
        assert "sesame" not in message + outcome.message
    assert owner.call(actions.links) == {}
    lines = owner.call(actions.log_lines)
    assert len(lines) == 1, lines
    assert "sesame" not in lines[0]


def test_owner_without_a_secret(owner: Peer) -> None:
    """The one who knows a secret does not link to one who does not."""
    with Peer(2) as plain:
        outcome = owner.call(actions.try_link, [(2, plain.address)])
        assert outcome.kind == "LinkFailed", outcome
        assert plain.call(actions.links) == {}
        assert "up" not in owner.call(actions.links).values()


def test_replayed_hello(owner: Peer) -> None:
    """Word for word what a friend said once, from someone else."""
    assert owner.address
    with Peer(2, listen=False, options=SECRET) as friend, Proxy(owner.address) as proxy:
        friend.link(owner, address=proxy.address)
        friend.unlink(owner)
        time.sleep(0.2)
        said = bytes(proxy.recorded[0])
    assert len(said) > 100
    owner.call(actions.log_lines, clear=True)
    before = owner.call(actions.links)
    with socket.create_connection(owner.address, timeout=15) as replayer:
        replayer.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            while replayer.recv(4096):
                pass
    assert owner.call(actions.links) == before
    assert "up" not in before.values()
    lines = owner.call(actions.log_lines)
    assert len(lines) == 1, lines
    # The friend itself is as welcome as before.
    with Peer(2, listen=False, options=SECRET) as friend:
        friend.link(owner)


def test_replayed_answer(owner: Peer) -> None:
    """A listener that only repeats what the owner once said is found out by the one who dials."""
    assert owner.address
    with Peer(2, listen=False, options=SECRET) as friend:
        with Proxy(owner.address) as proxy:
            friend.link(owner, address=proxy.address)
            friend.unlink(owner)
            time.sleep(0.2)
            answered = bytes(proxy.answered[0])
        with socket.create_server(("127.0.0.1", 0)) as impostor:
            impostor.settimeout(10)
            pending = friend.start(
                actions.try_link, [(1, impostor.getsockname()[:2])], timeout_ms=3000
            )
            connection, _ = impostor.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(10)
                connection.sendall(answered)
                while connection.recv(4096):
                    pass
            refused(pending.result())


def test_an_altered_hello_is_refused(owner: Peer) -> None:
    """The proof covers the whole hello: a bit changed on the way by the man in the middle, in
    any part of it, must not pass."""
    assert owner.address
    with Peer(2, listen=False, options=SECRET) as friend:
        with Proxy(owner.address) as proxy:
            friend.link(owner, address=proxy.address)
            length = len(proxy.recorded[0])
            friend.unlink(owner)
        passed = []
        places = range(8, min(length, 600), 37)
        for place in places:
            with Proxy(owner.address, alter=place) as proxy:
                outcome = friend.call(actions.try_link, [(1, proxy.address)], timeout_ms=2000)
                if outcome.ok:
                    passed.append(place)
                    friend.unlink(owner)
        assert passed == [], f"of {length} bytes, changed at {passed}"

"""Changing roles: who sees the new one, when it is refused, and what becomes of the listener."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from children import actions, roles, serving
from harness import Peer, wait_until

EXIST_LINK, PARAM_INVALID, FAILED = 0x5010B018, 0x5010B005, 0xFFFFFFFF


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[Peer, Peer]]:
    with Peer(1) as first, Peer(2) as second:
        yield first, second


@pytest.fixture(autouse=True)
def unlinked(two: tuple[Peer, Peer]) -> Iterator[None]:
    """Every test begins and ends with the roles and listeners of the start, and without links."""
    yield
    first, second = two
    first.unlink(second)
    wait_until(lambda: "up" not in second.call(actions.links).values())
    for peer in two:
        restored = set_role(peer, "MIX", listen="127.0.0.1:0")
        peer.address = restored.extra["listen"]


def set_role(peer: Peer, role: str, **changes: Any) -> actions.Outcome:
    outcome: actions.Outcome = peer.call(roles.set_role, role, **changes)
    return outcome


def accepts(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=2).close()
    except ConnectionRefusedError:
        return False
    return True


def test_peers_see_the_new_role(two: tuple[Peer, Peer]) -> None:
    """Whoever dials, on either side."""
    first, second = two
    assert set_role(first, "PROMPT").ok
    for mine, other in (two, two[::-1]):
        mine.link(other)
        wait_until(lambda: second.call(roles.roles) == {1: "PROMPT"})
        assert first.call(roles.roles) == {2: "MIX"}
        mine.unlink(other)
        wait_until(lambda other=other: "up" not in other.call(actions.links).values())
    assert set_role(first, "DECODER").ok
    assert set_role(second, "PROMPT").ok
    second.link(first)
    assert second.call(roles.roles) == {1: "DECODER"}
    wait_until(lambda: first.call(roles.roles) == {2: "PROMPT"})


def test_refused_while_linked(two: tuple[Peer, Peer]) -> None:
    first, second = two
    first.link(second)
    before = [peer.address for peer in two]
    for peer, other in (two, two[::-1]):
        for changes in ({}, {"listen": "127.0.0.1:0"}, {"listen": None}):
            outcome = set_role(peer, "PROMPT", **changes)
            assert outcome.kind == "ExistLink", outcome
            assert outcome.status == EXIST_LINK
            assert str(other.cluster_id) in outcome.message
            assert outcome.extra == {"listen": peer.address, "role": "MIX"}
    assert [peer.address for peer in two] == before
    assert first.call(roles.roles) == {2: "MIX"}
    second.unlink(first)
    # The other side's link goes down a moment later.
    wait_until(lambda: set_role(first, "PROMPT").ok, timeout=2)
    assert set_role(second, "DECODER").ok


def test_a_link_that_is_down_does_not_count(two: tuple[Peer, Peer]) -> None:
    first, _ = two
    with Peer(3) as third:
        first.link(third)
        assert set_role(first, "PROMPT").kind == "ExistLink"
        third.kill()
        wait_until(lambda: first.call(actions.links).get(3) == "down")
        outcome = set_role(first, "PROMPT")
        assert outcome.ok, outcome


def test_refused_while_linking(two: tuple[Peer, Peer]) -> None:
    first, _ = two
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = (9, silent.getsockname()[:2])
        pending = first.start(actions.try_link, [target], timeout_ms=1000)
        outcomes = []
        wait_until(lambda: outcomes.append(set_role(first, "PROMPT")) or not outcomes[-1].ok)
        assert outcomes[-1].kind == "ExistLink", outcomes[-1]
        assert "9" in outcomes[-1].message
        assert pending.result().kind == "LinkFailed"
    assert set_role(first, "PROMPT").ok


def test_the_listener_moves(two: tuple[Peer, Peer]) -> None:
    first, second = two
    before = first.address
    assert before
    assert accepts(before)
    # Without options, or with the same ones, it stays where it is.
    assert set_role(first, "PROMPT").extra["listen"] == before
    same = set_role(first, "PROMPT", sync_cache_wait_time_ms=1000)
    assert same.ok, same
    assert same.extra["listen"] == before
    moved = set_role(first, "DECODER", listen="localhost:0")
    assert moved.ok, moved
    after = moved.extra["listen"]
    assert after[1] != before[1]
    assert moved.extra["role"] == "DECODER"
    assert not accepts(before)
    assert accepts(after)
    second.link(first, address=after)
    assert second.call(roles.roles) == {1: "DECODER"}


def test_the_listener_closes_and_opens(two: tuple[Peer, Peer]) -> None:
    first, second = two
    before = first.address
    assert before
    closed = set_role(first, "DECODER", listen=None)
    assert closed.ok, closed
    assert closed.extra["listen"] is None
    assert not accepts(before)
    outcome = second.call(actions.try_link, [(1, before)], timeout_ms=500)
    assert outcome.kind == "LinkFailed", outcome
    # It dials all the same.
    first.link(second)
    wait_until(lambda: second.call(roles.roles) == {1: "DECODER"})
    first.unlink(second)
    opened = set_role(first, "PROMPT", listen=f"{before[0]}:{before[1]}")
    assert opened.ok, opened
    assert opened.extra["listen"] == before
    wait_until(lambda: "up" not in second.call(actions.links).values())
    second.link(first)
    assert second.call(roles.roles) == {1: "PROMPT"}


def test_to_another_host_at_the_same_port(two: tuple[Peer, Peer]) -> None:
    """Two listeners cannot have it at once, one after the other can."""
    first, _ = two
    assert first.address
    port = first.address[1]
    moved = set_role(first, "PROMPT", listen=f"0.0.0.0:{port}")
    assert moved.ok, moved
    assert moved.extra["listen"] == ("0.0.0.0", port)
    assert accepts(("127.0.0.1", port))
    assert accepts(("127.0.0.2", port))
    back = set_role(first, "PROMPT", listen=f"127.0.0.1:{port}")
    assert back.ok, back
    assert accepts(("127.0.0.1", port))
    assert not accepts(("127.0.0.2", port))


def test_what_cannot_be_listened_at(two: tuple[Peer, Peer]) -> None:
    """Role and listener stay as they were."""
    first, second = two
    assert first.address
    with socket.create_server(("127.0.0.3", first.address[1])) as taken:
        places = [
            "{}:{}".format(*taken.getsockname()[:2]),
            "{}:{}".format(*second.address or ()),
            # Where it listens itself, and somebody else as well.
            f"0.0.0.0:{first.address[1]}",
            "192.0.2.1:0",
        ]
        for place in places:
            outcome = set_role(first, "PROMPT", listen=place)
            assert outcome.kind == "LlmError", outcome
            assert outcome.status == FAILED
            assert place in outcome.message
            assert outcome.extra == {"listen": first.address, "role": "MIX"}
            assert accepts(first.address)
    second.link(first)
    assert second.call(roles.roles) == {1: "MIX"}


@pytest.mark.parametrize(
    "changes", [{"secret": "s"}, {"path": "get"}, {"ucx": {"TLS": "tcp"}}], ids=str
)
def test_other_options_cannot_change(two: tuple[Peer, Peer], changes: dict[str, Any]) -> None:
    first, _ = two
    outcome = set_role(first, "PROMPT", listen=None, **changes)
    assert outcome.kind == "ParamInvalid", outcome
    assert outcome.status == PARAM_INVALID
    assert outcome.extra == {"listen": first.address, "role": "MIX"}


def test_caches_stay(two: tuple[Peer, Peer]) -> None:
    first, second = two
    cache_id = first.call(actions.make_cache, "kv", 2, (1, 1000), seed=4)
    second.call(actions.make_cache, "sink", 2, (1, 1000), access="")
    assert set_role(first, "PROMPT").ok
    second.link(first)
    outcome = second.call(actions.pull_checked, "sink", 1, cache_id, 4, timeout_ms=5000)
    assert outcome.ok, outcome
    assert outcome.extra["wrong"] == []
    first.call(actions.drop_cache, "kv")
    second.call(actions.drop_cache, "sink")


def test_linked_peers_always_know_the_role(two: tuple[Peer, Peer]) -> None:
    """Links come and go while the role changes: nobody is linked under an old one."""
    first, second = two
    assert first.address
    changing = first.start(roles.change_until_told)
    linked = 0
    for number in range(60):
        dialler, other = two[:: 1 if number % 2 else -1]
        outcome = dialler.call(actions.try_link, [(other.cluster_id, other.address)])
        if not outcome.ok:
            # Only what it was told itself, when the role changed in mid-handshake.
            assert "another role" in outcome.message, outcome
            continue
        linked += 1
        wait_until(lambda: second.call(roles.roles))
        assert second.call(roles.roles) == {1: first.call(roles.role)}
        second.unlink(first)
        wait_until(lambda: "up" not in first.call(actions.links).values())
    first.call(serving.finish)
    counts = changing.result()
    assert linked > 30
    assert counts.keys() <= {"ok", "ExistLink"}
    assert counts["ok"] > 10

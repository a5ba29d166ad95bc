"""Links between processes: who may link to whom, how often, and what is said when it fails."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from children import actions, ending
from harness import Peer, wait_until
from ucxkv import _load

SUCCESS, LINK_FAILED, ALREADY_LINK = 0, 0x5010B009, 0x5010B008


@pytest.fixture
def two() -> Iterator[tuple[Peer, Peer]]:
    with Peer(1) as first, Peer(2) as second:
        yield first, second


def both_pull(first: Peer, second: Peer) -> None:
    for owner, puller in ((first, second), (second, first)):
        cache_id = owner.call(actions.make_cache, "kv", 2, (1, 1000), seed=owner.cluster_id)
        puller.call(actions.make_cache, "sink", 2, (1, 1000), access="")
        outcome = puller.call(
            actions.pull_checked,
            "sink",
            owner.cluster_id,
            cache_id,
            owner.cluster_id,
            timeout_ms=5000,
        )
        assert outcome.ok, outcome
        assert outcome.extra["wrong"] == []
        owner.call(actions.drop_cache, "kv")
        puller.call(actions.drop_cache, "sink")


def test_one_link_serves_both(two: tuple[Peer, Peer]) -> None:
    first, second = two
    (result,) = first.call(actions.link, 2, second.address)
    assert result[:2] == (2, SUCCESS)
    both_pull(first, second)
    assert first.call(actions.links) == {2: "up"}
    assert second.call(actions.links) == {1: "up"}


def test_already_linked(two: tuple[Peer, Peer]) -> None:
    first, second = two
    first.link(second)
    for peer, other in ((first, second), (second, first)):
        outcome = peer.call(actions.try_link, [(other.cluster_id, other.address)])
        statuses = [result[1] for result in outcome.extra["results"] or outcome.value]
        assert statuses == [ALREADY_LINK], outcome
    both_pull(first, second)


def test_both_link_at_once() -> None:
    """Crossed links end as one connection, and both calls succeed."""
    for _ in range(5):
        with Peer(1) as first, Peer(2) as second:
            pending = [
                peer.start(actions.try_link, [(other.cluster_id, other.address)])
                for peer, other in ((first, second), (second, first))
            ]
            for one in pending:
                outcome = one.result()
                statuses = [result[1] for result in outcome.extra["results"] or outcome.value]
                assert statuses[0] in (SUCCESS, ALREADY_LINK), outcome
            both_pull(first, second)
            assert first.call(actions.links) == {2: "up"}
            assert second.call(actions.links) == {1: "up"}


def test_another_cluster_answers(two: tuple[Peer, Peer]) -> None:
    first, second = two
    outcome = first.call(actions.try_link, [(3, second.address)])
    assert outcome.kind == "LinkFailed", outcome
    ((cluster_id, status, message),) = outcome.extra["results"]
    assert (cluster_id, status) == (3, LINK_FAILED)
    assert "2" in message, message
    assert "3" in message, message
    assert "up" not in first.call(actions.links).values()
    assert "up" not in second.call(actions.links).values()
    first.link(second)
    both_pull(first, second)


def test_bad_addresses_do_not_hold_up_the_others() -> None:
    with ExitStack() as stack:
        first = stack.enter_context(Peer(1))
        others = [stack.enter_context(Peer(10 + number)) for number in range(3)]
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        closed = socket.create_server(("127.0.0.1", 0))
        address = closed.getsockname()[:2]
        closed.close()
        targets = [
            (50, silent.getsockname()[:2]),
            *((peer.cluster_id, peer.address) for peer in others),
            (51, address),
        ]
        outcome = first.call(actions.try_link, targets, timeout_ms=1500)
        assert outcome.kind == "LinkFailed", outcome
        assert outcome.seconds < 2.5
        statuses = {result[0]: result[1] for result in outcome.extra["results"]}
        assert statuses.pop(50) != SUCCESS
        assert statuses.pop(51) == LINK_FAILED
        assert statuses == {10: SUCCESS, 11: SUCCESS, 12: SUCCESS}
        for peer in others:
            both_pull(first, peer)


def test_unlink(two: tuple[Peer, Peer]) -> None:
    first, second = two
    first.link(second)
    cache_id = first.call(actions.make_cache, "kv", 2, (1, 1000), seed=1)
    second.call(actions.make_cache, "kv", 2, (1, 1000), access="")
    assert second.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000).ok
    assert first.call(actions.unlink, 2)[0][:2] == (2, SUCCESS)
    wait_until(lambda: "up" not in second.call(actions.links).values(), timeout=2)
    outcome = second.call(actions.pull, "kv", 1, cache_id, timeout_ms=500)
    assert outcome.kind == "NotYetLink", outcome
    # What is not linked can be unlinked.
    assert first.call(actions.unlink, 2)[0][:2] == (2, SUCCESS)
    assert first.call(actions.unlink, 99)[0][:2] == (99, SUCCESS)
    second.link(first)
    assert second.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000).ok


@pytest.mark.parametrize("force", [False, True], ids=["patient", "force"])
def test_unlink_under_a_pull(pair: tuple[Peer, Peer], force: bool) -> None:
    owner, puller = pair
    shape = 8, (1, 8 << 20)
    cache_id = owner.call(actions.make_cache, "kv", *shape, seed=1, aliases=8)
    puller.call(actions.make_cache, "kv", *shape, access="", aliases=8)
    puller.call(actions.paint, "kv", 0)
    puller.call(actions.begin, "pull", "kv", 1, cache_id, timeout_ms=20000)
    assert puller.call(actions.wait_moving, "pull")
    puller.unlink(owner, timeout_ms=10000, force=force)
    outcome = puller.call(actions.finish, "pull", 1)
    if force:
        assert outcome.kind in ("LlmError", "NotYetLink"), outcome
        puller.call(actions.paint, "kv", 0x5A)
        assert puller.call(actions.painted, "kv", 0x5A)
    else:
        assert outcome.ok, outcome
        assert puller.call(actions.wrong_tensors, "kv", 1) == []
    puller.link(owner)
    assert puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=10000).ok
    for peer in pair:
        peer.call(actions.drop_cache, "kv")
        peer.call(actions.forget_arena, "kv")


def test_names_and_ipv6() -> None:
    with Peer(1, listen="localhost:0") as first, Peer(2, listen=False) as second:
        assert first.address
        second.link(first, address=("localhost", first.address[1]))
        both_pull(first, second)
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 loopback")
    with Peer(1, listen="[::1]:0") as first, Peer(2, listen=False) as second:
        second.link(first)
        both_pull(first, second)


def test_links_say_what_they_use(pair: tuple[Peer, Peer], path: str) -> None:
    owner, puller = pair
    text = puller.call(actions.links_text)
    assert owner.address
    assert f"{owner.address[0]}:{owner.address[1]}" in text
    assert path in text
    # Older ones do not tell the transports of an endpoint.
    if _load.loaded().version >= (1, 14):
        assert "tcp" in text or "cma" in text


def test_a_port_that_is_taken(pair: tuple[Peer, Peer]) -> None:
    owner, puller = pair
    assert owner.address
    outcome = puller.call(ending.listen_at, owner.address)
    assert outcome.kind == "LlmError", outcome
    assert str(owner.address[1]) in outcome.message

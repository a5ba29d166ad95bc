"""What links() and stats() count: after a known sequence of transfers, exactly that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from children import actions, blocks, pushing, registering
from harness import Peer

KV_CACHE_NOT_EXIST = 0x5010B002
FEATURE_NOT_ENABLED = 0x5010B019
TIMEOUT = 0x5010B01A
FAILED = 0xFFFFFFFF
BYTES = ("bytes_get", "bytes_stream", "bytes_pushed", "bytes_served")


@pytest.fixture
def trio(path: str) -> Iterator[tuple[Peer, Peer, Peer]]:
    """Two owners, and a puller that is linked to both; nothing has been counted yet."""
    with (
        Peer(1, path=path, name="first") as first,
        Peer(3, path=path, name="second") as second,
        Peer(2, path=path, name="puller", listen=False) as puller,
    ):
        for owner in (first, second):
            puller.link(owner)
        yield first, second, puller


def counted(peer: Peer, other: int) -> dict[str, Any]:
    """Of one link, after checking that links() and stats() say the same of it."""
    found = peer.call(pushing.totals, other)
    assert found["of_link"] == found["info"]
    return plain(found["info"])


def plain(stats: Any) -> dict[str, Any]:
    return {
        "transfers": stats.transfers,
        "spans": stats.spans,
        **{name: getattr(stats, name) for name in BYTES},
        "failures": {int(status): count for status, count in stats.failures.items()},
    }


def expected(path: str, **more: Any) -> dict[str, Any]:
    """What is counted of transfers; `pulled` bytes are those of the path."""
    pulled = more.pop("pulled", 0)
    nothing = {"transfers": 0, "spans": 0, **dict.fromkeys(BYTES, 0), "failures": {}}
    return {**nothing, f"bytes_{path}": pulled, **more}


def total(parts: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("transfers", "spans", *BYTES)
    failures: dict[int, int] = {}
    for part in parts:
        for status, count in part["failures"].items():
            failures[status] = failures.get(status, 0) + count
    return {**{name: sum(part[name] for part in parts) for name in names}, "failures": failures}


def test_a_known_sequence(trio: tuple[Peer, Peer, Peer], path: str) -> None:
    """Each link has its own; all of them together are the engine's; the owners count only what
    they stream."""
    first, second, puller = trio
    shape = (8, 1000)
    sources = {peer: peer.call(actions.make_cache, "kv", 4, shape, seed=1) for peer in trio[:2]}
    inbox = second.call(actions.make_cache, "inbox", 4, shape, access="rw")
    closed = second.call(actions.make_cache, "closed", 4, shape)
    puller.call(actions.make_cache, "kv", 4, shape, seed=2)
    for peer, other in ((puller, 1), (puller, 3), (first, 2), (second, 2)):
        assert counted(peer, other) == expected(path)
        assert peer.call(pushing.totals, other)["engine"].latency == {}

    # From the first: five slots, and blocks of which the first two are neighbours.
    for _ in range(5):
        assert puller.call(actions.pull, "kv", 1, sources[first], timeout_ms=5000).ok
    call = {
        "cluster_id": 1,
        "src_id": sources[first],
        "src_slot": 0,
        "dst": "kv",
        "src_blocks": [1, 2, 4],
        "dst_blocks": [5, 6, 0],
        "src_layers": (-1, -1),
        "dst_layers": (-1, -1),
        "per_layer": 2,
        "timeout_ms": 5000,
    }
    assert puller.call(blocks.raw_pull, call).ok
    # From the second a slot; to it two pushes, and one that it does not allow.
    assert puller.call(actions.pull, "kv", 3, sources[second], size=10, timeout_ms=5000).ok
    for _ in range(2):
        assert puller.call(pushing.push, "kv", 3, inbox, timeout_ms=5000).ok
    refused = puller.call(pushing.push, "kv", 3, closed, timeout_ms=5000)
    assert refused.status == FEATURE_NOT_ENABLED

    of_first, of_second = counted(puller, 1), counted(puller, 3)
    assert of_first == expected(
        path, transfers=6, spans=5 * 4 + 2 * 4, pulled=5 * 4 * 1000 + 3 * 4 * 1000
    )
    # What was refused before it began is no transfer.
    streamed = path == "stream"
    pushed = 2 * 4 * 1000
    assert of_second == expected(
        path,
        transfers=3,
        spans=4 + 2 * 4,
        pulled=4 * 10,
        bytes_pushed=pushed,
        # The receiver has pulled them.
        bytes_served=pushed if streamed else 0,
    )
    whole = puller.call(pushing.totals, 1)["engine"]
    assert plain(whole) == total([of_first, of_second])
    assert whole.bytes == 5 * 4000 + 3 * 4000 + 40 + 2 * 4000
    assert whole.links.keys() == {1, 3}

    assert counted(first, 2) == expected(path, bytes_served=8 * 4000 if streamed else 0)
    # The receiver's pulls that answer pushes are the sender's transfers, not its own.
    assert counted(second, 2) == expected(path, bytes_served=40 if streamed else 0)


def test_what_nobody_may_read_is_served_when_it_is_pushed(path: str) -> None:
    """It goes by stream on every path."""
    with (
        Peer(1, path=path, name="receiver") as receiver,
        Peer(2, path=path, name="sender", listen=False) as sender,
    ):
        sender.link(receiver)
        inbox = receiver.call(actions.make_cache, "inbox", 4, (2, 1000), access="rw")
        sender.call(actions.make_cache, "kv", 4, (2, 1000), seed=2, access="")
        assert sender.call(pushing.push, "kv", 1, inbox, timeout_ms=5000).ok
        found = counted(sender, 1)
        assert found["bytes_pushed"] == found["bytes_served"] == 4000
        assert counted(receiver, 2) == expected(path)


def test_failures_by_status(trio: tuple[Peer, Peer, Peer], path: str) -> None:
    """Those of transfers that had begun, each under its own status; they move no bytes."""
    first, _, puller = trio
    large = (2, (1, 16 << 20))
    source = first.call(actions.make_cache, "kv", *large, seed=1, aliases=200)
    inbox = first.call(actions.make_cache, "inbox", *large, access="rw", aliases=200)
    puller.call(actions.make_cache, "kv", *large, aliases=200)

    for _ in range(2):
        assert puller.call(actions.pull, "kv", 1, source, timeout_ms=20).status == TIMEOUT
    assert puller.call(pushing.push, "kv", 1, inbox, timeout_ms=20).status == TIMEOUT
    puller.call(actions.begin, "cancelled", "kv", 1, source, timeout_ms=20000)
    assert puller.call(actions.wait_moving, "cancelled")
    puller.call(actions.cancel, "cancelled")
    assert puller.call(actions.finish, "cancelled").status == FAILED
    puller.call(actions.begin, "lost", "kv", 1, source, timeout_ms=20000)
    assert puller.call(actions.wait_moving, "lost")
    first.call(actions.drop_cache, "kv", 1)
    assert puller.call(actions.finish, "lost").status == KV_CACHE_NOT_EXIST

    failures = {TIMEOUT: 3, FAILED: 1, KV_CACHE_NOT_EXIST: 1}
    found = counted(puller, 1)
    assert found["failures"] == failures
    assert found["transfers"] == 5
    assert found["spans"] == found["bytes_get"] == found["bytes_stream"] == 0
    assert found["bytes_pushed"] == 0
    assert counted(puller, 3) == expected(path)
    assert plain(puller.call(pushing.totals, 1)["engine"])["failures"] == failures
    assert puller.call(pushing.totals, 1)["engine"].latency == {}
    # The totals of a link go with it, the engine keeps them.
    puller.unlink(first, force=True)
    puller.link(first)
    assert counted(puller, 1) == expected(path)
    assert plain(puller.call(pushing.totals, 1)["engine"])["failures"] == failures


def test_latency_quantiles(trio: tuple[Peer, Peer, Peer]) -> None:
    """Of 100 pulls, some of which are much larger than the others, against what their callers have
    measured."""
    first, second, puller = trio
    small = first.call(actions.make_cache, "small", 2, (1, 100), seed=1)
    large = second.call(actions.make_cache, "large", 2, (1, 16 << 20), seed=1, aliases=4)
    puller.call(actions.make_cache, "small", 2, (1, 100), access="")
    puller.call(actions.make_cache, "large", 2, (1, 16 << 20), access="", aliases=4)
    outcomes = puller.call(actions.pull_many, "small", 1, small, 80, timeout_ms=5000)
    outcomes += puller.call(actions.pull_many, "large", 3, large, 20, timeout_ms=20000, timeout=60)
    assert all(outcome.ok for outcome in outcomes)
    found = puller.call(pushing.totals, 1)
    of_second = puller.call(pushing.totals, 3)["of_link"]
    for latency, times in (
        (found["engine"].latency, outcomes),
        (found["of_link"].latency, outcomes[:80]),
        (of_second.latency, outcomes[80:]),
    ):
        measured = sorted(outcome.seconds for outcome in times)
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            # The engine's time is a part of the caller's, and the histogram's steps are 1/8 apart.
            assert latency[name] <= 1.07 * quantile(measured, share)
        assert latency["p50"] <= latency["p90"] <= latency["p99"]
        assert latency["p50"] > 0
    # Where the times lie far apart, the quantiles tell which is which.
    slowest_small = max(outcome.seconds for outcome in outcomes[:80])
    if slowest_small < min(outcome.seconds for outcome in outcomes[80:]) / 2:
        assert found["engine"].latency["p50"] < found["engine"].latency["p90"]
        assert of_second.latency["p50"] > found["of_link"].latency["p90"]


def quantile(ordered: list[float], share: float) -> float:
    """The value that has `share` of all at or below it."""
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


@pytest.mark.parametrize(("gap", "regions"), [(0, 1), (4096, 8)])
def test_registered_memory(gap: int, regions: int) -> None:
    """Tensors that touch share a region, and what is unregistered no longer counts."""
    with Peer(1, path="get") as owner:
        before = owner.call(registering.registered)
        assert before == {"regions": 0, "bytes": 0, "seconds": 0.0}
        cache_id = owner.call(registering.register, 8, 1 << 20, gap)
        during = owner.call(registering.registered)
        assert (during["regions"], during["bytes"]) == (regions, 8 << 20)
        assert 0 < during["seconds"] < 10
        owner.call(registering.unregister, cache_id)
        assert owner.call(registering.registered) == {**before, "seconds": during["seconds"]}


def test_nothing_is_registered_where_nothing_can_get_it() -> None:
    with Peer(1, path="stream") as owner:
        owner.call(registering.register, 8, 1 << 20, 0)
        assert owner.call(registering.registered) == {"regions": 0, "bytes": 0, "seconds": 0.0}

"""Two engines, both directions at once, many threads, everything that there is to do."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from children import ageing, both_ways
from harness import SCALE, Peer, Sample, wait_until

LANES = 8
WARM_UP_SECONDS = 2.0
SECONDS = 6.0 * SCALE
# Otherwise glibc keeps what the temporary arrays of many threads have needed, and grows by that.
HONEST_MALLOC = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "131072",
}


@pytest.fixture
def wired(path: str) -> Iterator[tuple[Peer, Peer]]:
    """Two linked peers that share a socket of their own."""
    with ExitStack() as stack:
        ends = socket.socketpair()
        for end in ends:
            stack.enter_context(end)
        peers = tuple(
            stack.enter_context(
                Peer(
                    number,
                    path=path,
                    fds={"wire": end.fileno()},
                    listen=number == 1,
                    env=HONEST_MALLOC,
                )
            )
            for number, end in enumerate(ends, 1)
        )
        peers[1].link(peers[0])
        yield peers[0], peers[1]


def run(peers: tuple[Peer, Peer], seconds: float, seed: int) -> Counter[str]:
    """Traffic in both; what was done how often."""
    running = [peer.start(both_ways.traffic, seconds, seed + peer.cluster_id) for peer in peers]
    results = [one.result(seconds + 60) for one in running]
    assert [result["problems"] for result in results] == [[], []]
    done: Counter[str] = Counter()
    for result in results:
        done.update(result["done"])
    return done


def at_rest(peers: tuple[Peer, Peer], caches: list[int]) -> bool:
    """Nothing runs, nothing is held, and there are only the caches that there were."""
    found = [peer.call(both_ways.settled) for peer in peers]
    return [one["running"] for one in found] == [(0, 0, 0, 0)] * 2 and [
        one["caches"] for one in found
    ] == caches


def samples(peers: tuple[Peer, Peer]) -> list[tuple[Sample, dict[str, int]]]:
    return [(peer.sample(), peer.call(ageing.objects)) for peer in peers]


@pytest.mark.slow
@pytest.mark.timeout(240 + 2 * SECONDS)
def test_both_ways(wired: tuple[Peer, Peer], path: str) -> None:
    ids = [
        peer.call(both_ways.open_station, 3 - number, LANES, (number, 3 - number))
        for number, peer in enumerate(wired, 1)
    ]
    for peer, theirs in zip(wired, reversed(ids), strict=True):
        peer.call(both_ways.open_lanes, LANES, theirs)
    caches = [peer.call(both_ways.settled)["caches"] for peer in wired]

    run(wired, WARM_UP_SECONDS, 1000)
    wait_until(lambda: at_rest(wired, caches))
    before = samples(wired)
    done = run(wired, SECONDS, 2000)
    wait_until(lambda: at_rest(wired, caches))
    # UCX closes the sockets of endpoints that a fence has closed some time later.
    wait_until(
        lambda: all(
            peer.sample().fds <= old.fds + 4 for peer, (old, _) in zip(wired, before, strict=True)
        ),
        timeout=60,
        step=0.5,
    )
    after = samples(wired)
    print(f"{path}: {SECONDS} s", dict(sorted(done.items())))
    print(f"{path}:", [(old, new) for (old, _), (new, _) in zip(before, after, strict=True)])
    assert set(both_ways.WORK) <= set(done)

    for peer in wired:
        assert peer.call(both_ways.wrong) == []
    for one, other in (wired, wired[::-1]):
        assert one.call(both_ways.pushed_digests) == other.call(both_ways.inbox_digests)
        problem = both_ways.check_notices(
            one.call(both_ways.notices), *other.call(both_ways.told), LANES
        )
        assert not problem, problem

    for peer, (old, old_objects), (new, new_objects) in zip(wired, before, after, strict=True):
        assert new.threads <= old.threads, (peer.name, old, new)
        assert new.maps <= old.maps + 40, (peer.name, old, new)
        # Pools of UCX still grow to what the traffic needs.
        assert new.rss - old.rss < 8 << 20, (peer.name, old, new)
        grown = {
            name: (old_objects.get(name, 0), count)
            for name, count in new_objects.items()
            if name.startswith("ucxkv") and count > old_objects.get(name, 0) + 8
        }
        assert not grown, (peer.name, grown)
    for peer in wired:
        peer.call(both_ways.close_station)

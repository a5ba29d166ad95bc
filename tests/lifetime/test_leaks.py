"""A thousand links and pulls leave nothing behind."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from children import actions, ageing
from harness import Peer, rounds, wait_until

ROUNDS = rounds(1000)
WARM_UP = rounds(50)


@pytest.fixture
def strangers(path: str) -> Iterator[tuple[Peer, Peer]]:
    """(owner, puller), not linked."""
    with (
        Peer(1, path=path, name="owner") as owner,
        Peer(2, path=path, name="puller", listen=False) as puller,
    ):
        yield owner, puller


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_link_pull_unlink(strangers: tuple[Peer, Peer]) -> None:
    owner, puller = strangers
    cache_id = owner.call(actions.make_cache, "kv", 4, (2, 1000), seed=1)
    arguments = (1, owner.address, cache_id)
    puller.call(ageing.link_pull_unlink, *arguments, WARM_UP, timeout=60)
    wait_until(lambda: settled(strangers), step=0)
    before = [(peer.sample(), peer.call(ageing.objects)) for peer in strangers]
    puller.call(ageing.link_pull_unlink, *arguments, ROUNDS, timeout=180)
    wait_until(lambda: settled(strangers), step=0)
    after = [(peer.sample(), peer.call(ageing.objects)) for peer in strangers]
    for peer, (old, old_objects), (new, new_objects) in zip(strangers, before, after, strict=True):
        assert new.fds <= old.fds, (peer.name, old, new)
        assert new.threads <= old.threads, (peer.name, old, new)
        # The allocator may map a few more arenas; one mapping a round would be a leak.
        assert new.maps <= old.maps + 20, (peer.name, old, new)
        assert new.rss - old.rss < 8 << 20, (peer.name, old, new)
        grown = {
            name: (old_objects.get(name, 0), count)
            for name, count in new_objects.items()
            if count > old_objects.get(name, 0) + ROUNDS // 4 + 50
        }
        assert not grown, (peer.name, grown)


def settled(peers: tuple[Peer, Peer]) -> bool:
    """UCX lets go of TCP sockets a moment after their endpoints have closed."""
    before = [peer.sample().fds for peer in peers]
    time.sleep(0.5)
    return [peer.sample().fds for peer in peers] == before


def test_registrations_hold_and_release(strangers: tuple[Peer, Peer]) -> None:
    """Exports are held while registered, so that the memory cannot move, and released after."""
    owner, _ = strangers
    found = owner.call(ageing.exports)
    assert found == {"held": True, "released": True, "references": 0}


def test_registering_leaks_nothing(strangers: tuple[Peer, Peer]) -> None:
    owner, puller = strangers
    puller.link(owner)
    owner.call(ageing.register_unregister, 50)
    before = [(peer.sample(), peer.call(ageing.objects)) for peer in strangers]
    owner.call(ageing.register_unregister, 1000, timeout=60)
    after = [(peer.sample(), peer.call(ageing.objects)) for peer in strangers]
    for peer, (old, old_objects), (new, new_objects) in zip(strangers, before, after, strict=True):
        assert new.fds <= old.fds, (peer.name, old, new)
        assert new.maps <= old.maps + 20, (peer.name, old, new)
        assert new.rss - old.rss < 8 << 20, (peer.name, old, new)
        grown = {
            name: (old_objects.get(name, 0), count)
            for name, count in new_objects.items()
            if count > old_objects.get(name, 0) + 300
        }
        assert not grown, (peer.name, grown)


def test_failed_calls_leak_nothing(strangers: tuple[Peer, Peer]) -> None:
    """Errors are the place where references are lost: refused pulls, links and registrations."""
    owner, puller = strangers
    puller.link(owner)
    cache_id = owner.call(actions.make_cache, "kv", 4, (2, 1000), seed=1)
    puller.call(ageing.fail, 1, cache_id, 20)
    old, old_objects = puller.sample(), puller.call(ageing.objects)
    puller.call(ageing.fail, 1, cache_id, 300, timeout=60)
    new, new_objects = puller.sample(), puller.call(ageing.objects)
    assert new.fds <= old.fds
    assert new.maps <= old.maps + 20
    assert new.rss - old.rss < 8 << 20
    grown = {
        name: (old_objects.get(name, 0), count)
        for name, count in new_objects.items()
        if count > old_objects.get(name, 0) + 100
    }
    assert not grown, grown


def test_engines_come_and_go(path: str) -> None:
    """initialize and finalize give everything back: threads, descriptors, mappings."""
    with Peer(1, path=path, engine=False) as peer:
        options = {"listen": "127.0.0.1:0", **({"path": "get"} if path == "get" else {})}
        peer.call(ageing.cycle_engines, options, 3)
        old = peer.sample()
        peer.call(ageing.cycle_engines, options, 20, timeout=120)
        new = peer.sample()
    assert new.fds <= old.fds, (old, new)
    assert new.threads == old.threads, (old, new)
    assert new.maps <= old.maps + 20, (old, new)
    assert new.rss - old.rss < 16 << 20, (old, new)


def test_block_lists_go_with_their_transfers(strangers: tuple[Peer, Peer], path: str) -> None:
    """Whether those end well, are cancelled or refused, or end with their engine."""
    owner, puller = strangers
    cache_id = owner.call(actions.make_cache, "kv", 1, (200_000, 16), seed=1, access="rw")
    arguments = (1, owner.address, cache_id, path)
    before = puller.call(ageing.spend_lists, *arguments, 3, timeout=60)
    after = puller.call(ageing.spend_lists, *arguments, 8, timeout=60)
    # One list has as much.
    assert after - before < 800_000


def test_killed_peers_leave_nothing_open(path: str) -> None:
    """UCX kept a socket of each connection that was refused, as those to a dead process are."""
    with Peer(1, path=path, name="owner", fresh=True) as owner:
        cache_id = owner.call(actions.make_cache, "kv", 4, (2, 300_000), seed=1)
        counts = []
        for _ in range(3):
            with Peer(2, path=path, name="puller", listen=False, fresh=True) as puller:
                puller.link(owner)
                puller.call(actions.make_cache, "kv", 4, (2, 300_000), access="")
                puller.start(actions.pull_many, "kv", 1, cache_id, 100_000, timeout_ms=5000)
                wait_until(lambda: owner.call(actions.links) == {2: "up"})
                time.sleep(0.1)
                puller.kill()
            wait_until(lambda: owner.call(actions.links) in ({2: "down"}, {}))
            time.sleep(0.3)
            counts.append(owner.sample().fds)
        assert counts[-1] <= counts[0], counts

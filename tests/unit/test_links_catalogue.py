"""What each side knows of the other's caches, and when."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from control_pairs import Member, Proxy, eventually

from fake_native import FakeRemote, register
from ucxkv import wire
from ucxkv.catalogue import LocalCatalogue
from ucxkv.errors import KvCacheNotExist, LlmTimeout, NotYetLink, ParamInvalid
from ucxkv.types import CachePlacement, DataType


@pytest.fixture
def two() -> Iterator[tuple[Member, Member]]:
    """(owner, puller), linked."""
    with Member(1) as owner, Member(2) as puller:
        puller.link(owner)
        yield owner, puller


def test_registered_before_and_after(two: tuple[Member, Member]) -> None:
    _, puller = two
    with Member(3) as other:
        before = other.register(tensors=5)
        puller.link(other)
        after = other.register(access="rw")
        hidden = other.register(access="")
        for entry in (before, after):
            link, told = puller.resolve(other, entry.cache_id)
            assert link is puller.to(other)
            assert told.desc.shape == entry.desc.shape
            assert told.desc.num_tensors == entry.desc.num_tensors
            assert told.desc.data_type is DataType.FLOAT
            assert told.desc.placement is CachePlacement.HOST
            assert (told.blocks, told.block_bytes) == (entry.blocks, entry.block_bytes)
            assert told.access == entry.access
            assert told.generation == entry.native.generation
            assert told.native.told["slot"] == entry.native.slot
            assert told.native.told["rkeys"] == [b"rkey"]
        with pytest.raises(KvCacheNotExist, match="cluster 3"):
            puller.resolve(other, hidden.cache_id)


def test_known_at_once(two: tuple[Member, Member]) -> None:
    """The application's own message overtakes the catalogue; the owner is asked."""
    owner, puller = two
    for _ in range(300):
        entry = owner.register()
        assert puller.resolve(owner, entry.cache_id)[1].cache_id == entry.cache_id


def test_unknown(two: tuple[Member, Member]) -> None:
    owner, puller = two
    with pytest.raises(KvCacheNotExist, match=str(owner.address[1])):
        puller.resolve(owner, 10**9)


def test_not_linked(two: tuple[Member, Member]) -> None:
    owner, puller = two
    with Member(9) as stranger, pytest.raises(NotYetLink, match="cluster 9"):
        puller.resolve(stranger, 1)
    entry = owner.register()
    owner.unlink(puller)
    began = time.monotonic()
    with pytest.raises(NotYetLink, match="cluster 1"):
        puller.resolve(owner, entry.cache_id)
    with pytest.raises(NotYetLink, match="not linked"):
        owner.resolve(puller, 1)
    assert time.monotonic() - began < 0.5


def test_a_link_being_made_is_waited_for() -> None:
    with Member(1) as owner, Member(2) as puller:
        entry = owner.register()
        owner.engine.proves = puller.engine.proves = False
        thread = threading.Thread(target=puller.link, args=(owner,))
        thread.start()
        eventually(lambda: puller.state(owner) == "connecting")
        with pytest.raises(LlmTimeout, match="connecting"):
            puller.resolve(owner, entry.cache_id, seconds=0.1)
        threading.Timer(0.1, lambda: (owner.engine.prove(), puller.engine.prove())).start()
        assert puller.resolve(owner, entry.cache_id)[1].cache_id == entry.cache_id
        thread.join()


def test_the_owner_does_not_answer(two: tuple[Member, Member]) -> None:
    owner, _ = two
    with Member(3) as puller, Proxy(owner.address) as proxy:
        puller.link(owner.cluster(proxy.address))
        proxy.hold()
        began = time.monotonic()
        with pytest.raises(LlmTimeout, match="cluster 1"):
            puller.resolve(owner, 10**9, seconds=0.2)
        assert 0.2 <= time.monotonic() - began < 0.6


@pytest.mark.parametrize("before", [True, False], ids=["before the link", "after it"])
def test_ten_thousand(two: tuple[Member, Member], before: bool) -> None:
    owner, _ = two
    with Member(3) as puller:
        if not before:
            puller.link(owner)
        entries = [owner.register(tensors=40) for _ in range(10_000)]
        if before:
            puller.link(owner)
        puller.resolve(owner, entries[-1].cache_id, seconds=10)
        assert set(puller.to(owner).remote) == {entry.cache_id for entry in entries}


def test_unregistering(two: tuple[Member, Member]) -> None:
    owner, puller = two
    entry = owner.register()
    native: Any = puller.resolve(owner, entry.cache_id)[1].native
    assert owner.unregister(entry) < 1
    assert native.retired
    assert entry.cache_id not in puller.to(owner).remote
    with pytest.raises(KvCacheNotExist):
        puller.resolve(owner, entry.cache_id)


def test_unregistering_waits_for_pulls(two: tuple[Member, Member]) -> None:
    owner, puller = two
    entry = owner.register()
    native: Any = puller.resolve(owner, entry.cache_id)[1].native
    native.active = 1
    thread = threading.Thread(target=owner.unregister, args=(entry, 10))
    thread.start()
    eventually(lambda: native.retired)
    thread.join(0.1)
    assert thread.is_alive()
    native.active = 0
    thread.join(2)
    assert not thread.is_alive()


def test_unregistering_in_time(two: tuple[Member, Member]) -> None:
    owner, puller = two
    entry = owner.register()
    native: Any = puller.resolve(owner, entry.cache_id)[1].native
    native.active = 1
    assert 0.2 <= owner.unregister(entry, 0.2) < 0.4
    # A peer that does not answer costs the time-out, one that is gone costs nothing.
    another = owner.register()
    native = puller.resolve(owner, another.cache_id)[1].native
    native.active = 1
    closing = threading.Timer(0.1, puller.close)
    closing.start()
    assert owner.unregister(another, 5) < 1
    closing.join()


def test_unregistering_what_nobody_knows(two: tuple[Member, Member]) -> None:
    owner, puller = two
    assert owner.unregister(owner.register(access="")) < 0.5
    for _ in range(200):
        assert owner.unregister(owner.register()) < 0.5
    puller.close()
    assert owner.unregister(owner.register()) < 0.5


def test_unregistering_with_a_stalled_loop(two: tuple[Member, Member]) -> None:
    owner, _ = two
    entry = owner.register()
    owner.table.loop.call_soon_threadsafe(time.sleep, 0.5)
    time.sleep(0.05)
    assert owner.unregister(entry, 0.1) < 0.3
    eventually(lambda: owner.unregister(owner.register()) < 0.5)


def told(**changes: Any) -> wire.CacheEntry:
    values: dict[str, Any] = {
        "cache_id": 1,
        "generation": 2,
        "slot": 3,
        "shape": (3, 10),
        "num_tensors": 2,
        "data_type": "FLOAT",
        "placement": 0,
        "access": "r",
        "blocks": 3,
        "block_bytes": 40,
        "addresses": bytes(16),
        "regions": bytes(8),
        "rkeys": [],
    }
    return wire.CacheEntry(**{**values, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"data_type": "COMPLEX"},
        {"placement": 7},
        {"shape": ()},
        {"shape": (4, 10)},
        {"num_tensors": 0},
        {"access": "x"},
        {"block_bytes": 41},
        {"addresses": b""},
        {"blocks": 2**64 - 1, "shape": (2**64 - 1,)},
    ],
    ids=str,
)
def test_contradictions(two: tuple[Member, Member], changes: dict[str, Any]) -> None:
    """A peer that breaks the protocol loses its link, and nothing else happens."""
    owner, puller = two
    body = wire.encode_register([wire.encode(told(**changes))])
    connection = puller.to(owner)._connection
    assert connection
    puller.table.loop.call_soon_threadsafe(connection._queue, body)
    eventually(lambda: owner.state(puller) == "down")
    assert "protocol" in owner.to(puller).error
    eventually(lambda: puller.state(owner) == "down")
    puller.link(owner)
    assert owner.to(puller).up


def test_messages_out_of_place(two: tuple[Member, Member]) -> None:
    owner, puller = two
    attach = wire.Attach(1, 2, b"am", b"", 0, b"", 0)
    connection = puller.to(owner)._connection
    assert connection
    # Harmless ones first: confirmations that nobody asked for.
    for message in (wire.Retired(5), wire.Synced(0), wire.Retire(77), wire.Ready(), attach):
        puller.table.loop.call_soon_threadsafe(connection.send, message)
    eventually(lambda: owner.state(puller) == "down")
    assert "attachment" in owner.to(puller).error


def test_too_much_for_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "FRAME_LIMIT", 1000)
    with pytest.raises(ParamInvalid, match="regions"):
        register(LocalCatalogue(), tensors=200)


def test_local_catalogue() -> None:
    catalogue = LocalCatalogue()
    entries = [register(catalogue) for _ in range(3)]
    assert catalogue.snapshot() == entries
    assert catalogue.get(entries[0].cache_id) is entries[0]
    assert catalogue.remove(entries[1].cache_id) is entries[1]
    assert catalogue.remove(entries[1].cache_id) is None
    assert catalogue.get(entries[1].cache_id) is None
    assert catalogue.snapshot() == [entries[0], entries[2]]


def test_what_remote_caches_are_made_of(two: tuple[Member, Member]) -> None:
    owner, puller = two
    entry = owner.register()
    native = puller.resolve(owner, entry.cache_id)[1].native
    assert isinstance(native, FakeRemote)
    assert native.link is puller.to(owner).native

"""Thousands of transfers of one link at a time: whatever each waits for, each gets its turn."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from children import actions, copying, many, noticing
from harness import Peer, rounds

SLOTS = rounds(3000)
SLOT = 500
PULLED, PUSHED = 3, 4


@pytest.fixture(params=["stream", "get", "get by UCX"], scope="module")
def peers(request: pytest.FixtureRequest) -> Iterator[tuple[Peer, Peer]]:
    """(owner, puller), linked."""
    path = request.param.partition(" ")[0]
    with (
        Peer(1, path=path, name="owner") as owner,
        Peer(2, path=path, name="puller", listen=False) as puller,
    ):
        puller.link(owner)
        if request.param == "get by UCX":
            for peer, other in ((owner, 2), (puller, 1)):
                peer.call(copying.leave_to_ucx, other)
        for peer in (owner, puller):
            access = "r" if peer is owner else ""
            peer.call(actions.make_cache, "kv", 2, (SLOTS, SLOT), seed=PULLED, access=access)
            access = "rw" if peer is owner else "r"
            peer.call(actions.make_cache, "out", 2, (SLOTS, SLOT), seed=PUSHED, access=access)
        yield owner, puller


@pytest.mark.parametrize("broken", [False, True], ids=["whole", "broken"])
def test_every_kind(peers: tuple[Peer, Peer], broken: bool) -> None:
    """Also when the data connections break meanwhile."""
    owner, puller = peers
    puller.call(actions.paint, "kv", 0)
    owner.call(actions.paint, "out", 0)
    source = owner.call(many.cache_id, "kv")
    inbox = owner.call(many.cache_id, "out")
    taking = owner.start(noticing.collect)
    begun = puller.call(many.begin, 1, source, inbox, SLOTS, 5)
    finishing = puller.start(many.finish, begun, 6)
    rng = random.Random(7)
    breaks = 0
    assert owner.address
    # So many that none would be left alone, and not for ever: repairs take their time too.
    while broken and breaks < 200 and not finishing.done():
        breaks += rng.choice((owner, puller)).side(noticing.break_data, [owner.address[1]])
        time.sleep(0.01)
    assert (breaks > 0) == broken
    ends = finishing.result(40)
    owner.side(noticing.end_collecting)
    for kind in ("pull", "pull told", "push", "withheld"):
        assert ends[kind] == {"ok": len(begun[kind])}
    for kind in ("pull cancelled", "push cancelled"):
        assert set(ends[kind]) <= {"ok", "LlmError"}
    assert ends["dropped"] == {"LlmError": len(begun["dropped"])}
    assert puller.call(many.wrong, "kv", PULLED, begun["pull"] + begun["pull told"], SLOT) == []
    assert owner.call(many.wrong, "out", PUSHED, begun["push"] + begun["withheld"], SLOT) == []
    told = [int.from_bytes(data, "little") for _, data in taking.result()]
    assert sorted(told) == begun["pull told"]
    for peer, other in ((owner, 2), (puller, 1)):
        assert peer.call(many.running, other) == 0

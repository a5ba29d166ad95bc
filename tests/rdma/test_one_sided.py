"""A GET is served by the owner's device: its process need not run."""

from __future__ import annotations

import pytest

from children import actions
from harness import Peer
from rdma import wire
from rdma.conftest import OWNER, PULLER

pytestmark = [pytest.mark.rdma("rc"), pytest.mark.timeout(300)]

CACHE = 8, (2, 128 << 10)
MOVED = CACHE[0] * CACHE[1][1]
MTU = 4096


def test_a_stopped_owner_is_read_and_its_device_answers(ends: tuple[Peer, Peer]) -> None:
    owner, puller = ends
    cache_id = owner.call(actions.make_cache, "kv", *CACHE, seed=7)
    puller.call(actions.make_cache, "kv", *CACHE, access="")
    puller.call(actions.paint, "kv", 0)
    with owner.stopped():
        before = wire.counters(OWNER), wire.counters(PULLER)
        for slot in range(CACHE[1][0]):
            outcome = puller.call(
                actions.pull, "kv", 1, cache_id, src_slot=slot, dst_slot=slot, timeout_ms=60_000
            )
            assert outcome.ok, outcome
            assert (outcome.path, outcome.bytes) == ("get", MOVED)
        after = wire.counters(OWNER), wire.counters(PULLER)
    assert puller.call(actions.wrong_tensors, "kv", 7) == []
    served, asked = (
        {name: late[name] - early[name] for name in late}
        for early, late in zip(before, after, strict=True)
    )
    print(f"the owner's device: {served}\nthe puller's: {asked}")
    packets = CACHE[1][0] * MOVED // MTU
    assert served["sent_pkts"] >= packets, "the bytes did not come from the owner's device"
    assert asked["rcvd_pkts"] >= packets
    # Messages would be sends, and want a process that takes them.
    assert served["rdma_sends"] == 0
    for peer in ends:
        peer.call(actions.drop_cache, "kv")

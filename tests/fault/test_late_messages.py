"""What an endpoint had sent before it broke may come after what its successor has sent."""

from __future__ import annotations

import time

import pytest

from children import actions, noticing, pushing, stranger
from harness import Peer, wait_until


@pytest.mark.parametrize(("before", "after"), [(0, 1), (0, 3), (65535, 65536), (40000, 70000)])
def test_late_messages_are_dropped(before: int, after: int) -> None:
    """Somebody who knows the token speaks as the peer's endpoint, the older and the newer one."""
    with (
        Peer(1, name="owner") as owner,
        Peer(2, name="puller", listen=False) as puller,
        Peer(3, name="old and new", engine=False, fresh=True) as endpoint,
    ):
        puller.link(owner)
        owner.call(actions.make_cache, "kv", 1, (1, 1000), seed=1)
        plane = owner.call(stranger.data_plane, 2)

        def come() -> int:
            return int(owner.call(stranger.told)[0])

        # No further at once than numbers modulo 2**16 can tell from going back.
        risen = [("ping", epoch, epoch) for epoch in (*range(0, before, 20_000), before)]
        endpoint.call(stranger.tell_late, plane, [*risen, ("notice", before, 1)])
        wait_until(lambda: come() == 1)
        late = [("ping", after, after), ("notice", before, 2), ("notice", before - 1, 2)]
        endpoint.call(stranger.tell_late, plane, late)
        time.sleep(0.3)
        assert come() == 1
        endpoint.call(stranger.tell_late, plane, [("notice", after, 2)])
        wait_until(lambda: come() == 2)


def test_a_barrier_whose_echo_is_lost(path: str) -> None:
    """Only the peer's endpoint breaks, and with it the answer to a `quiesce`: pushes go on."""
    with Peer(1, path=path, name="receiver") as receiver, Peer(2, path=path) as sender:
        sender.link(receiver)
        cache_id = receiver.call(actions.make_cache, "kv", 1, (2, 1000), access="rw")
        sender.call(actions.make_cache, "kv", 1, (2, 1000), seed=1)
        assert receiver.address
        for value in range(1, 6):
            with sender.stopped():
                receiver.call(pushing.quiesce_and_reuse, "kv", 0, 1000, value, 100)
                # Its answer will be on its way, or about to be, when the endpoint breaks.
            sender.side(noticing.break_data, [receiver.address[1]])
            wait_until(
                lambda: sender.call(pushing.push, "kv", 1, cache_id, timeout_ms=10_000).ok, 10
            )
            assert receiver.call(actions.wrong_slots, "kv", 1, 0, 1000) == []

"""UCX's own port takes anyone's packets: what lacks the token of a link is dropped."""

from __future__ import annotations

from children import actions, serving, stranger
from harness import Peer, rounds

MESSAGES = rounds(4000)


def test_messages_without_the_token() -> None:
    """From a process that has not linked, while a friend is served: to the owner and to the
    puller, of whose transfers a stranger would like to write the bytes."""
    with (
        Peer(1, name="owner") as owner,
        Peer(2, name="puller", listen=False) as puller,
        Peer(3, name="stranger", engine=False, fresh=True) as intruder,
    ):
        puller.link(owner)
        cache_id = owner.call(actions.make_cache, "kv", 4, (2, 100_000), seed=1)
        puller.call(actions.make_cache, "kv", 4, (2, 100_000))
        assert puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000).ok
        for target, other in ((owner, 2), (puller, 1)):
            plane = target.call(stranger.data_plane, other)
            before = target.call(stranger.drops, other)
            pulling = puller.start(serving.pull_until_told, "kv", 1, cache_id)
            sent = intruder.call(stranger.intrude, plane, MESSAGES, timeout=60)
            puller.side(serving.finish)
            result = pulling.result()
            assert result["problems"] == [], result
            assert result["pulls"] > 10
            after = target.call(stranger.drops, other)
            nobody, wrong = (new - old for old, new in zip(before, after, strict=True))
            # Those for numbers that no message has are dropped by UCX itself.
            assert nobody > sent // 8
            assert wrong > sent // 20
            assert target.call(stranger.told) == (0, None)
        for peer, other in ((owner, 2), (puller, 1)):
            assert peer.call(actions.links) == {other: "up"}
        assert puller.call(actions.wrong_slots, "kv", 1, 0, 100_000) == []
        puller.call(actions.paint, "kv", 0)
        outcome = puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000)
        assert outcome.ok, outcome
        assert puller.call(actions.wrong_slots, "kv", 1, 0, 100_000) == []

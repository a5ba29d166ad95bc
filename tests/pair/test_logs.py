"""A busy session logged at the lowest level: what gives power over others is never in it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from children import actions, recording
from harness import Peer, Proxy, wait_until

SECRET = "open-sesame-4711"
SHAPE = 4, (1, 50_000)


@pytest.fixture
def trio(path: str) -> Iterator[tuple[Peer, Peer, Peer]]:
    """(owner, puller, one with another secret), all of whose logs are kept."""
    options = {"secret": SECRET}
    with (
        Peer(1, path=path, name="owner", options=options, fresh=True) as owner,
        Peer(2, path=path, name="puller", options=options, listen=False, fresh=True) as puller,
        Peer(3, path=path, name="wrong", options={"secret": "x" + SECRET}, fresh=True) as wrong,
    ):
        for peer in (owner, puller, wrong):
            peer.call(recording.record)
        yield owner, puller, wrong


def session(owner: Peer, puller: Peer, wrong: Peer) -> list[str]:
    """Links, pulls, cuts, refusals and breaches; returns secrets that only its actors know."""
    assert owner.address
    puller.call(actions.make_cache, "kv", *SHAPE, access="")
    cache_id = owner.call(actions.make_cache, "kv", *SHAPE, seed=1)
    tokens = []
    with Proxy(owner.address) as proxy:
        puller.link(owner, address=proxy.address)
        assert puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000).ok
        tokens.append(owner.call(recording.hold, "kv"))
        puller.call(recording.pull_held, "kv", 1, cache_id, tokens[-1])
        assert wrong.call(actions.try_link, [(1, owner.address)]).kind == "LinkFailed"
        assert owner.call(actions.try_link, [(3, wrong.address)]).kind == "LinkFailed"
        assert not puller.call(actions.pull, "kv", 1, cache_id + 50, timeout_ms=500).ok
        accepted = proxy.accepted
        proxy.cut()
        wait_until(lambda: proxy.accepted > accepted)
        later = owner.call(actions.make_cache, "later", *SHAPE, seed=2)
        assert puller.call(actions.pull, "kv", 1, later, timeout_ms=5000).ok
        # A frame that has been altered on its way.
        proxy.alter = len(proxy.recorded[-1]) + 20
        puller.call(actions.make_cache, "more", *SHAPE, seed=2)
        wait_until(lambda: proxy.accepted > accepted + 1)
        wait_until(lambda: puller.call(actions.links)[1] == "up")
    return tokens


def breaches(owner: Peer, puller: Peer) -> None:
    """What ends a link and says why, by either side's fault."""
    puller.link(owner)
    puller.call(recording.break_protocol, 1)
    wait_until(lambda: owner.call(actions.links)[2] == "down")
    wait_until(lambda: puller.call(actions.links)[1] == "down")
    puller.link(owner)
    owner.call(recording.fail_inside, 2)
    puller.call(actions.make_cache, "last", *SHAPE, seed=2)
    wait_until(lambda: owner.call(actions.links)[2] == "down")


@pytest.mark.timeout(120)
def test_nothing_that_gives_power(trio: tuple[Peer, Peer, Peer]) -> None:
    owner, puller, wrong = trio
    tokens = session(owner, puller, wrong)
    hidden: dict[str, set[str]] = {"secret": {SECRET, *tokens}}
    for peer in (owner, puller):
        for kind, values in peer.call(recording.sensitive).items():
            hidden.setdefault(kind, set()).update(values)
    puller.unlink(owner)
    breaches(owner, puller)
    for kind in ("secret", "word", "token", "address"):
        assert len(hidden[kind]) > 1, kind
    lines = [line for peer in trio for line in peer.call(recording.recorded)]
    text = "\n".join(lines)
    # It has been a busy session.
    for expected in ("secret", "broke the protocol", "a bug", "Traceback", "down"):
        assert expected in text, expected
    for kind, values in hidden.items():
        shown = [value for value in values if value in text]
        assert not shown, f"{kind}: {shown}"
    # Nor those of the objects of Python.
    assert not re.search(r"0x[0-9a-f]{6,}", text)

"""The control plane through a relay that means harm: a link that works, or a clear error in time.

Whatever happens on the way, nothing hangs or crashes, no wrong bytes come, and a good link follows.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from certificates import Authority
from children import actions
from harness import Peer, Proxy, rounds, wait_until
from proxy import FOREVER, KINDS, SIDES, Fault, MeanProxy
from sleeper import Sleeper

SHAPE = 2, (1, 5_000)
PROTECTIONS = ("nothing", "a secret", "TLS")
# Preamble, hello, proof or welcome, then those of the link itself.
FRAMES = range(8)
LINK_MS = 600
CASES = rounds(20)


@pytest.fixture(scope="module", params=PROTECTIONS)
def two(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[tuple[Peer, Peer]]:
    """(owner, puller) with a cache each, not linked."""
    authority = Authority(tmp_path_factory.mktemp("certificates"))
    options: list[dict[str, Any]] = [{}, {}]
    if request.param == "a secret":
        options = [{"secret": "open sesame"}] * 2
    elif request.param == "TLS":
        options = [{"tls": authority.files()}, {"tls": authority.files()}]
    with (
        Peer(1, name="owner", options=options[0]) as owner,
        Peer(2, name="puller", listen=False, options=options[1]) as puller,
    ):
        owner.call(actions.make_cache, "kv", *SHAPE, seed=1)
        puller.call(actions.make_cache, "kv", *SHAPE, access="")
        yield owner, puller


def faults(seed: str, frames: range = FRAMES) -> list[Fault]:
    """A sample in which each kind, side and place comes about as often as any other."""
    rng = random.Random(seed)
    cases = [
        Fault(kind, side, at, reset=bool(at % 2), seconds=rng.choice([0.2, FOREVER]))
        for kind, side, at in itertools.product(KINDS, SIDES, frames)
    ]
    for kind, side in itertools.product(KINDS, SIDES):
        place = rng.choice([0, 1, 5, 7, 8, 9, 11, 12, 13, *range(14, 900, 61)])
        seconds = rng.choice([0.2, FOREVER])
        cases.append(Fault(kind, side, place, "byte", seconds, rng.random() < 0.5))
    rng.shuffle(cases)
    return cases[:CASES]


def linked(puller: Peer, address: tuple[str, int], sleeper: Sleeper, timeout_ms: int) -> bool:
    """Link, in time, or say clearly why not; returns whether it has linked."""
    outcome = puller.call(actions.try_link, [(1, address)], timeout_ms=timeout_ms, timeout=20)
    assert outcome.seconds < timeout_ms / 1000 + 0.3 + sleeper.late, outcome
    if outcome.ok:
        return True
    assert outcome.kind == "LinkFailed", outcome
    (result,) = outcome.extra["results"]
    if "linked already" in result[2]:
        return True
    assert len(result[2]) > len("cluster 1: "), outcome
    assert "internal error" not in result[2], outcome
    return False


def check_pull(puller: Peer, cache_id: int, seed: int, *, must: bool, timeout_ms: int) -> None:
    puller.call(actions.paint, "kv", 0)
    outcome = puller.call(
        actions.pull_checked, "kv", 1, cache_id, seed, timeout_ms=timeout_ms, timeout=20
    )
    assert outcome.ok or not must, outcome
    if outcome.ok:
        assert outcome.extra["wrong"] == [], outcome
    else:
        assert outcome.kind in ("LlmTimeout", "NotYetLink", "KvCacheNotExist"), outcome


def quiet(peer: Peer) -> None:
    """Nothing that went wrong is our own fault."""
    lines = peer.call(actions.log_lines, clear=True)
    assert not [line for line in lines if line.startswith("ERROR")], lines


def mend(owner: Peer, puller: Peer, sleeper: Sleeper) -> None:
    """A good link, to all that is there, and its end."""
    assert owner.address
    outcome = puller.call(actions.try_link, [(1, owner.address)], timeout_ms=4000)
    assert outcome.ok or "linked already" in outcome.message, outcome
    check_pull(puller, 1, 1, must=True, timeout_ms=4000)
    puller.unlink(owner)
    for peer in (owner, puller):
        quiet(peer)


@pytest.mark.timeout(180)
def test_linking(two: tuple[Peer, Peer], sleeper: Sleeper) -> None:
    owner, puller = two
    assert owner.address
    good = 0
    with MeanProxy(owner.address) as proxy:
        for fault in faults("linking"):
            proxy.plan(fault)
            print(fault)
            if linked(puller, proxy.address, sleeper, LINK_MS):
                good += 1
                check_pull(puller, 1, 1, must=False, timeout_ms=1000)
            # A connection that is stalled for ever is nothing that TCP would ever mend.
            proxy.cut()
            mend(owner, puller, sleeper)
    assert 0 < good < CASES


@pytest.mark.timeout(180)
def test_reconnecting(two: tuple[Peer, Peer], sleeper: Sleeper) -> None:
    """The connection is cut, and it is the next one that is mistreated."""
    owner, puller = two
    assert owner.address
    with MeanProxy(owner.address) as proxy:
        for fault in faults("reconnecting")[: CASES // 2]:
            print(fault)
            assert linked(puller, proxy.address, sleeper, 4000)
            accepted = proxy.accepted
            proxy.plan(fault)
            proxy.cut()
            check_pull(puller, 1, 1, must=False, timeout_ms=1000)
            wait_until(lambda accepted=accepted: proxy.accepted > accepted)
            proxy.cut()
            mend(owner, puller, sleeper)


@pytest.mark.timeout(180)
def test_catalogue_updates(two: tuple[Peer, Peer], sleeper: Sleeper) -> None:
    """Frames of an established link are mistreated while caches come and go."""
    owner, puller = two
    assert owner.address
    with MeanProxy(owner.address) as proxy:
        for number, fault in enumerate(faults("catalogue", range(3))[: CASES // 2]):
            print(fault)
            assert linked(puller, proxy.address, sleeper, 4000)
            proxy.plan(fault, now=True)
            seed = 2 + number % 50
            cache_id = owner.call(actions.make_cache, "new", *SHAPE, seed=seed)
            check_pull(puller, cache_id, seed, must=False, timeout_ms=1000)
            assert owner.call(actions.drop_cache, "new", 300) < 0.8 + sleeper.late
            # Its memory has other bytes from now on.
            owner.call(actions.paint, "new", 0xEE)
            outcome = puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=500)
            assert not outcome.ok, outcome
            later = owner.call(actions.make_cache, "later", *SHAPE, seed=seed + 1)
            check_pull(puller, later, seed + 1, must=False, timeout_ms=500)
            proxy.cut()
            check_pull(puller, later, seed + 1, must=fault.unit == "frame", timeout_ms=4000)
            owner.call(actions.drop_cache, "later", 1000)
            mend(owner, puller, sleeper)


def test_a_whole_session_said_again(two: tuple[Peer, Peer], sleeper: Sleeper) -> None:
    """All that a dialler has said, said again on a connection of its own."""
    owner, puller = two
    assert owner.address
    with Proxy(owner.address) as proxy:
        assert linked(puller, proxy.address, sleeper, 4000)
        check_pull(puller, 1, 1, must=True, timeout_ms=4000)
        said = bytes(proxy.recorded[-1])
        for end in (len(said), len(said) // 2, 60):
            with socket.create_connection(owner.address, timeout=5) as replayer:
                replayer.settimeout(0.5)
                with contextlib.suppress(OSError):
                    replayer.sendall(said[:end])
                    while replayer.recv(4096):
                        pass
            check_pull(puller, 1, 1, must=True, timeout_ms=4000)
    mend(owner, puller, sleeper)

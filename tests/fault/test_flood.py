"""Strangers at the listener: random bytes, silence and truncated hellos, in thousands."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from children import actions, serving
from harness import Peer, Proxy, Sample, rounds, wait_until

SECRET = {"secret": "open sesame"}
CONNECTIONS = rounds(10_000)
MOST_GROWTH = 2 << 20


@dataclass
class Besieged:
    owner: Peer
    puller: Peer
    cache_id: int
    hello: bytes


@pytest.fixture(scope="module")
def besieged() -> Iterator[Besieged]:
    """A linked pair, and the bytes with which the puller introduced itself.

    They share a secret: without one, a hello with some other bits is as good as any.
    """
    with (
        Peer(1, name="owner", options=SECRET) as owner,
        Peer(2, name="puller", listen=False, options=SECRET) as puller,
    ):
        assert owner.address
        with Proxy(owner.address) as proxy:
            puller.link(owner, address=proxy.address)
            hello = bytes(proxy.recorded[0])
            puller.unlink(owner)
        puller.link(owner)
        cache_id = owner.call(actions.make_cache, "kv", 4, (1, 50_000), seed=1)
        puller.call(actions.make_cache, "kv", 4, (1, 50_000), access="")
        yield Besieged(owner, puller, cache_id, hello)


def garbage(rng: random.Random, hello: bytes) -> bytes:
    kind = rng.randrange(5)
    if kind == 0:
        return rng.randbytes(rng.choice([1, 3, 4, 5, 8, 100, 5000]))
    if kind == 1:
        # A length that promises far more than ever comes, in either byte order.
        return rng.choice([b"\xff" * 4, b"\x7f\xff\xff\xff", b"\0\0\0\x01"]) + rng.randbytes(20)
    if kind == 2:
        return hello[: rng.randrange(1, len(hello))]
    if kind == 3:
        place = rng.randrange(len(hello))
        return hello[:place] + rng.randbytes(1) + hello[place + 1 :]
    return b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def flood(address: tuple[str, int], count: int, hello: bytes, seed: int) -> int:
    """`count` connections, a third of which say nothing and stay; how many were let in."""
    rng = random.Random(seed)
    idle: list[socket.socket] = []
    connected = 0
    try:
        for number in range(count):
            if number % 50 == 0:
                # Faster, and the kernel would drop most of them before the listener sees them.
                time.sleep(0.01)
            try:
                stranger = socket.create_connection(address, timeout=5)
            except OSError:
                continue
            connected += 1
            if number % 3 == 0:
                idle.append(stranger)
                if len(idle) > 300:
                    idle.pop(0).close()
                continue
            with contextlib.suppress(OSError):
                stranger.sendall(garbage(rng, hello))
                if number % 3 == 1:
                    stranger.shutdown(socket.SHUT_WR)
            stranger.close()
    finally:
        for stranger in idle:
            stranger.close()
    return connected


def settled(peer: Peer) -> Sample:
    """A sample after the last stranger has been dropped."""
    last = [peer.sample()]

    def quiet() -> Sample | None:
        now = peer.sample()
        same = now.fds == last[0].fds and now.threads == last[0].threads
        last[0] = now
        return now if same else None

    time.sleep(1)
    found: Sample = wait_until(quiet, timeout=15, step=1)
    return found


@pytest.mark.timeout(180)
def test_flood(besieged: Besieged) -> None:
    owner, puller = besieged.owner, besieged.puller
    assert owner.address
    owner.call(actions.log_lines, clear=True)
    before = settled(owner)
    samples: list[Sample] = []
    # A pool may grow once more; what leaks grows by every flood.
    for seed in range(1, 5):
        puller.call(actions.paint, "kv", 0)
        pulling = puller.start(serving.pull_until_told, "kv", 1, besieged.cache_id)
        connected = flood(owner.address, CONNECTIONS, besieged.hello, seed)
        puller.side(serving.finish)
        result = pulling.result()
        assert connected > CONNECTIONS * 0.9
        assert result["problems"] == [], result
        assert result["pulls"] > 100
        assert puller.call(actions.wrong_tensors, "kv", 1) == []
        samples.append(settled(owner))
        if seed > 1 and samples[-1].rss - samples[-2].rss < MOST_GROWTH:
            break
    first, *_, last = samples
    assert last.fds <= first.fds <= before.fds, (before, samples)
    assert last.threads <= first.threads
    assert last.rss - samples[-2].rss < MOST_GROWTH, (before, samples)
    assert puller.call(actions.links)[1] == "up"
    # Strangers must not fill the log either.
    assert len(owner.call(actions.log_lines)) < 1000
    # The door is open to friends again.
    with Peer(3, name="friend", listen=False, options=SECRET) as friend:
        friend.link(owner)


def test_silent_connections_are_dropped(besieged: Besieged) -> None:
    owner = besieged.owner
    assert owner.address
    silent = [socket.create_connection(owner.address, timeout=15) for _ in range(5)]
    half = [socket.create_connection(owner.address, timeout=15) for _ in range(5)]
    began = time.monotonic()
    for stranger in half:
        stranger.sendall(besieged.hello[: len(besieged.hello) // 2])
    try:
        for stranger in (*silent, *half):
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass
        assert time.monotonic() - began < 12
    finally:
        for stranger in (*silent, *half):
            stranger.close()


def test_a_slow_friend_is_not_a_stranger(besieged: Besieged) -> None:
    """A connection is closed at once for what it says, not for how many bytes came at a time."""
    owner, puller = besieged.owner, besieged.puller
    assert owner.address
    with socket.create_connection(owner.address, timeout=10) as stranger:
        stranger.sendall(b"this is not the protocol, whatever it may be" * 3)
        began = time.monotonic()
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass
        assert time.monotonic() - began < 2
    assert puller.call(actions.pull, "kv", 1, besieged.cache_id, timeout_ms=2000).ok

"""An idle engine sleeps."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, nullcontext

import pytest

from children import actions, noticing
from harness import Peer, cpu_seconds

SECONDS = float(os.environ.get("UCXKV_TEST_IDLE_SECONDS", "20"))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_idle_engines_use_no_cpu() -> None:
    """Linked pairs that have pulled and now do nothing; both paths at the same time."""
    with ExitStack() as stack:
        peers = []
        for number, path in enumerate(("stream", "get")):
            owner = stack.enter_context(Peer(10 + number, path=path, name=f"{path} owner"))
            puller = stack.enter_context(
                Peer(20 + number, path=path, name=f"{path} puller", listen=False)
            )
            puller.link(owner)
            cache_id = owner.call(actions.make_cache, "kv", 4, (2, 1000), seed=1)
            puller.call(actions.make_cache, "kv", 4, (2, 1000), access="")
            outcome = puller.call(actions.pull, "kv", owner.cluster_id, cache_id, timeout_ms=5000)
            assert outcome.ok, outcome
            peers += [owner, puller]
        time.sleep(1)
        before = [cpu_seconds(peer.pid) for peer in peers]
        began = time.monotonic()
        time.sleep(SECONDS)
        passed = time.monotonic() - began
        used = {
            peer.name: (cpu_seconds(peer.pid) - old) / passed
            for peer, old in zip(peers, before, strict=True)
        }
        assert max(used.values()) < 0.005, used


@pytest.mark.parametrize("vain", [True, False], ids=["no answer", "answered"])
def test_an_unanswered_connection_uses_little_cpu(vain: bool) -> None:
    """The kernel of a stopped peer takes a connection that its process then does not answer.

    For UCX such a connection can always be written to, so its descriptor is ready all the time.
    """
    with Peer(1, path="stream", name="owner") as owner, Peer(2, path="stream") as puller:
        puller.link(owner)
        cache_id = owner.call(actions.make_cache, "kv", 1, (1, 1000), seed=1)
        puller.call(actions.make_cache, "kv", 1, (1, 1000), access="")
        assert puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000).ok
        assert owner.address
        with owner.stopped() if vain else nullcontext():
            broken = puller.side(noticing.break_data, [owner.address[1]])
            assert broken > 0
            time.sleep(0.2)
            before, began = cpu_seconds(puller.pid), time.monotonic()
            time.sleep(2)
            used = (cpu_seconds(puller.pid) - before) / (time.monotonic() - began)
        assert used < 0.3, used
        assert puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=10000).ok

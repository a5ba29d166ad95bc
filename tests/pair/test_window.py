"""What other processes of the same user see of an engine, and who does not see it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import msgspec
import pytest

from children import actions, watching
from harness import Peer
from ucxkv import window
from ucxkv.figures import FAILURES, LINK_STATES


def window_of(peer: Peer) -> str:
    peer.ready()
    (name,) = window.names(peer.pid)
    return name


def test_the_figures_of_a_process(pair: tuple[Peer, Peer], path: str) -> None:
    owner, puller = pair
    source = owner.call(actions.make_cache, "kv", 4, (8, 1000), seed=1)
    puller.call(actions.make_cache, "kv", 4, (8, 1000))
    assert all(o.ok for o in puller.call(actions.pull_many, "kv", 1, source, 3, timeout_ms=5000))
    name = window_of(puller)
    assert name in window.names()
    seen = window.look(name)
    own = puller.call(watching.figures)
    assert msgspec.to_builtins(seen) | {"at": 0} == own | {"at": 0}
    assert seen.pid == puller.pid
    assert (seen.cluster_id, seen.role, seen.address) == (2, "MIX", "")
    assert seen.totals.transfers == 3
    assert getattr(seen.totals, f"bytes_{path}") == 3 * 4 * 1000
    assert sum(count for _, count in seen.totals.latency) == 3
    assert seen.totals.latency_sum > 0
    (link,) = seen.links
    assert (link.cluster_id, link.state, link.path) == (1, "up", path)
    assert link.totals == seen.totals
    assert (seen.caches, seen.registered_bytes) == (1, 4 * 8 * 1000)
    assert seen.started <= time.time()
    assert "{}:{}".format(*(owner.address or ())) == link.address
    again = window.look(name)
    assert again.at > seen.at
    assert again.totals.since(seen.totals).transfers == 0


def test_it_goes_with_the_engine(path: str) -> None:
    with Peer(1, path=path) as peer:
        name = window_of(peer)
        assert window.look(name).cluster_id == 1
        peer.call(actions.finalize)
        assert window.names(peer.pid) == []
        with pytest.raises(ConnectionError):
            window.look(name)


def test_it_goes_with_the_process() -> None:
    with Peer(1, fresh=True) as peer:
        assert window_of(peer)
        peer.kill()
        assert window.names(peer.pid) == []


def test_a_stopped_process_is_not_waited_for(path: str) -> None:
    with Peer(1, path=path) as peer:
        name = window_of(peer)
        with peer.stopped():
            began = time.monotonic()
            with pytest.raises(TimeoutError):
                window.look(name, timeout=0.3)
            assert time.monotonic() - began < 5
        assert window.look(name).cluster_id == 1


def test_another_process_cannot_answer_for_it() -> None:
    """A name that is free can be taken by anybody."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as squatter:
        squatter.bind("\0ucxkv/1/77777")
        squatter.listen()
        assert "ucxkv/1/77777" in window.names(1)
        with pytest.raises(PermissionError, match="another process than 1"):
            window.look("ucxkv/1/77777")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_gets_nothing(path: str) -> None:
    code = """
import os, socket, sys
os.setuid(65534)
visitor = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
visitor.settimeout(20)
visitor.connect(chr(0) + sys.argv[1])
try:
    print(len(visitor.recv(1000)))
except ConnectionResetError:
    print(0)
"""
    with Peer(1, path=path) as peer:
        name = window_of(peer)
        seen = subprocess.run(
            [sys.executable, "-I", "-c", code, name],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (seen.stdout.strip(), seen.stderr) == ("0", "")


def test_names_of_what_can_be_counted() -> None:
    from ucxkv.transfer import FAILURE_STATUS

    from ucxkv.errors import Status

    assert tuple(Status(status).name for status in FAILURE_STATUS) == FAILURES
    assert len(set(LINK_STATES)) == 5


def test_nothing_is_loaded_for_those_who_do_not_watch(path: str) -> None:
    with Peer(1, path=path, fresh=True) as peer:
        assert window.look(window_of(peer)).cluster_id == 1
        for package in ("ucxkv.telemetry", "ucxkv.top", "prometheus_client", "opentelemetry"):
            assert not peer.call(watching.has_loaded, package)

"""A span for each transfer, whoever waits for it, with its layers; and none once it is closed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from children import actions, pushing, watching
from extras import need
from harness import Peer

need("opentelemetry.sdk", "telemetry")

SHAPE = (8, 1000)
LAYERS = 4


@pytest.fixture
def traced(path: str) -> Iterator[tuple[Peer, Peer, int]]:
    """An owner, a puller that is traced, and the id of the owner's cache."""
    with (
        Peer(1, path=path, name="owner") as owner,
        Peer(2, path=path, name="puller", listen=False) as puller,
    ):
        puller.link(owner)
        source = owner.call(actions.make_cache, "kv", 2 * LAYERS, SHAPE, seed=1)
        puller.call(actions.make_cache, "kv", 2 * LAYERS, SHAPE)
        puller.call(watching.begin_tracing)
        yield owner, puller, source
        assert puller.call(watching.end_tracing) == []


def one(peer: Peer, name: str) -> dict[str, Any]:
    (span,) = peer.call(watching.spans, name)
    return dict(span)


def check_success(span: dict[str, Any], path: str, source: int, address: str) -> None:
    assert span["status"] == "UNSET"
    assert span["kind"] == "CLIENT"
    assert span["attributes"] == {
        "ucxkv.cluster": 2,
        "ucxkv.peer": 1,
        "ucxkv.cache": source,
        "ucxkv.peer.address": address,
        "ucxkv.bytes": 2 * LAYERS * 1000,
        "ucxkv.spans": 2 * LAYERS,
        "ucxkv.path": path,
    }
    assert [name for name, _, _ in span["events"]] == ["layer"] * LAYERS
    assert [attributes["ucxkv.layer"] for _, attributes, _ in span["events"]] == [*range(LAYERS)]
    times = [span["start"], *(at for _, _, at in span["events"]), span["end"]]
    assert times == sorted(times)


def test_pulls_waited_for_and_forgotten(traced: tuple[Peer, Peer, int], path: str) -> None:
    owner, puller, source = traced
    assert owner.address
    address = "{}:{}".format(*owner.address)
    assert puller.call(actions.pull_checked, "kv", 1, source, 1, timeout_ms=5000).ok
    check_success(one(puller, "pull_kv_cache"), path, source, address)
    puller.call(watching.forgotten_pull, "kv", 1, source)
    check_success(one(puller, "pull_kv_cache"), path, source, address)


def test_the_parent_is_the_callers_span(traced: tuple[Peer, Peer, int]) -> None:
    _, puller, source = traced
    parent, outcome = puller.call(
        watching.pull_within_a_span, name="kv", cluster_id=1, cache_id=source, timeout_ms=5000
    )
    assert outcome.ok
    assert one(puller, "pull_kv_cache")["parent"] == parent


def test_failures(traced: tuple[Peer, Peer, int]) -> None:
    """Before anything begins, and on the way; the caller gets the same error as ever."""
    _, puller, source = traced
    for cluster_id, cache_id, size, error in (
        (1, source, 0, "ParamInvalid"),
        (1, 999, -1, "KvCacheNotExist"),
        (7, source, -1, "NotYetLink"),
    ):
        call = ("kv", cluster_id, cache_id)
        outcome = puller.call(actions.pull, *call, size=size, timeout_ms=2000)
        assert outcome.kind == error
        span = one(puller, "pull_kv_cache")
        assert span["status"] == "ERROR"
        assert span["description"] == outcome.message
        assert span["attributes"]["error.type"] == error
        assert [name for name, _, _ in span["events"]] == ["exception"]
    puller.call(actions.begin, "late", "kv", 7, source, timeout_ms=2000)
    outcome = puller.call(actions.finish, "late")
    assert outcome.kind == "NotYetLink"
    assert one(puller, "pull_kv_cache")["attributes"]["ucxkv.status"] == "NOT_YET_LINK"


def test_an_interrupted_pull_is_given_up(path: str) -> None:
    with (
        Peer(1, path=path, name="owner") as owner,
        Peer(2, path=path, name="puller", listen=False) as puller,
    ):
        puller.link(owner)
        large = (2, (1, 16 << 20))
        source = owner.call(actions.make_cache, "kv", *large, seed=1, aliases=400)
        puller.call(actions.make_cache, "kv", *large, aliases=400)
        puller.call(watching.begin_tracing)
        pending = puller.start_main(actions.pull, "kv", 1, source, timeout_ms=60_000)
        while puller.side(watching.figures)["running"] == 0:
            assert not pending.done()
        puller.interrupt()
        assert pending.result().kind == "KeyboardInterrupt"
        assert one(puller, "pull_kv_cache")["attributes"]["error.type"] == "KeyboardInterrupt"
        assert puller.call(watching.figures)["running"] == 0
        assert puller.call(watching.end_tracing) == []


def test_pushes_and_copies(traced: tuple[Peer, Peer, int]) -> None:
    owner, puller, _ = traced
    inbox = owner.call(actions.make_cache, "inbox", 2 * LAYERS, SHAPE, access="rw")
    assert puller.call(pushing.push, "kv", 1, inbox, timeout_ms=5000).ok
    span = one(puller, "push_kv_cache")
    assert span["attributes"]["ucxkv.cache"] == inbox
    assert span["attributes"]["ucxkv.bytes"] == 2 * LAYERS * 1000
    assert puller.call(watching.layered_push, "kv", 1, inbox).ok
    span = one(puller, "push_kv_cache")
    assert span["attributes"]["ucxkv.bytes"] == 2 * LAYERS * 1000
    assert [name for name, _, _ in span["events"]] == ["layer"] * LAYERS
    assert puller.call(watching.copy, "kv").ok
    span = one(puller, "copy_kv_cache")
    assert (span["kind"], span["attributes"]["ucxkv.path"]) == ("INTERNAL", "copy")


def test_what_is_not_sampled_is_not_looked_at(path: str) -> None:
    with (
        Peer(1, path=path, name="owner") as owner,
        Peer(2, path=path, name="puller", listen=False) as puller,
    ):
        puller.link(owner)
        source = owner.call(actions.make_cache, "kv", 4, SHAPE, seed=1)
        puller.call(actions.make_cache, "kv", 4, SHAPE)
        puller.call(watching.begin_tracing, ratio=0.0)
        assert puller.call(watching.trace_again).kind == "LlmError"
        assert puller.call(actions.pull_checked, "kv", 1, source, 1, timeout_ms=5000).ok
        assert puller.call(watching.spans, "pull_kv_cache", 0) == []
        assert puller.call(watching.end_tracing) == []

"""Engines with certificates: pulls, cuts and deaths are what they are without."""

from __future__ import annotations

from pathlib import Path

from certificates import Authority
from children import actions
from harness import Peer, Proxy, wait_until
from sleeper import Sleeper

SHAPE = 4, (1, 50_000)


def test_pulls_over_a_cut(path: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    wanted = "kv-{cluster_id}.example"
    with (
        Peer(
            1,
            path=path,
            name="owner",
            options={"tls": authority.files("kv-1.example", peer_name=wanted)},
        ) as owner,
        Peer(
            2,
            path=path,
            name="puller",
            listen=False,
            options={"tls": authority.files("kv-2.example", peer_name=wanted)},
        ) as puller,
    ):
        cache_id = owner.call(actions.make_cache, "kv", *SHAPE, seed=1)
        puller.call(actions.make_cache, "kv", *SHAPE, access="")
        assert owner.address
        with Proxy(owner.address) as proxy:
            puller.link(owner, address=proxy.address)
            for reset in (False, True):
                outcome = puller.call(actions.pull_checked, "kv", 1, cache_id, 1, timeout_ms=5000)
                assert outcome.ok, outcome
                assert outcome.extra["wrong"] == []
                wait_until(lambda: proxy.connections == 1, timeout=5)
                assert proxy.cut(reset=reset) == 1
                puller.call(actions.paint, "kv", 0)
            later = owner.call(actions.make_cache, "later", *SHAPE, seed=2)
            outcome = puller.call(actions.pull_checked, "kv", 1, later, 2, timeout_ms=5000)
            assert outcome.ok, outcome
            assert outcome.extra["wrong"] == []
            for said in (*proxy.recorded, *proxy.answered):
                assert b"ucxkv" not in said


def test_plain_and_secure_refuse_each_other(tmp_path: Path) -> None:
    options = {"tls": Authority(tmp_path).files()}
    with (
        Peer(1, name="secure", options=options) as secure,
        Peer(2, name="plain") as plain,
    ):
        outcome = plain.call(actions.try_link, [(1, secure.address)])
        assert outcome.kind == "LinkFailed", outcome
        assert "takes connections with TLS only" in outcome.message
        outcome = secure.call(actions.try_link, [(2, plain.address)])
        assert outcome.kind == "LinkFailed", outcome
        assert "it may not use TLS" in outcome.message


def test_a_death_is_noticed(tmp_path: Path, sleeper: Sleeper) -> None:
    authority = Authority(tmp_path)
    with (
        Peer(1, name="owner", options={"tls": authority.files()}) as owner,
        Peer(2, name="puller", listen=False, options={"tls": authority.files()}) as puller,
    ):
        puller.link(owner)
        owner.kill()
        wait_until(lambda: puller.call(actions.links)[1] == "down", timeout=1 + sleeper.late)
        owner.restart()
        puller.link(owner)
        cache_id = owner.call(actions.make_cache, "kv", *SHAPE, seed=1)
        puller.call(actions.make_cache, "kv", *SHAPE, access="")
        outcome = puller.call(actions.pull_checked, "kv", 1, cache_id, 1, timeout_ms=5000)
        assert outcome.ok, outcome
        assert outcome.extra["wrong"] == []

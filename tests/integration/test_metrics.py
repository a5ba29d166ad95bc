"""What Prometheus gets: the figures of stats() and links(), in text that its own tool accepts."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from children import actions, pushing, watching
from extras import need, program
from harness import Peer, wait_until

need("prometheus_client", "telemetry")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"
SHAPE = (8, 1000)
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def busy(path: str) -> Iterator[tuple[Peer, Peer]]:
    """An owner and a puller that has had successes and failures, and has been pushed from."""
    with (
        Peer(1, path=path, name="owner") as owner,
        Peer(2, path=path, name="puller", listen=False) as puller,
    ):
        puller.link(owner)
        source = owner.call(actions.make_cache, "kv", 4, SHAPE, seed=1)
        inbox = owner.call(actions.make_cache, "inbox", 4, SHAPE, access="rw")
        large = owner.call(actions.make_cache, "large", 2, (1, 16 << 20), seed=1, aliases=200)
        puller.call(actions.make_cache, "kv", 4, SHAPE)
        puller.call(actions.make_cache, "large", 2, (1, 16 << 20), aliases=200)
        outcomes = puller.call(actions.pull_many, "kv", 1, source, 5, timeout_ms=5000)
        assert all(outcome.ok for outcome in outcomes)
        assert puller.call(pushing.push, "kv", 1, inbox, timeout_ms=5000).ok
        assert not puller.call(actions.pull, "large", 1, large, timeout_ms=20).ok
        yield owner, puller


def samples_of(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def test_metrics_are_the_engines_own_figures(busy: tuple[Peer, Peer], path: str) -> None:
    _, puller = busy
    text = puller.call(watching.metrics)
    assert puller.call(watching.metrics, own=True) == text
    samples = samples_of(text)
    without = samples_of(puller.call(watching.metrics, links=False))
    assert without == {key: one for key, one in samples.items() if "peer" not in dict(key[1])}
    stats = puller.call(pushing.totals, 1)["engine"]
    assert stats.transfers == 7
    for prefix, labels, whose in (
        ("ucxkv", {"cluster": "2"}, stats),
        ("ucxkv_link", {"cluster": "2", "peer": "1"}, stats.links[1]),
    ):
        assert value(samples, f"{prefix}_transfers_total", **labels) == whose.transfers
        assert value(samples, f"{prefix}_transfer_spans_total", **labels) == whose.spans
        for kind in ("get", "stream", "pushed", "served"):
            moved = value(samples, f"{prefix}_transfer_bytes_total", **labels, kind=kind)
            assert moved == getattr(whose, f"bytes_{kind}")
        failed = {
            status: value(samples, f"{prefix}_transfer_failures_total", **labels, status=status)
            for status in ("TIMEOUT", "FAILED", "HOLD_ENDED", "KV_CACHE_NOT_EXIST")
        }
        assert failed == {"TIMEOUT": 1, "FAILED": 0, "HOLD_ENDED": 0, "KV_CACHE_NOT_EXIST": 0}
        check_histogram(samples, f"{prefix}_transfer_duration_seconds", labels, whose.latency)
    assert value(samples, "ucxkv_transfer_bytes_total", cluster="2", kind=path) == 5 * 4 * 1000
    assert value(samples, "ucxkv_links", cluster="2", state="up") == 1
    assert value(samples, "ucxkv_links", cluster="2", state="down") == 0
    assert value(samples, "ucxkv_link_up", cluster="2", peer="1") == 1
    assert value(samples, "ucxkv_caches", cluster="2") == 2
    assert value(samples, "ucxkv_transfers_running", cluster="2") == 0
    small, large = 4 * 8 * 1000, 16 << 20
    registered = value(samples, "ucxkv_registered_bytes", cluster="2")
    assert registered == small + 2 * 200 * large
    # The large one is the same memory again and again.
    pinned = value(samples, "ucxkv_pinned_bytes", cluster="2")
    if path == "get":
        assert small + 2 * large <= pinned < small + 3 * large


def check_histogram(
    samples: Samples, name: str, labels: dict[str, str], latency: dict[str, float]
) -> None:
    """Six successes, cumulative, the quantiles in the buckets that they belong to."""
    buckets = sorted(
        (float(dict(key)["le"]), count)
        for (sample, key), count in samples.items()
        if sample == f"{name}_bucket" and labels.items() <= dict(key).items()
    )
    assert buckets[-1] == (math.inf, 6)
    counts = [count for _, count in buckets]
    assert counts == sorted(counts)
    assert value(samples, f"{name}_count", **labels) == 6
    for share, quantile in (("p50", 3), ("p99", 6)):
        bound = next(bound for bound, count in buckets if count >= quantile)
        assert bound / 2 <= latency[share] <= bound
    assert 0 < value(samples, f"{name}_sum", **labels) < 6 * buckets[-2][0]


def test_promtool_has_nothing_to_say(busy: tuple[Peer, Peer]) -> None:
    tool = program("promtool", "prometheus")
    owner, puller = busy
    for peer in (owner, puller):
        text = peer.call(watching.metrics)
        done = subprocess.run(
            [tool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_each_metric_of_the_dashboard_is_there(busy: tuple[Peer, Peer]) -> None:
    names = {name for name, _ in samples_of(busy[1].call(watching.metrics))}
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(expressions) > 15
    used = {name for text in expressions for name in re.findall(r"\bucxkv\w+", text)}
    assert used <= names
    shown = {name.removesuffix("_sum").removesuffix("_count") for name in names}
    left_out = {name for name in shown if name not in used and f"{name}_bucket" not in used}
    # What is only for those who look closer.
    assert left_out == {
        "ucxkv_start_time_seconds",
        "ucxkv_caches",
        "ucxkv_notices_received_total",
        "ucxkv_dropped_messages_total",
        "ucxkv_transfer_spans_total",
        "ucxkv_link_transfers_total",
        "ucxkv_link_transfer_spans_total",
    }


def test_promtool_can_read_the_dashboard(tmp_path: Path) -> None:
    tool = program("promtool", "prometheus")
    dashboard = json.loads(DASHBOARD.read_text())
    rules = [
        {"record": f"panel:{panel['id']}:{number}", "expr": filled_in(target["expr"])}
        for panel in dashboard["panels"]
        for number, target in enumerate(panel["targets"])
    ]
    file = tmp_path / "rules.yaml"
    # JSON is YAML.
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(
        [tool, "check", "rules", str(file)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert f"SUCCESS: {len(rules)} rules found" in done.stdout


def filled_in(expression: str) -> str:
    """As Grafana does it."""
    expression = expression.replace("$__rate_interval", "1m")
    return re.sub(r"\$\w+", ".*", expression)


def test_a_dead_peer_shows(path: str) -> None:
    with (
        Peer(1, path=path, name="owner", fresh=True) as owner,
        Peer(2, path=path, name="puller", listen=False) as puller,
    ):
        puller.link(owner)
        owner.kill()

        def down() -> bool:
            samples = samples_of(puller.call(watching.metrics))
            return value(samples, "ucxkv_links", cluster="2", state="down") == 1

        wait_until(down)
        samples = samples_of(puller.call(watching.metrics))
        assert value(samples, "ucxkv_link_up", cluster="2", peer="1") == 0


def test_a_closed_engine_has_no_figures(path: str) -> None:
    with Peer(1, path=path) as peer:
        assert 'cluster="1"' in peer.call(watching.metrics)
        peer.call(actions.finalize)
        text = peer.call(watching.metrics)
        assert "cluster=" not in text
        assert "# TYPE ucxkv_transfers_total counter" in text


def test_engines_that_end_while_they_are_looked_at(path: str) -> None:
    with Peer(1, path=path) as peer:
        assert peer.call(watching.scrape_while_ending, 10, timeout=100) == []

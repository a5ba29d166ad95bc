"""Figures read back from metrics: whatever else a server has, and whatever it says."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from ucxkv.figures import Totals
from ucxkv.scraping import figures_in, scrape

TEXT = """\
# HELP python_info Python platform information
python_info{implementation="CPython"} 1.0
ucxkv_engine_info{address="[::1]:5",cluster="2",role="DECODER",ucx="1.22.0",version="0.1.0"} 1.0
ucxkv_start_time_seconds{cluster="2"} 1.5e+09
ucxkv_transfers_running{cluster="2"} 3.0
ucxkv_registered_bytes{cluster="2"} 1.6e+07
ucxkv_holds{cluster="2"} 4.0
ucxkv_transfers_total{cluster="2"} 10.0
ucxkv_transfers_total{cluster="3"} 99.0
ucxkv_transfer_bytes_total{cluster="2",kind="get"} 1e+09
ucxkv_transfer_failures_total{cluster="2",status="TIMEOUT"} 2.0
ucxkv_transfer_failures_total{cluster="2",status="FAILED"} 0.0
ucxkv_transfer_duration_seconds_bucket{cluster="2",le="0.001"} 0.0
ucxkv_transfer_duration_seconds_bucket{cluster="2",le="0.002"} 6.0
ucxkv_transfer_duration_seconds_bucket{cluster="2",le="0.004"} 7.0
ucxkv_transfer_duration_seconds_bucket{cluster="2",le="+Inf"} 8.0
ucxkv_transfer_duration_seconds_sum{cluster="2"} 1.25
ucxkv_link_info{address="a\\"b\\\\c\\nd",cluster="2",path="get",peer="1",state="up",transports="cma/memory,tcp/lo"} 1.0
ucxkv_link_info{address="",cluster="2",path="",peer="5",state="down",transports=""} 1.0
ucxkv_link_transfers_total{cluster="2",peer="1"} 7.0
ucxkv_link_transfers_total{cluster="2",peer="5"} 1.0
"""  # noqa: E501


def test_an_engine_and_its_links() -> None:
    (engine,) = figures_in(TEXT, 5.0)
    assert (engine.cluster_id, engine.role, engine.address) == (2, "DECODER", "[::1]:5")
    assert (engine.at, engine.started, engine.running) == (5.0, 1.5e9, 3)
    assert (engine.registered_bytes, engine.holds, engine.caches) == (16_000_000, 4, 0)
    totals = engine.totals
    assert (totals.transfers, totals.bytes_get, totals.failures) == (10, 10**9, {"TIMEOUT": 2})
    assert totals.latency == [(0.0015, 6), (0.003, 1), (0.004, 1)]
    assert totals.latency_sum == 1.25
    up, down = engine.links
    assert (up.cluster_id, up.state, up.path, up.address) == (1, "up", "get", 'a"b\\c\nd')
    assert up.transports == ["cma/memory", "tcp/lo"]
    assert (up.totals.transfers, down.totals.transfers) == (7, 1)
    assert (down.cluster_id, down.state, down.transports) == (5, "down", [])


@pytest.mark.parametrize(
    "text", ["", "ucxkv_engine_info", "ucxkv_engine_info 1.0", 'ucxkv_engine_info{cluster="x"} 1']
)
def test_no_engine(text: str) -> None:
    assert figures_in(text, 0.0) == []


def test_what_has_come_since() -> None:
    earlier = Totals(
        transfers=5, bytes_get=100, failures={"FAILED": 1}, latency=[(0.1, 3), (0.2, 1)]
    )
    later = Totals(
        transfers=9,
        bytes_get=150,
        failures={"FAILED": 1, "TIMEOUT": 2},
        latency=[(0.1, 4), (0.2, 1), (0.3, 1)],
    )
    recent = later.since(earlier)
    assert (recent.transfers, recent.bytes_get, recent.failures) == (4, 50, {"TIMEOUT": 2})
    assert recent.latency == [(0.1, 1), (0.3, 1)]
    assert later.since(Totals()) == later
    # A link that was made anew.
    assert earlier.since(later) == earlier


def test_quantiles() -> None:
    totals = Totals(latency=[(0.1, 90), (0.2, 9), (0.3, 1)])
    assert [totals.quantile(share) for share in (0.5, 0.9, 0.91, 0.99, 1.0)] == [
        0.1, 0.1, 0.2, 0.2, 0.3
    ]  # fmt: skip
    assert Totals().quantile(0.5) is None


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (200, TEXT, None),
        (200, "up 1\n", "no figures of an open engine"),
        (404, "", "404"),
        (200, 'ucxkv_engine_info{cluster="1"} many', "many"),
    ],
)
def test_a_server(status: int, body: str, problem: str | None) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            if problem is None:
                assert len(scrape("127.0.0.1", server.server_port)) == 1
            else:
                with pytest.raises(ValueError, match=problem):
                    scrape("127.0.0.1", server.server_port)
        finally:
            server.shutdown()
            thread.join()
    with pytest.raises(OSError, match="refused"):
        scrape("127.0.0.1", server.server_port)

"""The connector's figures, as vLLM logs them and shows them to Prometheus."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from ucxkv.integrations.vllm.figures import Figures

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BYTES = tuple(float(4**power * 1024) for power in range(12))
_COUNTED = {
    "failed_pulls": "Requests of which blocks could not be pulled.",
    "failed_blocks": "Blocks that could not be pulled.",
    "cancelled_pulls": "Pulls that an abort has ended.",
    "failed_links": "Requests whose prefill engine could not be reached.",
    "failed_notices": "Requests whose end prefill could not be told of.",
    "handed_off": "Requests whose blocks were held for decode.",
    "noticed": "Requests whose blocks decode has given back.",
    "expired_holds": "Requests whose blocks nobody has pulled in time.",
}


class UcxKvStats(KVConnectorStats):
    """`data` has the fields of `Figures`; lists are joined, numbers added."""

    def reset(self) -> None:
        """Begin anew."""
        self.data = Figures().take()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """These, with those of another worker or another time."""
        for name, value in other.data.items():
            self.data[name] = self.data[name] + value if name in self.data else value
        return self

    def is_empty(self) -> bool:
        """Whether nothing has happened."""
        return not any(self.data.values())

    def reduce(self) -> dict[str, int | float]:
        """For a line of the log."""
        seconds: list[float] = self.data["pull_seconds"]
        moved = sum(self.data["pull_bytes"])
        ordered = sorted(seconds)
        shown: dict[str, int | float] = {
            "Pulls": len(seconds),
            "MB pulled": round(moved / 1e6, 3),
            "Median pull (ms)": round(ordered[len(ordered) // 2] * 1e3, 3) if ordered else 0,
            "Longest pull (ms)": round(ordered[-1] * 1e3, 3) if ordered else 0,
        }
        shown.update({name: self.data[name] for name in _COUNTED if self.data[name]})
        return shown


class UcxKvPromMetrics(KVConnectorPromMetrics):
    """The same as Prometheus metrics, named vllm:ucxkv_..."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        histogram = self._histogram
        self._histograms = {
            "pull_seconds": histogram("pull_seconds", "Seconds of a request's pull.", _SECONDS),
            "pull_bytes": histogram("pull_bytes", "Bytes of a request's pull.", _BYTES),
        }
        self._counters = {name: self._counter(name, text) for name, text in _COUNTED.items()}

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Any:
        metric = self._histogram_cls(
            name=f"vllm:ucxkv_{name}",
            documentation=text,
            buckets=buckets,
            labelnames=self._labelnames,
        )
        return create_metric_per_engine(metric, self.per_engine_labelvalues)

    def _counter(self, name: str, text: str) -> Any:
        metric = self._counter_cls(
            name=f"vllm:ucxkv_{name}", documentation=text, labelnames=self._labelnames
        )
        return create_metric_per_engine(metric, self.per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what an engine has counted."""
        for name, histogram in self._histograms.items():
            for value in transfer_stats_data[name]:
                histogram[engine_idx].observe(value)
        for name, counter in self._counters.items():
            if transfer_stats_data[name]:
                counter[engine_idx].inc(transfer_stats_data[name])

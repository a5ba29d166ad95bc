"""What scheduler and workers of one engine tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from ucxkv.integrations.vllm.params import Source
from ucxkv.integrations.vllm.pulls import Load


@dataclass
class WorkerInfo(KVConnectorHandshakeMetadata):
    """A worker to its scheduler, once: where it listens, what it has, and tokens of its holds.

    `port` is None for one that does not listen.
    """

    cluster: int
    host: str
    port: int | None
    cache: int
    compatibility: str
    factors: dict[str, Any]
    holds: list[str]


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The scheduler to all workers, with each step."""

    loads: list[Load] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    released: list[Source] = field(default_factory=list)
    #: Requests that wait for decode, with the tokens of their holds by rank.
    handed_off: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass
class NewHolds(KVConnectorWorkerMetadata):
    """Workers to the scheduler, with the output of a step: tokens of further holds, by rank."""

    holds: dict[int, list[str]]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Those of several workers, or of several steps, together."""
        if not isinstance(other, NewHolds):
            raise TypeError(f"NewHolds cannot be joined with {type(other).__name__}")
        joined = {rank: list(tokens) for rank, tokens in self.holds.items()}
        for rank, tokens in other.holds.items():
            joined.setdefault(rank, []).extend(tokens)
        return NewHolds(joined)

"""The connector in a worker: its engine, its registered blocks, what it serves and pulls."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from ucxkv import LlmDataDist, LlmRole
from ucxkv.integrations.vllm.compatibility import compatibility_hash
from ucxkv.integrations.vllm.figures import Figures
from ucxkv.integrations.vllm.handoffs import HandOffs
from ucxkv.integrations.vllm.layout import CacheMemory
from ucxkv.integrations.vllm.metadata import NewHolds, StepMetadata, WorkerInfo
from ucxkv.integrations.vllm.pulls import Pulls
from ucxkv.integrations.vllm.settings import ConnectorSettings

# Parameters pass through proxies whose JSON has doubles for numbers.
_CLUSTER_BITS = 52


class WorkerSide:
    """One tensor-parallel rank.  `host` is where it is reached; `holds` how many hand-offs to allow
    in the steps until the scheduler hears of new ones."""

    def __init__(
        self,
        memory: CacheMemory,
        rank: int,
        factors: dict[str, Any],
        settings: ConnectorSettings,
        *,
        host: str,
        serves: bool,
        holds: int,
    ) -> None:
        self._rank = rank
        self._factors = factors
        self._settings = settings
        self._host = host
        self._holds = holds
        self._layers: Mapping[str, int] = memory.layers
        self.figures = Figures()
        self.compatibility = compatibility_hash(factors)
        listen = None
        if serves:
            address = f"[{host}]" if ":" in host else host
            listen = f"{address}:{settings.port + rank if settings.port else 0}"
        cluster = secrets.randbits(_CLUSTER_BITS)
        self.engine = LlmDataDist(cluster, LlmRole.MIX, settings.options(listen))
        self.engine.initialize()
        try:
            self.cache = self.engine.register_kv_cache(
                memory.description, memory.addresses, access="r" if serves else ""
            )
        except BaseException:
            self.engine.finalize()
            raise
        self._handoffs = HandOffs(self.engine, self.cache, self.figures) if serves else None
        self._pulls = Pulls(
            self.engine,
            self.cache,
            memory,
            rank,
            settings,
            self.compatibility,
            factors,
            self.figures,
        )
        self._spent = 0

    def info(self) -> WorkerInfo:
        """For the scheduler; to be asked for once, since it has the first tokens."""
        address = self.engine.listen_address
        return WorkerInfo(
            cluster=self.engine.cluster_id,
            host=self._host,
            port=None if address is None else address[1],
            cache=self.cache.cache_id,
            compatibility=self.compatibility,
            factors=self._factors,
            holds=[] if self._handoffs is None else self._handoffs.issue(self._holds),
        )

    # -- a step -----------------------------------------------------------------------------------

    def start(self, step: StepMetadata) -> None:
        """Do what the scheduler says, without waiting for any of it."""
        for request_id in step.cancelled:
            self._pulls.cancel(request_id)
        for source in step.released:
            self._pulls.release(source)
        for load in step.loads:
            self._pulls.begin(load)
        if self._handoffs is not None:
            for request_id, tokens in step.handed_off.items():
                self._handoffs.begin(request_id, tokens[self._rank], self._settings.hold_seconds)
                self._spent += 1

    def wait_layer(self, name: str) -> None:
        """Wait until what a layer's attention is about to read has landed."""
        layer = self._layers.get(name)
        if layer is not None:
            self._pulls.wait_layer(layer)

    def finish_step(self) -> None:
        """After the forward: no pull that this step has waited for goes on."""
        self._pulls.wait_layerwise()

    def finished(self) -> tuple[set[str], set[str]]:
        """Requests whose blocks prefill may free, and those whose pulls are over."""
        sent = set() if self._handoffs is None else self._handoffs.ended()
        return sent, self._pulls.poll()

    def take_failed_blocks(self) -> set[int]:
        """Blocks that should have been filled and are not."""
        return self._pulls.take_failed_blocks()

    def take_new_holds(self) -> NewHolds | None:
        """As many holds as were used since the last call."""
        if self._handoffs is None or not self._spent:
            return None
        spent, self._spent = self._spent, 0
        return NewHolds({self._rank: self._handoffs.issue(spent)})

    def close(self) -> None:
        """End pulls, fenced, and close the engine."""
        self._pulls.close()
        self.engine.finalize()

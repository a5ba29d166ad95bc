"""UcxKvConnector: vLLM's side of the two halves, that of the scheduler and that of a worker."""

from __future__ import annotations

from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.utils.network_utils import get_ip
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ucxkv.integrations.vllm.compatibility import factors_of
from ucxkv.integrations.vllm.layout import memory_of
from ucxkv.integrations.vllm.metadata import NewHolds, StepMetadata, WorkerInfo
from ucxkv.integrations.vllm.scheduler import SchedulerSide
from ucxkv.integrations.vllm.settings import ConnectorSettings
from ucxkv.integrations.vllm.stats import UcxKvPromMetrics, UcxKvStats
from ucxkv.integrations.vllm.worker import WorkerSide

# As many hand-offs per sequence that runs: steps overlap, and new holds come a step late.
_HOLDS_PER_SEQUENCE = 4


class UcxKvConnector(KVConnectorBase_V1):
    """Prefill in one engine, decode in another, and the blocks pulled from one to the other.

    Settings are those of `ConnectorSettings`.  Both engines must have the same model, KV cache
    type, block size, layout and tensor-parallel size: rank r of decode pulls from rank r of
    prefill.  Engines that do not match refuse each other's blocks, request by request, as a load
    failure with the reason in the log; vLLM's `kv_load_failure_policy` says what becomes of those.

    Preempted requests need nothing special: a pull between steps holds its request back until it is
    over, a layerwise one ends within its step, and blocks that are held for decode are those of
    finished requests.
    """

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        for name in (
            "pipeline_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
        ):
            if getattr(parallel, name) > 1:
                raise ValueError(f"UcxKvConnector does not support {name} > 1")
        groups = len(kv_cache_config.kv_cache_groups)
        if groups > 1:
            raise ValueError(
                f"UcxKvConnector supports models with one kind of KV cache, this one has {groups}"
            )
        self._settings = ConnectorSettings.from_extra_config(
            self._kv_transfer_config.kv_connector_extra_config
        )
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                str(self._kv_transfer_config.engine_id),
                vllm_config.cache_config.block_size,
                self._settings.layerwise,
            )

    # -- the worker ---------------------------------------------------------------------------

    @property
    def worker(self) -> WorkerSide:
        """The worker's half, from `register_kv_caches` on."""
        if self._worker is None:
            raise RuntimeError("this connector has no worker: KV caches were not registered")
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Open an engine and register the blocks; those of an earlier call are given back."""
        self.shutdown()
        config = self._vllm_config
        memory = memory_of(kv_caches, self._kv_cache_config.num_blocks)
        factors = factors_of(
            config,
            memory,
            config.cache_config.kv_cache_layout,
            [backend.get_name() for backend in get_current_attn_backends(config)],
            vllm.__version__,
        )
        self._worker = WorkerSide(
            memory,
            get_tensor_model_parallel_rank(),
            factors,
            self._settings,
            host=self._settings.host or get_ip(),
            serves=self._kv_transfer_config.is_kv_producer,
            holds=_HOLDS_PER_SEQUENCE * config.scheduler_config.max_num_seqs,
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What the scheduler puts in the parameters of requests."""
        return self.worker.info()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin, and cancel, what the scheduler has said; never waits."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        self.worker.start(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for that layer of this step's layerwise pulls."""
        self.worker.wait_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: decode pulls blocks from where they are."""

    def wait_for_save(self) -> None:
        """The end of a step: its layerwise pulls are over too."""
        self.worker.finish_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks decode has pulled, or left too long, and those that have landed."""
        sent, received = self.worker.finished()
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Exactly the blocks that were to be pulled and are not what they should be."""
        return self.worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Tokens of new holds in the place of those used."""
        return self.worker.take_new_holds()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What this worker has counted since the last call."""
        if self._worker is None:
            return None
        stats = UcxKvStats(data=self._worker.figures.take())
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        """Close the engine; no pull goes on."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    # -- the scheduler ------------------------------------------------------------------------

    @property
    def scheduler(self) -> SchedulerSide:
        """The scheduler's half."""
        if self._scheduler is None:
            raise RuntimeError("this is a worker's connector")
        return self._scheduler

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """The workers, by tensor-parallel rank."""
        workers = {rank: info for rank, info in metadata.items() if isinstance(info, WorkerInfo)}
        self.scheduler.introduce(workers)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that prefill has computed beyond those that are here already."""
        return self.scheduler.matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """All there are, which is one."""
        return (0,)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Where those tokens go."""
        (own,) = blocks.get_block_ids()
        self.scheduler.allocated(request, own, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """What workers have to do with this step."""
        return self.scheduler.step_metadata()

    def update_connector_output(self, connector_output: Any) -> None:
        """What workers say of the last one."""
        holds = connector_output.kv_connector_worker_meta
        self.scheduler.heard(
            connector_output.finished_recving, holds if isinstance(holds, NewHolds) else None
        )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks stay for decode to pull, with the parameters that it needs."""
        return self.scheduler.finished(request, block_ids)

    # -- what vLLM asks of the class ----------------------------------------------------------

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layerwise loads wait between layers, which a captured graph would skip."""
        return ConnectorSettings.from_extra_config(extra_config).layerwise

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Statistics that have come as their data."""
        stats = UcxKvStats(data=data or {})
        if not data:
            stats.reset()
        return stats

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Their Prometheus metrics."""
        return UcxKvPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

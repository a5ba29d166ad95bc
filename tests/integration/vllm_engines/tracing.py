"""A connector that notes when layers land, when they are waited for, and when they are computed."""

from __future__ import annotations

import threading
import time
from typing import Any

from ucxkv import LlmError
from ucxkv.integrations.vllm.connector import UcxKvConnector


class TracingConnector(UcxKvConnector):
    """Keeps, for each layer, the times of the last step that pulled layer by layer."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.times: dict[str, dict[int, float]] = {}
        self.tracing = False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        begun = time.monotonic()
        super().start_load_kv(forward_context, **kwargs)
        pulls = list(self.worker._pulls._pulls.values())
        if not pulls:
            return
        self.tracing = True
        self.times = {"begun": {0: begun}, "landed": {}, "asked": {}, "computed": {}}
        landed = self.times["landed"]

        def watch(transfer: Any) -> None:
            try:
                for layer in transfer.layers():
                    landed[layer] = max(landed.get(layer, 0.0), time.monotonic())
            except LlmError:
                return

        for pull in pulls:
            for _, transfer in pull.pieces:
                threading.Thread(target=watch, args=(transfer,), daemon=True).start()

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self.tracing:
            self.times["asked"][self.worker._layers[layer_name]] = time.monotonic()
        super().wait_for_layer_load(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if self.tracing:
            self.times["computed"][self.worker._layers[layer_name]] = time.monotonic()

    def wait_for_save(self) -> None:
        super().wait_for_save()
        if not self.worker._pulls._pulls:
            self.tracing = False


def times(engine: Any) -> dict[str, dict[int, float]]:
    """What has been noted, by Engine.call."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return dict(get_kv_transfer_group().times)

"""Whether the blocks of one engine mean the same in another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ucxkv.integrations.vllm.layout import CacheMemory

# To be raised with every change of what engines tell each other in kv_transfer_params.
PROTOCOL = 1


def factors_of(
    vllm_config: Any, memory: CacheMemory, layout: str | None, backends: Sequence[str], version: str
) -> dict[str, Any]:
    """What must be equal for blocks to be exchanged, by name; JSON values.

    `layout` is vLLM's name of the KV cache's layout, `backends` are the names of the attention
    backends, which decide what is inside a block, `version` is vLLM's.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    return {
        "protocol": PROTOCOL,
        "vllm": version,
        "model": model.model,
        "revision": model.revision,
        "quantization": model.quantization,
        "dtype": str(model.dtype),
        "kv_dtype": str(cache.cache_dtype),
        "layers": len(memory.addresses),
        "layer_names": _digest(sorted(memory.layers)),
        "kv_heads": model.get_total_num_kv_heads(),
        "head_size": model.get_head_size(),
        "block_size": cache.block_size,
        "block_bytes": memory.block_bytes,
        "layout": layout,
        "backends": sorted(backends),
        "tensor_parallel_size": parallel.tensor_parallel_size,
    }


def compatibility_hash(factors: Mapping[str, Any]) -> str:
    """One string that is equal where all factors are."""
    return _digest(dict(sorted(factors.items())))


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Which factors differ, in words."""
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return ", ".join(
        f"{name} {ours.get(name)!r} here, {theirs.get(name)!r} there" for name in names
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]

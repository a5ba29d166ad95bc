"""Parts of the connector that need neither vLLM nor another process."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from ucxkv import CachePlacement
from ucxkv.integrations.vllm.compatibility import compatibility_hash, difference, factors_of
from ucxkv.integrations.vllm.layout import memory_of
from ucxkv.integrations.vllm.params import (
    RankSource,
    RemoteRequest,
    Source,
    read_params,
    write_params,
)
from ucxkv.integrations.vllm.pulls import landed_blocks
from ucxkv.integrations.vllm.settings import ConnectorSettings


@dataclass
class Tensor:
    """What is asked of a torch tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int = 4096
    size: int = 2
    kind: str = "cpu"

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def data_ptr(self) -> int:
        return self.address

    def element_size(self) -> int:
        return self.size

    @property
    def device(self) -> Any:
        return SimpleNamespace(type=self.kind)


HEADS_FIRST = Tensor((10, 4, 16, 128), (4 * 16 * 128, 16 * 128, 128, 1))
TOKENS_FIRST = Tensor((10, 4, 16, 128), (4 * 16 * 128, 128, 4 * 128, 1))


@pytest.mark.parametrize("tensor", [HEADS_FIRST, TOKENS_FIRST])
def test_memory_of_blocks_in_one_piece(tensor: Tensor) -> None:
    memory = memory_of({"a": tensor}, 10)
    assert memory.addresses == (4096,)
    assert memory.block_bytes == 4 * 16 * 128 * 2
    assert memory.description.shape == (10, 4 * 16 * 128 * 2)
    assert memory.placement is CachePlacement.HOST


def test_layers_come_in_the_order_of_their_numbers() -> None:
    tensors = {f"layers.{i}.attn": Tensor((4, 8), (8, 1), 1000 + i) for i in (10, 2, 1)}
    memory = memory_of(tensors, 4)
    assert memory.addresses == (1001, 1002, 1010)
    assert memory.layers == {"layers.1.attn": 0, "layers.2.attn": 1, "layers.10.attn": 2}


def test_layers_that_share_a_cache_are_one_tensor() -> None:
    tensors = {f"layers.{i}": Tensor((4, 8), (8, 1), 1000 + i % 2) for i in range(4)}
    memory = memory_of(tensors, 4)
    assert memory.addresses == (1000, 1001)
    assert memory.layers["layers.3"] == 1


def test_blocks_of_several_kernel_blocks() -> None:
    assert memory_of({"a": Tensor((40, 8), (8, 1))}, 10).block_bytes == 4 * 8 * 2


def test_device_memory_is_described_as_such() -> None:
    memory = memory_of({"a": Tensor((4, 8), (8, 1), kind="cuda")}, 4)
    assert memory.placement is CachePlacement.DEVICE
    assert memory.description.placement is CachePlacement.DEVICE


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, "no KV cache"),
        ({"a": [HEADS_FIRST]}, "plain KV tensor"),
        ({"a": Tensor((11, 8), (8, 1))}, "not one of 10 blocks"),
        ({"a": Tensor((10, 4, 8), (32 * 3, 8, 1))}, "without gaps"),
        ({"a": Tensor((10, 4, 8), (8, 80, 1))}, "without gaps"),
        ({"a": Tensor((10, 8), (8, 1)), "b": Tensor((10, 4), (4, 1), 1)}, "differ in size"),
    ],
)
def test_what_cannot_be_transferred_is_refused(tensors: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        memory_of(tensors, 10)


@pytest.mark.parametrize(
    ("landed", "blocks"),
    [(0, 0), (2 * 5 * 100, 0), (2 * 5 * 100 + 99, 0), (1100, 1), (1499, 4), (1500, 5)],
)
def test_blocks_are_complete_when_their_last_tensor_is(landed: int, blocks: int) -> None:
    assert landed_blocks(landed, tensors=3, block_bytes=100, blocks=5) == blocks


def config(**changed: Any) -> Any:
    given = {"model": "m", "block_size": 16, "heads": 8, "tp": 2, **changed}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=given["model"],
            revision=None,
            quantization=None,
            dtype="bfloat16",
            get_total_num_kv_heads=lambda: given["heads"],
            get_head_size=lambda: 64,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=given["block_size"]),
        parallel_config=SimpleNamespace(tensor_parallel_size=given["tp"]),
    )


def factors(layout: str = "LBHNC", version: str = "0.32.0", **changed: Any) -> dict[str, Any]:
    return factors_of(config(**changed), memory_of({"a": HEADS_FIRST}, 10), layout, ["X"], version)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model": "n"}, "model 'm' here, 'n' there"),
        ({"block_size": 32}, "block_size 16 here, 32 there"),
        ({"heads": 4}, "kv_heads 8 here, 4 there"),
        ({"tp": 1}, "tensor_parallel_size 2 here, 1 there"),
        ({"layout": "LBNHC"}, "layout 'LBHNC' here, 'LBNHC' there"),
        ({"version": "0.33.0"}, "vllm '0.32.0' here, '0.33.0' there"),
    ],
)
def test_what_differs_is_named(changed: dict[str, Any], words: str) -> None:
    assert compatibility_hash(factors()) == compatibility_hash(factors())
    assert compatibility_hash(factors()) != compatibility_hash(factors(**changed))
    assert difference(factors(), factors(**changed)) == words


REMOTE = RemoteRequest(
    Source("r", "x", {"a": 1}, (RankSource(2**52 - 1, "::1", 80, 3, "ab"),)), (4, 5), 20
)


def test_parameters_survive_json() -> None:
    import json

    params = write_params(REMOTE, "engine")
    assert params["do_remote_prefill"] is True
    assert read_params(json.loads(json.dumps(params))) == REMOTE


@pytest.mark.parametrize(
    "change",
    [
        {"ucxkv": None},
        {"ucxkv": {}},
        {"remote_block_ids": ["x"]},
        {"remote_num_tokens": None},
        {"remote_request_id": 3},
    ],
)
def test_other_parameters_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="kv_transfer_params"):
        read_params({**write_params(REMOTE, "engine"), **change})


def test_settings() -> None:
    settings = ConnectorSettings.from_extra_config({"load": "layerwise", "port": 7000})
    assert settings.layerwise
    assert settings.options("127.0.0.1:0").sync_cache_wait_time_ms == 60_000


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"lode": "async"}, "lode"),
        ({"load": "later"}, "later"),
        ({"hold_seconds": 0}, "hold_seconds"),
        ({"port": 70000}, "port"),
    ],
)
def test_settings_that_make_no_sense(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ConnectorSettings.from_extra_config(extra)

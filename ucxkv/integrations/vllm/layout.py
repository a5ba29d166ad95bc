"""From vLLM's KV tensors to the memory that is registered."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ucxkv import CacheDesc, CachePlacement, DataType


@dataclass(frozen=True)
class CacheMemory:
    """Where the blocks of each layer are: block k of a layer is `block_bytes` at `k * block_bytes`.

    `layers` maps the name of each layer to the number of its tensor; layers that share a cache have
    the same one.
    """

    addresses: tuple[int, ...]
    blocks: int
    block_bytes: int
    layers: Mapping[str, int]
    placement: CachePlacement

    @property
    def description(self) -> CacheDesc:
        """For the library a block is bytes: what they mean is compared by the connector."""
        return CacheDesc(
            len(self.addresses), (self.blocks, self.block_bytes), DataType.UINT8, self.placement
        )


def memory_of(kv_caches: Mapping[str, Any], blocks: int) -> CacheMemory:
    """The memory of a worker's KV tensors, `blocks` blocks each.

    A tensor's first axis is that of the blocks, or of a whole number of parts of each, as where an
    attention kernel wants smaller ones.  In memory it must be the outermost too, and nothing may
    lie between: the layouts LBHNC and LBNHC of vLLM.

    Raises ValueError for anything else, with what was found.
    """
    if not kv_caches:
        raise ValueError("the model has no KV cache to transfer")
    addresses: dict[int, int] = {}
    layers: dict[str, int] = {}
    sizes: dict[int, str] = {}
    devices: set[str] = set()
    for name in sorted(kv_caches, key=_natural):
        tensor = kv_caches[name]
        sizes.setdefault(_block_bytes(name, tensor, blocks), name)
        devices.add(str(tensor.device.type))
        layers[name] = addresses.setdefault(int(tensor.data_ptr()), len(addresses))
    if len(sizes) > 1:
        shown = ", ".join(f"{size} bytes ({name})" for size, name in sizes.items())
        raise ValueError(f"layers whose blocks differ in size cannot be transferred yet: {shown}")
    on_host = devices == {"cpu"}
    return CacheMemory(
        addresses=tuple(addresses),
        blocks=blocks,
        block_bytes=next(iter(sizes)),
        layers=layers,
        placement=CachePlacement.HOST if on_host else CachePlacement.DEVICE,
    )


def _natural(name: str) -> tuple[tuple[int, ...], str]:
    """Layers in the order of their numbers, which is that in which they are computed."""
    return tuple(int(number) for number in re.findall(r"\d+", name)), name


def _block_bytes(name: str, tensor: Any, blocks: int) -> int:
    if not hasattr(tensor, "data_ptr"):
        raise ValueError(f"{name} has no plain KV tensor, but a {type(tensor).__name__}")
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    if not shape or not shape[0] or shape[0] % blocks:
        raise ValueError(f"the KV tensor of {name}, {shape}, is not one of {blocks} blocks")
    # The inner axes may lie in any order, as long as a block is one piece.
    expected = 1
    inner = sorted(zip(strides[1:], shape[1:], strict=True))
    for stride, extent in [*inner, (strides[0], shape[0])]:
        if extent > 1 and stride != expected:
            raise ValueError(
                f"the KV tensor of {name} has shape {shape} and strides {strides}: blocks must"
                " follow each other without gaps (vLLM's layouts LBHNC and LBNHC)"
            )
        expected *= extent
    return int(expected * tensor.element_size() // blocks)

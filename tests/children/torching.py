"""Caches of PyTorch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from child import Context

TENSORS, SHAPE = 6, (3, 2, 5, 8)


def make(ctx: Context, dtype: str, seed: int, allocated: bool = False) -> int:
    """A registered cache of random tensors, the library's own memory or torch's."""
    import torch

    import ucxkv

    if "torch" in ctx.caches:
        ctx.engine.unregister_kv_cache(ctx.caches["torch"].cache_id)
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(SHAPE, generator=generator) for _ in range(TENSORS)]
    made = [tensor.to(getattr(torch, dtype)) for tensor in drawn]
    if allocated:
        desc = ucxkv.CacheDesc.from_tensors(made)
        cache = ctx.engine.allocate_kv_cache(desc)
        tensors = [torch.from_dlpack(array) for array in cache.tensors]
        for tensor, values in zip(tensors, made, strict=True):
            tensor.copy_(values)
        assert [tensor.data_ptr() for tensor in tensors] == list(cache.tensor_addrs)
    else:
        tensors = made
        cache = ctx.engine.register_kv_cache(None, tensors)
    ctx.caches["torch"] = cache
    ctx.values["tensors"] = tensors
    return int(cache.cache_id)


def values(ctx: Context) -> list[Any]:
    return [tensor.float().tolist() for tensor in ctx.values["tensors"]]


def pull(ctx: Context, cluster_id: int, cache_id: int) -> list[Any]:
    """Pull every slot of another's cache into the same of ours; what our tensors then hold."""
    import ucxkv

    for slot in range(SHAPE[0]):
        index = ucxkv.CacheIndex(cluster_id, cache_id, slot)
        ctx.engine.pull_kv_cache(index, ctx.caches["torch"], slot, timeout_ms=5000)
    return values(ctx)


def regions_of_views(ctx: Context) -> dict[str, int]:
    """Memory regions of caches that are views into one tensor."""
    import torch

    whole = torch.zeros(8, 4, 100)
    found = {}
    for name, views in (
        ("unbind", whole.unbind()),
        ("split", whole.split(2)),
        ("apart", whole[::2].unbind()),
    ):
        cache = ctx.engine.register_kv_cache(None, views)
        found[name] = ctx.engine._engine().catalogue.get(cache.cache_id).native.regions
        ctx.engine.unregister_kv_cache(cache.cache_id)
    return found

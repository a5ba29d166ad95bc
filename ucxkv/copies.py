"""Copies between the caches of one engine: their checks, then the native copy.

The checks are a pull's, in its order, without those of a link: types, values, the caches, geometry.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ucxkv import geometry, numbers
from ucxkv.catalogue import LocalCatalogue, LocalEntry
from ucxkv.copy import Copy
from ucxkv.errors import KvCacheNotExist, LlmOutOfMemory, ParamInvalid
from ucxkv.types import Cache, CacheIndex, TransferReport

# A call has a cluster and a deadline, of which a copy has neither.
_NO_CLUSTER = 0
_NO_DEADLINE = 1.0


def copy_slot(
    catalogue: LocalCatalogue,
    src_cache: Any,
    dst_cache: Any,
    src_batch_index: Any,
    dst_batch_index: Any,
    offset: Any,
    size: Any,
    ext_param: Any,
) -> TransferReport:
    """`LlmDataDist.copy_kv_cache`."""
    source = _cache_id(src_cache, "src_cache")
    _cache_id(dst_cache, "dst_cache")
    start = numbers.integer(offset, "offset")
    call = geometry.check_slots(
        CacheIndex(_NO_CLUSTER, source, src_batch_index),
        dst_cache,
        ext_param,
        None,
        _NO_DEADLINE,
        dst_batch_index,
        size,
    )
    if start < 0:
        raise ParamInvalid(f"offset must not be negative, not {start}")
    return _copy(catalogue, call, start)


def copy_blocks(
    catalogue: LocalCatalogue,
    src_cache: Any,
    dst_cache: Any,
    src_blocks: Any,
    dst_blocks: Any,
    ext_param: Any,
) -> TransferReport:
    """`LlmDataDist.copy_kv_blocks`."""
    source = _cache_id(src_cache, "src_cache")
    _cache_id(dst_cache, "dst_cache")
    if isinstance(src_blocks, Mapping):
        if dst_blocks is not None:
            raise TypeError("dst_blocks must be left out where src_blocks is a mapping")
        src_blocks, dst_blocks = _flat(src_blocks)
    elif src_blocks is None:
        raise TypeError("src_blocks must be a sequence of integers or a mapping, not None")
    index = CacheIndex(_NO_CLUSTER, source)
    call = geometry.check_blocks(
        index, dst_cache, ext_param, None, _NO_DEADLINE, src_blocks, dst_blocks
    )
    return _copy(catalogue, call, 0)


def _cache_id(cache: Any, name: str) -> int:
    if not isinstance(cache, Cache):
        raise TypeError(f"{name} must be a Cache, not {type(cache).__name__}")
    return numbers.integer(cache.cache_id, f"{name}.cache_id")


def _flat(blocks: Mapping[Any, Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """A mapping of source blocks to their destinations as two lists of equal length."""
    sources = geometry.block_array(list(blocks), "src_blocks")
    lists = [geometry.block_array(value, "the blocks of a source") for value in blocks.values()]
    if not lists:
        return sources, sources
    targets = np.concatenate([_signed(one) for one in lists])
    return np.repeat(sources, [one.size for one in lists]), targets


def _signed(array: NDArray[Any]) -> NDArray[np.int64]:
    """As int64, since NumPy makes floating-point numbers of int64 and uint64 together.

    What does not fit stays a number that no block can have.
    """
    if array.dtype.kind == "u":
        array = np.minimum(array.astype(np.uint64), np.uint64(np.iinfo(np.int64).max))
    return array.astype(np.int64)


def _copy(catalogue: LocalCatalogue, call: geometry.Call, offset: int) -> TransferReport:
    began = time.perf_counter()
    source = _entry(catalogue, call.far_cache_id)
    target = _entry(catalogue, call.near_cache_id)
    plan = geometry.plan(_reach(call, offset, source, target), source, target)
    if not target.native.writable:
        raise ParamInvalid(f"the tensors of cache {target.cache_id} are read-only")
    try:
        copy = Copy(
            source.native,
            target.native,
            src_first=plan.src_first,
            dst_first=plan.dst_first,
            tensors=plan.tensors,
            block_len=plan.block_len - offset,
            src_block=call.src_batch,
            dst_block=call.dst_batch,
            src_blocks=call.src_blocks,
            dst_blocks=call.dst_blocks,
            offset=offset,
        )
        overlap = copy.overlaps()
    except MemoryError as error:
        raise LlmOutOfMemory("no memory for the lists of a copy's blocks") from error
    if overlap:
        raise ParamInvalid(
            f"a copy from cache {source.cache_id} to cache {target.cache_id} would write bytes that"
            " it reads"
        )
    spans = copy.run()
    if spans is None:
        lost = source if catalogue.get(source.cache_id) is not source else target
        raise KvCacheNotExist(f"cache {lost.cache_id} was unregistered during a copy")
    return TransferReport(
        bytes=copy.total, seconds=time.perf_counter() - began, path="copy", spans=spans
    )


def _entry(catalogue: LocalCatalogue, cache_id: int) -> LocalEntry:
    entry = catalogue.get(cache_id)
    if entry is None:
        raise KvCacheNotExist(f"no local cache {cache_id} is registered")
    return entry


def _reach(
    call: geometry.Call, offset: int, source: LocalEntry, target: LocalEntry
) -> geometry.Call:
    """The call for the bytes up to the last one to be copied, those before `offset` included."""
    if not offset:
        return call
    if offset >= source.block_bytes:
        raise ParamInvalid(f"offset {offset} of a source slot with {source.block_bytes} bytes")
    if call.size == -1:
        return call
    end = offset + call.size
    if end > source.block_bytes or end > target.block_bytes:
        raise ParamInvalid(
            f"size {call.size} from offset {offset} on exceeds a slot: source"
            f" {source.block_bytes} bytes, destination {target.block_bytes}"
        )
    return call.resized(end)

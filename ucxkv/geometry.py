"""The checks of a transfer and the geometry they allow.

A transfer's arguments are checked in a fixed order, and the first check that fails decides: types,
values, the local cache, the link, the remote cache, geometry.  Those before the link are in
:func:`check_slots` and :func:`check_blocks`, those after it in :func:`plan`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ucxkv.blocks import BlockList
from ucxkv.errors import LlmOutOfMemory, ParamInvalid
from ucxkv.holds import Token, token_of
from ucxkv.numbers import integer, milliseconds
from ucxkv.types import ALL_LAYERS, Cache, CacheIndex, DataType, KvCacheExtParam

if TYPE_CHECKING:
    from ucxkv.catalogue import LocalEntry, RemoteEntry

    Entry: TypeAlias = LocalEntry | RemoteEntry

# As in pyx/ucxkv/core.pxd.
NOTICE_BYTES = 4096

Blocks = NDArray[np.uint32]


# Tuples, not frozen dataclasses: one of each is made for every transfer.
class Call(NamedTuple):
    """The arguments of one pull or push, their types and values checked.

    The far cache is the peer's, the near one ours.

    With `dst_blocks` it is a pull of blocks: from `src_blocks`, or from the continuous slot
    `src_batch` where there are none.
    """

    cluster_id: int
    far_cache_id: int
    near_cache_id: int
    src_batch: int
    dst_batch: int
    size: int
    src_layers: tuple[int, int]
    dst_layers: tuple[int, int]
    tensors_per_layer: int
    timeout_ms: float
    src_blocks: BlockList | None = None
    dst_blocks: BlockList | None = None
    push: bool = False
    notice: bytes | None = None
    hold: Token | None = None


class Plan(NamedTuple):
    """What to copy: tensors of both sides, and the bytes of each slot."""

    src_first: int
    dst_first: int
    tensors: int
    tensors_per_layer: int
    block_len: int


def _notice(value: Any) -> bytes | None:
    if value is None:
        return None
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(f"notice must be bytes, not {type(value).__name__}")
    notice = bytes(value)
    if len(notice) > NOTICE_BYTES:
        raise ParamInvalid(f"a notice of {len(notice)} bytes, where {NOTICE_BYTES} are allowed")
    return notice


def _layer_range(value: Any, name: str) -> tuple[int, int]:
    if value is ALL_LAYERS:
        return -1, -1
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name} must be a pair of integers")
    return integer(value[0], name), integer(value[1], name)


def block_array(value: Any, name: str) -> NDArray[Any]:
    """`value`, a sequence of integers or an integer array, as a one-dimensional array.

    Raises TypeError for anything else.  An array of integers is not copied.
    """
    if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
        raise TypeError(f"{name} must be a sequence of integers, not {type(value).__name__}")
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise TypeError(f"{name} must be a sequence of integers: {error}") from None
    if array.ndim == 1 and array.size == 0:
        return array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be a flat sequence of integers")
    return array


def block_list(value: Any, name: str) -> BlockList:
    """`value`, as for `block_array`, as a list of its own; its numbers are not checked yet."""
    array = block_array(value, name)
    wide = array.dtype.newbyteorder("=") if array.dtype.itemsize >= 4 else np.dtype(np.int32)
    try:
        plain = np.ascontiguousarray(array, dtype=wide)
        return BlockList(plain if plain.flags.aligned else plain.copy())
    except MemoryError as error:
        raise LlmOutOfMemory(f"no memory for the list {name}") from error


def ascending_blocks(value: Any) -> Blocks | None:
    """A slot, or blocks, as ascending numbers; None stays None."""
    if value is None:
        return None
    if not hasattr(value, "__len__"):
        value = [integer(value, "slot_or_blocks")]
    array = np.unique(block_array(value, "slot_or_blocks"))
    if array.size and (array[0] < 0 or array[-1] > np.iinfo(np.uint32).max):
        raise ParamInvalid("slot_or_blocks has numbers that no block can have")
    return array.astype(np.uint32)


class Common(NamedTuple):
    """What pulls and pushes of slots and of blocks have in common, as it was passed."""

    index: Any
    cache: Any
    ext_param: Any
    timeout_ms: Any
    default_timeout_ms: float
    push: bool = False
    notice: Any = None
    hold: Any = None


def check_slots(common: Common, near_batch: Any, size: Any) -> Call:
    """Steps 1 and 2 of a transfer of slots: types (TypeError), then values (ParamInvalid)."""
    index, cache, ext_param = common.index, common.cache, common.ext_param
    if not isinstance(index, CacheIndex):
        raise TypeError(f"the peer's cache must be a CacheIndex, not {type(index).__name__}")
    if not isinstance(cache, Cache):
        raise TypeError(f"the local cache must be a Cache, not {type(cache).__name__}")
    if not isinstance(ext_param, KvCacheExtParam):
        raise TypeError(f"ext_param must be a KvCacheExtParam, not {type(ext_param).__name__}")
    far_slot = integer(index.batch_index, "CacheIndex.batch_index")
    near_slot = integer(near_batch, "batch_index")
    call = Call(
        cluster_id=integer(index.cluster_id, "cluster_id"),
        far_cache_id=integer(index.cache_id, "cache_id"),
        near_cache_id=integer(cache.cache_id, "Cache.cache_id"),
        src_batch=near_slot if common.push else far_slot,
        dst_batch=far_slot if common.push else near_slot,
        size=integer(size, "size"),
        src_layers=_layer_range(ext_param.src_layer_range, "src_layer_range"),
        dst_layers=_layer_range(ext_param.dst_layer_range, "dst_layer_range"),
        tensors_per_layer=integer(ext_param.tensor_num_per_layer, "tensor_num_per_layer"),
        timeout_ms=(
            common.default_timeout_ms
            if common.timeout_ms is None
            else milliseconds(common.timeout_ms, "timeout_ms")
        ),
        push=common.push,
        notice=_notice(common.notice),
        hold=None if common.hold is None else token_of(common.hold),
    )
    if call.size != -1 and call.size <= 0:
        raise ParamInvalid(f"size must be -1 or positive, not {call.size}")
    if call.src_batch < 0 or call.dst_batch < 0:
        raise ParamInvalid(
            f"batch indices must not be negative: source {call.src_batch},"
            f" destination {call.dst_batch}"
        )
    for name, layers in (("src", call.src_layers), ("dst", call.dst_layers)):
        if layers != ALL_LAYERS and not 0 <= layers[0] <= layers[1]:
            raise ParamInvalid(f"{name}_layer_range {layers} is neither (-1, -1) nor ascending")
    if call.tensors_per_layer < 1:
        raise ParamInvalid(f"tensor_num_per_layer must be at least 1, not {call.tensors_per_layer}")
    if not call.timeout_ms > 0:
        raise ParamInvalid(f"timeout_ms must be positive, not {call.timeout_ms}")
    return call


def check_blocks(common: Common, src_blocks: Any, dst_blocks: Any) -> Call:
    """Steps 1 and 2 of a transfer of blocks."""
    sources = None if src_blocks is None else block_list(src_blocks, "src_blocks")
    targets = block_list(dst_blocks, "dst_blocks")
    call = check_slots(common, 0, -1)
    if not targets.representable:
        raise ParamInvalid("dst_blocks has numbers that no block can have")
    if not targets.distinct():
        raise ParamInvalid("dst_blocks names a block twice")
    if sources is not None and sources.size != targets.size:
        raise ParamInvalid(f"{sources.size} source blocks for {targets.size} destination blocks")
    if sources is not None and not sources.representable:
        raise ParamInvalid("src_blocks has numbers that no block can have")
    return call._replace(src_blocks=sources, dst_blocks=targets)


def _side_layers(layers: tuple[int, int], n: int, num_tensors: int, side: str) -> tuple[int, int]:
    """First tensor and number of layers that a range selects on one side."""
    # The default of 2 is not the caller's word about the cache, any other number is.
    if n != 2 and num_tensors % n:
        raise ParamInvalid(
            f"tensor_num_per_layer {n} does not divide the {num_tensors} tensors of the {side}"
        )
    if layers == ALL_LAYERS:
        return 0, num_tensors // n
    if n > num_tensors:
        raise ParamInvalid(
            f"tensor_num_per_layer {n} exceeds the {num_tensors} tensors of the {side}"
        )
    if layers[1] > num_tensors // n - 1:
        raise ParamInvalid(f"layer {layers[1]} of the {side}, which has {num_tensors // n} layers")
    return layers[0] * n, layers[1] - layers[0] + 1


def plan(call: Call, source: Entry, target: Entry) -> Plan:
    """Step 6: geometry (ParamInvalid), and what it amounts to."""
    _check_slots(call, source, target)
    n = call.tensors_per_layer
    src_tensors, dst_tensors = source.desc.num_tensors, target.desc.num_tensors
    if call.src_layers == ALL_LAYERS and call.dst_layers == ALL_LAYERS:
        if src_tensors != dst_tensors:
            raise ParamInvalid(
                f"the source has {src_tensors} tensors, the destination {dst_tensors}"
            )
        src_first = dst_first = 0
        tensors = src_tensors
        n = min(n, tensors)
    else:
        src_first, src_count = _side_layers(call.src_layers, n, src_tensors, "source")
        dst_first, dst_count = _side_layers(call.dst_layers, n, dst_tensors, "destination")
        if src_count != dst_count:
            raise ParamInvalid(f"{src_count} source layers against {dst_count} destination layers")
        tensors = src_count * n
    length = _length(call, source, target)
    src_type, dst_type = source.desc.data_type, target.desc.data_type
    if DataType.UNDEFINED not in (src_type, dst_type) and src_type is not dst_type:
        raise ParamInvalid(
            f"data types differ: source {src_type.name}, destination {dst_type.name}"
        )
    return Plan(src_first, dst_first, tensors, n, length)


def _check_slots(call: Call, source: Entry, target: Entry) -> None:
    for blocks, entry, side in (
        (call.src_blocks, source, "source"),
        (call.dst_blocks, target, "destination"),
    ):
        if blocks is not None and blocks.size and blocks.largest >= entry.blocks:
            raise ParamInvalid(f"block {blocks.largest} of a {side} with {entry.blocks} blocks")
    if call.src_blocks is None and call.src_batch >= source.blocks:
        raise ParamInvalid(f"batch index {call.src_batch} of a source with {source.blocks} slots")
    if call.dst_blocks is None and call.dst_batch >= target.blocks:
        raise ParamInvalid(
            f"batch index {call.dst_batch} of a destination with {target.blocks} slots"
        )


def _length(call: Call, source: Entry, target: Entry) -> int:
    """Bytes to copy to each destination slot or block."""
    if call.dst_blocks is not None and call.src_blocks is None:
        needed = call.dst_blocks.size * target.block_bytes
        if needed > source.block_bytes:
            raise ParamInvalid(
                f"{call.dst_blocks.size} destination blocks need {needed} bytes, the source slot"
                f" has {source.block_bytes}"
            )
        return target.block_bytes
    if call.size == -1:
        if source.block_bytes > target.block_bytes:
            raise ParamInvalid(
                f"a source slot has {source.block_bytes} bytes, a destination slot"
                f" {target.block_bytes}"
            )
        return source.block_bytes
    if call.size > source.block_bytes or call.size > target.block_bytes:
        raise ParamInvalid(
            f"size {call.size} exceeds a slot: source {source.block_bytes} bytes,"
            f" destination {target.block_bytes}"
        )
    return call.size

"""The checks of a transfer and the geometry they allow.

A transfer's arguments are checked in a fixed order, and the first check that fails decides: types,
values, the local cache, the link, the remote cache, geometry.  Those before the link are in
`check_slots` and `check_blocks`, those after it in `plan`.

It is native because a small transfer takes less time than its checks would take in Python.
"""

import numpy as np

from ucxkv import numbers
from ucxkv.errors import LlmOutOfMemory, ParamInvalid
from ucxkv.holds import token_of
from ucxkv.types import ALL_LAYERS, Cache, CacheIndex, DataType, KvCacheExtParam

from libc.stdint cimport uint64_t

from ucxkv.blocks cimport BlockList, read_both
from ucxkv.core cimport NOTICE_MAX

cdef object UNDEFINED = DataType.UNDEFINED
cdef tuple EVERY = ALL_LAYERS


cdef class Call:
    """The arguments of one pull, push or copy, their types and values checked.

    The far cache is the peer's, the near one ours.

    With `dst_blocks` it is one of blocks: from `src_blocks`, or from the continuous slot
    `src_batch` where there are none.
    """

    def resized(self, size):
        """The same with another `size`."""
        cdef Call other = Call.__new__(Call)
        other.cluster_id = self.cluster_id
        other.far_cache_id = self.far_cache_id
        other.near_cache_id = self.near_cache_id
        other.src_batch = self.src_batch
        other.dst_batch = self.dst_batch
        other.size = size
        other.tensors_per_layer = self.tensors_per_layer
        other.src_layers = self.src_layers
        other.dst_layers = self.dst_layers
        other.timeout_ms = self.timeout_ms
        other.src_blocks = self.src_blocks
        other.dst_blocks = self.dst_blocks
        other.push = self.push
        other.notice = self.notice
        other.hold = self.hold
        return other


cdef class Plan:
    """What to copy: tensors of both sides, the bytes of each slot or block, and which of them."""

    def layer(self, uint64_t number):
        """The part of it that is layer `number`."""
        cdef Plan part = Plan.__new__(Plan)
        cdef uint64_t begin = number * self.tensors_per_layer
        part.push = self.push
        part.src_first = self.src_first + begin
        part.dst_first = self.dst_first + begin
        part.tensors = min(self.tensors_per_layer, self.tensors - begin)
        part.tensors_per_layer = self.tensors_per_layer
        part.block_len = self.block_len
        part.src_block = self.src_block
        part.dst_block = self.dst_block
        part.src_blocks = self.src_blocks
        part.dst_blocks = self.dst_blocks
        part.notice = self.notice
        part.hold = self.hold
        return part

    @property
    def layers(self):
        """Number of layers."""
        return (self.tensors + self.tensors_per_layer - 1) // self.tensors_per_layer


cdef inline object integer(value, str name):
    if type(value) is int:
        return value
    return numbers.integer(value, name)


cdef bytes notice_of(value):
    cdef bytes notice
    if value is None:
        return None
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(f"notice must be bytes, not {type(value).__name__}")
    notice = bytes(value)
    if len(notice) > NOTICE_MAX:
        raise ParamInvalid(f"a notice of {len(notice)} bytes, where {NOTICE_MAX} are allowed")
    return notice


cdef tuple layer_range(value, str name):
    if value is EVERY:
        return EVERY
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name} must be a pair of integers")
    return integer(value[0], name), integer(value[1], name)


def block_array(value, str name):
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


cdef object plain_array(value, str name):
    """`value`, as for `block_array`, as an array that a BlockList can read."""
    array = block_array(value, name)
    kind = array.dtype
    wide = kind.newbyteorder("=") if kind.itemsize >= 4 else np.dtype(np.int32)
    plain = np.ascontiguousarray(array, dtype=wide)
    return plain if plain.flags.aligned else plain.copy()


def block_list(value, str name):
    """`value`, as for `block_array`, as a list of its own; its numbers are not checked yet."""
    try:
        return BlockList(plain_array(value, name))
    except MemoryError as error:
        raise LlmOutOfMemory(f"no memory for the list {name}") from error


def ascending_blocks(value):
    """A slot, or blocks, as ascending numbers (uint32); None stays None."""
    if value is None:
        return None
    if not hasattr(value, "__len__"):
        value = [numbers.integer(value, "slot_or_blocks")]
    array = np.unique(block_array(value, "slot_or_blocks"))
    if array.size and (array.min() < 0 or array.max() > np.iinfo(np.uint32).max):
        raise ParamInvalid("slot_or_blocks has numbers that no block can have")
    return array.astype(np.uint32)


def check_slots(index, cache, parameters, timeout_ms, double default_timeout_ms, near_batch, size,
                *, bint push=False, notice=None, hold=None):
    """Steps 1 and 2 of a transfer of slots: types (TypeError), then values (ParamInvalid)."""
    cdef Call call = typed(index, cache, parameters, timeout_ms, default_timeout_ms, near_batch,
                           size, push, notice, hold)
    check_values(call)
    return call


def check_blocks(index, cache, parameters, timeout_ms, double default_timeout_ms, src_blocks,
                 dst_blocks, *, bint push=False, notice=None, hold=None):
    """Steps 1 and 2 of a transfer of blocks."""
    cdef BlockList sources = None, targets
    cdef Call call
    if src_blocks is None:
        targets = block_list(dst_blocks, "dst_blocks")
    else:
        try:
            sources, targets = read_both(plain_array(src_blocks, "src_blocks"),
                                         plain_array(dst_blocks, "dst_blocks"))
        except MemoryError as error:
            raise LlmOutOfMemory("no memory for the lists of blocks") from error
    call = typed(index, cache, parameters, timeout_ms, default_timeout_ms, 0, -1, push, notice,
                 hold)
    check_values(call)
    if not targets.representable:
        raise ParamInvalid("dst_blocks has numbers that no block can have")
    if not targets.distinct:
        raise ParamInvalid("dst_blocks names a block twice")
    if sources is not None and sources.size != targets.size:
        raise ParamInvalid(f"{sources.size} source blocks for {targets.size} destination blocks")
    if sources is not None and not sources.representable:
        raise ParamInvalid("src_blocks has numbers that no block can have")
    call.src_blocks = sources
    call.dst_blocks = targets
    return call


cdef Call typed(index, cache, parameters, timeout_ms, double default_timeout_ms, near_batch, size,
                bint push, notice, hold):
    cdef Call call = Call.__new__(Call)
    if not isinstance(index, CacheIndex):
        raise TypeError(f"the peer's cache must be a CacheIndex, not {type(index).__name__}")
    if not isinstance(cache, Cache):
        raise TypeError(f"the local cache must be a Cache, not {type(cache).__name__}")
    if not isinstance(parameters, KvCacheExtParam):
        raise TypeError(f"ext_param must be a KvCacheExtParam, not {type(parameters).__name__}")
    far_slot = integer(index.batch_index, "CacheIndex.batch_index")
    near_slot = integer(near_batch, "batch_index")
    call.cluster_id = integer(index.cluster_id, "cluster_id")
    call.far_cache_id = integer(index.cache_id, "cache_id")
    call.near_cache_id = integer(cache.cache_id, "Cache.cache_id")
    call.src_batch = near_slot if push else far_slot
    call.dst_batch = far_slot if push else near_slot
    call.size = integer(size, "size")
    call.src_layers = layer_range(parameters.src_layer_range, "src_layer_range")
    call.dst_layers = layer_range(parameters.dst_layer_range, "dst_layer_range")
    call.tensors_per_layer = integer(parameters.tensor_num_per_layer, "tensor_num_per_layer")
    call.timeout_ms = (default_timeout_ms if timeout_ms is None
                       else numbers.milliseconds(timeout_ms, "timeout_ms"))
    call.push = push
    call.notice = notice_of(notice)
    call.hold = None if hold is None else token_of(hold)
    return call


cdef int check_values(Call call) except -1:
    if call.size != -1 and call.size <= 0:
        raise ParamInvalid(f"size must be -1 or positive, not {call.size}")
    if call.src_batch < 0 or call.dst_batch < 0:
        raise ParamInvalid(
            f"batch indices must not be negative: source {call.src_batch},"
            f" destination {call.dst_batch}"
        )
    check_layers("src", call.src_layers)
    check_layers("dst", call.dst_layers)
    if call.tensors_per_layer < 1:
        raise ParamInvalid(f"tensor_num_per_layer must be at least 1, not {call.tensors_per_layer}")
    if not call.timeout_ms > 0:
        raise ParamInvalid(f"timeout_ms must be positive, not {call.timeout_ms}")
    return 0


cdef int check_layers(str side, tuple layers) except -1:
    if layers is EVERY or layers == EVERY:
        return 0
    if not 0 <= layers[0] <= layers[1]:
        raise ParamInvalid(f"{side}_layer_range {layers} is neither (-1, -1) nor ascending")
    return 0


cdef tuple side_layers(tuple layers, n, num_tensors, str side):
    """First tensor and number of layers that a range selects on one side."""
    # The default of 2 is not the caller's word about the cache, any other number is.
    if n != 2 and num_tensors % n:
        raise ParamInvalid(
            f"tensor_num_per_layer {n} does not divide the {num_tensors} tensors of the {side}"
        )
    if layers == EVERY:
        return 0, num_tensors // n
    if n > num_tensors:
        raise ParamInvalid(
            f"tensor_num_per_layer {n} exceeds the {num_tensors} tensors of the {side}"
        )
    if layers[1] > num_tensors // n - 1:
        raise ParamInvalid(f"layer {layers[1]} of the {side}, which has {num_tensors // n} layers")
    return layers[0] * n, layers[1] - layers[0] + 1


def plan(Call call not None, source, target):
    """Step 6: geometry (ParamInvalid), and what it amounts to.

    `source` and `target` are entries of the catalogue.
    """
    cdef Plan made = Plan.__new__(Plan)
    source_desc, target_desc = source.desc, target.desc
    source_blocks, target_blocks = source.blocks, target.blocks
    check_range(call.src_blocks, call.src_batch, source_blocks, "source")
    check_range(call.dst_blocks, call.dst_batch, target_blocks, "destination")
    n = call.tensors_per_layer
    src_tensors, dst_tensors = source_desc.num_tensors, target_desc.num_tensors
    if call.src_layers == EVERY and call.dst_layers == EVERY:
        if src_tensors != dst_tensors:
            raise ParamInvalid(
                f"the source has {src_tensors} tensors, the destination {dst_tensors}"
            )
        made.tensors = src_tensors
        made.tensors_per_layer = min(n, src_tensors)
    else:
        src_first, src_count = side_layers(call.src_layers, n, src_tensors, "source")
        dst_first, dst_count = side_layers(call.dst_layers, n, dst_tensors, "destination")
        if src_count != dst_count:
            raise ParamInvalid(f"{src_count} source layers against {dst_count} destination layers")
        made.src_first = src_first
        made.dst_first = dst_first
        made.tensors = src_count * n
        made.tensors_per_layer = n
    made.block_len = length(call, source, target)
    src_type, dst_type = source_desc.data_type, target_desc.data_type
    if src_type is not dst_type and src_type is not UNDEFINED and dst_type is not UNDEFINED:
        raise ParamInvalid(
            f"data types differ: source {src_type.name}, destination {dst_type.name}"
        )
    made.push = call.push
    made.src_blocks = call.src_blocks
    made.dst_blocks = call.dst_blocks
    # Of a side that is given by blocks, the index of a slot means nothing.
    if call.src_blocks is None:
        made.src_block = call.src_batch
    if call.dst_blocks is None:
        made.dst_block = call.dst_batch
    made.notice = call.notice
    made.hold = call.hold
    return made


cdef int check_range(BlockList blocks, batch, count, str side) except -1:
    if blocks is not None:
        if blocks.size and blocks.largest >= count:
            raise ParamInvalid(f"block {blocks.largest} of a {side} with {count} blocks")
    elif batch >= count:
        raise ParamInvalid(f"batch index {batch} of a {side} with {count} slots")
    return 0


cdef object length(Call call, source, target):
    """Bytes to copy to each destination slot or block."""
    source_bytes, target_bytes = source.block_bytes, target.block_bytes
    if call.dst_blocks is not None and call.src_blocks is None:
        needed = call.dst_blocks.size * target_bytes
        if needed > source_bytes:
            raise ParamInvalid(
                f"{call.dst_blocks.size} destination blocks need {needed} bytes, the source slot"
                f" has {source_bytes}"
            )
        return target_bytes
    if call.size == -1:
        if source_bytes > target_bytes:
            raise ParamInvalid(
                f"a source slot has {source_bytes} bytes, a destination slot {target_bytes}"
            )
        return source_bytes
    if call.size > source_bytes or call.size > target_bytes:
        raise ParamInvalid(
            f"size {call.size} exceeds a slot: source {source_bytes} bytes,"
            f" destination {target_bytes}"
        )
    return call.size

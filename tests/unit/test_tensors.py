"""What can be registered: arrays, buffers, DLPack tensors and addresses; and what cannot."""

from __future__ import annotations

import array
import ctypes
import mmap
from typing import Any

import numpy as np
import pytest

from ucxkv import CacheDesc, CachePlacement, DataType, FeatureNotEnabled, ParamInvalid
from ucxkv.tensors import allocate, bytes_of, resolve

SHAPE = (4, 6)


class DlpackOnly:
    """A tensor that offers nothing but DLPack, as other frameworks' do."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class OnDevice:
    __cuda_array_interface__ = {  # noqa: RUF012
        "shape": SHAPE,
        "typestr": "|u1",
        "data": (4096, False),
        "version": 3,
    }


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (np.float32, DataType.FLOAT),
        (np.float16, DataType.FLOAT16),
        (np.float64, DataType.DOUBLE),
        (np.bool_, DataType.BOOL),
        (np.int8, DataType.INT8),
        (np.int16, DataType.INT16),
        (np.int32, DataType.INT32),
        (np.int64, DataType.INT64),
        (np.uint8, DataType.UINT8),
        (np.uint16, DataType.UINT16),
        (np.uint32, DataType.UINT32),
        (np.uint64, DataType.UINT64),
    ],
)
@pytest.mark.parametrize("dlpack", [False, True])
def test_arrays(dtype: Any, expected: DataType, dlpack: bool) -> None:
    arrays = [np.zeros(SHAPE, dtype) for _ in range(3)]
    tensors = [DlpackOnly(one) for one in arrays] if dlpack else arrays
    found, desc = resolve(tensors, None)
    assert desc == CacheDesc(3, SHAPE, expected, CachePlacement.HOST)
    assert [one.address for one in found] == [one.ctypes.data for one in arrays]
    assert bytes_of(found, desc) == 24 * np.dtype(dtype).itemsize
    assert all(one.writable for one in found)
    assert CacheDesc.from_tensors(tensors) == desc


@pytest.mark.parametrize(
    "buffer", [bytearray(24), memoryview(bytearray(24)), array.array("B", bytes(24))]
)
def test_buffers(buffer: Any) -> None:
    found, desc = resolve([buffer], CacheDesc(1, (4, 6), DataType.UINT8))
    assert found[0].nbytes == 24
    assert found[0].writable
    assert desc.shape == (4, 6)
    assert found[0].address == ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def test_read_only_memory_is_no_destination() -> None:
    frozen = np.zeros(SHAPE, np.uint8)
    frozen.flags.writeable = False
    found, _ = resolve([frozen, bytes(24)], CacheDesc(2, SHAPE, DataType.UINT8))
    assert [one.writable for one in found] == [False, False]
    assert found[1].address


def test_addresses() -> None:
    found, desc = resolve([4096, np.int64(8192)], CacheDesc(2, SHAPE, DataType.BF16))
    assert [one.address for one in found] == [4096, 8192]
    assert all(type(one.address) is int for one in found)
    assert bytes_of(found, desc) == 48


def test_holds_keep_memory_where_it_is() -> None:
    memory = bytearray(24)
    found, _ = resolve([memory], CacheDesc(1, SHAPE, DataType.UINT8))
    with pytest.raises(BufferError):
        memory.append(0)
    del found
    memory.append(0)
    mapping = mmap.mmap(-1, 4096)
    whole = np.frombuffer(mapping, np.uint8)
    found, _ = resolve([whole.reshape(1, -1)], None)
    del whole
    with pytest.raises(BufferError):
        mapping.close()
    del found
    mapping.close()


def test_an_undefined_type_takes_the_bytes_of_the_arrays() -> None:
    tensors = [np.zeros(SHAPE, np.float32)]
    found, desc = resolve(tensors, CacheDesc(1, SHAPE))
    assert desc.data_type is DataType.UNDEFINED
    assert bytes_of(found, desc) == 96


@pytest.mark.parametrize(
    ("tensors", "desc"),
    [
        ([np.zeros(SHAPE)[:, ::2]], None),
        ([np.zeros(SHAPE).T], None),
        ([DlpackOnly(np.zeros(SHAPE).T)], None),
        ([memoryview(bytearray(24))[::2]], None),
        ([np.zeros(SHAPE), np.zeros((6, 4))[:3]], None),
        ([np.zeros(SHAPE, np.int32), np.zeros(SHAPE, np.float32)], None),
        ([np.zeros((0, 4))], None),
        ([np.zeros(())], None),
        ([], None),
        ([], CacheDesc(0, SHAPE, DataType.INT8)),
        ([np.zeros(SHAPE)], CacheDesc(2, SHAPE, DataType.DOUBLE)),
        ([np.zeros(SHAPE)], CacheDesc(1, (4, 5), DataType.DOUBLE)),
        ([np.zeros(SHAPE)], CacheDesc(1, SHAPE, DataType.FLOAT)),
        ([np.zeros(SHAPE)], CacheDesc(1, SHAPE, DataType.INT64)),
        ([4096], None),
        ([4096], CacheDesc(1, SHAPE)),
        ([0], CacheDesc(1, SHAPE, DataType.INT8)),
        ([-4096], CacheDesc(1, SHAPE, DataType.INT8)),
        ([4096], CacheDesc(1, (4, -6), DataType.INT8)),
        ([2**64 - 8], CacheDesc(1, SHAPE, DataType.INT8)),
        ([2**64 + 4096], CacheDesc(1, SHAPE, DataType.INT8)),
    ],
)
def test_refused(tensors: Any, desc: CacheDesc | None) -> None:
    with pytest.raises(ParamInvalid):
        resolve(tensors, desc)


@pytest.mark.parametrize(
    ("tensors", "desc"),
    [
        ([object()], None),
        ([None], None),
        (["text"], None),
        ([True], CacheDesc(1, SHAPE, DataType.INT8)),
        ([1.5], CacheDesc(1, SHAPE, DataType.INT8)),
        (5, CacheDesc(1, SHAPE, DataType.INT8)),
        ([bytearray(24)], (1, SHAPE)),
    ],
)
def test_wrong_types(tensors: Any, desc: Any) -> None:
    with pytest.raises(TypeError):
        resolve(tensors, desc)


def test_device_memory() -> None:
    """Never a host copy of a device pointer."""
    with pytest.raises(FeatureNotEnabled):
        resolve([OnDevice()], None)
    device = CacheDesc(1, SHAPE, DataType.INT8, CachePlacement.DEVICE)
    with pytest.raises(FeatureNotEnabled):
        resolve([4096], device)


@pytest.mark.parametrize("data_type", [one for one in DataType if one is not DataType.UNDEFINED])
def test_allocate(data_type: DataType) -> None:
    arrays, _ = allocate(CacheDesc(3, (2, 5), data_type))
    spans = set()
    for one in arrays:
        assert one.shape == (2, 5)
        assert one.nbytes == 10 * data_type.itemsize
        assert one.ctypes.data % mmap.PAGESIZE == 0
        assert not one.any()
        one.view(np.uint8)[:] = 1
        spans.add(one.ctypes.data)
    assert len(spans) == 3


def test_allocate_nothing() -> None:
    for desc in (
        CacheDesc(1, (2, 5)),
        CacheDesc(0, (2, 5), DataType.INT8),
        CacheDesc(1, (), DataType.INT8),
        CacheDesc(1, (0, 5), DataType.INT8),
    ):
        with pytest.raises(ParamInvalid):
            allocate(desc)

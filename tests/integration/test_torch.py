"""PyTorch's tensors as caches: as they are, without importing torch, and safe against torch."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from children import torching
from extras import need
from harness import Peer

need("torch", "transformers")

import torch  # noqa: E402

import ucxkv  # noqa: E402
from ucxkv import CacheDesc, DataType, FeatureNotEnabled, ParamInvalid  # noqa: E402
from ucxkv.tensors import allocate, bytes_of, resolve  # noqa: E402

SHAPE = (4, 6)
TYPES = [
    (torch.float32, DataType.FLOAT),
    (torch.float16, DataType.FLOAT16),
    (torch.bfloat16, DataType.BF16),
    (torch.float64, DataType.DOUBLE),
    (torch.bool, DataType.BOOL),
    (torch.int8, DataType.INT8),
    (torch.int16, DataType.INT16),
    (torch.int32, DataType.INT32),
    (torch.int64, DataType.INT64),
    (torch.uint8, DataType.UINT8),
    (torch.uint16, DataType.UINT16),
    (torch.uint32, DataType.UINT32),
    (torch.uint64, DataType.UINT64),
    (torch.float8_e4m3fn, DataType.FLOAT8_E4M3),
    (torch.float8_e5m2, DataType.FLOAT8_E5M2),
]


@pytest.mark.parametrize(("dtype", "data_type"), TYPES)
def test_types(dtype: torch.dtype, data_type: DataType) -> None:
    tensors = [torch.zeros(SHAPE, dtype=dtype) for _ in range(2)]
    found, desc = resolve(tensors, None)
    assert desc == CacheDesc(2, SHAPE, data_type, ucxkv.CachePlacement.HOST)
    assert [one.address for one in found] == [one.data_ptr() for one in tensors]
    assert bytes_of(found, desc) == 24 * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.complex64])
def test_types_of_no_name_are_bytes(dtype: torch.dtype) -> None:
    found, desc = resolve([torch.zeros(SHAPE, dtype=dtype)], None)
    assert desc.data_type is DataType.UNDEFINED
    assert bytes_of(found, desc) == 24 * dtype.itemsize


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(SHAPE, requires_grad=True), "detach"),
        (torch.nn.Parameter(torch.zeros(SHAPE)), "detach"),
        (torch.zeros(SHAPE, requires_grad=True) * 2, "detach"),
        (torch.zeros(SHAPE).T, "C-contiguous"),
        (torch.zeros(SHAPE)[:, ::2], "C-contiguous"),
        (torch.zeros(1, 6).expand(4, 6), "C-contiguous"),
        (torch.zeros(SHAPE).to_sparse(), "strided"),
        (torch.zeros(SHAPE, device="meta"), "meta"),
        (torch.zeros(SHAPE, dtype=torch.complex64).conj(), "conjugate"),
        (torch.zeros(0, 6), "no bytes"),
    ],
)
def test_refused_with_the_reason(tensor: torch.Tensor, reason: str) -> None:
    with pytest.raises(ParamInvalid, match=reason):
        resolve([tensor], None)


@pytest.mark.parametrize("left", [0, 40])
def test_a_storage_that_was_resized_under_its_tensor(left: int) -> None:
    """As is done to give a tensor's memory back for a while."""
    tensor = torch.zeros(SHAPE)
    tensor.untyped_storage().resize_(left)
    with pytest.raises(ParamInvalid, match=f"96 bytes has a storage of {left}, which was resized"):
        resolve([tensor], None)
    tensor.untyped_storage().resize_(96)
    assert resolve([tensor], None)[0][0].address == tensor.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_registered_memory_stays_where_it_is(dtype: torch.dtype) -> None:
    tensor = torch.zeros(SHAPE, dtype=dtype)
    view = tensor[1:]
    found, _ = resolve([tensor], None)
    for resize in (
        lambda: tensor.resize_(1000, 1000),
        lambda: view.resize_(1000, 1000),
        lambda: tensor.untyped_storage().resize_(0),
    ):
        with pytest.raises(RuntimeError, match="not resizable"):
            resize()
    assert found[0].address == tensor.data_ptr()
    # What takes another storage leaves the old one to those who have it.
    pointer = tensor.data_ptr()
    tensor.data = torch.ones(3, dtype=dtype)
    assert bytes((ctypes.c_byte * 24).from_address(pointer)) == bytes(24)


def test_views_of_storages() -> None:
    """A tensor with an offset, a detached parameter, and what inference mode makes."""
    whole = torch.zeros(8, 4, 6)
    found, _ = resolve(list(whole[2:5]), None)
    assert [one.address - whole.data_ptr() for one in found] == [192, 288, 384]
    parameter = torch.nn.Parameter(torch.zeros(SHAPE))
    assert resolve([parameter.detach()], None)[0][0].address == parameter.data_ptr()
    with torch.inference_mode():
        made = torch.zeros(SHAPE)
    assert resolve([made], None)[0][0].address == made.data_ptr()
    shared = torch.zeros(SHAPE).share_memory_()
    assert resolve([shared], None)[0][0].address == shared.data_ptr()


class OnGpu:
    """What a CUDA tensor says of itself; to export it would fail here."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("exported")

    @property
    def __cuda_array_interface__(self) -> Any:
        raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad.")


def test_device_memory() -> None:
    with pytest.raises(FeatureNotEnabled, match="device memory"):
        resolve([OnGpu()], None)


@pytest.mark.parametrize(("dtype", "data_type"), TYPES)
def test_allocated_memory_becomes_tensors_without_a_copy(
    dtype: torch.dtype, data_type: DataType
) -> None:
    arrays, _ = allocate(CacheDesc(2, SHAPE, data_type))
    for array in arrays:
        tensor = torch.from_dlpack(array)
        assert tensor.dtype is dtype
        assert tuple(tensor.shape) == SHAPE
        assert tensor.data_ptr() == array.ctypes.data
        tensor.view(torch.uint8).fill_(1)
        assert (array.view(np.uint8) == 1).all()
        assert torch.from_dlpack(array[1:3]).dtype is dtype
    found, desc = resolve(arrays, None)
    assert desc.data_type is data_type
    assert resolve([torch.from_dlpack(array) for array in arrays], None)[1] == desc
    assert [one.address for one in found] == [array.ctypes.data for array in arrays]


def test_what_is_computed_from_typed_arrays_is_ordinary() -> None:
    (array,), _ = allocate(CacheDesc(1, SHAPE, DataType.BF16))
    assert type(array + 1) is np.ndarray
    assert resolve([array.view(np.uint8)], None)[1].data_type is DataType.UINT8
    assert torch.from_dlpack(array.view(np.uint8)).dtype is torch.uint8


@pytest.fixture(scope="module")
def tensors(path: str) -> Iterator[tuple[Peer, Peer]]:
    with (
        Peer(1, path=path, name="owner") as owner,
        Peer(2, path=path, name="puller", listen=False) as puller,
    ):
        puller.link(owner)
        yield owner, puller


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("allocated", [False, True])
def test_pulled_into_tensors(tensors: tuple[Peer, Peer], dtype: str, allocated: bool) -> None:
    owner, puller = tensors
    source = owner.call(torching.make, dtype, seed=1)
    puller.call(torching.make, dtype, seed=2, allocated=allocated)
    assert puller.call(torching.pull, 1, source) == owner.call(torching.values)


def test_one_allocation_is_one_region(tensors: tuple[Peer, Peer]) -> None:
    owner, puller = tensors
    for peer in (owner, puller):
        assert peer.call(torching.regions_of_views) == {"unbind": 1, "split": 1, "apart": 4}


def test_torch_is_not_imported_for_it() -> None:
    code = f"""
import sys
sys.path[:] = {sys.path!r}
import numpy as np
import ucxkv.telemetry, ucxkv.top
from ucxkv.tensors import resolve
class Dlpack:
    def __init__(self, array): self.array = array
    def __dlpack__(self, **options): return self.array.__dlpack__(**options)
    def __dlpack_device__(self): return self.array.__dlpack_device__()
resolve([Dlpack(np.zeros(8)), np.zeros(8)], None)
assert not [name for name in sys.modules if name.partition(".")[0] == "torch"]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

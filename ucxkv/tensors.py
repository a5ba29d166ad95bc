"""From the user's tensors to addresses, and the holds that keep those addresses valid."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import operator
import os
import sys
import weakref
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ucxkv.errors import FeatureNotEnabled, LlmOutOfMemory, ParamInvalid
from ucxkv.types import CacheDesc, CachePlacement, DataType

_HUGE_PAGE = 2 << 20
_ADDRESS_END = 1 << 63
_MOST_DIMENSIONS = 32


@dataclass(frozen=True)
class Tensor:
    """One tensor's memory.  `hold` keeps it from being freed, moved or resized."""

    address: int
    nbytes: int | None
    shape: tuple[int, ...] | None
    data_type: DataType
    writable: bool
    hold: object


class _DLDevice(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class _DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    """The head of a DLManagedTensor (DLPack 0.x layout, which unversioned capsules have)."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]

# DLPack's device types that are ordinary memory to the CPU: kDLCPU, kDLCUDAHost, kDLROCMHost.
_HOST_DEVICES = {1, 3, 11}

# (kind, bits) of NumPy and (code, bits) of DLPack; 8-bit floats have DLPack codes of their own.
_NUMPY_TYPES = {
    ("f", 32): DataType.FLOAT,
    ("f", 16): DataType.FLOAT16,
    ("f", 64): DataType.DOUBLE,
    ("b", 8): DataType.BOOL,
    ("i", 8): DataType.INT8,
    ("i", 16): DataType.INT16,
    ("i", 32): DataType.INT32,
    ("i", 64): DataType.INT64,
    ("u", 8): DataType.UINT8,
    ("u", 16): DataType.UINT16,
    ("u", 32): DataType.UINT32,
    ("u", 64): DataType.UINT64,
}
_NAMED_TYPES = {
    "bfloat16": DataType.BF16,
    "float8_e4m3fn": DataType.FLOAT8_E4M3,
    "float8_e4m3": DataType.FLOAT8_E4M3,
    "float8_e5m2": DataType.FLOAT8_E5M2,
}
_DLPACK_KINDS = {0: "i", 1: "u", 2: "f", 6: "b"}
_DLPACK_BFLOAT = 4
_DLPACK_FLOAT8 = {8: DataType.FLOAT8_E4M3, 10: DataType.FLOAT8_E4M3, 12: DataType.FLOAT8_E5M2}
# How types that NumPy lacks are called when arrays of the library's own are exported.
_DLPACK_CODES = {DataType.BF16: 4, DataType.FLOAT8_E4M3: 10, DataType.FLOAT8_E5M2: 12}
# Where the DLTensor is in a capsule: what comes before it in DLManagedTensorVersioned are its
# version, a context, a deleter and flags, of 8 bytes each.
_DLPACK_CAPSULES = {b"dltensor": 0, b"dltensor_versioned": 32}


class TypedArray(np.ndarray[Any, np.dtype[Any]]):
    """An array of a type that NumPy lacks, as unsigned integers of its size.

    By DLPack it goes out under its own type: `torch.from_dlpack` makes a tensor of it that is
    bfloat16 (or an 8-bit float) without a copy.  `data_type` says which; what is computed from such
    an array is an ordinary one.
    """

    data_type: DataType

    def __array_finalize__(self, source: Any) -> None:
        self.data_type = getattr(source, "data_type", DataType.UNDEFINED)

    def __array_wrap__(self, array: Any, *_: Any) -> Any:
        return np.asarray(array)

    def __dlpack__(self, **options: Any) -> Any:
        capsule = super().__dlpack__(**options)
        # Another view of it, of whole bytes for example, is what NumPy says it is.
        if self.dtype == _numpy_dtype(self.data_type):
            _dl_tensor(capsule).dtype.code = _DLPACK_CODES[self.data_type]
        return capsule


def _dl_tensor(capsule: Any) -> _DLTensor:
    """The description in a capsule that nobody has taken yet; ValueError if it is none."""
    for name, offset in _DLPACK_CAPSULES.items():
        try:
            return _DLTensor.from_address(_capsule_pointer(capsule, name) + offset)
        except ValueError:
            continue
    raise ValueError("neither a dltensor nor a dltensor_versioned")


def data_type_of(dtype: np.dtype[Any]) -> DataType:
    """The DataType of a NumPy dtype (ml_dtypes' included); UNDEFINED where there is none."""
    named = _NAMED_TYPES.get(dtype.name)
    if named is not None:
        return named
    return _NUMPY_TYPES.get((dtype.kind, dtype.itemsize * 8), DataType.UNDEFINED)


def _data_type_in(array: np.ndarray[Any, Any]) -> DataType:
    if isinstance(array, TypedArray) and array.dtype == _numpy_dtype(array.data_type):
        return array.data_type
    return data_type_of(array.dtype)


def _from_array(array: np.ndarray[Any, Any]) -> Tensor:
    if not array.flags.c_contiguous:
        raise ParamInvalid("a tensor is not C-contiguous")
    if array.dtype.hasobject:
        raise ParamInvalid("references to Python objects mean nothing in another process")
    # Many a buffer cannot be resized while it is exported, which a reference would not prevent.
    try:
        flat: Any = array.reshape(-1).view(np.uint8)
        hold: object = (array, memoryview(flat))
    except (TypeError, ValueError):
        hold = array
    return Tensor(
        array.ctypes.data,
        array.nbytes,
        array.shape,
        _data_type_in(array),
        array.flags.writeable,
        hold,
    )


def _from_dlpack(tensor: Any) -> Tensor:
    try:
        # First, since a device may have to finish what it is doing before it exports.
        if tensor.__dlpack_device__()[0] not in _HOST_DEVICES:
            raise FeatureNotEnabled("device memory cannot take part in transfers yet")
        capsule = tensor.__dlpack__()
    except FeatureNotEnabled:
        raise
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ParamInvalid(f"a tensor refuses to be exported by DLPack: {error}") from error
    try:
        view = _dl_tensor(capsule)
    except ValueError as error:
        raise ParamInvalid(f"a tensor gives no DLPack capsule that is known: {error}") from error
    if view.device.type not in _HOST_DEVICES:
        raise FeatureNotEnabled("device memory cannot take part in transfers yet")
    shape = tuple(view.shape[i] for i in range(view.ndim))
    if view.strides:
        expected = 1
        for i in reversed(range(view.ndim)):
            if shape[i] != 1 and view.strides[i] != expected:
                raise ParamInvalid("a tensor is not C-contiguous")
            expected *= shape[i]
    dtype = view.dtype
    if dtype.lanes != 1 or dtype.bits % 8:
        raise ParamInvalid("a tensor's elements are not whole bytes")
    if dtype.code == _DLPACK_BFLOAT:
        data_type = DataType.BF16
    elif dtype.code in _DLPACK_FLOAT8:
        data_type = _DLPACK_FLOAT8[dtype.code]
    else:
        data_type = _NUMPY_TYPES.get(
            (_DLPACK_KINDS.get(dtype.code, ""), dtype.bits), DataType.UNDEFINED
        )
    nbytes = prod(shape) * dtype.bits // 8
    address = (view.data or 0) + view.byte_offset
    lock = _lock_storage(tensor, address, nbytes) if hasattr(tensor, "untyped_storage") else None
    return Tensor(address, nbytes, shape, data_type, True, (tensor, capsule, lock))


def _lock_storage(tensor: Any, address: int, nbytes: int) -> object:
    """See that a PyTorch tensor's memory is there, and stays where it is.

    Its storage can be resized without the tensor's knowledge, which DLPack does not look at; as an
    array of NumPy's it cannot any more, for good.
    """
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    end = start + storage.nbytes()
    if nbytes and not start <= address <= address + nbytes <= end:
        raise ParamInvalid(
            f"a tensor of {nbytes} bytes has a storage of {storage.nbytes()}, which was resized"
            " under it: register it when it has its memory again"
        )
    byte = sys.modules["torch"].uint8
    try:
        return tensor.detach().reshape(-1).view(byte).numpy()
    except (RuntimeError, TypeError, ValueError) as error:
        raise ParamInvalid(f"a tensor's memory cannot be kept where it is: {error}") from error


def _resolve(tensor: Any) -> Tensor:
    if isinstance(tensor, np.ndarray):
        return _from_array(tensor)
    if isinstance(tensor, (int, np.integer)) and not isinstance(tensor, bool):
        if tensor <= 0:
            raise ParamInvalid(f"{tensor} is not an address")
        return Tensor(int(tensor), None, None, DataType.UNDEFINED, True, None)
    # By its type: PyTorch's property raises errors of its own for some tensors.
    if hasattr(type(tensor), "__dlpack__"):
        return _from_dlpack(tensor)
    if hasattr(tensor, "__cuda_array_interface__"):
        raise FeatureNotEnabled("device memory cannot take part in transfers yet")
    try:
        view = memoryview(tensor)
    except TypeError:
        raise TypeError(
            f"{type(tensor).__name__} is neither an array, a buffer, a DLPack tensor nor an address"
        ) from None
    if not view.c_contiguous:
        raise ParamInvalid("a tensor is not C-contiguous")
    return _from_array(np.asarray(view))


def resolve(tensors: Any, desc: CacheDesc | None) -> tuple[list[Tensor], CacheDesc]:
    """Find the memory of `tensors`; check it against `desc`, or make the description from it.

    Raises TypeError for what is no tensor, ParamInvalid for tensors that are not contiguous, empty,
    unequal or not as described, FeatureNotEnabled for device memory.
    """
    if desc is not None and not isinstance(desc, CacheDesc):
        raise TypeError(f"cache_desc must be a CacheDesc or None, not {type(desc).__name__}")
    if desc is not None:
        desc = _plain(desc)
    if isinstance(tensors, (str, bytes)) or not hasattr(tensors, "__iter__"):
        raise TypeError("tensors must be a sequence of tensors")
    found = []
    for number, tensor in enumerate(tensors):
        try:
            found.append(_resolve(tensor))
        except (ParamInvalid, FeatureNotEnabled) as error:
            raise type(error)(f"tensors[{number}]: {error}") from error.__cause__
    if not found:
        raise ParamInvalid("a cache has at least one tensor")
    if desc is None:
        first = found[0]
        if first.shape is None:
            raise ParamInvalid("plain addresses need a CacheDesc")
        desc = CacheDesc(len(found), first.shape, first.data_type, CachePlacement.HOST)
    if desc.placement == CachePlacement.DEVICE:
        raise FeatureNotEnabled("device memory cannot take part in transfers yet")
    if desc.num_tensors != len(found):
        raise ParamInvalid(f"{len(found)} tensors, but the description says {desc.num_tensors}")
    if not desc.shape or any(extent <= 0 for extent in desc.shape):
        raise ParamInvalid(f"the shape {desc.shape} has no bytes")
    elements = prod(desc.shape)
    itemsize = desc.data_type.itemsize if desc.data_type is not DataType.UNDEFINED else None
    sizes = {tensor.nbytes for tensor in found if tensor.nbytes is not None}
    if itemsize is not None:
        sizes.add(elements * itemsize)
    if not sizes:
        raise ParamInvalid("plain addresses need a CacheDesc with a data type")
    if len(sizes) > 1:
        raise ParamInvalid(f"tensors and description disagree about bytes: {sorted(sizes)}")
    if next(iter(sizes)) % desc.shape[0]:
        raise ParamInvalid(f"a tensor cannot be cut into {desc.shape[0]} equal slots")
    nbytes = next(iter(sizes))
    for tensor in found:
        if tensor.address + nbytes > _ADDRESS_END:
            raise ParamInvalid(f"{nbytes} bytes at {tensor.address:#x} leave the address space")
        if tensor.data_type not in (DataType.UNDEFINED, desc.data_type) and (
            desc.data_type is not DataType.UNDEFINED
        ):
            raise ParamInvalid(f"a tensor is {tensor.data_type.name}, not {desc.data_type.name}")
    return found, CacheDesc(
        desc.num_tensors, tuple(desc.shape), desc.data_type, CachePlacement.HOST
    )


def _plain(desc: CacheDesc) -> CacheDesc:
    """`desc` made of plain Python values; TypeError where that cannot be."""
    if isinstance(desc.shape, (str, bytes)) or not hasattr(desc.shape, "__iter__"):
        raise TypeError("CacheDesc.shape must be a sequence of integers")
    if not isinstance(desc.data_type, DataType):
        raise TypeError("CacheDesc.data_type must be a DataType")
    if desc.placement is not None and not isinstance(desc.placement, CachePlacement):
        raise TypeError("CacheDesc.placement must be a CachePlacement or None")
    try:
        shape = tuple(operator.index(extent) for extent in desc.shape)
        num_tensors = operator.index(desc.num_tensors)
    except TypeError:
        raise TypeError("CacheDesc needs integers for num_tensors and shape") from None
    if len(shape) > _MOST_DIMENSIONS or any(extent >= _ADDRESS_END for extent in shape):
        raise ParamInvalid(f"no memory has the shape {shape}")
    return CacheDesc(num_tensors, shape, desc.data_type, desc.placement)


def bytes_of(tensors: list[Tensor], desc: CacheDesc) -> int:
    """Bytes of one tensor of a cache that `resolve` has accepted."""
    for tensor in tensors:
        if tensor.nbytes is not None:
            return tensor.nbytes
    return prod(desc.shape) * desc.data_type.itemsize


class Shared(NamedTuple):
    """A file that memory is a mapping of, so that other processes of the host can map it too."""

    fd: int
    inode: int
    base: int  # address of its first byte in this process
    length: int


def allocate(desc: CacheDesc) -> tuple[list[np.ndarray[Any, Any]], Shared | None]:
    """Page-aligned zeroed arrays for `desc`, in one mapping, and the file that it is of.

    The memory lives for as long as an array does, and the file's descriptor with it.  Types that
    NumPy lacks (BF16, the 8-bit floats) come as `TypedArray`.
    """
    desc = _plain(desc)
    if desc.data_type is DataType.UNDEFINED:
        raise ParamInvalid("memory can only be allocated for a known data type")
    if desc.num_tensors < 1 or not desc.shape or any(extent <= 0 for extent in desc.shape):
        raise ParamInvalid(f"{desc.num_tensors} tensors of shape {desc.shape} have no bytes")
    dtype = _numpy_dtype(desc.data_type)
    nbytes = prod(desc.shape) * dtype.itemsize
    pitch = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    length = desc.num_tensors * pitch + _HUGE_PAGE
    fd = _sealed_file(length)
    try:
        mapping = mmap.mmap(-1 if fd is None else fd, length)
    except (OSError, OverflowError, ValueError) as error:
        if fd is not None:
            os.close(fd)
        raise LlmOutOfMemory(f"cannot map {desc.num_tensors * pitch} bytes: {error}") from error
    if fd is not None:
        weakref.finalize(mapping, os.close, fd)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without transparent huge pages, or without those of files, has ordinary ones.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapping, dtype=np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE
    arrays: list[np.ndarray[Any, Any]] = [
        whole[start + i * pitch : start + i * pitch + nbytes].view(dtype).reshape(desc.shape)
        for i in range(desc.num_tensors)
    ]
    if desc.data_type in _DLPACK_CODES:
        typed = [array.view(TypedArray) for array in arrays]
        for array in typed:
            array.data_type = desc.data_type
        arrays = [*typed]
    if fd is None:
        return arrays, None
    return arrays, Shared(fd, os.fstat(fd).st_ino, whole.ctypes.data, length)


def _sealed_file(length: int) -> int | None:
    """A file in memory that never changes its length; None where there is none to be had."""
    try:
        fd = os.memfd_create("ucxkv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (OSError, AttributeError):
        return None
    try:
        os.ftruncate(fd, length)
        # Who maps it is killed by reading beyond its end.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except (OSError, OverflowError, AttributeError):
        os.close(fd)
        return None
    return fd


def _numpy_dtype(data_type: DataType) -> np.dtype[Any]:
    for (kind, bits), known in _NUMPY_TYPES.items():
        if known is data_type:
            return np.dtype(f"{kind}{bits // 8}" if kind != "b" else "?")
    return np.dtype(f"u{data_type.itemsize}")

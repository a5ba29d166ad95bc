"""Hands the cache of a model of Hugging Face's transformers from one process to another.

The process that has computed a prompt offers its cache, and tells the other what it has to know, by
whatever channel the two have; the other receives it into a cache of the same kind and goes on to
generate at once: each layer waits for its own keys and values when the model comes to it.

    with offer(engine, cache) as offered:      # prefill, cluster 1
        send(offered.told)
        ...                                    # until the other has said that it is done

    cache = DynamicCache(config=model.config)  # decode, linked to cluster 1
    with receive(engine, 1, told, cache) as arriving:
        model.generate(..., past_key_values=cache)
        arriving.result()

Dynamic and static caches, with full attention, sliding windows or both, and quantized ones of the
"fp8" backend are known; others are refused with FeatureNotEnabled.  A slot is a row of the batch,
so the receiver may take some of the rows only, in any order.  Rows of different lengths are padded,
as ever, and the attention mask is the application's to pass on.

Only the model's own updates wait: whatever else looks into a cache that is arriving, to reorder or
crop it for example, has to wait for `Arrival.result`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from ucxkv.datadist import LlmDataDist
from ucxkv.errors import FeatureNotEnabled, LlmError, ParamInvalid
from ucxkv.types import Cache, CacheDesc, CacheIndex, TransferReport

if TYPE_CHECKING:
    from ucxkv.transfers import Transfer

_VERSION = 1
_DYNAMIC = ("DynamicLayer", "DynamicSlidingWindowLayer")
_STATIC = ("StaticLayer", "StaticSlidingWindowLayer")
_QUANTIZED = "Fp8QuantizedLayer"


class _Layer(msgspec.Struct, frozen=True):
    """What makes a layer's state beside its tensors, which are a layer of one of the caches."""

    kind: str
    group: int
    place: int
    length: int
    dtype: str
    window: int = 0
    scales: tuple[float, float] | None = None


class _Group(msgspec.Struct, frozen=True):
    """Layers whose keys and values all have one shape and type are one cache."""

    cache_id: int
    shape: tuple[int, ...]
    dtype: str


class _Told(msgspec.Struct, frozen=True):
    version: int
    groups: list[_Group]
    layers: list[_Layer]


class Offer:
    """A cache that others can receive until it is closed; made by `offer`."""

    def __init__(self, engine: LlmDataDist, caches: Sequence[Cache], told: bytes) -> None:
        self._engine = engine
        self._caches = list(caches)
        #: What a receiver has to know; bytes, to be sent as they are.
        self.told = told

    def close(self, timeout_ms: float = 1000) -> None:
        """Take the memory back; who still receives gets KvCacheNotExist.  Again is no error."""
        while self._caches:
            self._engine.unregister_kv_cache(self._caches[-1].cache_id, timeout_ms=timeout_ms)
            self._caches.pop()

    def __enter__(self) -> Offer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def offer(engine: LlmDataDist, cache: Any, *, peers: Sequence[int] | None = None) -> Offer:
    """Let linked clusters (all, or `peers`) receive a transformers cache that has been filled.

    The model must not run on with this cache before the offer is closed.  Memory is not copied,
    except for sliding windows that have slid, which transformers keeps as views with gaps.

    Raises FeatureNotEnabled for layers of an unknown kind, ParamInvalid for an empty cache, and
    what `register_kv_cache` raises.
    """
    found = [_look_at(number, layer) for number, layer in enumerate(cache.layers)]
    if not found:
        raise ParamInvalid("a cache without layers")
    groups: dict[tuple[tuple[int, ...], str], list[torch.Tensor]] = {}
    layers = []
    for layer, tensors in found:
        key = (tuple(tensors[0].shape), _name(tensors[0].dtype))
        if (tuple(tensors[1].shape), _name(tensors[1].dtype)) != key:
            raise FeatureNotEnabled("keys and values of different shapes cannot be handed over")
        mine = groups.setdefault(key, [])
        place = [*groups].index(key)
        layers.append(msgspec.structs.replace(layer, group=place, place=len(mine) // 2))
        mine += [tensor.detach().contiguous() for tensor in tensors]
    registered: list[Cache] = []
    offered = Offer(engine, registered, b"")
    try:
        for tensors in groups.values():
            offered._caches.append(engine.register_kv_cache(None, tensors, peers=peers))
    except BaseException:
        offered.close()
        raise
    told = _Told(
        _VERSION,
        [
            _Group(one.cache_id, shape, dtype)
            for one, (shape, dtype) in zip(offered._caches, groups, strict=True)
        ],
        layers,
    )
    offered.told = msgspec.msgpack.encode(told)
    return offered


def _look_at(number: int, layer: Any) -> tuple[_Layer, list[torch.Tensor]]:
    kind = type(layer).__name__
    if kind not in (*_DYNAMIC, *_STATIC, _QUANTIZED):
        raise FeatureNotEnabled(f"layer {number} is a {kind}, which cannot be handed over")
    if not layer.is_initialized:
        raise ParamInvalid(f"layer {number} has nothing in it yet")
    tensors = [layer.keys, layer.values]
    scales = None
    if kind == _QUANTIZED:
        (keys, key_scale), (values, value_scale) = layer._quantized_keys, layer._quantized_values
        tensors = [keys, values]
        scales = float(key_scale), float(value_scale)
    state = _Layer(
        kind,
        group=0,
        place=0,
        length=int(layer.get_seq_length()),
        dtype=_name(layer.keys.dtype),
        window=int(getattr(layer, "sliding_window", 0)),
        scales=scales,
    )
    return state, tensors


def receive(
    engine: LlmDataDist,
    cluster_id: int,
    told: bytes,
    cache: Any,
    *,
    rows: Sequence[int] | None = None,
    timeout_ms: float | None = None,
) -> Arrival:
    """Begin to receive what a linked cluster has offered into an empty cache of the same kind.

    It can be given to a model at once, whose layers wait for their keys and values where these have
    not arrived; if they do not, the model's forward pass raises the transfer's error.  `rows` are
    the rows of the offered batch that are wanted, in the order in which they will be here; None:
    all.  Static caches are received in place; to the others belongs memory of the library's own.

    Raises ParamInvalid if the cache is not of the kind that was offered, or has been used;
    otherwise what `pull_kv_blocks_async` raises.
    """
    try:
        described = msgspec.msgpack.decode(told, type=_Told)
    except msgspec.DecodeError as error:
        raise ParamInvalid(f"these bytes do not tell of an offer: {error}") from error
    if described.version != _VERSION:
        raise ParamInvalid(f"an offer of version {described.version}, not {_VERSION}")
    _check(described)
    _match(described, cache)
    arrival = Arrival(engine)
    try:
        for number, group in enumerate(described.groups):
            wanted = list(range(group.shape[0])) if rows is None else list(rows)
            shape = (len(wanted), *group.shape[1:])
            members = [
                (state, cache.layers[place])
                for place, state in enumerate(described.layers)
                if state.group == number
            ]
            local = _room_for(engine, members, shape, group.dtype)
            arrival._caches.append(local)
            index = CacheIndex(cluster_id, group.cache_id)
            ours = list(range(len(wanted)))
            transfer = engine.pull_kv_blocks_async(
                index, local, wanted, ours, timeout_ms=timeout_ms
            )
            arrival._transfers.append(transfer)
            for state, layer in members:
                _wait_first(layer, transfer, state.place)
    except BaseException:
        arrival.close()
        raise
    return arrival


def _check(told: _Told) -> None:
    """ParamInvalid where what was told contradicts itself."""
    for number, group in enumerate(told.groups):
        places = [layer.place for layer in told.layers if layer.group == number]
        if places != [*range(len(places))] or not places:
            raise ParamInvalid(f"the layers of cache {group.cache_id} are not told in order")
        if len(group.shape) != 4 or min(group.shape) < 0:
            raise ParamInvalid(f"keys and values of the shape {group.shape}")
        _dtype(group.dtype)
    for number, layer in enumerate(told.layers):
        if not 0 <= layer.group < len(told.groups) or layer.length < 0:
            raise ParamInvalid(f"layer {number} is in no cache that was told")
        if (layer.scales is None) is (layer.kind == _QUANTIZED):
            raise ParamInvalid(f"layer {number} has scales without being quantized, or has none")
        _dtype(layer.dtype)


def _match(told: _Told, cache: Any) -> None:
    replicated = getattr(cache, "layer_class_to_replicate", None)
    while replicated is not None and len(cache.layers) < len(told.layers):
        cache.layers.append(replicated())
    if len(cache.layers) != len(told.layers):
        raise ParamInvalid(f"a cache of {len(told.layers)} layers for one of {len(cache.layers)}")
    for number, (state, layer) in enumerate(zip(told.layers, cache.layers, strict=True)):
        kind = type(layer).__name__
        window = int(getattr(layer, "sliding_window", 0))
        if (kind, window) != (state.kind, state.window):
            raise ParamInvalid(
                f"layer {number} is a {state.kind} of window {state.window} there, but a {kind} of"
                f" window {window} here"
            )
        if layer.is_initialized:
            raise ParamInvalid(f"layer {number} of the cache is in use already")
        capacity = told.groups[state.group].shape[-2]
        if state.kind in _STATIC and layer.max_cache_len != capacity:
            raise ParamInvalid(
                f"layer {number} has room for {capacity} tokens there, but for"
                f" {layer.max_cache_len} here"
            )


def _room_for(
    engine: LlmDataDist, members: list[tuple[_Layer, Any]], shape: tuple[int, ...], dtype: str
) -> Cache:
    """Give each layer its tensors, and register them all."""
    like = torch.empty((shape[0], shape[1], 0, shape[3]), dtype=_dtype(members[0][0].dtype))
    if members[0][0].kind in _STATIC:
        for state, layer in members:
            layer.lazy_initialization(like, like)
            _set_length(state, layer)
        tensors = [one for _, layer in members for one in (layer.keys, layer.values)]
        return engine.register_kv_cache(None, tensors, access="")
    empty = torch.empty(shape, dtype=_dtype(dtype), device="meta")
    data_type = CacheDesc.from_tensors([torch.empty(1, dtype=empty.dtype)]).data_type
    local = engine.allocate_kv_cache(CacheDesc(2 * len(members), shape, data_type), access="")
    tensors = [torch.from_dlpack(array) for array in local.tensors]
    for (state, layer), keys, values in zip(members, tensors[::2], tensors[1::2], strict=True):
        if state.scales is not None:
            # Not its own, which would want to find scales for what is not there yet.
            _dynamic_layer(layer).lazy_initialization(layer, like, like)
            scales = [torch.tensor(scale, dtype=torch.float32) for scale in state.scales]
            layer._quantized_keys, layer._quantized_values = (
                (keys, scales[0]),
                (values, scales[1]),
            )
        else:
            layer.lazy_initialization(like, like)
            layer.keys, layer.values = keys, values
        _set_length(state, layer)
    return local


def _dynamic_layer(layer: Any) -> Any:
    return next(one for one in type(layer).__mro__ if one.__name__ == "DynamicLayer")


def _set_length(state: _Layer, layer: Any) -> None:
    if hasattr(layer, "cumulative_length_int"):
        layer.cumulative_length_int = state.length
    if isinstance(getattr(layer, "cumulative_length", None), torch.Tensor):
        layer.cumulative_length.fill_(state.length)
    elif hasattr(layer, "cumulative_length"):
        layer.cumulative_length = state.length


def _wait_first(layer: Any, transfer: Transfer, place: int) -> None:
    """Have the layer's next update wait for what it goes on from."""
    update: Callable[..., Any] = type(layer).update

    def arrived(*args: Any, **kwargs: Any) -> Any:
        transfer.wait_layer(place)
        vars(layer).pop("update", None)
        return update(layer, *args, **kwargs)

    layer.update = arrived


class Arrival:
    """A cache that is being received; made by `receive`, closed at the end of a ``with`` block."""

    def __init__(self, engine: LlmDataDist) -> None:
        self._engine = engine
        self._caches: list[Cache] = []
        self._transfers: list[Transfer] = []

    def done(self) -> bool:
        """Whether all of it has arrived, or never will."""
        return all(transfer.done() for transfer in self._transfers)

    def result(self, timeout: float | None = None) -> TransferReport:
        """Wait until all has arrived; a report of all, or the error.

        `timeout`, in seconds, is that of each of its transfers, one for each shape of tensors.
        """
        reports = [transfer.result(timeout) for transfer in self._transfers]
        return TransferReport(
            bytes=sum(report.bytes for report in reports),
            seconds=max(report.seconds for report in reports),
            path="get" if all(report.path == "get" for report in reports) else "stream",
            spans=sum(report.spans for report in reports),
        )

    def close(self) -> None:
        """Give up what has not arrived; the cache keeps its memory, the engine lets go of it.

        Again is no error.
        """
        for transfer in self._transfers:
            transfer.cancel()
        while self._caches:
            self._engine.unregister_kv_cache(self._caches[-1].cache_id)
            self._caches.pop()

    def __enter__(self) -> Arrival:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except LlmError:
            # Where the engine was finalized there is nothing left to let go of.
            if error is None:
                raise


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ParamInvalid(f"{name!r} is no type of PyTorch's")
    return dtype

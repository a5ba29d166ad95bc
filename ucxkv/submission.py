"""From a checked call to a running transfer: find link and cache, check geometry, submit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ucxkv import geometry
from ucxkv.catalogue import LocalEntry, RemoteEntry
from ucxkv.engine import monotonic_ns
from ucxkv.errors import (
    FeatureNotEnabled,
    HoldEnded,
    KvCacheNotExist,
    LlmError,
    LlmOutOfMemory,
    NotYetLink,
    ParamInvalid,
    Status,
)
from ucxkv.handle import TransferHandle
from ucxkv.layered import LayeredPush, Ready, layers_of
from ucxkv.links import Link
from ucxkv.numbers import FOREVER_MS
from ucxkv.running import Running
from ucxkv.transfers import PRESENT, Counts, Transfer
from ucxkv.types import TransferReport


def run(running: Running, call: geometry.Call) -> TransferReport:
    """Start a transfer and wait for it; an interrupted wait gives it up, fenced."""
    transfer, start = _prepare(running, call, attended=True)
    try:
        start()
        return transfer.result()
    except LlmError:
        raise
    except BaseException:
        transfer._abort("its caller was interrupted")
        raise


def run_async(running: Running, call: geometry.Call, ready: Ready | None = None) -> Transfer:
    """Start a transfer; with `ready` it is a push whose layers go one by one."""
    transfer, start = _prepare(running, call, attended=False, ready=ready)
    try:
        start()
        if isinstance(transfer, LayeredPush):
            running.feeder.add(transfer)
    except BaseException:
        transfer._abort("its caller was interrupted")
        raise
    return transfer


def _prepare(
    running: Running, call: geometry.Call, *, attended: bool, ready: Ready | None = None
) -> tuple[Transfer, Callable[[], None]]:
    """A transfer that nothing writes for yet, and what starts it.

    The two are apart so that an interrupt can come at any moment: who holds the transfer can end
    it.
    """
    near = running.catalogue.get(call.near_cache_id)
    if near is None:
        raise KvCacheNotExist(f"no local cache {call.near_cache_id} is registered")
    deadline = monotonic_ns() + int(min(call.timeout_ms, FOREVER_MS) * 1e6)
    link = running.links.lookup(call.cluster_id)
    far = link.remote.get(call.far_cache_id) if link is not None and link.up else None
    if link is not None and far is not None and not far.native.retired:
        plan, get = _decide(running.path, call, link, far, near)
        if ready is None:
            transfer = Transfer(_new(running, deadline, attended), call)
        else:
            ready.check(plan.layers)
            transfer = _layered(running, deadline, plan.layers, call, ready)
        return transfer, partial(transfer._begin, link, far, near, plan, get, attended)
    if ready is None:
        transfer = Transfer(_new(running, deadline, False), call)
    else:
        transfer = _layered(running, deadline, layers_of(call, near), call, ready)

    called = _Called(link, call) if call.push and link is not None else None

    def start() -> None:
        if not running.links.post(_start_later, running, transfer, call, near, deadline, called):
            raise LlmError("the engine was finalized")

    return transfer, start


class _Called:
    """When a push was called that has to wait for its link: a later `quiesce` concerns it."""

    def __init__(self, link: Link, call: geometry.Call) -> None:
        self._link = link
        self._far = link.remote.get(call.far_cache_id)
        self._barriers = link.native.barriers_heard
        self._quieted = 0 if self._far is None else self._far.native.quieted

    def counts(self, link: Link, far: RemoteEntry) -> Counts:
        """What TransferHandle.submit is to compare; NotYetLink if there is nothing to compare."""
        if link is not self._link:
            raise NotYetLink(
                f"cluster {link.cluster_id} ({link.address}): the link was made anew while the push"
                " waited for it"
            )
        if far is self._far:
            return Counts(quieted=self._quieted)
        return Counts(barriers=self._barriers)


def _layered(
    running: Running, deadline: int, layers: int, call: geometry.Call, ready: Ready
) -> LayeredPush:
    return LayeredPush(partial(_new, running, deadline, False), layers, call, ready)


def _new(running: Running, deadline: int, attended: bool) -> TransferHandle:
    try:
        return running.native.new_transfer(deadline, attended)
    except MemoryError as error:
        raise LlmOutOfMemory(str(error)) from error
    except RuntimeError as error:
        raise LlmError(str(error)) from error


def _decide(
    path: str, call: geometry.Call, link: Link, far: RemoteEntry, near: LocalEntry
) -> tuple[geometry.Plan, bool]:
    """Geometry, then what the caches and the link allow; and whether a pull goes by GET."""
    try:
        plan = geometry.plan(call, near, far) if call.push else geometry.plan(call, far, near)
    except ParamInvalid as error:
        raise ParamInvalid(f"cluster {call.cluster_id} ({link.address}): {error}") from None
    if call.push:
        if far.access != "rw":
            raise FeatureNotEnabled(
                f"cache {far.cache_id} of cluster {call.cluster_id} ({link.address}) was not"
                " registered with access 'rw'"
            )
        return plan, False
    if not near.native.writable:
        raise ParamInvalid(f"the tensors of cache {near.cache_id} are read-only")
    if call.hold is not None and call.hold.generation != far.generation:
        raise HoldEnded(
            f"the hold is none of cache {far.cache_id} of cluster {call.cluster_id}"
            f" ({link.address}), or of an earlier registration"
        )
    if path == "get" and not link.native.get:
        raise FeatureNotEnabled(
            f"path 'get' is forced, but one-sided reads do not reach cluster {call.cluster_id}"
            f" ({link.address}): it may force path 'stream', otherwise 'ucxkv info' on both sides"
            " says what is in the way"
        )
    return plan, path != "stream" and link.native.get


def _start_later(
    running: Running,
    transfer: Transfer,
    call: geometry.Call,
    near: LocalEntry,
    deadline: int,
    called: _Called | None,
) -> None:
    """On the control loop: find link and cache, waiting where that helps, then submit."""

    async def start() -> None:
        try:
            link, far = await running.links.resolve(
                call.cluster_id, call.far_cache_id, deadline / 1e9
            )
            plan, get = _decide(running.path, call, link, far, near)
            counts = PRESENT if called is None else called.counts(link, far)
            transfer._begin(link, far, near, plan, get, counts=counts)
        except LlmError as error:
            if error.status is Status.TIMEOUT:
                return  # the deadline itself ends the transfer, not a moment earlier
            transfer._fail(error)

    task = running.links.loop.create_task(start())
    running.links.keep(task)

"""Pulls of blocks in the children: random cases, arguments of any type, and memory at its peak."""

from __future__ import annotations

import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import model
from children import actions
from model import Case

if TYPE_CHECKING:
    from child import Context


@dataclass
class BlockCase:
    """A pull of blocks: the caches and layers of `case`, and the lists that replace its slots.

    Without `src_blocks` the source is the continuous slot of `case.src`.
    """

    case: Case
    src_blocks: list[int] | None
    dst_blocks: list[int]
    src_kind: str
    dst_kind: str
    twin: bool

    @property
    def length(self) -> int:
        """Bytes of each block that are written."""
        if self.src_blocks is None:
            return self.case.dst.slot_bytes
        return self.case.src.slot_bytes

    @property
    def moved(self) -> int:
        return len(self.case.pairs()) * len(self.dst_blocks) * self.length


def as_kind(numbers: list[int], kind: str) -> Any:
    """The list as a sequence or an array of some kind."""
    if kind == "list":
        return list(numbers)
    if kind == "tuple":
        return tuple(numbers)
    if kind == "scalars":
        return [np.int16(number) for number in numbers]
    if kind == "range":
        step = (numbers[1] - numbers[0] if len(numbers) > 1 else 1) or 1
        guess = range(numbers[0], numbers[0] + len(numbers) * step, step) if numbers else range(0)
        return guess if list(guess) == numbers else numbers
    if kind == "array.array":
        return array.array("i", numbers)
    if kind == "memoryview":
        return memoryview(np.array(numbers, np.int32))
    if kind == "strided":
        return np.repeat(np.array(numbers, np.int64), 3)[1::3]
    if kind == "backwards":
        return np.array(numbers[::-1], np.uint16)[::-1]
    if kind == "column":
        return np.array([numbers, numbers], np.uint32).T[:, 1]
    if kind == "readonly":
        made = np.array(numbers, np.uint32)
        made.flags.writeable = False
        return made
    if kind == "unaligned":
        raw = np.zeros(4 * len(numbers) + 1, np.uint8)[1:]
        view = raw.view(np.uint32)
        view[:] = numbers
        return view
    return np.array(numbers, np.dtype(kind))


def model_pull(case: BlockCase, destination: list[model.Bytes]) -> None:
    """Do to `destination` what the pull must do."""
    src, dst = case.case.src, case.case.dst
    length = case.length
    for one, other in case.case.pairs():
        seed = model.source_seed(case.case, one)
        whole = model.pattern(seed, 0, src.nbytes)
        for place, block in enumerate(case.dst_blocks):
            if case.src_blocks is None:
                start = src.slot * src.slot_bytes + place * length
            else:
                start = case.src_blocks[place] * src.slot_bytes
            target = block * dst.slot_bytes
            destination[other][target : target + length] = whole[start : start + length]


def run_cases(
    ctx: Context, cluster_id: int, cases: Sequence[BlockCase], cache_ids: Sequence[int], path: str
) -> list[str]:
    def run(case: BlockCase, cache_id: int) -> str:
        return run_case(ctx, cluster_id, case, cache_id, path)

    return actions.problems_of(run, cases, cache_ids)


def run_case(ctx: Context, cluster_id: int, case: BlockCase, cache_id: int, path: str) -> str:
    import ucxkv

    side = case.case.dst
    arena, cache = actions.open_side(ctx, case.case, side, "")
    expected = actions.after(arena, lambda tensors: model_pull(case, tensors))
    sources = None if case.src_blocks is None else as_kind(case.src_blocks, case.src_kind)
    arguments = (
        ucxkv.CacheIndex(cluster_id, cache_id, case.case.src.slot),
        cache,
        sources,
        as_kind(case.dst_blocks, case.dst_kind),
        ucxkv.KvCacheExtParam(case.case.src.layers, side.layers, case.case.per_layer),
    )
    try:
        if case.twin:
            report = ctx.engine.pull_kv_blocks_async(*arguments, timeout_ms=10000).result(15)
        else:
            report = ctx.engine.pull_kv_blocks(*arguments, timeout_ms=10000)
    except (ucxkv.LlmError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        ctx.engine.unregister_kv_cache(cache.cache_id)
    return actions.difference(arena, expected) or actions.misreport(report, case.moved, [path])


def raw_pull(ctx: Context, fields: dict[str, Any], twin: bool = False) -> actions.Outcome:
    """A pull of blocks whose arguments may be of any type (see actions.raw_call)."""
    return actions.raw_call(ctx, "pull_kv_blocks", fields, ("src_blocks", "dst_blocks"), twin=twin)


def raw_pulls(
    ctx: Context, calls: Sequence[dict[str, Any]], twin: bool = False
) -> list[actions.Outcome]:
    return [raw_pull(ctx, fields, twin) for fields in calls]


# Many blocks


def block_bytes(ctx: Context, name: str) -> list[model.Bytes]:
    shape = ctx.caches[name].cache_desc.shape
    return [raw.reshape(shape) for raw in ctx.arenas[name].raws()]


def permutation(seed: int, blocks: int) -> Any:
    return np.random.default_rng(seed).permutation(blocks)


def pull_permuted(
    ctx: Context,
    name: str,
    cluster_id: int,
    cache_id: int,
    seed: int,
    *,
    reuse: bool = False,
    **more: Any,
) -> actions.Outcome:
    """Pull every block to another place; extra["wrong"] are the tensors with wrong bytes.

    With `reuse` the lists get other contents as soon as the call has returned.
    """
    import ucxkv

    blocks = ctx.caches[name].cache_desc.shape[0]
    sources, targets = permutation(1, blocks), permutation(2, blocks)

    def pull() -> Any:
        transfer = ctx.engine.pull_kv_blocks_async(
            ucxkv.CacheIndex(cluster_id, cache_id), ctx.caches[name], sources, targets, **more
        )
        if reuse:
            sources[:] = targets[:] = 0
        return transfer.result()

    outcome = actions.attempt(pull)
    outcome.extra["wrong"] = wrong_permuted(ctx, name, seed)
    return outcome


def push_permuted_layers(
    ctx: Context, name: str, cluster_id: int, cache_id: int, **more: Any
) -> actions.Outcome:
    """Push every block to another place, a tensor at a time; the lists are gone before the first.

    What takes their memory meanwhile are lists of zeros.
    """
    import ucxkv

    desc = ctx.caches[name].cache_desc
    sources, targets = permutation(1, desc.shape[0]), permutation(2, desc.shape[0])
    push = ctx.engine.push_kv_blocks_async(
        ctx.caches[name],
        ucxkv.CacheIndex(cluster_id, cache_id),
        sources,
        targets,
        ucxkv.KvCacheExtParam(tensor_num_per_layer=1),
        layer_ready=True,
        **more,
    )
    sources[:] = targets[:] = 0
    del sources, targets
    zeros = [np.zeros(desc.shape[0], kind) for kind in (np.uint32, np.int64) for _ in range(8)]
    for layer in reversed(range(desc.num_tensors)):
        push.layer_ready(layer)
    outcome = actions.attempt(push.result)
    del zeros
    return outcome


def wrong_permuted(ctx: Context, name: str, seed: int) -> list[int]:
    """Tensors whose blocks are not where they had to be moved to; -1 for bytes outside of all."""
    shape = ctx.caches[name].cache_desc.shape
    sources, targets = permutation(1, shape[0]), permutation(2, shape[0])
    wrong = [
        tensor
        for tensor, moved in enumerate(block_bytes(ctx, name))
        if not np.array_equal(
            moved[targets],
            model.pattern(actions.tensor_seed(seed, tensor), 0, moved.size).reshape(shape)[sources],
        )
    ]
    if not ctx.arenas[name].guards_intact():
        wrong.append(-1)
    return wrong


def memory(field: str) -> int:
    """Bytes of a field of /proc/self/status, such as VmRSS."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    raise LookupError(field)


def watch_memory(ctx: Context) -> None:
    """Measure the peak from here on."""
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")
    ctx.values["rss"] = memory("VmRSS")


def extra_memory(ctx: Context) -> int:
    """Bytes that the peak since `watch_memory` lay above the start."""
    return memory("VmHWM") - int(ctx.values["rss"])


def pull_alternate(
    ctx: Context, name: str, cluster_id: int, cache_id: int, seed: int, timeout_ms: int
) -> actions.Outcome:
    """Pull the even blocks of a cache to the odd ones, one span each.

    extra["planning"] are the seconds that its checks take, extra["wrong"] the number of wrong
    bytes, extra["outside"] of bytes written elsewhere, extra["memory"] the bytes of extra memory at
    its peak.
    """
    import ucxkv

    desc = ctx.caches[name].cache_desc
    count = desc.shape[0]
    sources = np.arange(0, count, 2)
    targets = np.arange(1, count, 2)
    index = ucxkv.CacheIndex(cluster_id, cache_id)
    ext = ucxkv.KvCacheExtParam()
    watch_memory(ctx)
    outcome = actions.attempt(
        lambda: ctx.engine.pull_kv_blocks(
            index, ctx.caches[name], sources, targets, ext, timeout_ms=timeout_ms
        )
    )
    outcome.extra["memory"] = extra_memory(ctx)
    # A pull of layers that there are not takes as long, but for the bytes; the quickest of three is
    # the one that was not kept from its core.
    nothing = ucxkv.KvCacheExtParam((5, 5), (5, 5))
    refused = [
        actions.attempt(
            lambda: ctx.engine.pull_kv_blocks(index, ctx.caches[name], sources, targets, nothing)
        )
        for _ in range(3)
    ]
    assert {one.kind for one in refused} == {"ParamInvalid"}, refused
    outcome.extra["planning"] = min(one.seconds for one in refused)
    blocks = block_bytes(ctx, name)[0]
    whole = model.pattern(actions.tensor_seed(seed, 0), 0, blocks.size).reshape(desc.shape)
    outcome.extra["wrong"] = int((blocks[1::2] != whole[0::2]).sum())
    outcome.extra["outside"] = int((blocks[0::2] != 0).sum())
    return outcome

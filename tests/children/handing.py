"""Caches of transformers, handed from one child to another by the example's own functions."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from children.actions import Outcome, attempt

if TYPE_CHECKING:
    from child import Context

EXAMPLE = Path(__file__).parents[2] / "examples" / "disaggregated_transformers.py"


def example() -> Any:
    name = EXAMPLE.stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def prefill(ctx: Context, task: dict[str, Any]) -> tuple[bytes, list[list[int]], list[list[int]]]:
    """What is told of the cache, the first tokens, and all that a single process comes to."""
    from ucxkv.integrations.transformers import offer

    module = example()
    wanted = module.Task(**task)
    model = wanted.model()
    prompts = wanted.prompts()
    alone = module.generate(model, wanted.empty_cache(model.config), *prompts, wanted.tokens)
    cache = wanted.empty_cache(model.config)
    first = module.generate(model, cache, *prompts, 1)
    ctx.values["offer"] = offer(ctx.engine, cache)
    return ctx.values["offer"].told, first.tolist(), alone.tolist()


def withdraw(ctx: Context) -> None:
    ctx.values.pop("offer").close()


def decode(
    ctx: Context,
    task: dict[str, Any],
    told: bytes,
    first: list[list[int]],
    rows: list[int],
    spoil: bool = False,
) -> Outcome:
    """The tokens of some rows; `spoil`: as if one layer had never arrived."""
    import torch

    from ucxkv.integrations.transformers import receive

    module = example()
    wanted = module.Task(**task)
    model = wanted.model()
    ids, mask = wanted.prompts()
    begun = torch.tensor(first)
    cache = wanted.empty_cache(model.config)

    def run() -> list[list[int]]:
        with receive(ctx.engine, 1, told, cache, rows=rows, timeout_ms=10_000) as arriving:
            if spoil:
                arriving.result()
                cache.layers[1].values.zero_()
            more = module.generate(
                model,
                cache,
                torch.cat([ids[rows], begun[rows]], 1),
                torch.cat([mask[rows], torch.ones(len(rows), 1, dtype=torch.long)], 1),
                wanted.tokens - 1,
            )
            report = arriving.result()
            assert arriving.done()
            assert report.bytes == bytes_of(ctx, arriving)
        return [
            [*one, *others] for one, others in zip(begun[rows].tolist(), more.tolist(), strict=True)
        ]

    outcome = attempt(run)
    outcome.extra["caches"] = len(ctx.engine._engine().catalogue.snapshot())
    return outcome


def bytes_of(ctx: Context, arriving: Any) -> int:
    """Bytes of the memory that belongs to an arrival."""
    entries = [ctx.engine._engine().catalogue.get(one.cache_id) for one in arriving._caches]
    return sum(one.desc.num_tensors * one.blocks * one.block_bytes for one in entries)


def mistaken(ctx: Context, task: dict[str, Any], other: dict[str, Any], told: bytes) -> Outcome:
    """Receive into a cache that another task would have."""
    from ucxkv.integrations.transformers import receive

    module = example()
    wanted = module.Task(**{**task, **other})
    cache = wanted.empty_cache(wanted.model().config)
    return attempt(lambda: receive(ctx.engine, 1, told, cache))


def refused_offers(ctx: Context) -> dict[str, Outcome]:
    import torch
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    from ucxkv.integrations.transformers import offer

    class Odd(DynamicLayer):
        pass

    odd = DynamicCache()
    odd.layers.append(Odd())
    unequal = DynamicCache()
    unequal.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 8), 0)
    unread = DynamicCache()
    unread.layers.append(DynamicLayer())
    caches = {"none": DynamicCache(), "odd": odd, "unequal": unequal, "unread": unread}
    return {name: attempt(lambda: offer(ctx.engine, cache)) for name, cache in caches.items()}  # noqa: B023


def bad_bytes(ctx: Context, told: bytes, seed: int, count: int) -> list[str]:
    """The errors of receiving what others have made of a good offer; all of them are ours."""
    import random

    from transformers import DynamicCache

    from ucxkv import LlmError
    from ucxkv.integrations.transformers import receive

    chance = random.Random(seed)
    kinds = set()
    for _ in range(count):
        bad = bytearray(told)
        for _ in range(chance.randint(1, 4)):
            bad[chance.randrange(len(bad))] = chance.choice((0, 1, 2, 255, chance.randrange(256)))
        try:
            with receive(ctx.engine, 1, bytes(bad), DynamicCache(), timeout_ms=50) as arriving:
                arriving.result()
        except LlmError as error:
            kinds.add(type(error).__name__)
    assert attempt(lambda: receive(ctx.engine, 1, b"nonsense", DynamicCache())).status
    return sorted(kinds)

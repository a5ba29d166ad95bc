"""A cache of transformers, handed over: the tokens are those of a single process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ucxkv
from children import handing
from extras import need
from harness import Peer, rounds

need("transformers", "transformers")

TASK = {"layers": 3, "hidden": 64, "lengths": (9, 1, 30), "tokens": 6, "window": 8}
CACHES = ("dynamic", "sliding", "hybrid", "static", "static-hybrid", "quantized")

# What torch and transformers say to each other while they are being loaded.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def both(path: str) -> Iterator[tuple[Peer, Peer]]:
    with (
        Peer(1, path=path, name="prefill") as prefill,
        Peer(2, path=path, name="decode", listen=False) as decode,
    ):
        decode.link(prefill)
        yield prefill, decode


def handed_over(
    both: tuple[Peer, Peer], task: dict[str, Any], rows: list[int], spoil: bool = False
) -> tuple[list[list[int]], list[list[int]]]:
    """The tokens of a single process, and those of two."""
    prefill, decode = both
    told, first, alone = prefill.call(handing.prefill, task, timeout=120)
    outcome = decode.call(handing.decode, task, told, first, rows, spoil, timeout=120)
    prefill.call(handing.withdraw)
    assert outcome.ok, outcome
    assert outcome.extra["caches"] == 0
    return [alone[row] for row in rows], outcome.value


@pytest.mark.parametrize("cache", CACHES)
def test_tokens_are_those_of_a_single_process(both: tuple[Peer, Peer], cache: str) -> None:
    """Of prompts of different lengths, in another order of rows."""
    alone, together = handed_over(both, {**TASK, "cache": cache}, [2, 0, 1])
    assert together == alone
    assert len({tuple(tokens) for tokens in together}) == 3


@pytest.mark.parametrize("cache", ["dynamic", "static-hybrid"])
def test_some_rows_only(both: tuple[Peer, Peer], cache: str) -> None:
    alone, together = handed_over(both, {**TASK, "cache": cache}, [1, 2])
    assert together == alone


def test_bfloat16(both: tuple[Peer, Peer]) -> None:
    alone, together = handed_over(both, {**TASK, "dtype": "bfloat16"}, [2, 0, 1])
    assert together == alone


def test_the_tokens_depend_on_every_layer(both: tuple[Peer, Peer]) -> None:
    """Otherwise equal ones would show nothing."""
    alone, together = handed_over(both, TASK, [0, 1, 2], spoil=True)
    assert together != alone


def test_each_layer_waits_for_its_bytes(both: tuple[Peer, Peer], path: str) -> None:
    """From a process that is stopped they come all the same, or not before it goes on."""
    prefill, decode = both
    told, first, alone = prefill.call(handing.prefill, TASK, timeout=120)
    call = (handing.decode, TASK, told, first, [0, 1, 2])
    assert decode.call(*call, timeout=120).value == alone
    with prefill.stopped():
        pending = decode.start(*call)
        if path == "get":
            assert pending.result(120).value == alone
        else:
            time.sleep(1.0)
            assert not pending.done()
    assert pending.result(120).value == alone
    prefill.call(handing.withdraw)


def test_caches_of_another_kind(both: tuple[Peer, Peer]) -> None:
    prefill, decode = both
    for task, other, reason in (
        ({}, {"cache": "static"}, "layer 0 is a DynamicLayer of window 0 there, but a StaticLayer"),
        ({}, {"layers": 2}, "a cache of 3 layers for one of 2"),
        ({"cache": "sliding"}, {"window": 7}, "of window 8 there"),
        (
            {"cache": "static"},
            {"tokens": 7},
            "layer 0 has room for 36 tokens there, but for 37 here",
        ),
    ):
        told, _, _ = prefill.call(handing.prefill, {**TASK, **task}, timeout=120)
        outcome = decode.call(handing.mistaken, {**TASK, **task}, other, told, timeout=120)
        prefill.call(handing.withdraw)
        assert outcome.kind == "ParamInvalid"
        assert reason in outcome.message


def test_bytes_that_were_tampered_with(both: tuple[Peer, Peer]) -> None:
    prefill, decode = both
    told, _, _ = prefill.call(handing.prefill, TASK, timeout=120)
    kinds = decode.call(handing.bad_bytes, told, seed=5, count=rounds(300), timeout=120)
    prefill.call(handing.withdraw)
    assert "ParamInvalid" in kinds


def test_what_cannot_be_offered(both: tuple[Peer, Peer]) -> None:
    found = both[0].call(handing.refused_offers)
    kinds = {name: outcome.kind for name, outcome in found.items()}
    assert kinds == {
        "none": "ParamInvalid",
        "odd": "FeatureNotEnabled",
        "unequal": "FeatureNotEnabled",
        "unread": "ParamInvalid",
    }
    assert "Odd" in found["odd"].message


def test_an_offer_that_was_withdrawn(both: tuple[Peer, Peer]) -> None:
    """The model does not go on from what has not come."""
    prefill, decode = both
    told, first, _ = prefill.call(handing.prefill, TASK, timeout=120)
    prefill.call(handing.withdraw)
    outcome = decode.call(handing.decode, TASK, told, first, [0, 1, 2], timeout=120)
    assert outcome.kind == "KvCacheNotExist"
    assert outcome.extra["caches"] == 0


def test_the_example() -> None:
    done = subprocess.run(
        [sys.executable, str(handing.EXAMPLE), "--layers=2", "--hidden=64", "--tokens=4",
         "--lengths", "5", "11"],
        env={**os.environ, "PYTHONPATH": str(Path(ucxkv.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "The tokens are those of a single process." in done.stdout

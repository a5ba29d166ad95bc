"""Pulls of random geometry leave exactly the bytes that a NumPy model leaves."""

from __future__ import annotations

import os

import pytest

import model
from children import actions
from harness import Peer, rounds

CASES = int(os.environ.get("UCXKV_TEST_CASES", "0")) or rounds(500)
BATCH = 25


def run(pair: tuple[Peer, Peer], cases: list[model.Case], path: str) -> list[str]:
    owner, puller = pair
    problems: list[str] = []
    for first in range(0, len(cases), BATCH):
        batch = cases[first : first + BATCH]
        ids = owner.call(actions.open_sources, batch)
        problems += puller.call(actions.run_cases, owner.cluster_id, batch, ids, path)
        problems += owner.call(actions.close_sources)
    return problems


@pytest.mark.timeout(300)
def test_random_geometry(pair: tuple[Peer, Peer], path: str) -> None:
    cases = [model.random_case(seed) for seed in range(CASES)]
    problems = run(pair, cases, path)
    assert not problems, f"{len(problems)} problems, the first: {problems[0]}"

"""A short soak: everything at once, with kills, restarts and cuts (see soak.py)."""

from __future__ import annotations

import pytest

import soak
from harness import SCALE

SECONDS = 5.0 * SCALE


@pytest.mark.slow
@pytest.mark.timeout(120 + 4 * SECONDS)
def test_soak() -> None:
    assert soak.run(SECONDS, 3, round_seconds=2.5 if SCALE <= 1 else 5.0, faults=3)

"""Decode begins with the first layer while the last is still on its way."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm


def test_layers_are_computed_while_later_ones_come(tmp_path: Path) -> None:
    from overlap import LAYERS, measure, plot

    timeline = measure("layerwise", tmp_path)
    print(timeline.table())
    for layer in range(LAYERS):
        # A layer is computed after it has landed.  (Its landing is noted by another thread.)
        assert timeline.computed[layer] > timeline.landed[layer] - 0.05
    assert timeline.computed[0] < timeline.landed[-1] / 2
    assert timeline.computed == sorted(timeline.computed)
    plot(timeline, tmp_path / "overlap.png")
    assert (tmp_path / "overlap.png").stat().st_size > 10_000

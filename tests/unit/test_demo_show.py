"""What the demo tells while it runs, where there is no terminal."""

from __future__ import annotations

import io

from ucxkv.demo.processes import Progress
from ucxkv.demo.show import Lines


def test_progress_is_told_in_lines() -> None:
    file = io.StringIO()
    lines = Lines(file, every=0)
    lines.update("prefill", Progress("prefill", 1, 3))
    lines.update("decode", Progress("pull", 3, 3))
    lines.close()
    assert file.getvalue() == (
        "prefill: computing the prompt, 33 %\ndecode: pulling the cache, 100 %\n"
    )


def test_what_is_over_soon_is_not_told() -> None:
    file = io.StringIO()
    lines = Lines(file)
    for done in range(1, 100):
        lines.update("prefill", Progress("prefill", done, 100))
    lines.close()
    assert file.getvalue() == ""

"""Runs cells, those of the two paths side by side, and sums up what came of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from matrix.cells import PATHS, Cell
from matrix.rig import Result, Rig

Tell = Callable[[Result], object]


def run(todo: Sequence[Cell], clock: Path | None, tell: Tell) -> list[Result]:
    """Run all of `todo`; `tell` hears of each cell when it is over.

    Cells mostly wait, so there is room for two at a time.  But the processes of one may keep those
    of the other from a processor when no sleeper wants it: what was late, and nothing worse, is run
    once more by itself.
    """
    with ThreadPoolExecutor(len(PATHS)) as pool:
        running = [
            pool.submit(_run_path, path, [cell for cell in todo if cell.path == path], clock, tell)
            for path in PATHS
        ]
        results = [result for one in running for result in one.result()]
    for number, result in enumerate(results):
        if result.late and result.late == len(result.problems):
            (results[number],) = _run_path(result.cell.path, [result.cell], clock, tell)
    return results


def _run_path(path: str, todo: Sequence[Cell], clock: Path | None, tell: Tell) -> list[Result]:
    """One after the other, on one rig; after a cell in which a process has died, or does not
    answer, on a new one."""
    results: list[Result] = []
    rig: Rig | None = None
    for cell in todo:
        try:
            rig = rig or Rig(path, clock)
            result = rig.run(cell)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            result = Result(cell, outcome="hung or crashed", problems=[text])
            if rig is not None:
                rig.abandon()
                rig = None
        results.append(result)
        tell(result)
    if rig is not None:
        rig.close()
    return results


def table(results: Sequence[Result]) -> str:
    """Outcomes by point and fault, how late calls were, and the cells that broke a promise."""
    rows: dict[tuple[str, str], Counter[str]] = {}
    for result in results:
        rows.setdefault((result.cell.point, result.cell.fault), Counter())[result.outcome] += 1
    lines = [f"{'point':22}{'fault':24}outcomes"]
    for (point, fault), counts in rows.items():
        told = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        lines.append(f"{point:22}{fault:24}{told}")
    lines.append("")
    total = Counter(result.outcome for result in results)
    lines.append("in all: " + ", ".join(f"{count} {kind}" for kind, count in total.most_common()))
    met = sum(result.met for result in results)
    lines.append(f"the fault met what it was meant to meet in {met} of {len(results)} cells")
    worst: dict[str, tuple[float, Cell]] = {}
    for result in results:
        for what, over in result.over.items():
            worst[what] = max(worst.get(what, (0.0, result.cell)), (over, result.cell))
    for what, (over, cell) in sorted(worst.items()):
        lines.append(
            f"longest over the deadline, beyond a sleeper's lateness: {what} {over * 1e3:.1f} ms"
            f" ({cell})"
        )
    broken = [result for result in results if result.problems]
    lines += [f"BROKEN {result.line()}" for result in broken]
    lines.append(f"{len(results) - len(broken)} passed, {len(broken)} failed")
    return "\n".join(lines)

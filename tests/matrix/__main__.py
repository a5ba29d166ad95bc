"""Runs cells of the fault matrix and prints what came of them.

python tests/matrix --all       every cell that makes sense
python tests/matrix --sample    the pairwise sample that pytest runs
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from matrix import cells, rig, runner, wire


def chosen(arguments: argparse.Namespace) -> list[cells.Cell]:
    pool = cells.every_cell()
    if arguments.sample:
        pool = cells.pairwise(pool)
    return [cell for cell in pool if all(word in str(cell) for word in arguments.only)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--all", action="store_true", help="every cell")
    which.add_argument("--sample", action="store_true", help="a pairwise sample")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="cells whose name has this in it; may be repeated",
    )
    parser.add_argument("--list", action="store_true", help="print the cells, run none")
    arguments = parser.parse_args()
    todo = chosen(arguments)
    if arguments.list:
        for cell in todo:
            print(f"{cell}: {', '.join(sorted(cells.allowed(cell)))}")
        return 0
    obstacle = wire.obstacle()
    if obstacle:
        print(f"two hosts cannot be made here: {obstacle}", file=sys.stderr)
        return 2
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        clock = rig.clock_library(Path(folder))
        results = runner.run(todo, clock, lambda result: print(result.line(), flush=True))
    print(f"\n{runner.table(results)} in {time.monotonic() - began:.0f} s")
    return any(result.problems for result in results)


if __name__ == "__main__":
    sys.exit(main())

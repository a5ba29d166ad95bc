"""Results as lines of JSON: first the environment, then one record per figure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def write(path: Path | None, records: Iterable[Record]) -> None:
    """Write records to a file; nothing where no file was asked for."""
    if path is not None:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))


def read(paths: Iterable[Path]) -> list[Record]:
    """The records of all files."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines() if line]

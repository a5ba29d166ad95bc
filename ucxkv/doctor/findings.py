"""What the doctor found, and how it is written down."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_WIDTH = 80
_NAME = 13

Level = Literal["ok", "note", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    `level` is "ok", "note" (good to know), "warn" (it works, but badly) or "fail".  `why` says why
    it matters, `mend` is the command that mends it, or in words what does; both are empty where
    nothing is wrong.
    """

    check: str
    level: Level
    what: str
    why: str = ""
    mend: str = ""


def failed(findings: Sequence[Finding]) -> bool:
    """Whether something does not work."""
    return any(finding.level == "fail" for finding in findings)


def lines(finding: Finding) -> list[str]:
    """For people: within 80 columns."""
    found = _indented(f"{finding.level:<5}{finding.check:<{_NAME}} ", finding.what)
    for label, text in (("why", finding.why), ("mend", finding.mend)):
        if text:
            found += _indented(f"{'':<5}{label:>{_NAME}} ", text)
    return found


def _indented(first: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_on_hyphens=False,
    )

"""The pages of the documentation, and what stands in their code blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of code: its page, the line it begins in, its language, and the code."""

    page: str
    line: int
    language: str
    code: str

    @property
    def name(self) -> str:
        """Where it is."""
        return f"{self.page}:{self.line}"

    @property
    def is_script(self) -> bool:
        """Whether it stands for itself, with a main part or with arguments of its own."""
        return "__main__" in self.code or "sys.argv" in self.code or "sys.stdin" in self.code


def pages() -> list[Path]:
    """All pages, those at the root included."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "perf/README.md"]
    return sorted(found)


def blocks(language: str) -> list[Block]:
    """All blocks of a language."""
    found = []
    for page in pages():
        text = page.read_text()
        for match in _BLOCK.finditer(text):
            indent, kind, code = match.groups()
            if kind == language:
                line = text.count("\n", 0, match.start()) + 2
                code = re.sub(f"^{indent}", "", code, flags=re.MULTILINE)
                found.append(Block(page.relative_to(ROOT).as_posix(), line, kind, code))
    return found

"""The texts that the troubleshooting page explains are texts that the library has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pages
import pytest

PAGE = pages.ROOT / "docs/troubleshooting.md"
GAP = "…"
# A string of Cython, with what follows it immediately: prefix, text, and perhaps more strings.
_STRINGS = re.compile(r'(?:[bf]?"(?:[^"\\\n]|\\.)*"\s*)+')
_STRING = re.compile(r'([bf]?)"((?:[^"\\\n]|\\.)*)"')


def _of_python(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else GAP for part in node.values]
            found.add("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def _of_cython(file: Path) -> set[str]:
    found = set()
    for strings in _STRINGS.findall(file.read_text()):
        parts = [
            re.sub(r"\{[^}]*\}", GAP, text) if prefix == "f" else text
            for prefix, text in _STRING.findall(strings)
        ]
        found.add("".join(parts))
    return found


@pytest.fixture(scope="module")
def texts() -> set[str]:
    """All strings of the library, with a gap for each value that is put in."""
    found: set[str] = set()
    for file in (pages.ROOT / "ucxkv").rglob("*.py"):
        found |= _of_python(file)
    for file in (pages.ROOT / "pyx").rglob("*.pyx"):
        found |= _of_cython(file)
    return found


def quoted() -> list[str]:
    """What the page has as headings."""
    return re.findall(r"^### `(.*)`$", PAGE.read_text(), re.MULTILINE)


def test_there_are_many() -> None:
    assert len(quoted()) > 30
    assert len(quoted()) == len(re.findall("^###", PAGE.read_text(), re.MULTILINE))


@pytest.mark.parametrize("text", quoted())
def test_the_library_says_that(text: str, texts: set[str]) -> None:
    pattern = re.compile(".*".join(map(re.escape, text.split(GAP))), re.DOTALL)
    assert any(pattern.search(known) for known in texts)

"""The site builds, without a warning."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pages
import pytest

import ucxkv

_NEEDED = ("mkdocs", "material", "mkdocstrings_handlers.python")

if any(importlib.util.find_spec(name.split(".")[0]) is None for name in _NEEDED):
    pytest.skip("the site is NOT built: pip install '.[docs]'", allow_module_level=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as its readers get it."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=pages.ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    built = {page.relative_to(site).as_posix() for page in site.rglob("*.html")}
    sources = {
        page.relative_to(pages.ROOT / "docs") for page in (pages.ROOT / "docs").rglob("*.md")
    }
    assert {source.with_suffix(".html").as_posix() for source in sources} <= built
    assert {"index.html", "security.html", "measuring.html"} <= built


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    anchors = {
        anchor
        for page in (site / "reference").glob("*.html")
        for anchor in re.findall(r'id="(ucxkv\.[\w.]+)"', page.read_text())
    }
    names = {f"ucxkv.{name}" for name in ucxkv.__all__ if not name.startswith("_")}
    assert names - anchors == set()


def test_nothing_comes_from_elsewhere(site: Path) -> None:
    """A page is read where there is no way out, too."""
    for page in site.rglob("*.html"):
        sources = re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text()
        )
        assert sources == [], page


def test_fields_are_lists(site: Path) -> None:
    """As in the docstring of Options, where each has a line of its own."""
    page = (site / "reference/options.html").read_text()
    for field in dataclasses.fields(ucxkv.Options):
        assert re.search(rf"<li>\s*(<p>)?<code>{field.name}</code>", page), field.name

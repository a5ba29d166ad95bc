"""Files at the root of the repository become pages, and links between files lead to pages.

In the repository a link such as ``../SECURITY.md`` leads to the file, so that it works where the
files are read as they are; on the site the same file is the page ``security.md``.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, InclusionLevel

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_ROOT = Path(__file__).resolve().parents[1]
_PAGES = {
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "perf/README.md": "measuring.md",
}
_FILES = {page: file for file, page in _PAGES.items()}
# Files that pages lead to, as they are.
_PLAIN = ("LICENSE", "examples/*.py")
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside of docs/."""
    plain = [file for pattern in _PLAIN for file in _ROOT.glob(pattern)]
    added = {file.relative_to(_ROOT).as_posix(): file for file in plain}
    added |= {page: _ROOT / file for file, page in _PAGES.items()}
    for uri, file in added.items():
        files.append(
            File.generated(config, uri, abs_src_path=str(file), inclusion=InclusionLevel.INCLUDED)
        )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files into links to their pages."""
    own = page.file.src_uri
    file = _FILES.get(own, f"docs/{own}")

    def lead(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(file), match[1]))
        uri = _PAGES.get(target, target.removeprefix("docs/"))
        return posixpath.relpath(uri, posixpath.dirname(own) or ".")

    return _LINK.sub(lead, markdown)

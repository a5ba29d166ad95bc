"""Every block of Python in the documentation runs or, where it is a part of something, has types.

Parts are checked by mypy, the blocks of a page one after the other, with the names of `prelude.py`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pages
import pytest

import ucxkv
from ucxkv import cli

PACKAGE = Path(ucxkv.__file__).resolve().parents[1]
PRELUDE = Path(__file__).with_name("prelude.py")
# Run by a test of its own, in tests/pair/test_readme.py.
ELSEWHERE = {"README.md"}


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(PACKAGE), "MYPYPATH": str(PACKAGE)}


@contextmanager
def started(code: str, folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `code`."""
    script = folder / f"script{len(list(folder.iterdir()))}.py"
    script.write_text(code)
    process = subprocess.Popen(
        [sys.executable, str(script), *arguments],
        cwd=folder,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def scripts_of(page: str) -> list[pages.Block]:
    return [block for block in pages.blocks("python") if block.page == page and block.is_script]


def test_the_quickstart_runs(tmp_path: Path) -> None:
    owner, puller = scripts_of("docs/quickstart.md")
    with started(owner.code, tmp_path) as prefill:
        assert prefill.stdout is not None
        told = prefill.stdout.readline().split()
        with started(puller.code, tmp_path, *told) as decode:
            out, errors = decode.communicate(timeout=60)
        assert decode.returncode == 0, errors
        values = [float(number) for number in range(8)]
        assert out.startswith(f"{8 * 128 * 8 * 64 * 4} bytes by ")
        assert out.endswith(f": {values}\n")
        _, errors = prefill.communicate("\n", timeout=60)
        assert (prefill.returncode, errors) == (0, "")


def test_every_script_is_run_by_a_test() -> None:
    scripts = {block.page for block in pages.blocks("python") if block.is_script}
    assert scripts <= {"docs/quickstart.md", *ELSEWHERE}


def test_parts_have_the_right_types(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="the examples' types are not checked: no mypy ('.[docs]')")
    parts = [block for block in pages.blocks("python") if not block.is_script]
    assert parts
    folder = tmp_path / "checked"
    folder.mkdir()
    (folder / "prelude.py").write_text(PRELUDE.read_text())
    for page, of_page in itertools.groupby(parts, key=lambda block: block.page):
        name = re.sub(r"\W", "_", page.removesuffix(".md"))
        body = "".join(f"# {block.name}\n{block.code}" for block in of_page)
        # Parts may await; names that a page defines twice may change their type.
        code = f"async def page() -> None:\n{textwrap.indent(body, '    ')}\n"
        (folder / f"{name}.py").write_text(f"from prelude import *\n\n{code}")
    tolerated = ("import-untyped", "import-not-found", "no-untyped-call")
    options = [
        "--strict",
        "--allow-redefinition",
        "--config-file=",
        f"--cache-dir={tmp_path}/cache",
    ]
    options += [f"--disable-error-code={code}" for code in tolerated]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(folder)],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def commands() -> Iterator[tuple[pages.Block, list[str]]]:
    for block in pages.blocks("sh"):
        code = block.code.replace("\\\n", " ")
        for arguments in re.findall(r"^(?:.*&& )?ucxkv ([^#&|\n]+)", code, re.MULTILINE):
            yield block, shlex.split(arguments)


def test_every_command_of_ours_is_understood() -> None:
    found = list(commands())
    assert found
    parser = cli._parser()
    (subcommands,) = (
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    for block, (command, *arguments) in found:
        assert command in subcommands.choices, block.name
        known = subcommands.choices[command].format_help()
        for argument in arguments:
            if argument.startswith("-"):
                assert re.search(rf"{argument.split('=')[0]}\b", known), (block.name, argument)

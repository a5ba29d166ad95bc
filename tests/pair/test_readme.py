"""The README's example does what it shows, and its commands are where they are looked for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ucxkv

README = Path(__file__).parents[2] / "README.md"
FIRST_SCREEN = 40


@pytest.fixture(scope="module")
def readme() -> str:
    return README.read_text()


def test_the_example_runs(readme: str, tmp_path: Path) -> None:
    code, *_ = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 22
    script = tmp_path / "example.py"
    script.write_text(code)
    ran = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(ucxkv.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    *layers, report = ran.stdout.splitlines()
    assert layers == [f"layer {number} is here: 7.0" for number in range(4)]
    assert report.startswith(f"TransferReport(bytes={8 * 128 * 8 * 64 * 4}, ")


def test_both_commands_and_the_missing_rdma_are_on_the_first_screen(readme: str) -> None:
    first = readme.splitlines()[:FIRST_SCREEN]
    assert "pip install . && ucxkv demo" in first
    assert "pip install '.[test]' && pytest -n 2" in first
    assert any("No RDMA in the wheel" in line for line in first)


def test_every_exception_is_in_the_table(readme: str) -> None:
    for name in ucxkv.__all__:
        kind = getattr(ucxkv, name)
        if isinstance(kind, type) and issubclass(kind, ucxkv.LlmError):
            assert f"| `{name}` |" in readme


def test_links_to_files_lead_somewhere(readme: str) -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", readme):
        assert (README.parent / target).exists(), target

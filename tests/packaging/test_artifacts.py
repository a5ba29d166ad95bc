"""The sdist and the wheel: what is in them, and whether they work elsewhere."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from build import ProjectBuilder
from build.env import DefaultIsolatedEnv

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = (".git", "build", "dist", "*.egg-info", "__pycache__", "*.so", ".*_cache", ".venv")
# What the sdist has to have, of the files of this source tree.
PARTS = (
    "LICENSE",
    "*.md",
    "MANIFEST.in",
    "pyproject.toml",
    "setup.py",
    ".ci/run",
    "mkdocs.yml",
    "docs/*.py",
    "docs/*.css",
    "pyx/*.pyx",
    "pyx/*.pxd",
    "ucxkv/*.py",
    "ucxkv/*.pyi",
    "ucxkv/py.typed",
    "tests/*.py",
    "tests/*.c",
    "tests/*.supp",
    "perf/*.py",
    "perf/*.md",
    "perf/*.c",
    "perf/*.pyx",
    "examples/*.py",
    "docs/*.md",
    "docs/*.json",
)
SMALL_DEMO = ("--layers=2", "--dim=64", "--heads=2", "--kv-heads=1", "--ffn=64", "--tokens=3")
LIBRARIES = ("libucm.so.0", "libucs.so.0", "libuct.so.0", "libucp.so.0")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(
    command: Sequence[str | Path], cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run to success, in an environment with nothing of ours, showing the output otherwise."""
    names = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("UCX", "PYTHON", "LD_", "VIRTUAL_ENV"))
    }
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**names, **(env or {})},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done


def sources() -> set[str]:
    """The files of this source tree that belong to the project, as relative paths."""
    found = set()
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [f for f in folders if not any(fnmatch.fnmatch(f, out) for out in LEFT_OUT)]
        if "pyvenv.cfg" in files:
            folders.clear()
        for file in files:
            name = (Path(folder) / file).relative_to(ROOT).as_posix()
            if any(fnmatch.fnmatch(name, part) for part in PARTS):
                found.add(name)
    return found


@dataclass(frozen=True)
class Built:
    """The sdist, and the wheel made from what is in it."""

    unpacked: Path
    wheel: Path
    sdist_files: frozenset[str]
    wheel_files: frozenset[str]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """As `python -m build` makes them, but both in one isolated environment."""
    folder = tmp_path_factory.mktemp("build")
    tree = folder / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
    out = folder / "out"
    with DefaultIsolatedEnv() as env:
        sdist = build(env, "sdist", tree, out)
        run(["tar", "xzf", sdist], folder)
        unpacked = folder / sdist.name.removesuffix(".tar.gz")
        files = frozenset(
            file.relative_to(unpacked).as_posix() for file in unpacked.rglob("*") if file.is_file()
        )
        wheel = build(env, "wheel", unpacked, out)
    with zipfile.ZipFile(wheel) as packed:
        content = frozenset(packed.namelist())
    return Built(unpacked, wheel, files, content)


def build(env: DefaultIsolatedEnv, what: Literal["sdist", "wheel"], tree: Path, out: Path) -> Path:
    def backend(
        command: Sequence[str], cwd: str | None = None, more: Mapping[str, str] | None = None
    ) -> None:
        # What is built, and how fast that is, does not matter to what is in the files.
        run(command, Path(cwd or tree), {**(more or {}), "UCXKV_QUICK_BUILD": "1"})

    builder = ProjectBuilder.from_isolated_env(env, tree, runner=backend)
    env.install(builder.build_system_requires)
    env.install(builder.get_requires_for_build(what))
    return Path(builder.build(what, out))


@dataclass(frozen=True)
class Installed:
    """A fresh virtual environment with the wheel in it, and a folder that is not the source."""

    python: Path
    command: Path
    elsewhere: Path

    def info(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        found: dict[str, str] = json.loads(
            run([self.command, "info", "--json"], self.elsewhere, env).stdout
        )
        return found


def pip_for(python: Path) -> list[str | Path]:
    """The command that installs into another environment, which needs no pip of its own."""
    return [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv")
    scripts = folder / "venv/bin"
    run([*pip_for(scripts / "python"), built.wheel], folder)
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    yield Installed(scripts / "python", scripts / "ucxkv", elsewhere)
    shutil.rmtree(folder / "venv")


@pytest.fixture(scope="module")
def system_ucx(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another whole UCX, where the dynamic linker looks first."""
    wheel = Path(installed.info()["ucx_library"]).parent
    lib = tmp_path_factory.mktemp("system") / "lib"
    (lib / "ucx").mkdir(parents=True)
    for file in (*LIBRARIES, "ucx/libuct_cma.so.0"):
        shutil.copy(wheel / file, lib / file)
    return lib


def test_sdist_is_complete(built: Built) -> None:
    assert sources() - built.sdist_files == set()


def test_sdist_has_nothing_built(built: Built) -> None:
    wrong = [
        name
        for name in built.sdist_files
        if re.search(r"\.(so|o|pyc)$|^(pyx|ucxkv)/.*\.c$|__pycache__|^(build|dist)/", name)
    ]
    assert wrong == []


def test_wheel_is_complete(built: Built) -> None:
    tree = sources()
    plain = {name for name in tree if name.startswith("ucxkv/")}
    assert plain - built.wheel_files == set()
    compiled = {name.split(".")[0] for name in built.wheel_files if name.endswith(".so")}
    wanted = {f"ucxkv/{Path(name).stem}" for name in tree if re.match(r"pyx/.*\.pyx$", name)}
    assert compiled == wanted


def test_wheel_has_the_package_alone(built: Built) -> None:
    others = {name for name in built.wheel_files if not name.startswith("ucxkv")}
    assert others == set()
    assert not [name for name in built.wheel_files if name.endswith((".pyx", ".pxd", ".c"))]


def test_metadata(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as packed:
        (name,) = (name for name in built.wheel_files if name.endswith("/METADATA"))
        text = packed.read(name).decode()
        (name,) = (name for name in built.wheel_files if name.endswith("/entry_points.txt"))
        commands = packed.read(name).decode()
        (license_text,) = (
            packed.read(name).decode()
            for name in built.wheel_files
            if name.endswith("/licenses/LICENSE")
        )
    head = text.partition("\n\n")[0]
    assert "License-Expression: Apache-2.0" in head
    assert "Requires-Python: >=3.10" in head
    needed = {
        re.split(r"[^\w-]", line)[0]
        for line in re.findall(r"^Requires-Dist: (.*)$", head, re.MULTILINE)
        if "extra ==" not in line
    }
    assert needed == {"numpy", "msgspec", "psutil", "rich", "libucx-cu12"}
    assert "ucxkv = ucxkv_command:main" in commands
    assert "Apache License" in license_text


def test_extensions_ask_for_ucx_by_name(built: Built, tmp_path: Path) -> None:
    """No path of the machine that built them: what `ucxkv._load` has loaded is what they get."""
    with zipfile.ZipFile(built.wheel) as packed:
        packed.extractall(tmp_path)
    extensions = sorted((tmp_path / "ucxkv").glob("*.so"))
    assert extensions
    for extension in extensions:
        dynamic = run(["readelf", "-d", extension], tmp_path).stdout
        assert not re.search(r"R(UN)?PATH.*libucx", dynamic), dynamic
        needed = set(re.findall(r"NEEDED.*\[(libuc.*?)\]", dynamic))
        assert needed <= {"libucp.so.0", "libucs.so.0"}


def test_the_wheel_works_elsewhere(installed: Installed) -> None:
    code = "import ucxkv, ucxkv.engine; print(ucxkv.__file__, ucxkv.engine.__file__)"
    found = run([installed.python, "-c", code], installed.elsewhere).stdout.split()
    assert all(Path(file).is_relative_to(installed.python.parents[1]) for file in found)
    info = installed.info()
    assert info["ucx_origin"] == "wheel"
    assert Path(info["ucx_library"]).is_relative_to(installed.python.parents[1])


@pytest.mark.parametrize("path", ["get", "stream"])
def test_two_processes_pull_with_the_installed_wheel(installed: Installed, path: str) -> None:
    done = run(
        [installed.command, "demo", "--json", f"--path={path}", *SMALL_DEMO], installed.elsewhere
    )
    assert json.loads(done.stdout)["tokens_equal"] is True


def test_a_system_ucx_that_the_linker_prefers_is_not_taken(
    installed: Installed, system_ucx: Path
) -> None:
    info = installed.info({"LD_LIBRARY_PATH": str(system_ucx)})
    assert info["ucx_origin"] == "wheel"
    assert not Path(info["ucx_library"]).is_relative_to(system_ucx)


@pytest.mark.parametrize("switch", ["system", "prefix"])
def test_a_system_ucx_is_taken_when_asked_for(
    installed: Installed, system_ucx: Path, switch: str
) -> None:
    env = {"LD_LIBRARY_PATH": str(system_ucx), "UCXKV_UCX": "system"}
    if switch == "prefix":
        env = {"UCXKV_UCX": str(system_ucx.parent)}
    info = installed.info(env)
    assert info["ucx_origin"] == switch
    assert Path(info["ucx_library"]) == system_ucx / "libucp.so.0"
    demo = run([installed.command, "demo", "--json", *SMALL_DEMO], installed.elsewhere, env)
    assert json.loads(demo.stdout)["tokens_equal"] is True


@pytest.mark.parametrize("switch", ["wheel", "system"])
def test_libraries_transports_and_extensions_are_of_one_ucx(
    installed: Installed, system_ucx: Path, switch: str
) -> None:
    """Also once UCX has loaded its transport modules, which happens with the first context."""
    code = """
import re, sys
from ucxkv import LlmDataDist, Options, _load
with LlmDataDist(1, options=Options(listen="127.0.0.1:0")):
    with open("/proc/self/maps") as maps:
        files = {line.split(maxsplit=5)[5].strip() for line in maps if "/libuc" in line}
    print(_load.loaded().folder, *sorted(files))
"""
    env = {"LD_LIBRARY_PATH": str(system_ucx), "UCXKV_UCX": switch}
    folder, *files = run([installed.python, "-c", code], installed.elsewhere, env).stdout.split()
    assert (folder == str(system_ucx)) is (switch == "system")
    assert f"{folder}/ucx/libuct_cma.so.0" in files
    assert {Path(file).name for file in files} >= set(LIBRARIES)
    assert [file for file in files if not file.startswith(folder + "/")] == []


@pytest.mark.skipif(
    os.environ.get("UCXKV_TEST_ALL") != "1",
    reason="builds everything a second time, for a minute: set UCXKV_TEST_ALL=1",
)
def test_the_source_tree_installs_in_place(built: Built, installed: Installed) -> None:
    """An editable install; the last test here, because it replaces the wheel that is installed."""
    pip = [*pip_for(installed.python), "--no-deps"]
    run([*pip, "--editable", built.unpacked], built.unpacked.parent)
    code = "import ucxkv, ucxkv.engine; print(ucxkv.__file__, ucxkv.engine.__file__)"
    found = run([installed.python, "-c", code], installed.elsewhere).stdout.split()
    assert [Path(file).parent for file in found] == [built.unpacked / "ucxkv"] * 2
    demo = run([installed.command, "demo", "--json", *SMALL_DEMO], installed.elsewhere)
    assert json.loads(demo.stdout)["tokens_equal"] is True

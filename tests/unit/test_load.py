"""Which UCX is chosen, on made-up installations, and what loading a real one leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

import ucxkv
from ucxkv import _load

LIBRARIES = tuple(f"lib{name}.so.0" for name in _load._LIBRARIES)
PACKAGE = Path(ucxkv.__file__).parent

# Runs the loader alone, as the import of the package would.
LOADER = f"""
import ctypes, os, sys, types
package = types.ModuleType("ucxkv")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["ucxkv"] = package
from ucxkv import _load
"""


def installation(lib: Path, version: str = "1.22.0", *, rdma: bool = False) -> Path:
    """Files that look like a UCX; nothing in them can be loaded."""
    (lib / "ucx").mkdir(parents=True)
    for name in LIBRARIES:
        (lib / name).write_bytes(b"\x7fELF" + b"no UCX 1.7 or later\0A" + version.encode() + b"\0")
    if rdma:
        (lib / "ucx" / "libuct_ib.so.0").touch()
    return lib


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without UCX and without RDMA; what is put into its folders is found."""
    monkeypatch.setattr(_load, "wheel_folder", lambda: existing(tmp_path / "wheel/lib"))
    monkeypatch.setattr(_load, "_SYSTEM_FOLDERS", (str(tmp_path / "usr/lib"),))
    monkeypatch.setattr(_load, "_LINKER_CONFIGURATION", tmp_path / "ld.so.conf.d")
    monkeypatch.setattr(_load, "_RDMA_DEVICES", tmp_path / "infiniband")
    monkeypatch.setattr(_load, "_mapped", dict)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    return tmp_path


def existing(folder: Path) -> Path | None:
    return folder if folder.exists() else None


def give_rdma(machine: Path) -> None:
    (machine / "infiniband/mlx5_0").mkdir(parents=True)


# -- the choice -----------------------------------------------------------------------------


def test_auto_takes_the_wheel_where_there_is_no_rdma(machine: Path) -> None:
    wheel = installation(machine / "wheel/lib")
    system = installation(machine / "usr/lib", rdma=True)
    assert _load.choose("auto") == (wheel, "wheel")
    assert _load.choose("system") == (system, "system")


def test_auto_takes_a_system_ucx_for_rdma_devices(machine: Path) -> None:
    give_rdma(machine)
    wheel = installation(machine / "wheel/lib")
    assert _load.choose("auto") == (wheel, "wheel")
    system = installation(machine / "usr/lib", "1.13.1", rdma=True)
    assert _load.choose("auto") == (system, "system")
    assert _load.choose("wheel") == (wheel, "wheel")


@pytest.mark.parametrize(("version", "rdma"), [("1.12.1", True), ("1.18.1", False)])
def test_auto_leaves_a_system_ucx_that_is_too_old_or_has_no_rdma(
    machine: Path, version: str, rdma: bool
) -> None:
    give_rdma(machine)
    wheel = installation(machine / "wheel/lib")
    installation(machine / "usr/lib", version, rdma=rdma)
    assert _load.choose("auto") == (wheel, "wheel")


def test_auto_takes_a_system_ucx_where_there_is_no_wheel(machine: Path) -> None:
    system = installation(machine / "usr/lib")
    assert _load.choose("auto") == (system, "system")


def test_a_version_that_cannot_be_told_is_left_to_the_library_itself(machine: Path) -> None:
    give_rdma(machine)
    installation(machine / "wheel/lib")
    system = installation(machine / "usr/lib", "unknown", rdma=True)
    assert _load.version_in(system) is None
    assert _load.choose("auto") == (system, "system")


@pytest.mark.parametrize("place", ["lib", "lib64", ".", "ucx/lib", "mt/lib"])
def test_a_prefix(machine: Path, place: str) -> None:
    installation(machine / "wheel/lib")
    lib = installation(machine / "opt/ucx" / place)
    folder, origin = _load.choose(str(machine / "opt/ucx"))
    assert folder.resolve() == lib.resolve()
    assert origin == "prefix"


@pytest.mark.parametrize("prefix", ["opt/hpcx", "opt/hpcx/ucx"])
def test_of_hpcx_s_builds_the_one_for_threads(machine: Path, prefix: str) -> None:
    installation(machine / "opt/hpcx/ucx/lib", rdma=True)
    (machine / "opt/hpcx/ompi/lib").mkdir(parents=True)
    threads = installation(machine / "opt/hpcx/ucx/mt/lib", rdma=True)
    assert _load.choose(str(machine / prefix)) == (threads, "prefix")


def test_a_prefix_without_ucx(machine: Path) -> None:
    (machine / "opt/ucx/lib").mkdir(parents=True)
    with pytest.raises(ImportError, match=r"no lib/libucp\.so\.0 under it"):
        _load.choose(str(machine / "opt/ucx"))


@pytest.mark.parametrize(
    ("switch", "words"),
    [
        ("auto", "libucx-cu12"),
        ("wheel", "libucx-cu12"),
        ("system", "LD_LIBRARY_PATH"),
        ("somewhere", "auto, wheel, system or a prefix"),
        ("/nowhere/at/all", "no such folder"),
    ],
)
def test_what_is_not_there_is_named(machine: Path, switch: str, words: str) -> None:
    with pytest.raises(ImportError, match=words) as caught:
        _load.choose(switch)
    assert switch == "auto" or switch in str(caught.value)


def test_the_linker_s_folders_come_in_its_order(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = installation(machine / "usr/lib")
    assert _load.system_folder() == usual
    configured = installation(machine / "opt/fabric")
    (machine / "ld.so.conf.d").mkdir()
    (machine / "ld.so.conf.d/fabric.conf").write_text(f"# ours\n{configured}\n")
    assert _load.system_folder() == configured
    first = installation(machine / "opt/first")
    monkeypatch.setenv("LD_LIBRARY_PATH", f":relative:/nowhere:{first}")
    assert _load.system_folder() == first


@pytest.mark.parametrize(
    ("text", "version"),
    [("1.13.1", (1, 13, 1)), ("1.22.0", (1, 22, 0)), ("1.18.0-rc1", (1, 18, 0)), ("2", None)],
)
def test_version_of_a_file(tmp_path: Path, text: str, version: tuple[int, ...] | None) -> None:
    assert _load.version_in(installation(tmp_path / "lib", text)) == version


def test_version_of_the_loaded_library_is_in_its_file() -> None:
    ucx = _load.loaded()
    assert _load.version_in(ucx.folder) == ucx.version
    assert ucx.version_text == ".".join(map(str, ucx.version))


# -- one UCX in a process -------------------------------------------------------------------


def present(monkeypatch: pytest.MonkeyPatch, *libs: Path) -> None:
    files = {lib / "libucp.so.0" for lib in libs}
    monkeypatch.setattr(_load, "_mapped", lambda: {"ucp": files})


def test_auto_goes_with_a_ucx_that_is_loaded_already(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = installation(machine / "wheel/lib")
    system = installation(machine / "usr/lib")
    other = installation(machine / "opt/lib")
    for lib, origin in ((wheel, "wheel"), (system, "system"), (other, "prefix")):
        present(monkeypatch, lib)
        assert _load._wanted("auto") == (lib, origin)
    present(monkeypatch, wheel)
    assert _load._wanted("wheel") == (wheel, "wheel")


def test_another_than_the_loaded_one_cannot_be_had(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = installation(machine / "wheel/lib", "1.22.0")
    system = installation(machine / "usr/lib", "1.13.1")
    present(monkeypatch, system)
    with pytest.raises(ImportError) as caught:
        _load._wanted("wheel")
    for word in (str(system), str(wheel), "1.13.1", "1.22.0", "UCXKV_UCX=wheel"):
        assert word in str(caught.value)


def test_two_loaded_ones_are_an_error(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = installation(machine / "wheel/lib")
    system = installation(machine / "usr/lib", "1.13.1")
    present(monkeypatch, wheel, system)
    with pytest.raises(ImportError, match="cannot be mixed") as caught:
        _load._check_unmixed(wheel)
    for word in (str(system), str(wheel), "UCXKV_UCX"):
        assert word in str(caught.value)


def test_libraries_of_two_installations_are_an_error(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = installation(machine / "wheel/lib")
    system = installation(machine / "usr/lib")
    files = {"ucp": {wheel / "libucp.so.0"}, "ucs": {system / "libucs.so.0"}}
    monkeypatch.setattr(_load, "_mapped", lambda: files)
    with pytest.raises(ImportError, match="cannot be mixed"):
        _load._check_unmixed(wheel)


def test_transports_of_another_installation_are_refused(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = installation(machine / "wheel/lib")
    system = installation(machine / "usr/lib")
    monkeypatch.setenv("UCX_MODULE_DIR", str(wheel / "ucx"))
    _load._check_modules(wheel)
    monkeypatch.setenv("UCX_MODULE_DIR", str(machine / "own"))
    _load._check_modules(wheel)
    monkeypatch.setenv("UCX_MODULE_DIR", str(system / "ucx"))
    with pytest.raises(ImportError, match="UCX_MODULE_DIR"):
        _load._check_modules(wheel)


def test_an_incomplete_installation_is_not_loaded(machine: Path) -> None:
    lib = installation(machine / "usr/lib")
    (lib / "libuct.so.0").unlink()
    with pytest.raises(ImportError, match=r"libuct\.so\.0 missing"):
        _load._load_from(lib)


def test_an_installation_that_cannot_be_loaded_is_named(machine: Path) -> None:
    lib = installation(machine / "usr/lib")
    with pytest.raises(ImportError, match=str(lib)):
        _load._load_from(lib)


@pytest.mark.parametrize("name", ["/lib/libucp.so", "/a b/libucs.so.0", "/x/libucm-1a2b.so.0.0.0"])
def test_libraries_are_known_by_their_files(name: str) -> None:
    assert _load._MAPPED.search(name)


@pytest.mark.parametrize("name", ["/x/libuct_cma.so.0", "/x/libucs_signal.so.0", "/x/libuc.so"])
def test_modules_are_not_taken_for_libraries(name: str) -> None:
    assert not _load._MAPPED.search(name)


# -- loading, in processes of their own -----------------------------------------------------


def run(code: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    names = {k: v for k, v in os.environ.items() if not k.startswith(("UCX", "LD_"))}
    return subprocess.run(
        [sys.executable, "-I", "-c", LOADER + textwrap.dedent(code)],
        env={**names, **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
    )


def output(code: str, env: Mapping[str, str] | None = None) -> str:
    done = run(code, env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_the_whole_of_one_installation_is_loaded_and_found_by_name() -> None:
    wheel = _load.wheel_folder()
    assert wheel is not None
    found = output(
        """
        ucx = _load.load()
        assert _load.load() is ucx is _load.loaded()
        by_name = ctypes.CDLL("libucp.so.0")
        assert by_name._handle == ctypes.CDLL(ucx.path)._handle
        assert ctypes.CDLL(None).ucp_get_version_string
        print(*sorted(str(file) for files in _load._mapped().values() for file in files))
        print(ucx.origin)
        """,
        {"UCXKV_UCX": "wheel"},
    )
    files = sorted(str((wheel / name).resolve()) for name in LIBRARIES)
    assert found.splitlines() == [" ".join(files), "wheel"]


def test_files_of_the_wheel_under_other_names_are_not_loaded_twice() -> None:
    """The wheel has copies where others have symbolic links, and its own loader takes those."""
    assert (
        output(
            """
            import libucx
            keep = libucx.load_library()
            ucx = _load.load()
            assert all(len(files) == 1 for files in _load._mapped().values()), _load._mapped()
            print(os.path.basename(ucx.path), ucx.origin)
            """
        )
        == "libucp.so wheel"
    )


def test_nothing_is_loaded_before_load() -> None:
    assert output("print(_load._mapped())") == "{}"
    done = run("_load.loaded()")
    assert "RuntimeError: no UCX has been loaded" in done.stderr


# struct sigaction: handler, mask, flags, of which SA_RESTORER is libc's affair.
DISPOSITIONS = """
import faulthandler, signal, struct
libc = ctypes.CDLL(None)
def actions():
    found = {}
    for number in range(1, 65):
        buffer = ctypes.create_string_buffer(256)
        if libc.sigaction(number, None, buffer) == 0:
            handler, mask, flags = struct.unpack_from("P8s120xI", buffer)
            found[number] = handler, mask, flags & ~0x04000000
    stack = ctypes.create_string_buffer(64)
    libc.sigaltstack(None, stack)
    return found, stack.raw
"""


@pytest.mark.parametrize("fatal", [False, True], ids=["plain", "faulthandler"])
def test_signals_and_environment_stay_as_they_were(fatal: bool) -> None:
    output(
        DISPOSITIONS
        + f"if {fatal}: faulthandler.enable()\n"
        + textwrap.dedent(
            """
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGUSR2, lambda *_: None)
            environment, before = dict(os.environ), actions()
            _load.load()
            assert actions() == before
            assert dict(os.environ) == environment
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
            """
        )
    )


def test_the_guard_undoes_what_is_set_within_it() -> None:
    """Whatever this machine's UCX does: handlers and signal stack come back."""
    output(
        DISPOSITIONS
        + textwrap.dedent(
            """
            class Stack(ctypes.Structure):
                _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int),
                            ("size", ctypes.c_size_t)]
            memory = ctypes.create_string_buffer(65536)
            before = actions()
            with _load._Dispositions():
                signal.signal(signal.SIGHUP, signal.SIG_IGN)
                faulthandler.enable()
                stack = Stack(ctypes.addressof(memory), 0, len(memory))
                assert libc.sigaltstack(ctypes.byref(stack), None) == 0
                inside = actions()
                assert inside[0] != before[0] and inside[1] != before[1]
            assert actions() == before
            """
        )
    )


def test_too_old_a_ucx_is_refused_by_name(tmp_path: Path) -> None:
    installation(tmp_path / "lib", "1.12.1")
    done = run("_load.load()", {"UCXKV_UCX": str(tmp_path)})
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    for word in (str(tmp_path), "1.12.1", "older than 1.13", "UCXKV_UCX"):
        assert word in last


def test_source_without_extensions_says_so(tmp_path: Path) -> None:
    (tmp_path / "ucxkv").mkdir()
    for name in ("__init__.py", "_load.py", "_version.py"):
        (tmp_path / "ucxkv" / name).write_text((PACKAGE / name).read_text())
    done = subprocess.run(
        [sys.executable, "-c", "import ucxkv"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "its extensions have not been built" in done.stderr.splitlines()[-1]

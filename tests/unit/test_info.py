"""What ``ucxkv info`` says, on made-up machines and on this one."""

from __future__ import annotations

import errno
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from sysfs import ROOT, Sysfs

from ucxkv import _load, info
from ucxkv.devices import interfaces, rdma_ports
from ucxkv.options import Options

RESOURCES = {
    "cma": "#      resource 1  :  md 1  dev 0  flags -- cma/memory",
    "posix": "#      resource 0  :  md 0  dev 0  flags -- posix/memory",
    "tcp": "#      resource 2  :  md 2  dev 1  flags -- tcp/eth0",
    "self": "#      resource 3  :  md 3  dev 2  flags -- self/memory",
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine whose UCX has all of RESOURCES, without RDMA and without restrictions."""

    def describe(settings: dict[str, str]) -> str:
        names = settings["TLS"].split(",")
        return "\n".join(line for name, line in RESOURCES.items() if name in names)

    monkeypatch.setattr(info, "describe", describe)
    monkeypatch.setattr(info, "silence_ucx", lambda: None)
    monkeypatch.setattr(info, "_probe", lambda: 0)
    monkeypatch.setattr(info, "_YAMA", tmp_path / "ptrace_scope")
    monkeypatch.setattr(_load, "_RDMA_DEVICES", tmp_path / "infiniband")
    monkeypatch.delenv("UCXKV_PATH", raising=False)
    monkeypatch.delenv("UCX_TLS", raising=False)
    use(monkeypatch, (1, 22, 0))
    return tmp_path


def use(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int]) -> None:
    ucx = _load.LoadedUcx("/opt/ucx/lib/libucp.so.0", version, "prefix")
    monkeypatch.setattr(_load, "_loaded", ucx)


def test_a_machine_as_it_should_be(machine: Path) -> None:
    found = info.collect()
    assert found.same_host_get.native
    assert found.get_transports == ["cma/memory", "posix/memory"]
    assert found.stream_transports == ["tcp/eth0", "self/memory"]
    assert (found.ucx_version, found.ucx_origin) == ("1.22.0", "prefix")
    assert not found.rdma_transports
    assert found.rdma_devices == []


@pytest.mark.parametrize(("tls", "why"), [("tcp,self", "no transport"), ("posix", "no transport")])
def test_a_setting_in_the_way_is_named(machine: Path, tls: str, why: str) -> None:
    finding = info.collect(Options(ucx={"TLS": tls})).same_host_get
    assert not finding.native
    assert f"UCX_TLS={tls}" in finding.reason
    assert why in finding.reason
    assert "UCX_TLS" in finding.advice


def test_a_forced_path_is_named(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCXKV_PATH", "stream")
    finding = info.collect().same_host_get
    assert not finding.native
    assert "stream" in finding.reason
    assert "UCXKV_PATH" in finding.advice


def test_an_old_ucx_is_named(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, (1, 18, 1))
    finding = info.collect().same_host_get
    assert not finding.native
    assert "1.18.1" in finding.reason
    assert "1.19" in finding.advice


def test_a_missing_transport_is_named(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RESOURCES, "cma")
    finding = info.collect().same_host_get
    assert not finding.native
    assert "cma" in finding.reason
    assert "UCXKV_UCX=wheel" in finding.advice


@pytest.mark.parametrize("scope", [2, 3])
def test_ptrace_scope_is_named(machine: Path, monkeypatch: pytest.MonkeyPatch, scope: int) -> None:
    (machine / "ptrace_scope").write_text(f"{scope}\n")
    monkeypatch.setattr(info, "_probe", lambda: errno.EPERM)
    finding = info.collect().same_host_get
    assert not finding.native
    assert f"ptrace_scope is {scope}" in finding.reason
    assert "ptrace_scope=1" in finding.advice
    assert ("reboot" in finding.advice) is (scope == 3)


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_a_container_is_suspected(
    machine: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    (machine / "ptrace_scope").write_text("1\n")
    monkeypatch.setattr(info, "_probe", lambda: number)
    finding = info.collect().same_host_get
    assert not finding.native
    assert "process_vm_readv" in finding.reason
    assert "seccomp" in finding.advice
    assert "namespace" in finding.advice


def test_a_probe_that_cannot_run_is_no_crash(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> int:
        raise subprocess.TimeoutExpired("probe", 20)

    monkeypatch.setattr(info, "_probe", fail)
    assert "could not be tried" in info.collect().same_host_get.reason


def test_rdma_devices_without_transports(machine: Path) -> None:
    (machine / "infiniband/mlx5_0").mkdir(parents=True)
    found = info.collect()
    assert found.rdma_devices == ["mlx5_0"]
    text = printed(found)
    assert "no RDMA transports" in text
    assert "UCXKV_UCX" in text


def test_devices_and_where_they_are(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sys = Sysfs(machine / "sys")
    sys.gpu(f"{ROOT}/0000:00:01.0/0000:01:00.0/0000:02:00.0", 0)
    sys.port("mlx5_0", f"{ROOT}/0000:00:01.0/0000:01:00.0/0000:03:00.0", node=1)
    monkeypatch.setattr(info, "rdma_ports", lambda: rdma_ports(sys.folder))
    monkeypatch.setattr(info, "interfaces", lambda: interfaces(sys.folder))
    text = " ".join(printed(info.collect()).split())
    assert "mlx5_0:1 ACTIVE, Ethernet, 100 Gbit/s, NUMA node 1, PCI 0000:03:00.0" in text
    assert "NVIDIA GPU 0000:02:00.0 behind the same PCI bridge" in text
    assert "net_mlx5_0 MTU 9000, 100 Gbit/s" in text


def printed(found: info.Info) -> str:
    stream = io.StringIO()
    info.render(found, Console(file=stream, width=80))
    return stream.getvalue()


def test_it_fits_a_terminal(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ucx = _load.LoadedUcx("/long" * 30 + "/libucp.so.0", (1, 22, 0), "prefix")
    monkeypatch.setattr(_load, "_loaded", ucx)
    for tls in ("cma", "tcp", "posix,sysv,self,tcp,ud,rc,dc" * 4):
        lines = printed(info.collect(Options(ucx={"TLS": tls}))).splitlines()
        assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("tls", [None, "tcp,self", "rc,tcp", "rc"])
def test_json_of_this_machine(tls: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever UCX has to complain of, standard output is JSON and nothing else."""
    if tls is None:
        monkeypatch.delenv("UCX_TLS", raising=False)
    else:
        monkeypatch.setenv("UCX_TLS", tls)
    code = f"import sys; sys.path[:] = {sys.path!r}\nfrom ucxkv import info\ninfo.main(json=True)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    found = json.loads(done.stdout)
    assert found["ucx_library"] == _load.loaded().path
    assert found["same_host_get"]["native"] == any(
        name.startswith("cma/") for name in found["get_transports"]
    )
    if tls is not None:
        assert not found["same_host_get"]["native"]

"""What the doctor finds, on made-up machines and from made-up measurements."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest
from sysfs import ROOT, Sysfs

from ucxkv import _load
from ucxkv.devices import Interface, rdma_ports
from ucxkv.doctor import board, findings, host, pair
from ucxkv.doctor.findings import Finding
from ucxkv.doctor.pair import Measured
from ucxkv.info import Finding as Get
from ucxkv.info import Info
from ucxkv.options import Options

PLACE = f"{ROOT}/0000:00:01.0/0000:01:00.0"
UNLIMITED = resource.RLIM_INFINITY


class Made:
    """A machine on which nothing is wrong: one RoCE port, limits and pages as they should be."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.sys = Sysfs(folder / "sys")
        self.get = Get(True, "cma", "")
        self.limit(UNLIMITED, UNLIMITED)
        self.ucx((1, 18, 1))
        (folder / "ucx/lib/ucx").mkdir(parents=True)
        (folder / "ucx/lib/ucx/libuct_ib.so.0").touch()
        (folder / "dev/infiniband").mkdir(parents=True)
        (folder / "dev/infiniband/uverbs0").touch()
        (folder / "dev/shm").mkdir()
        self.sys.write("kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
        self.proc("meminfo", "HugePages_Total:       0\n")

    def proc(self, name: str, text: str) -> None:
        file = self.folder / "proc" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def limit(self, soft: int, hard: int) -> None:
        self.monkeypatch.setattr(host.resource, "getrlimit", lambda _kind: (soft, hard))

    def ucx(self, version: tuple[int, int, int]) -> None:
        path = str(self.folder / "ucx/lib/libucp.so.0")
        self.monkeypatch.setattr(_load, "_loaded", _load.LoadedUcx(path, version, "prefix"))

    def examine(self, options: Options | None = None) -> dict[str, Finding]:
        info = Info(
            ucxkv="1", python="3", ucx_version="1", ucx_library="", ucx_origin="", path="auto",
            stream_transports=[], get_transports=[], rdma_transports=True, rdma_devices=[],
            same_host_get=self.get, ports=[], interfaces=[],
        )  # fmt: skip
        place = host.Machine(self.folder / "sys", self.folder / "proc", self.folder / "dev")
        found = host.examine(info, options or Options(), place)
        for finding in found:
            check_form(finding)
        return {finding.check: finding for finding in found}


def check_form(finding: Finding) -> None:
    """Whatever is wrong says why that matters and what mends it, and all of it fits a terminal."""
    assert finding.what
    if finding.level in ("warn", "fail"):
        assert finding.why
        assert finding.mend
    lines = findings.lines(finding)
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(finding.level)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    for name in list(host.os.environ):
        if name.startswith(("UCX_", "UCXKV_")):
            monkeypatch.delenv(name)
    return Made(tmp_path, monkeypatch)


def bad(found: dict[str, Finding]) -> dict[str, str]:
    return {name: f.level for name, f in found.items() if f.level in ("warn", "fail")}


def test_nothing_is_found_where_nothing_is_wrong(made: Made) -> None:
    made.sys.port("mlx5_0", PLACE)
    found = made.examine()
    assert bad(found) == {}
    assert "100 Gbit/s" in found["mlx5_0:1"].what
    assert "RoCE v2 at 1" in found["mlx5_0:1 GID"].what


def test_no_rdma_at_all_is_no_fault(made: Made) -> None:
    made.limit(65536, 65536)
    found = made.examine()
    assert bad(found) == {}
    assert found["RDMA"].level == "note"


def test_a_ucx_without_rdma(made: Made) -> None:
    made.sys.port("mlx5_0", PLACE)
    (made.folder / "ucx/lib/ucx/libuct_ib.so.0").unlink()
    found = made.examine()
    assert bad(found) == {"RDMA": "fail"}
    assert "libucx0" in found["RDMA"].mend
    assert "UCXKV_UCX" in found["RDMA"].mend


def test_a_ucx_without_its_modules(made: Made) -> None:
    (made.folder / "ucx/lib/ucx/libuct_ib.so.0").unlink()
    (made.folder / "ucx/lib/ucx").rmdir()
    assert bad(made.examine()) == {"UCX modules": "warn"}


def test_a_release_that_is_known_to_fail(made: Made) -> None:
    made.ucx((1, 20, 0))
    assert bad(made.examine()) == {"UCX": "warn"}


def test_a_container_without_the_device_files(made: Made) -> None:
    made.sys.port("mlx5_0", PLACE)
    (made.folder / "dev/infiniband/uverbs0").unlink()
    found = made.examine()
    assert bad(found) == {"RDMA": "fail"}
    assert "--device=/dev/infiniband" in found["RDMA"].mend


def test_a_device_file_that_may_not_be_opened(made: Made) -> None:
    made.sys.port("mlx5_0", PLACE)
    made.monkeypatch.setattr(host.os, "access", lambda *_: False)
    found = made.examine()
    assert bad(found) == {"RDMA": "fail"}
    assert "chmod" in found["RDMA"].mend


@pytest.mark.parametrize(
    ("layer", "state", "mend"),
    [
        ("Ethernet", "1: DOWN", "ip link set net_mlx5_0 up"),
        ("InfiniBand", "2: INIT", "opensm"),
        ("InfiniBand", "1: DOWN", "cable"),
    ],
)
def test_a_port_that_is_down(made: Made, layer: str, state: str, mend: str) -> None:
    made.sys.port("mlx5_0", PLACE, state=state, link_layer=layer)
    found = made.examine()
    assert bad(found) == {"mlx5_0:1": "fail"}
    assert mend in found["mlx5_0:1"].mend


def test_roce_without_a_routable_address(made: Made) -> None:
    made.sys.port("mlx5_0", PLACE, gids=("IB/RoCE v1",))
    found = made.examine()
    assert bad(found) == {"mlx5_0:1 GID": "warn"}
    assert "ip addr add" in found["mlx5_0:1 GID"].mend


def test_roce_with_small_packets(made: Made) -> None:
    made.sys.port("mlx5_0", PLACE, mtu=1500)
    found = made.examine()
    assert bad(found) == {"mlx5_0:1 MTU": "warn"}
    assert "ip link set net_mlx5_0 mtu 9000" in found["mlx5_0:1 MTU"].mend


def test_a_device_at_another_numa_node(made: Made) -> None:
    made.sys.port("mlx5_0", PLACE, node=1)
    made.sys.write("devices/system/node/node0/cpulist", "0-511")
    made.sys.write("devices/system/node/node1/cpulist", "512-1023")
    found = made.examine()
    assert bad(found) == {"mlx5_0:1 NUMA": "warn"}
    assert "--cpunodebind=1" in found["mlx5_0:1 NUMA"].mend


@pytest.mark.parametrize(
    ("hard", "mend"), [(UNLIMITED, "ulimit -l unlimited"), (65536, "limits.conf")]
)
def test_too_little_memory_may_be_locked(made: Made, hard: int, mend: str) -> None:
    made.sys.port("mlx5_0", PLACE)
    made.limit(65536, hard)
    found = made.examine()
    assert bad(found) == {"memlock": "fail"}
    assert mend in found["memlock"].mend


def test_a_capability_is_as_good_as_a_limit(made: Made) -> None:
    made.sys.port("mlx5_0", PLACE)
    made.limit(65536, 65536)
    made.proc("self/status", "Name:\tx\nCapEff:\t0000000000004000\n")
    assert bad(made.examine()) == {}
    made.proc("self/status", "Name:\tx\nCapEff:\t000001ffffffbfff\n")
    assert bad(made.examine()) == {"memlock": "fail"}


def test_soft_roce_needs_a_setting(made: Made) -> None:
    made.sys.port("rxe0", None)
    found = made.examine()
    assert bad(found) == {"soft RoCE": "fail"}
    assert "UCX_UD_VERBS_ETH_DGID_CHECK=n" in found["soft RoCE"].mend
    assert bad(made.examine(Options(ucx={"UD_VERBS_ETH_DGID_CHECK": "n"}))) == {}


def test_no_get_on_one_host(made: Made) -> None:
    made.get = Get(False, "kernel.yama.ptrace_scope is 2", "sysctl kernel.yama.ptrace_scope=1")
    found = made.examine()
    assert bad(found) == {"same-host GET": "warn"}
    assert "sysctl" in found["same-host GET"].mend


def test_no_huge_pages(made: Made) -> None:
    made.sys.write("kernel/mm/transparent_hugepage/enabled", "always madvise [never]")
    assert bad(made.examine()) == {"huge pages": "warn"}
    made.proc("meminfo", "HugePages_Total:     512\n")
    assert bad(made.examine()) == {}


def test_little_shared_memory(made: Made) -> None:
    (made.folder / "dev/shm").rmdir()
    found = made.examine()
    assert bad(found) == {"/dev/shm": "warn"}
    assert "--shm-size" in found["/dev/shm"].mend


def test_settings_that_no_link_can_be_made_with(made: Made) -> None:
    made.monkeypatch.setenv("UCX_TCP_TX_SEG_SIZE", "8k")
    found = made.examine()
    assert bad(found) == {"settings": "fail"}
    assert found["settings"].mend == "unset UCX_TCP_TX_SEG_SIZE"
    assert "UCX_TCP_TX_SEG_SIZE=8k" in found["environment"].what


# -- between two ends -----------------------------------------------------------------------


@pytest.mark.parametrize(("offset", "level"), [(0.0, "ok"), (-3600.0, "warn"), (1.0, "warn")])
def test_clocks(offset: float, level: str) -> None:
    found = pair.clocks(lambda: board.Posted(time.time() + offset, {}))
    check_form(found)
    assert found.level == level


def pulls(gigabytes: float, path: str = "get") -> list[Measured]:
    return [Measured(size, size / gigabytes / 1e9, path) for size in pair.SIZES]


def test_a_rate_is_held_against_the_port_that_carries_it(made: Made) -> None:
    made.sys.port("mlx5_0", PLACE)
    ports = rdma_ports(made.sys.folder)
    networks = [Interface("eth0", True, 1500, 10.0, None)]
    for transports, gigabytes, path, level in (
        (("rc_mlx5/mlx5_0:1", "tcp/eth0"), 11.0, "get", "ok"),
        (("rc_mlx5/mlx5_0:1", "tcp/eth0"), 2.0, "get", "warn"),
        (("tcp/eth0",), 1.0, "stream", "ok"),
        (("tcp/eth0",), 0.3, "stream", "warn"),
        (("tcp/lo", "cma/memory"), 0.3, "get", "ok"),
    ):
        found = list(pair.rates(pulls(gigabytes, path), transports, ports, networks))
        for finding in found:
            check_form(finding)
        assert [finding.level for finding in found[:-1]] == ["ok", "ok"]
        assert found[-1].level == level, transports


def test_a_port_in_software_promises_nothing(made: Made) -> None:
    made.sys.port("rxe0", None)
    ports = rdma_ports(made.sys.folder)
    assert pair.promised(("rc_verbs/rxe0:1",), ports, []) is None


def test_a_name_that_is_none() -> None:
    found = pair.visit("no.such.host.invalid", 1, Options())
    (finding,) = found.findings
    check_form(finding)
    assert finding.level == "fail"
    assert "no.such.host.invalid" in finding.what

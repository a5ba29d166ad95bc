"""What is told of network devices, on made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest
from sysfs import ROOT, Sysfs

from ucxkv import devices


@pytest.fixture
def sys(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path)


def test_a_machine_without_anything(sys: Sysfs) -> None:
    assert devices.rdma_ports(sys.folder) == []
    assert devices.interfaces(sys.folder) == []
    assert devices.nodes_of({0}, sys.folder) == set()


def test_a_port_of_a_device(sys: Sysfs) -> None:
    sys.port("mlx5_0", f"{ROOT}/0000:00:01.0/0000:01:00.0", node=1)
    (port,) = devices.rdma_ports(sys.folder)
    assert (port.name, port.state, port.link_layer) == ("mlx5_0:1", "ACTIVE", "Ethernet")
    assert (port.gigabits, port.mtu, port.interface) == (100, 9000, "net_mlx5_0")
    assert (port.numa_node, port.pci) == (1, "0000:01:00.0")
    assert [(gid.index, gid.kind) for gid in port.gids] == [(0, "RoCE v1"), (1, "RoCE v2")]
    assert port.routable
    assert not port.software


def test_a_port_in_software(sys: Sysfs) -> None:
    sys.port("rxe0", None, gids=("IB/RoCE v1",))
    (port,) = devices.rdma_ports(sys.folder)
    assert port.software
    assert port.pci is port.numa_node is None
    assert not port.routable


def test_how_far_gpus_are(sys: Sysfs) -> None:
    sys.gpu(f"{ROOT}/0000:00:01.0/0000:01:00.0/0000:02:00.0", 0)
    sys.gpu(f"{ROOT}/0000:00:02.0/0000:05:00.0", 0)
    sys.gpu("devices/pci0000:40/0000:40:01.0/0000:41:00.0", 0, "0x1002")
    sys.gpu("devices/pci0000:80/0000:80:01.0/0000:81:00.0", 1)
    sys.gpu("devices/pci0000:c0/0000:c0:01.0/0000:c1:00.0", -1)
    sys.port("mlx5_0", f"{ROOT}/0000:00:01.0/0000:01:00.0/0000:03:00.0")
    (port,) = devices.rdma_ports(sys.folder)
    assert {gpu.pci: gpu.distance for gpu in port.gpus} == {
        "0000:02:00.0": "behind the same PCI bridge",
        "0000:05:00.0": "at the same PCI root",
        "0000:41:00.0": "on the same NUMA node",
        "0000:81:00.0": "on another NUMA node",
        "0000:c1:00.0": "at another PCI root",
    }
    assert {gpu.vendor for gpu in port.gpus} == {"NVIDIA", "AMD"}


def test_interfaces_and_their_rates(sys: Sysfs) -> None:
    sys.port("mlx5_0", None)
    sys.write("class/net/lo/mtu", "65536")
    sys.write("class/net/lo/operstate", "unknown")
    sys.write("class/net/eth9/speed", "-1")
    sys.write("class/net/eth9/operstate", "down")
    found = {net.name: net for net in devices.interfaces(sys.folder)}
    assert found["net_mlx5_0"].gigabits == 100
    assert found["lo"].up
    assert found["lo"].mtu == 65536
    assert found["lo"].gigabits is found["eth9"].gigabits is None
    assert not found["eth9"].up


def test_numa_nodes_of_cpus(sys: Sysfs) -> None:
    sys.write("devices/system/node/node0/cpulist", "0-3,8")
    sys.write("devices/system/node/node1/cpulist", "4-7,9-11")
    sys.write("devices/system/node/possible", "0-1")
    assert devices.nodes_of({2}, sys.folder) == {0}
    assert devices.nodes_of({8, 9}, sys.folder) == {0, 1}


def test_this_machine_can_be_looked_at() -> None:
    assert "lo" in {net.name for net in devices.interfaces()}
    devices.rdma_ports()

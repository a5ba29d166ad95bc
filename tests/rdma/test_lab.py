"""The lab itself, as far as it can be tried without a guest."""

from __future__ import annotations

import pytest

from rdma import guest, lab

DEPENDENCIES = """\
kernel/drivers/rxe/rdma_rxe.ko.xz: kernel/net/ib_core.ko.xz kernel/net/udp_tunnel.ko.xz
kernel/net/ib_core.ko.xz: kernel/net/nothing.ko.xz
kernel/net/udp_tunnel.ko.xz:
kernel/net/nothing.ko.xz:
kernel/drivers/net/veth.ko.xz:
"""


def test_modules_come_after_what_they_need() -> None:
    ordered = guest.in_order(DEPENDENCIES, ["veth", "rdma_rxe", "built_in"])
    names = [path.rsplit("/", 1)[1].split(".")[0] for path in ordered]
    assert names[0] == "veth"
    assert names.index("nothing") < names.index("ib_core") < names.index("rdma_rxe")
    assert names.index("udp_tunnel") < names.index("rdma_rxe")
    assert len(names) == 5


def test_what_is_missing_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert lab.main(["--", "true"]) == lab.NOT_HERE
    told = capsys.readouterr().err
    assert "NO RDMA GUEST HERE" in told
    assert "qemu-system-x86_64" in told
    assert "apt-get install" in told


def test_only_root_has_a_guest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert lab.main(["--", "true"]) == lab.NOT_HERE
    assert "root" in capsys.readouterr().err

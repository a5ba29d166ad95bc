"""UCX settings: precedence, what is forced, and which transports a GET may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ucxkv import _load, settings
from ucxkv.options import Options

OLDEST, LAST_OLD, FIRST_CMA, NEXT, NEW = (
    (1, 13, 1),
    (1, 18, 1),
    (1, 19, 0),
    (1, 20, 0),
    (1, 22, 0),
)
TCP = {"TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE", "TCP_CONN_NB"}
POSIX, SYSV = {"POSIX_ERROR_HANDLING"}, {"SYSV_ERROR_HANDLING"}
ALWAYS = {"ADDRESS_VERSION", "RNDV_THRESH"}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("UCX_") or name == "UCXKV_PATH":
            monkeypatch.delenv(name)


def options(tls: str | None = None, path: str = "auto", **ucx: str) -> Options:
    return Options(path=path, ucx=({"TLS": tls} if tls else {}) | ucx)


def am(chosen: Options, interface: str | None = "eth0", rdma: bool = False) -> dict[str, str]:
    return settings.am_settings(chosen, interface, NEW, rdma=rdma)


def rma_tls(
    tls: str | None, version: tuple[int, int, int] = NEW, rdma: bool = False
) -> list[str] | None:
    found = settings.rma_settings(options(tls), version, rdma=rdma)
    return None if found is None else sorted(found["TLS"].split(","))


# -- streaming ------------------------------------------------------------------------------


def test_streaming_defaults() -> None:
    size = str(settings.STREAM_SEGMENT)
    assert am(Options()) == {
        "TLS": "tcp,self",
        "NET_DEVICES": "eth0",
        "TCP_TX_SEG_SIZE": size,
        "TCP_RX_SEG_SIZE": size,
        "TCP_CONN_NB": "y",
        "ADDRESS_VERSION": "v2",
        "RNDV_THRESH": "inf",
    }
    assert "NET_DEVICES" not in am(Options(), interface=None)


def test_a_segment_holds_a_chunk_and_headers_and_is_the_same_both_ways() -> None:
    sizes = [int(am(Options())[f"TCP_{way}_SEG_SIZE"]) for way in ("TX", "RX")]
    assert sizes[0] == sizes[1] == settings.STREAM_SEGMENT > settings.STREAM_CHUNK + 512


def test_older_releases_take_settings_of_transports_without_their_names() -> None:
    old = settings.am_settings(options("tcp,posix"), "lo", (1, 16, 0), rdma=False)
    new = settings.am_settings(options("tcp,posix"), "lo", (1, 17, 0), rdma=False)
    assert old["TX_SEG_SIZE"] == new["TCP_TX_SEG_SIZE"]
    assert old["CONN_NB"] == new["TCP_CONN_NB"] == "y"
    assert old["ERROR_HANDLING"] == new["POSIX_ERROR_HANDLING"] == "y"
    assert not any(name.startswith(("TCP_", "POSIX_")) for name in old)
    assert old["RNDV_THRESH"] == new["RNDV_THRESH"] == "inf"


def test_options_win_over_the_environment_and_both_over_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "posix")
    monkeypatch.setenv("UCX_NET_DEVICES", "eth7")
    found = am(Options())
    # The environment is read by UCX itself, so nothing may be set over it.
    assert "TLS" not in found
    assert "NET_DEVICES" not in found
    found = am(options("tcp", KEEPALIVE_INTERVAL="5s"))
    assert found["TLS"] == "tcp"
    assert found["KEEPALIVE_INTERVAL"] == "5s"


def test_what_is_forced_wins_over_the_user() -> None:
    found = am(options(TCP_TX_SEG_SIZE="8k", RNDV_THRESH="1024"))
    assert found["TCP_TX_SEG_SIZE"] == str(settings.STREAM_SEGMENT)
    assert found["RNDV_THRESH"] == "inf"


@pytest.mark.parametrize(
    ("tls", "rdma", "bound"),
    [
        (None, False, True),
        (None, True, True),
        ("tcp", False, True),
        ("tcp,cma,self", True, True),
        ("rc,tcp", True, False),
        ("ud_verbs,tcp", True, False),
        ("posix,self", False, False),
        ("all", False, True),
        ("all", True, False),
        ("^cma", False, True),
        ("^cma", True, False),
        ("^tcp", False, False),
    ],
)
def test_tcp_is_kept_to_its_interface_where_nothing_else_has_devices(
    tls: str | None, rdma: bool, bound: bool
) -> None:
    assert ("NET_DEVICES" in am(options(tls), rdma=rdma)) is bound


@pytest.mark.parametrize(
    ("tls", "concerned"),
    [
        (None, TCP),
        ("tcp", TCP),
        ("tcp,posix", TCP | POSIX),
        ("sysv", SYSV),
        ("sm,self", POSIX | SYSV),
        ("rc,self", set()),
        ("all", TCP | POSIX | SYSV),
        ("^cma", TCP | POSIX | SYSV),
        ("^sm", TCP),
        ("^tcp,sysv", POSIX),
    ],
)
def test_forced_settings_concern_the_transports_that_may_be_used(
    tls: str | None, concerned: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(am(options(tls))) & set(settings.FORCED) == concerned | ALWAYS
    if tls is not None:
        monkeypatch.setenv("UCX_TLS", tls)
        assert set(am(Options())) & set(settings.FORCED) == concerned | ALWAYS


def test_shared_memory_reports_the_death_of_peers() -> None:
    assert rma(NEW, rdma=False)["POSIX_ERROR_HANDLING"] == "y"


# -- conflicts ------------------------------------------------------------------------------


def test_contradictions_are_named_with_both_values(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.forced_conflicts(Options()) == []
    monkeypatch.setenv("UCX_ADDRESS_VERSION", "v1")
    found = settings.forced_conflicts(options(TCP_RX_SEG_SIZE="8k"))
    assert len(found) == 2
    assert any("UCX_ADDRESS_VERSION=v1" in text and "=v2" in text for text in found)
    assert any("UCX_TCP_RX_SEG_SIZE=8k" in text for text in found)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RNDV_THRESH", "INF"),
        ("POSIX_ERROR_HANDLING", "yes"),
        ("SYSV_ERROR_HANDLING", "1"),
        ("TCP_TX_SEG_SIZE", "257k"),
        ("TCP_RX_SEG_SIZE", "263168b"),
    ],
)
def test_other_spellings_of_the_same_value_are_no_contradiction(name: str, value: str) -> None:
    assert settings.forced_conflicts(options(**{name: value})) == []


def test_options_hide_a_contradiction_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_RNDV_THRESH", "8k")
    assert settings.forced_conflicts(options(RNDV_THRESH="inf")) == []


# -- transports of a GET --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tls", "left"),
    [
        (None, ["cma", "posix"]),
        ("all", ["cma", "posix"]),
        ("tcp,self", None),
        ("self", None),
        ("tcp", None),
        ("posix,sysv,self", None),
        ("tcp,cma", ["cma", "posix"]),
        ("cma,posix", ["cma", "posix"]),
        (" cma , sysv ", ["cma", "sysv"]),
        ("cma,tcp,self", ["cma", "posix", "self"]),
        ("sm,tcp", ["sm"]),
        ("shm", ["shm"]),
        ("mm,tcp", None),
        ("mm,cma", ["cma", "mm"]),
        ("^mm", None),
        ("ud,ud_verbs,udx,tcp", None),
        ("rc,tcp", None),
        ("rc,cma", ["cma", "posix"]),
        ("^tcp", ["cma", "posix"]),
        ("^posix", ["cma", "sysv"]),
        ("^posix,sysv", None),
        ("^cma", None),
        ("^sm", None),
        ("^ib", ["cma", "posix"]),
    ],
)
def test_no_emulating_transport_is_left_without_rdma(tls: str | None, left: list[str]) -> None:
    assert rma_tls(tls) == left


@pytest.mark.parametrize(
    ("tls", "left"),
    [
        (None, ["cma", "posix", "rc"]),
        ("rc,ud,tcp", ["rc"]),
        ("rc_verbs,self", ["rc_verbs", "self", "ud_verbs:aux"]),
        ("rc_verbs,ud_verbs,self", ["rc_verbs", "self", "ud_verbs:aux"]),
        ("rc_mlx5,dc_mlx5", ["dc_mlx5", "rc_mlx5", "ud_mlx5:aux"]),
        ("dc_x,tcp", ["dc_x"]),
        ("ud_verbs,tcp", None),
        ("ib", ["ib"]),
        ("^tcp", ["cma", "posix", "rc"]),
        ("^sm", ["rc", "self"]),
        ("^rc", ["cma", "posix"]),
        ("^ib,cma", None),
    ],
)
def test_no_emulating_transport_is_left_with_rdma(tls: str | None, left: list[str]) -> None:
    assert rma_tls(tls, rdma=True) == left


@pytest.mark.parametrize("version", [OLDEST, LAST_OLD])
def test_older_ucx_has_gets_over_rdma_only(version: tuple[int, int, int]) -> None:
    assert rma_tls(None, version) is None
    assert rma_tls("cma,posix", version) is None
    assert rma_tls("sm", version) is None
    assert rma_tls(None, version, rdma=True) == ["rc", "self"]
    assert rma_tls("rc,cma,posix", version, rdma=True) == ["rc"]


def rma(version: tuple[int, int, int], rdma: bool, **ucx: str) -> dict[str, str]:
    found = settings.rma_settings(options(**ucx), version, rdma=rdma)
    assert found is not None
    return found


@pytest.mark.parametrize("version", [OLDEST, LAST_OLD, FIRST_CMA, NEXT, NEW])
def test_settings_that_depend_on_the_version(version: tuple[int, int, int]) -> None:
    found = rma(version, rdma=True)
    assert ("PROTO_ENABLE" in found) == (version < FIRST_CMA)
    assert ("CMA_MEMORY_INVALIDATE" in found) == (version == FIRST_CMA)
    assert ("PROTO_EMULATION_ENABLE" in found) == (version == NEW)
    assert found["RCACHE_MAX_UNRELEASED"] == "1024"
    assert found["RNDV_THRESH"] == "inf"
    assert not TCP & set(found)


def test_the_user_may_change_what_is_not_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_PROTO_EMULATION_ENABLE", "y")
    found = rma(NEW, rdma=False, RCACHE_MAX_UNRELEASED="7")
    assert "PROTO_EMULATION_ENABLE" not in found
    assert found["RCACHE_MAX_UNRELEASED"] == "7"


def test_the_environment_is_reduced_like_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,cma")
    assert rma(NEW, rdma=False)["TLS"] == "cma,posix"


# -- paths ----------------------------------------------------------------------------------


def test_a_forced_stream_needs_no_context_for_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.rma_settings(options(path="stream"), NEW, rdma=True) is None
    monkeypatch.setenv("UCXKV_PATH", "stream")
    assert settings.rma_settings(options(path="get"), NEW, rdma=True) is None


def test_a_forced_get_emulates_only_where_nothing_native_is_named() -> None:
    emulated = settings.rma_settings(options("tcp,self", path="get"), NEW, rdma=False)
    assert emulated is not None
    assert emulated["TLS"] == "tcp,self"
    assert "PROTO_EMULATION_ENABLE" not in emulated
    assert emulated["TCP_TX_SEG_SIZE"] == emulated["TCP_RX_SEG_SIZE"]
    native = settings.rma_settings(options("tcp,cma", path="get"), NEW, rdma=False)
    assert native is not None
    assert native["TLS"] == "cma,posix"
    assert settings.rma_settings(options(path="get"), OLDEST, rdma=False) is None


def test_rdma_needs_devices_and_transports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    devices = tmp_path / "infiniband"
    folder = tmp_path / "lib"
    monkeypatch.setattr(_load, "_RDMA_DEVICES", devices)
    loaded = _load.LoadedUcx(str(folder / "libucp.so.0"), NEW, "prefix")
    monkeypatch.setattr(_load, "_loaded", loaded)
    assert not settings.rdma_usable()
    (devices / "mlx5_0").mkdir(parents=True)
    assert not settings.rdma_usable()
    (folder / "ucx").mkdir(parents=True)
    (folder / "ucx" / "libuct_ib.so.0").touch()
    assert settings.rdma_usable()
    assert rma_tls(None, rdma=settings.rdma_usable()) == ["cma", "posix", "rc"]

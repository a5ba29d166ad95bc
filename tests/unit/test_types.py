"""Public values, statuses and exceptions, as the specification fixes them."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest

import ucxkv
from ucxkv import errors
from ucxkv.errors import Status, error_for
from ucxkv.types import (
    Cache,
    CacheDesc,
    CacheIndex,
    CachePlacement,
    ClusterInfo,
    DataType,
    EngineStats,
    IpInfo,
    KvCacheExtParam,
    LinkInfo,
    LinkResult,
    LlmRole,
    TransferReport,
    TransferStats,
    transfer_totals,
)

STATUSES = {
    "SUCCESS": (0, None, None),
    "FAILED": (0xFFFFFFFF, errors.LlmError, RuntimeError),
    "KV_CACHE_NOT_EXIST": (0x5010B002, errors.KvCacheNotExist, LookupError),
    "PARAM_INVALID": (0x5010B005, errors.ParamInvalid, ValueError),
    "NOT_YET_LINK": (0x5010B007, errors.NotYetLink, ConnectionError),
    "ALREADY_LINK": (0x5010B008, errors.AlreadyLink, errors.LlmError),
    "LINK_FAILED": (0x5010B009, errors.LinkFailed, ConnectionError),
    "UNLINK_FAILED": (0x5010B00A, errors.UnlinkFailed, errors.LlmError),
    "DEVICE_OUT_OF_MEMORY": (0x5010B00E, errors.LlmOutOfMemory, MemoryError),
    "EXIST_LINK": (0x5010B018, errors.ExistLink, errors.LlmError),
    "FEATURE_NOT_ENABLED": (0x5010B019, errors.FeatureNotEnabled, errors.LlmError),
    "TIMEOUT": (0x5010B01A, errors.LlmTimeout, TimeoutError),
    "OUT_OF_MEMORY": (0x5010B01C, errors.LlmOutOfMemory, MemoryError),
    # Not LLM-DataDist's, and apart from its numbers.
    "HOLD_ENDED": (0x5010B101, errors.HoldEnded, errors.LlmError),
}


def test_status_has_the_values_of_the_specification() -> None:
    assert {status.name: int(status) for status in Status} == {
        name: value for name, (value, _, _) in STATUSES.items()
    }


@pytest.mark.parametrize("name", [name for name in STATUSES if name != "SUCCESS"])
def test_each_status_has_its_exception(name: str) -> None:
    value, kind, base = STATUSES[name]
    error = error_for(Status(value), "why")
    assert type(error) is kind
    assert isinstance(error, base)
    assert isinstance(error, errors.LlmError)
    assert isinstance(error, RuntimeError)
    assert error.status == value
    assert str(error) == "why"


def test_success_is_no_error() -> None:
    with pytest.raises(ValueError, match="SUCCESS"):
        error_for(Status.SUCCESS, "")


def test_status_of_a_class_is_that_of_its_table_row() -> None:
    assert errors.LlmTimeout().status is Status.TIMEOUT
    assert errors.LlmOutOfMemory().status is Status.OUT_OF_MEMORY
    assert errors.LlmError("odd", Status.UNLINK_FAILED).status is Status.UNLINK_FAILED


def test_link_failed_has_results() -> None:
    results = [LinkResult(7, Status.LINK_FAILED, "refused"), LinkResult(8, Status.SUCCESS)]
    error = errors.LinkFailed("cluster 7: refused", results=results)
    assert error.results == results
    assert error.status is Status.LINK_FAILED
    assert errors.LinkFailed("none given").results == []


def test_errors_can_go_from_process_to_process() -> None:
    results = [LinkResult(7, Status.LINK_FAILED, "refused")]
    for error in (
        error_for(Status.DEVICE_OUT_OF_MEMORY, "full"),
        errors.LinkFailed("no", results=results),
    ):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert copy.status is error.status
        assert str(copy) == str(error)
        assert vars(copy) == vars(error)


@pytest.mark.parametrize(
    ("names", "size"),
    [
        (("UNDEFINED",), 0),
        (("BOOL", "INT8", "UINT8", "FLOAT8_E4M3", "FLOAT8_E5M2"), 1),
        (("FLOAT16", "BF16", "INT16", "UINT16"), 2),
        (("FLOAT", "INT32", "UINT32"), 4),
        (("DOUBLE", "INT64", "UINT64"), 8),
    ],
)
def test_item_sizes(names: tuple[str, ...], size: int) -> None:
    assert [DataType[name].itemsize for name in names] == [size] * len(names)


def test_data_types_are_those_of_the_specification_and_distinct() -> None:
    assert len(DataType.__members__) == len(list(DataType)) == 16


def test_enumerations() -> None:
    assert [(role.name, int(role)) for role in LlmRole] == [
        ("PROMPT", 1),
        ("DECODER", 2),
        ("MIX", 3),
    ]
    assert [(place.name, int(place)) for place in CachePlacement] == [("HOST", 0), ("DEVICE", 1)]


def test_defaults() -> None:
    assert CacheDesc(2, (3, 4)) == CacheDesc(2, (3, 4), DataType.UNDEFINED, None)
    assert Cache() == Cache(-1, (), None)
    assert CacheIndex(5, 6) == CacheIndex(5, 6, 0)
    assert KvCacheExtParam() == KvCacheExtParam((-1, -1), (-1, -1), 2)
    info = ClusterInfo(3, [IpInfo("::1", 80)])
    assert info.remote_role is None
    assert tuple(info.local_ip_infos) == ()


@pytest.mark.parametrize(
    "value",
    [
        CacheDesc(2, (3, 4)),
        CacheIndex(5, 6),
        KvCacheExtParam(),
        IpInfo("h", 1),
        ClusterInfo(3, ()),
        LinkResult(1, Status.SUCCESS),
        LinkInfo(1, "h:1", "up"),
        TransferReport(8, 0.5, "get", 1),
    ],
)
def test_values_do_not_change(value: object) -> None:
    assert dataclasses.is_dataclass(value)
    name = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, None)
    assert pickle.loads(pickle.dumps(value)) == value


def test_caches_are_compared_without_their_arrays() -> None:
    arrays = (np.zeros(3),)
    assert Cache(1, (2,), None, arrays) == Cache(1, (2,), None)
    assert "tensors" not in repr(Cache(1, (2,), None, arrays))


def test_description_from_tensors() -> None:
    arrays = [np.zeros((2, 3), np.float16) for _ in range(4)]
    assert CacheDesc.from_tensors(arrays) == CacheDesc(
        4, (2, 3), DataType.FLOAT16, CachePlacement.HOST
    )
    with pytest.raises(errors.ParamInvalid):
        CacheDesc.from_tensors([*arrays, np.zeros((2, 4), np.float16)])
    with pytest.raises(TypeError):
        CacheDesc.from_tensors([object()])


COUNTED = {
    "transfers": 10,
    "spans": 12,
    "bytes_get": 100,
    "bytes_stream": 20,
    "bytes_pushed": 3,
    "bytes_served": 5000,
    "failures": {0x5010B002: 2, 0x5010B01A: 1, 0x5010B101: 4},
    "latency_ns": {1000.0: 90, 2000.0: 9, 5000.0: 1},
}


def test_stats_from_what_was_counted() -> None:
    stats = TransferStats(**transfer_totals(COUNTED))
    assert stats.failures == {
        Status.KV_CACHE_NOT_EXIST: 2,
        Status.TIMEOUT: 1,
        Status.HOLD_ENDED: 4,
    }
    assert all(isinstance(status, Status) for status in stats.failures)
    assert stats.latency == pytest.approx({"p50": 1e-6, "p90": 1e-6, "p99": 2e-6})
    assert (stats.transfers, stats.spans) == (10, 12)
    assert (stats.bytes_get, stats.bytes_stream, stats.bytes_pushed) == (100, 20, 3)
    assert stats.bytes == 123
    assert stats.bytes_served == 5000


def test_stats_of_nothing() -> None:
    stats = TransferStats(**transfer_totals(COUNTED | {"latency_ns": {}, "failures": {}}))
    assert stats.latency == {}
    assert stats.failures == {}
    assert TransferStats() == TransferStats(0, 0, 0, 0, 0, 0, {}, {})
    assert EngineStats().links == {}


def test_every_public_name_is_there_and_documented() -> None:
    for name in ucxkv.__all__:
        assert getattr(ucxkv, name).__doc__, name


class TestOptions:
    def test_defaults(self) -> None:
        options = ucxkv.Options()
        assert options.listen is None
        assert options.sync_cache_wait_time_ms == 1000
        assert options.secret is None
        assert options.path == "auto"
        assert options.ucx == {}

    def test_the_secret_is_not_shown(self) -> None:
        assert "hush" not in repr(ucxkv.Options(secret="hush"))

    @pytest.mark.parametrize(
        "wrong",
        [
            {"listen": 80},
            {"sync_cache_wait_time_ms": "1"},
            {"sync_cache_wait_time_ms": True},
            {"secret": 5},
            {"path": None},
            {"ucx": [("TLS", "tcp")]},
            {"ucx": {"TLS": 1}},
            {"ucx": {1: "tcp"}},
            {"devices": "mlx5_0:1"},
            {"devices": [1]},
            {"devices": 1},
            {"traffic_class": "1"},
            {"service_level": True},
            {"gid_index": 1.0},
        ],
    )
    def test_wrong_types(self, wrong: dict[str, object]) -> None:
        with pytest.raises(TypeError):
            ucxkv.Options(**wrong)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "wrong",
        [
            {"listen": "host"},
            {"listen": "host:port"},
            {"listen": "host:65536"},
            {"listen": "host:-1"},
            {"sync_cache_wait_time_ms": 0},
            {"sync_cache_wait_time_ms": float("nan")},
            {"sync_cache_wait_time_ms": float("inf")},
            {"secret": ""},
            {"secret": b""},
            {"path": "put"},
            {"ucx": {"UCX_TLS": "tcp"}},
            {"devices": []},
            {"devices": ["mlx5_0:1,mlx5_1:1"]},
            {"devices": [""]},
            {"devices": ["eth0"], "ucx": {"NET_DEVICES": "eth0"}},
            {"traffic_class": 256},
            {"traffic_class": 1, "ucx": {"IB_TRAFFIC_CLASS": "1"}},
            {"service_level": 16},
            {"gid_index": -1},
        ],
    )
    def test_wrong_values(self, wrong: dict[str, object]) -> None:
        with pytest.raises(ucxkv.ParamInvalid):
            ucxkv.Options(**wrong)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("listen", "endpoint"),
        [
            (None, None),
            ("127.0.0.1:0", ("127.0.0.1", 0)),
            ("[::1]:7000", ("::1", 7000)),
            ("some.host:65535", ("some.host", 65535)),
        ],
    )
    def test_listen(self, listen: str | None, endpoint: tuple[str, int] | None) -> None:
        assert ucxkv.Options(listen=listen).listen_endpoint() == endpoint

    def test_the_environment_chooses_the_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("UCXKV_PATH", raising=False)
        assert ucxkv.Options(path="get").resolved_path() == "get"
        monkeypatch.setenv("UCXKV_PATH", "stream")
        assert ucxkv.Options(path="get").resolved_path() == "stream"
        monkeypatch.setenv("UCXKV_PATH", "")
        assert ucxkv.Options(path="get").resolved_path() == "get"
        monkeypatch.setenv("UCXKV_PATH", "push")
        with pytest.raises(ucxkv.ParamInvalid, match="UCXKV_PATH"):
            ucxkv.Options().resolved_path()

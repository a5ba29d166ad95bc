"""What is said of the limit on locked memory."""

from __future__ import annotations

import resource

import pytest

from ucxkv import memlock


@pytest.mark.parametrize(
    ("limit", "devices", "said"),
    [
        (65536, ["mlx5_0"], True),
        (65536, [], False),
        (resource.RLIM_INFINITY, ["mlx5_0"], False),
    ],
)
def test_the_limit_is_named_where_it_matters(
    monkeypatch: pytest.MonkeyPatch, limit: int, devices: list[str], said: bool
) -> None:
    monkeypatch.setattr(memlock, "rdma_devices", lambda: devices)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    text = memlock.advice()
    assert ("64 KiB" in text and "ulimit -l unlimited" in text) is said
    assert bool(text) is said

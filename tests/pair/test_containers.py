"""Peers on one host that cannot read each other's memory: as in two containers, or on two hosts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import ucxkv

OWNER = """
    import sys
    import numpy as np
    from ucxkv import LlmDataDist, Options
    with LlmDataDist(1, options=Options(listen="127.0.0.1:0")) as engine:
        cache = engine.register_kv_cache(None, [np.full((2, 1000), 7, np.uint8)] * 4)
        print(*engine.listen_address, cache.cache_id, flush=True)
        sys.stdin.read()
"""
PULLER = """
    import sys
    import numpy as np
    from ucxkv import CacheIndex, ClusterInfo, IpInfo, LlmDataDist
    host, port, cache_id = sys.argv[1:]
    tensors = [np.zeros((2, 1000), np.uint8) for _ in range(4)]
    with LlmDataDist(2) as engine:
        engine.link_llm_clusters([ClusterInfo(1, [IpInfo(host, int(port))])], timeout_ms=5000)
        cache = engine.register_kv_cache(None, tensors)
        report = engine.pull_kv_cache(CacheIndex(1, int(cache_id)), cache, timeout_ms=5000)
        assert all((tensor[0] == 7).all() and not tensor[1].any() for tensor in tensors)
        print(report.path, engine.links()[0].path)
"""


def _may_unshare(flags: str) -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", flags, "true"], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    "flags", ["-pf", "-i", "-pfi"], ids=["process ids", "shared memory", "both"]
)
def test_streams_where_no_get_reaches(flags: str, tmp_path: Path) -> None:
    if not _may_unshare(flags):
        pytest.skip(f"namespaces cannot be made here (unshare {flags})")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("UCX")},
        "PYTHONPATH": str(Path(ucxkv.__file__).parents[1]),
    }
    owner = subprocess.Popen(
        ["unshare", flags, sys.executable, "-c", textwrap.dedent(OWNER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    try:
        told = owner.stdout.readline().split()
        pulled = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(PULLER), *told],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
            cwd=tmp_path,
            check=False,
        )
        assert (pulled.stdout, pulled.stderr) == ("stream stream\n", "")
    finally:
        owner.stdin.close()
        owner.stdout.close()
        owner.wait(20)

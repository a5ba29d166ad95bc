"""``ucxkv doctor`` against a real peer: a listening doctor, an engine that is none, nobody."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import ucxkv
from harness import Peer, environment

DOCTOR = [sys.executable, "-m", "ucxkv", "doctor"]
SECONDS = 90
# A folder with no other ucxkv than the one that is tested, which is found wherever that is.
HERE = Path(__file__).parent
FOUND = {"PYTHONPATH": str(Path(ucxkv.__file__).parents[1])}


def run(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DOCTOR, *arguments],
        cwd=HERE,
        env={**os.environ, **(env or {}), **FOUND},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def report(*arguments: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    done = run("--json", *arguments, env=env)
    assert done.returncode in (0, 1), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["ok"] is (done.returncode == 0)
    for finding in found["findings"]:
        if finding["level"] in ("warn", "fail"):
            assert finding["why"], finding
            assert finding["mend"], finding
    return found


def levels(found: dict[str, Any]) -> dict[str, str]:
    return {finding["check"]: finding["level"] for finding in found["findings"]}


@contextmanager
def listening(env: Mapping[str, str] | None = None) -> Iterator[str]:
    with subprocess.Popen(
        [*DOCTOR, "--listen", "127.0.0.1:0", "--seconds", str(SECONDS)],
        cwd=HERE,
        env={**os.environ, **(env or {}), **FOUND},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield line.split()[-1]
        process.terminate()
        assert process.wait(10) == 0


def test_two_processes(path: str) -> None:
    env = environment(path, {"UCXKV_PATH": path})
    with listening(env) as address:
        found = report("--peer", address, env=env)
    assert found["peer"] == address
    assert found["path"] == path
    assert [pull["path"] for pull in found["pulls"]] == [path] * 3
    assert all(pull["gigabytes_per_second"] > 0 for pull in found["pulls"])
    checks = levels(found)
    for check in ("control port", "versions", "settings", "clocks", "latency", "rate"):
        assert checks[check] == "ok", found["findings"]


def test_this_host_alone_as_text() -> None:
    done = run()
    assert done.returncode in (0, 1), done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert re.fullmatch(r"\d+ to mend, \d+ to look at", lines[-1])
    for word in ("UCX", "memlock", "same-host GET", "control port", "clocks", "latency", "rate"):
        assert re.search(rf"^(ok  |warn|fail|note) {word}", done.stdout, re.MULTILINE), word


def test_settings_that_differ_are_named() -> None:
    with listening({"UCX_KEEPALIVE_INTERVAL": "7s"}) as address:
        found = report("--peer", address)
    finding = next(f for f in found["findings"] if f["check"] == "settings")
    assert finding["level"] == "warn"
    assert "UCX_KEEPALIVE_INTERVAL is unset here, 7s there" in finding["what"]


def test_nobody_listens() -> None:
    found = report("--peer", "127.0.0.1:1")
    assert not found["ok"]
    assert levels(found)["control port"] == "fail"
    assert "--listen 0.0.0.0:1" in found["findings"][-1]["mend"]


def test_an_engine_that_is_no_doctor() -> None:
    with Peer(1) as engine:
        host, port = engine.address
        found = report("--peer", f"{host}:{port}")
    finding = found["findings"][-1]
    assert (finding["check"], finding["level"]) == ("link", "fail")
    assert "cluster 1 answers here" in finding["what"]
    assert "--listen" in finding["mend"]


@pytest.mark.parametrize("address", ["nowhere", "host:99999"])
def test_what_is_no_address(address: str) -> None:
    done = run("--peer", address)
    assert done.returncode == 2
    assert "host:port" in done.stderr

"""Each script of perf/ runs, at a tiny size; how fast anything is does not matter here."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import ucxkv

PERF = Path(__file__).resolve().parents[2] / "perf"
RUN_SECONDS = 60
PEERS = ("get", "get-allocated", "stream", "vm-readv", "memcpy", "sockets", "bare-get-cma")
NOT_INSTALLED = ("nixl-host", "mooncake")


def environment(folder: Path) -> dict[str, str]:
    """Nothing of the caller's but what finds the package; peers' environments: none."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("UCX", "PYTHON")) and key != "XDG_CACHE_HOME"
    }
    package = str(Path(ucxkv.__file__).resolve().parents[1])
    return {**kept, "PYTHONPATH": package, "XDG_CACHE_HOME": str(folder)}


def command(script: str, *arguments: object) -> list[str]:
    return [sys.executable, "-W", "error", str(PERF / script), *map(str, arguments)]


def run(folder: Path, script: str, *arguments: object) -> str:
    """Run to success; what it printed."""
    done = subprocess.run(
        command(script, *arguments),
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    shown = done.stdout.replace(str(folder), "")
    assert all(len(line) <= 80 for line in shown.splitlines()), done.stdout
    return done.stdout


def records(file: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[0]["kind"] == "environment"
    assert lines[0]["ucxkv"] == ucxkv.__version__
    assert lines[0]["ucx"]
    return lines[1:]


def of(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in found if record["kind"] == kind]


def test_compare(tmp_path: Path) -> None:
    file = tmp_path / "compare.json"
    arguments = ["--tiny", "--rounds", 1, "--json", file, "--work", "W2"]
    text = run(tmp_path, "compare.py", *arguments, "--only", *PEERS, *NOT_INSTALLED)
    found = records(file)
    missing = {record["peer"]: record["reason"] for record in of(found, "missing")}
    assert all("--setup" in missing.pop(peer) for peer in NOT_INSTALLED)
    # The bare C program wants a compiler.
    assert set(missing) <= {"bare-get-cma"}, missing
    for name in missing:
        assert name in text
    assert {record["peer"] for record in of(found, "compare")} == set(PEERS) - set(missing)
    assert all(record["seconds"] for record in of(found, "compare"))
    run_check(tmp_path, file)


def run_check(folder: Path, file: Path) -> None:
    """Whatever the figures are, each target has a verdict."""
    done = subprocess.run(
        command("check.py", "--json", file),
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )
    assert done.returncode in (0, 1), done.stderr
    counted = re.search(r"(\d+) hold, (\d+) missed, (\d+) not measurable", done.stdout)
    assert counted, done.stdout + done.stderr
    assert int(counted[3]) > 0


def test_kv_pull(tmp_path: Path) -> None:
    file = tmp_path / "pull.json"
    shape = ("--model", "tiny", "--tokens", 64, "--threads", 2, "--in-flight", 2, "--layers", 2)
    variants = ("--path", "get", "stream", "--memory", "ordinary", "huge")
    rounds = ("--rounds", 2, "--warmup", 1, "--json", file)
    run(tmp_path, "kv_pull.py", "--local", *shape, *variants, *rounds)
    found = records(file)
    assert {(record["path"], record["memory"]) for record in found} == {
        (path, memory) for path in ("get", "stream") for memory in ("ordinary", "huge")
    }
    for record in found:
        assert record["took"] == [record["path"]]
        # 2 tensors of 4 layers, 2 heads of 32 values of 2 bytes, 64 tokens of 4 requests.
        assert record["bytes"] == 2 * 4 * 2 * 32 * 2 * 64 * 4
        assert len(record["seconds"]) == 2
        assert len(record["arrival"]) == 4
        assert record["arrival"] == sorted(record["arrival"])


def test_kv_pull_models_are_listed(tmp_path: Path) -> None:
    text = run(tmp_path, "kv_pull.py", "--models")
    for name in ("llama3-8b", "llama3-70b", "qwen2.5", "qwen3", "mistral", "deepseek", "gpt-oss"):
        assert name in text


def test_kv_pull_between_nodes(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        command("kv_pull.py", "--listen", "127.0.0.1:0"),
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with owner:
        try:
            assert owner.stdout is not None
            port = re.search(r"127\.0\.0\.1:(\d+)", owner.stdout.readline())
            assert port
            address = f"127.0.0.1:{port[1]}"
            for path in ("get", "stream"):
                file = tmp_path / f"{path}.json"
                arguments = ("--model", "tiny", "--tokens", 32, "--rounds", 1, "--path", path)
                run(tmp_path, "kv_pull.py", "--connect", address, *arguments, "--json", file)
                assert records(file)[0]["took"] == [path]
            owner.send_signal(signal.SIGINT)
            assert owner.wait(RUN_SECONDS) == 0
        finally:
            owner.kill()


@pytest.mark.parametrize(
    ("script", "arguments", "kinds"),
    [
        ("latency.py", ("--size", 4096, "--pulls", 20), {"latency": 6}),
        ("fairness.py", ("--huge", 8, "--rounds", 1), {"fairness": 2}),
        ("planning.py", ("--spans", 1000, "--rounds", 2), {"planning": 4}),
        ("registration.py", ("--tiny", "--caches", 5, 10, "--rounds", 2), {"many_caches": 4}),
        ("scale.py", ("--links", 2, "--seconds", 0.2), {"scale": 2}),
        ("call_cost.py", ("--rounds", 2), {"call": 6, "gil": 2}),
        ("model.py", ("--tiny", "--rounds", 1), {"costs": 2}),
        ("model.py", ("--fabric", "200G", "--rails", 1, 4), {"prediction": 6}),
    ],
)
def test_figures(
    tmp_path: Path, script: str, arguments: tuple[object, ...], kinds: Mapping[str, int]
) -> None:
    file = tmp_path / "figures.json"
    run(tmp_path, script, *arguments, "--json", file)
    found = records(file)
    assert {kind: len(of(found, kind)) for kind in kinds} == kinds


def test_the_model_reads_what_it_has_written(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    run(tmp_path, "model.py", "--tiny", "--rounds", 1, "--path", "get", "--json", first)
    run(tmp_path, "model.py", "--tiny", "--measured", first, "--json", second)
    assert records(second) == records(first)
    points = of(records(first), "point")
    assert {point["owners"] for point in points} == {1, 2}
    assert {point["fitted"] for point in points} == {True, False}


def test_gil(tmp_path: Path) -> None:
    run(tmp_path, "gil.py", "--path", "get", "--seconds", 0.2)


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="wants ucxkv[perf]")
def test_plot(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("compare.json", "pull.json", "latency.json")]
    peers = ("--only", "get", "stream", "--work", "W1", "W2")
    run(tmp_path, "compare.py", "--tiny", "--rounds", 1, *peers, "--json", files[0])
    model = ("--model", "tiny", "--tokens", 32, "--rounds", 1)
    run(tmp_path, "kv_pull.py", "--local", *model, "--json", files[1])
    run(tmp_path, "latency.py", "--size", 4096, 65536, "--pulls", 20, "--json", files[2])
    png, page = tmp_path / "plot.png", tmp_path / "plot.html"
    run(tmp_path, "plot.py", *files, "--png", png, "--html", page)
    assert png.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert text.count("<svg") == 4
    # Nothing is loaded from elsewhere.
    assert not re.search(r"(src|href)=[\"']https?:", text)

"""``ucxkv demo`` as its users run it: whole processes, their output and their exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import ucxkv
from harness import needs_get
from ucxkv import _load, cli
from ucxkv.cli import PROMPT

# Small enough to be over in a moment, large enough for every kind of layer and head.
SMALL = (
    "--layers=3", "--dim=64", "--heads=4", "--kv-heads=2", "--ffn=96", "--tokens=12",
)  # fmt: skip
LIMIT = 60

# Run as a script, since a spawned process finds a script's functions, but no monkeypatch.
PATCHED = """
import dataclasses, os, signal, sys, time
from ucxkv import cli
from ucxkv.demo import processes

decode, reference = processes.decode, processes.reference

def other_reference(job, teller):
    config = dataclasses.replace(job.config, seed=job.config.seed + 1)
    return reference(dataclasses.replace(job, config=config), teller)

def broken_decode(job, teller, pipe):
    raise RuntimeError("broken on purpose")

def dying_decode(job, teller, pipe):
    os.kill(os.getpid(), signal.SIGKILL)

def refusing_decode(job, teller, pipe):
    pipe.send(None)
    processes._receive(pipe, teller.parent)
    raise RuntimeError("refused on purpose")

def swapping_decode(job, teller, pipe):
    pull = processes._pull

    def swapped(engine, registered, sequence, handoff, job):
        blocks = handoff.blocks[1::-1] + handoff.blocks[2:]
        swapped = dataclasses.replace(handoff, blocks=blocks)
        return pull(engine, registered, sequence, swapped, job)

    processes._pull = swapped
    return decode(job, teller, pipe)

def hanging_decode(job, teller, pipe):
    time.sleep(600)

def dying_prefill(job, teller, pipe):
    processes._model(job, teller)
    os._exit(7)

def broken_reference(job, teller):
    raise RuntimeError("broken on purpose")

if __name__ == "__main__":
    setattr(processes, sys.argv[1].rpartition("_")[2], globals()[sys.argv[1]])
    sys.exit(cli.main(sys.argv[2:]))
"""


def environment(**changes: str) -> dict[str, str]:
    """The package under test is found from any folder, and nothing forces a path."""
    root = str(Path(ucxkv.__file__).parents[1])
    inherited = {name: value for name, value in os.environ.items() if name != "UCXKV_PATH"}
    return {
        **inherited,
        "PYTHONPATH": root,
        "COLUMNS": "80",
        "OPENBLAS_NUM_THREADS": "1",
        **changes,
    }


def demo(folder: Path, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ucxkv", "demo", *SMALL, *arguments],
        cwd=folder,
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def child_pids(pid: int) -> list[int]:
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except FileNotFoundError:
        return []


def patched(folder: Path, what: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = folder / "patched.py"
    script.write_text(PATCHED)
    return subprocess.run(
        [sys.executable, str(script), what, "demo", *SMALL, *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def quiet(stderr: str) -> bool:
    """Whether there is nothing but progress in it, which a slow machine makes."""
    line = r"(prefill|decode|one process): [a-z ]+, \d+ %\n"
    return re.fullmatch(f"({line})*", stderr) is not None


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For what starts no process of its own: the folder and environment of the others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UCXKV_PATH", raising=False)
    monkeypatch.setenv("COLUMNS", "80")


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The exit code of the command line, run in this process, and what it has printed."""
    try:
        code = cli.main(arguments)
    except SystemExit as ended:
        code = int(ended.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def narrow(text: str) -> bool:
    return all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize("path", ["auto", "stream"])
def test_the_pulled_cache_gives_the_tokens_of_a_single_process(tmp_path: Path, path: str) -> None:
    ran = demo(tmp_path, "--json", "--path", path)
    assert ran.returncode == 0, ran.stderr
    assert quiet(ran.stderr), ran.stderr
    found = json.loads(ran.stdout)
    assert found["paged"] is None
    assert found["tokens_equal"]
    assert found["bytes_equal"]
    assert found["tokens"] == found["single_process_tokens"]
    assert len(found["tokens"]) == 12
    pull = found["pull"]
    # K and V of 3 layers, and of each the prompt's tokens: 2 KV heads of 16 floats.
    assert pull["bytes"] == 2 * 3 * found["prompt_tokens"] * 2 * 16 * 4
    assert pull["spans"] == 6
    assert path in ("auto", pull["path"])
    assert pull["transports"] or _load.loaded().version < (1, 14)
    assert pull["seconds"] > 0
    assert 0 < pull["layer_0_began_after_bytes"] <= pull["bytes"]
    assert all(seconds > 0 for seconds in found["seconds"].values())


def test_text_says_the_same_in_80_columns(tmp_path: Path) -> None:
    ran = demo(tmp_path, "--prompt", "Caché?", "--seed", "5")
    assert ran.returncode == 0, ran.stderr
    assert narrow(ran.stdout)
    assert "computed 7 tokens" in ran.stdout
    assert f"{2 * 3 * 7 * 2 * 16 * 4:,} bytes in 6 spans" in ran.stdout
    assert "all 12 equal to those of a single process" in ran.stdout


@pytest.mark.parametrize(("path", "block_size"), [("get", 1), ("stream", 7), ("get", 4096)])
def test_pulled_blocks_give_the_tokens_of_a_single_process(
    tmp_path: Path, path: str, block_size: int
) -> None:
    if path == "get":
        needs_get()
    ran = demo(tmp_path, "--paged", "--json", "--path", path, "--block-size", str(block_size))
    assert ran.returncode == 0, ran.stderr
    assert quiet(ran.stderr), ran.stderr
    found = json.loads(ran.stdout)
    assert found["tokens_equal"]
    assert found["bytes_equal"]
    paged, pull = found["paged"], found["pull"]
    blocks = -(-found["prompt_tokens"] // block_size)
    assert paged["block_tokens"] == block_size
    source, destination = paged["source_blocks"], paged["destination_blocks"]
    assert len(source) == len(destination) == blocks
    assert not set(source) & set(destination)
    for used in source, destination:
        assert len(used) == 1 or min(np.diff(np.sort(used))) > 1
    assert pull["path"] == path
    assert pull["spans"] == 2 * 3 * blocks
    assert pull["bytes"] == 2 * 3 * blocks * block_size * 2 * 16 * 4
    assert (paged["hold"], paged["notice"]) == ("noticed", "request-1")
    assert paged["held_seconds"] > 0


def test_blocks_and_hold_are_told_in_80_columns(tmp_path: Path) -> None:
    ran = demo(tmp_path, "--paged")
    assert ran.returncode == 0, ran.stderr
    assert narrow(ran.stdout)
    told = " ".join(ran.stdout.split())
    # The prompt is the usual one.
    blocks = -(-len(PROMPT.encode()) // 16)
    assert f"Moved {blocks} blocks of 16 tokens: {2 * 3 * blocks * 16 * 2 * 16 * 4:,}" in told
    assert f"bytes in {2 * 3 * blocks} spans" in told
    assert "Hold ended by the notice 'request-1' after" in told
    assert "prefill has written over its blocks since" in told
    assert "all 12 equal to those of a single process" in told


def test_other_tokens_are_noticed_in_blocks_too(tmp_path: Path) -> None:
    ran = patched(tmp_path, "other_reference", "--paged")
    assert ran.returncode == 1
    assert "WRONG: they differ from those of a single process, from token" in ran.stdout


def test_blocks_in_other_places_are_noticed(tmp_path: Path) -> None:
    """Attention does not mind the order of what it reads, but the bytes are compared too."""
    ran = patched(tmp_path, "swapping_decode", "--paged")
    assert ran.returncode == 1
    assert "WRONG: the bytes pulled are not the prefill process's" in ran.stdout


@pytest.mark.parametrize("what", ["dying_decode", "refusing_decode"])
def test_prefill_does_not_wait_for_a_notice_that_cannot_come(tmp_path: Path, what: str) -> None:
    ran = patched(tmp_path, what, "--paged")
    assert ran.returncode == 1
    assert "the decode process failed" in ran.stderr


def test_a_file_and_standard_input_are_read_as_bytes(tmp_path: Path) -> None:
    text = bytes(range(256)) * 3
    (tmp_path / "prompt.bin").write_bytes(text)
    by_name = demo(tmp_path, "--json", "--file", "prompt.bin")
    assert by_name.returncode == 0, by_name.stderr
    by_pipe = subprocess.run(
        [sys.executable, "-m", "ucxkv", "demo", *SMALL, "--json", "--file", "-"],
        cwd=tmp_path,
        env=environment(),
        input=text,
        capture_output=True,
        timeout=LIMIT,
        check=False,
    )
    one, other = json.loads(by_name.stdout), json.loads(by_pipe.stdout)
    assert one["prompt_tokens"] == len(text)
    assert one["tokens"] == other["tokens"]


def test_other_tokens_are_noticed(tmp_path: Path) -> None:
    ran = patched(tmp_path, "other_reference")
    assert ran.returncode == 1
    assert "WRONG: they differ from those of a single process, from token" in ran.stdout
    assert quiet(ran.stderr.removesuffix("ucxkv: the tokens differ\n"))
    ran = patched(tmp_path, "other_reference", "--json")
    assert ran.returncode == 1
    assert not json.loads(ran.stdout)["tokens_equal"]


@pytest.mark.parametrize("what", ["broken_decode", "broken_reference"])
def test_a_failing_process_sends_its_traceback_home(tmp_path: Path, what: str) -> None:
    name = what.removeprefix("broken_")
    ran = patched(tmp_path, what)
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert f"In the {name} process:\nTraceback" in ran.stderr
    assert f"the {name} process failed: RuntimeError: broken on purpose" in ran.stderr


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("dying_decode", "the decode process failed: it was killed by signal 9"),
        ("dying_prefill", "the prefill process failed: it ended without a word, with exit code 7"),
    ],
)
def test_a_process_that_dies_ends_the_demo(tmp_path: Path, what: str, message: str) -> None:
    start = time.monotonic()
    ran = patched(tmp_path, what)
    assert ran.returncode == 1
    assert message in ran.stderr.replace("\n", " ")
    assert "Traceback" not in ran.stderr
    assert time.monotonic() - start < 20


def test_a_process_that_hangs_ends_the_demo(tmp_path: Path) -> None:
    ran = patched(tmp_path, "hanging_decode", "--timeout", "0.5")
    assert ran.returncode == 1
    assert "no progress for 6 s; still running: decode and prefill" in ran.stderr


def test_ctrl_c_ends_every_process_at_once(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "ucxkv", "demo", "--tokens=100000"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    children: list[psutil.Process] = []
    until = time.monotonic() + 30
    # The third one keeps the books of multiprocessing.
    while len(children) < 3 and time.monotonic() < until:
        time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")
    psutil.wait_procs(children, timeout=5)
    assert not any(child.is_running() for child in children)


def test_no_child_hears_ctrl_c_while_it_starts(tmp_path: Path) -> None:
    """It would end with a traceback of its own; at every moment it blocks or ignores SIGINT."""
    with subprocess.Popen(
        [sys.executable, "-m", "ucxkv", "demo", *SMALL],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
    ) as process:
        seen: set[int] = set()
        until = time.monotonic() + LIMIT
        while process.poll() is None and time.monotonic() < until:
            for pid in child_pids(process.pid):
                seen.add(pid)
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    status = Path(f"/proc/{pid}/status").read_text()
                    deaf = [int(mask, 16) for mask in re.findall(r"Sig(?:Blk|Ign):\t(\w+)", status)]
                    # Of one that has just ended there is nothing left to read.
                    assert not deaf or any(mask & 1 << signal.SIGINT - 1 for mask in deaf), status
            time.sleep(0.002)
    assert process.returncode == 0
    # Its three, and the one that keeps the books of multiprocessing.
    assert len(seen) == 4


def test_a_ucx_that_cannot_be_used_is_told_in_a_line(tmp_path: Path) -> None:
    command = "import sys; from ucxkv_command import main; sys.exit(main())"
    ran = subprocess.run(
        [sys.executable, "-c", command, "info"],
        cwd=tmp_path,
        env=environment(UCXKV_UCX="/nonexistent"),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("ucxkv: UCXKV_UCX=/nonexistent, but there is no ")
    assert narrow(ran.stderr)
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--file", "missing"], "missing: No such file or directory"),
        (["--file", "."], ".: Is a directory"),
        (["--file", "/dev/null"], "/dev/null: there is nothing in it"),
        (["--file", "x", "--prompt", "y"], "not allowed with argument"),
        (["--tokens", "1"], "argument --tokens: 1 is less than 2"),
        (["--tokens", "x"], "argument --tokens: 'x' is not a whole number"),
        (["--timeout", "0"], "argument --timeout: 0 is not between 0 and 86400 seconds"),
        (["--block-size", "8"], "--block-size needs --paged"),
        (["--paged", "--block-size", "0"], "argument --block-size: 0 is less than 1"),
        (["--path", "rdma"], "argument --path: invalid choice"),
        (["--heads", "3"], "dim 64 does not divide into 3 heads"),
        (["--prompt", "abc", "--max-tokens", "13"], "need room for 14, but --max-tokens is 13"),
    ],
)
def test_what_cannot_work_is_said_at_once(
    here: None, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = command(capsys, "demo", *SMALL, *arguments)
    assert code == 2
    assert message in err.replace("\n", " ")
    assert narrow(err)
    assert out == ""


def test_more_than_the_memory_is_refused(here: None, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = command(capsys, "demo", *SMALL, "--max-tokens", "1000000000")
    assert code == 1
    assert "GB of memory, but only" in err


def test_contradicting_paths_are_refused(
    here: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCXKV_PATH", "stream")
    code, _, err = command(capsys, "demo", *SMALL, "--path", "get")
    assert code == 2
    assert "--path get contradicts the environment's UCXKV_PATH=stream" in err


@pytest.mark.parametrize(
    "arguments", [["--help"], ["demo", "--help"], ["info", "--help"], ["doctor", "--help"]]
)
def test_help_fits_a_terminal(
    here: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = command(capsys, *arguments)
    assert code == 0
    assert out.startswith("usage: ucxkv")
    assert narrow(out)


def test_version_names_the_ucx_in_use(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "ucxkv", "--version"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=True,
    )
    assert ran.stdout.startswith(f"ucxkv {ucxkv.__version__} with UCX 1.")

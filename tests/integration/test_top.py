"""The command ``ucxkv top`` on real engines: by process, address, metrics; and in a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from children import actions, watching
from extras import need
from harness import Peer

COMMAND = "import sys; sys.path[:] = {!r}\nfrom ucxkv.cli import main\nsys.exit(main(sys.argv[1:]))"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", COMMAND.format(sys.path), "top", *arguments]


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "80"},
    )


@pytest.fixture(scope="module")
def watched(path: str) -> Iterator[tuple[Peer, Peer]]:
    """A linked pair between which something was moved."""
    with (
        Peer(1, path=path, name="owner") as owner,
        Peer(2, path=path, name="puller", listen=False) as puller,
    ):
        puller.link(owner)
        source = owner.call(actions.make_cache, "kv", 4, (8, 1000), seed=1)
        puller.call(actions.make_cache, "kv", 4, (8, 1000))
        assert puller.call(actions.pull, "kv", 1, source, timeout_ms=5000).ok
        yield owner, puller


def found_by(target: str) -> list[dict[str, Any]]:
    done = top(target, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return list(json.loads(done.stdout))


def test_by_process_and_by_address(watched: tuple[Peer, Peer]) -> None:
    owner, puller = watched
    (seen,) = found_by(str(puller.pid))
    assert seen["cluster_id"] == 2
    assert seen["totals"]["transfers"] == 1
    assert seen["links"][0]["cluster_id"] == 1
    assert owner.address
    (seen,) = found_by("{}:{}".format(*owner.address))
    assert (seen["cluster_id"], seen["pid"]) == (1, owner.pid)


def test_by_metrics(watched: tuple[Peer, Peer]) -> None:
    """They tell the same as the process does itself."""
    need("prometheus_client", "telemetry")
    _, puller = watched
    port = puller.call(watching.serve_metrics)
    try:
        (told,) = found_by(f"127.0.0.1:{port}")
    finally:
        puller.call(watching.stop_serving)
    (own,) = found_by(str(puller.pid))
    assert told["totals"].pop("latency")[0][1] == own["totals"].pop("latency")[0][1] == 1
    for figures in (told, own):
        for link in figures["links"]:
            link["totals"].pop("latency", None)
        # A clock of its own, and what metrics leave out.
        for name in ("at", "pid"):
            figures.pop(name, None)
    assert told == own


def test_once(watched: tuple[Peer, Peer], path: str) -> None:
    _, puller = watched
    done = top(str(puller.pid), "--once", "--interval", "0.1")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"cluster 2 · MIX · process {puller.pid}" in done.stdout
    assert re.search(rf"\b1 +up +{path}\b", done.stdout)
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_nothing_to_look_at() -> None:
    for target, code in (("1", 1), ("127.0.0.1:1", 1), ("nowhere", 2)):
        done = top(target, "--once")
        assert done.returncode == code
        assert done.stderr.startswith("ucxkv top: ")
        assert "Traceback" not in done.stderr


class Terminal:
    """The command in a terminal of 80 columns and 24 lines."""

    def __init__(self, *arguments: str) -> None:
        pid, self.fd = pty.fork()
        if pid == 0:
            os.environ.update(TERM="xterm", COLUMNS="80", LINES="24")
            words = command(*arguments)
            os.execv(words[0], words)
        self.pid = pid
        self.text = ""

    def until(self, pattern: str, timeout: float = 20.0) -> None:
        """Read until the pattern has appeared in what has come since the last call."""
        end = time.monotonic() + timeout
        new = ""
        while not re.search(pattern, new):
            assert time.monotonic() < end, f"no {pattern!r} in {new!r}"
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    new += os.read(self.fd, 65536).decode(errors="replace")
                except OSError:
                    break
        self.text += new

    def close(self) -> int:
        """Read on to the end; the exit code."""
        with contextlib.suppress(OSError):
            while select.select([self.fd], [], [], 20)[0] and os.read(self.fd, 65536):
                pass
        # What still runs ends with its terminal.
        os.close(self.fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_live(path: str) -> None:
    """It goes on while the process does not answer, leaves the terminal as it was when
    interrupted, and ends with the engine."""
    with Peer(1, path=path) as peer:
        peer.ready()
        terminal = Terminal(str(peer.pid), "--interval", "0.1")
        terminal.until("cluster 1")
        terminal.until("cluster 1")
        os.kill(terminal.pid, signal.SIGINT)
        terminal.until(re.escape("\x1b[?1049l"))
        assert terminal.close() == 0

        terminal = Terminal(str(peer.pid), "--interval", "0.1")
        terminal.until("cluster 1")
        peer.call(actions.finalize)
        terminal.until(f"no engine is open in process {peer.pid}")
        assert terminal.close() == 1

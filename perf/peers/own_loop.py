"""Tools that have their own memory and their own loop: what they report is taken over, unchecked.

Both of their ends are started by the puller, anew for each pull.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers import sides
from peers.bare_get import ucx_wheel

_PATIENCE = 60


class Owner(sides.Owner):
    """Has nothing to do."""

    def prepare(self, work: dict[str, Any]) -> dict[str, Any]:
        return {}


class _Puller(sides.Puller):
    def prepare(self, work: dict[str, Any], offer: dict[str, Any]) -> None:
        self.work = sides.Work(**work)

    def clear(self) -> None:
        """Its memory is its own."""

    def check(self, everywhere: bool = False) -> None:
        """Its memory is its own."""

    def measure(self, count: int) -> dict[str, Any]:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = self._measure(count)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        # Of both its ends.
        return {"seconds": seconds, "cpu": cpu}

    def _measure(self, count: int) -> list[float]:
        raise NotImplementedError


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _listening(port: int, process: subprocess.Popen[str]) -> None:
    """Wait until somebody listens at a port, without connecting: it serves but one client."""
    wanted = f":{port:04X} "
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and process.poll() is None:
        lines = [line for name in ("tcp", "tcp6") for line in _table(name)]
        if any(wanted in " ".join(line.split()[1:2]) + " " and " 0A " in line for line in lines):
            return
        time.sleep(0.01)
    raise RuntimeError(f"{process.args} does not listen")


def _table(name: str) -> list[str]:
    try:
        return Path(f"/proc/net/{name}").read_text().splitlines()
    except OSError:
        return []


def _both(server: Sequence[str], client: Sequence[str], port: int, env: dict[str, str]) -> str:
    """Output of the client of a server that ends with it."""
    with subprocess.Popen(
        server, env=env, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as serving:
        try:
            _listening(port, serving)
            done = subprocess.run(
                client, env=env, capture_output=True, text=True, timeout=_PATIENCE
            )
            if done.returncode:
                raise RuntimeError(f"{client[0]}: {done.stdout[-500:]}{done.stderr[-500:]}")
            serving.wait(_PATIENCE)
            return done.stdout
        finally:
            serving.kill()


def iperf3_missing() -> str:
    """Why iperf3 cannot run here; empty if it can."""
    return "" if shutil.which("iperf3") else "iperf3 is not installed"


class Iperf3(_Puller):
    """One TCP stream, from the server to the client."""

    def _measure(self, count: int) -> list[float]:
        port = _free_port()
        total = self.work.bytes * count
        server = ["iperf3", "-s", "-1", "-p", str(port), "--idle-timeout", str(_PATIENCE)]
        client = ["iperf3", "-c", "127.0.0.1", "-p", str(port), "-R", "-J", "-n", str(total)]
        report = json.loads(_both(server, client, port, dict(os.environ)))
        received = report["end"]["sum_received"]
        return [self.work.bytes * 8 / received["bits_per_second"]] * count


def perftest_missing() -> str:
    """Why ucx_perftest cannot run here; empty if it can."""
    return "" if _perftest() else "ucx_perftest is not installed"


def _perftest() -> str | None:
    wheel = ucx_wheel()
    if wheel and os.access(wheel / "bin" / "ucx_perftest", os.X_OK):
        return str(wheel / "bin" / "ucx_perftest")
    return shutil.which("ucx_perftest")


class UcxPerftest(_Puller):
    """Active messages over TCP by `ucx_perftest`: its GET is emulated, and its server too slow."""

    def _measure(self, count: int) -> list[float]:
        tool, wheel = _perftest(), ucx_wheel()
        if tool is None:
            raise RuntimeError(perftest_missing())
        env = {**os.environ, "UCX_TLS": "tcp,self"}
        if wheel and tool.startswith(str(wheel)):
            env["LD_LIBRARY_PATH"] = str(wheel / "lib")
        port = _free_port()
        size, times = self.work.block_bytes, self.work.spans * count
        client = [tool, "127.0.0.1", "-p", str(port), "-t", "ucp_am_bw"]
        client += ["-s", str(size), "-n", str(times), "-w", str(max(1, times // 10))]
        output = _both([tool, "-p", str(port)], client, port, env)
        # Its last line: iterations, then microseconds of one message (a quantile, the average of
        # the last interval and over all).
        final = re.findall(r"^Final:\s+\d+\s+[\d.]+\s+[\d.]+\s+([\d.]+)", output, re.M)
        if not final:
            raise RuntimeError(f"ucx_perftest printed {output[-500:]}")
        return [float(final[-1]) * 1e-6 * self.work.spans] * count

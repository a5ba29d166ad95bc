"""The command itself: who examines what, and how it is printed."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from ucxkv import LlmDataDist, LlmError, Options, info
from ucxkv._load import loaded
from ucxkv.doctor import findings, host, pair
from ucxkv.doctor.board import CLUSTER, Board
from ucxkv.doctor.findings import Finding
from ucxkv.netif import endpoint

_CHILD_SECONDS = 60
_ENDING_SECONDS = 10
_LISTENING = re.compile(r"^listening at (\S+)$", re.MULTILINE)
_TARGET = "a second process on this host"


def examine(peer: tuple[str, int] | None, options: Options, as_json: bool) -> int:
    """Examine this machine and a peer, or a second process of this machine; the exit code."""
    found = host.examine(info.collect(options), options)
    if not as_json:
        _heading("this machine")
        _print(found)
    if peer is not None:
        target = endpoint(*peer)
        seen = pair.visit(*peer, options)
    else:
        target = _TARGET
        try:
            with _second_process() as address:
                seen = pair.visit(*address, options)
        except OSError as error:
            seen = pair.Visit([Finding("second process", "fail", f"cannot be started: {error}")])
    everything = [*found, *seen.findings]
    bad = findings.failed(everything)
    if as_json:
        print(json.dumps(_as_dict(everything, seen, target, ok=not bad), indent=2))
        return int(bad)
    _heading(target)
    _print(seen.findings)
    counts = {level: sum(f.level == level for f in everything) for level in ("fail", "warn")}
    print(f"\n{counts['fail']} to mend, {counts['warn']} to look at")
    return int(bad)


def listen(listen: str, options: Options, seconds: float | None) -> int:
    """Be the other end until interrupted, or for so many seconds; the exit code."""
    # Ended by a service manager it closes its links too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with LlmDataDist(CLUSTER, options=options) as engine, contextlib.closing(Board(engine)):
        assert engine.listen_address is not None
        print(f"listening at {endpoint(*engine.listen_address)}", flush=True)
        end = None if seconds is None else time.monotonic() + seconds
        with contextlib.suppress(KeyboardInterrupt):
            while end is None or time.monotonic() < end:
                time.sleep(1.0 if end is None else min(1.0, max(0.0, end - time.monotonic())))
    return 0


@contextlib.contextmanager
def _second_process() -> Iterator[tuple[str, int]]:
    """A listening doctor on this host; yields its address."""
    command = [sys.executable, "-m", "ucxkv", "doctor", "--listen", "127.0.0.1:0"]
    command += ["--seconds", str(_CHILD_SECONDS)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    ) as child:
        try:
            assert child.stdout is not None
            said = _LISTENING.search(child.stdout.readline())
            if said is None:
                raise OSError("it did not say where it listens")
            address, _, port = said[1].rpartition(":")
            yield address, int(port)
        finally:
            child.terminate()
            try:
                child.wait(_ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()


def _heading(text: str) -> None:
    print(f"--- {text} ".ljust(80, "-"), flush=True)


def _print(found: Sequence[Finding]) -> None:
    for finding in found:
        for line in findings.lines(finding):
            print(line, flush=True)


def _as_dict(
    everything: Sequence[Finding], seen: pair.Visit, target: str, *, ok: bool
) -> dict[str, object]:
    return {
        "ok": ok,
        "ucx": loaded().version_text,
        "peer": target,
        "path": seen.path,
        "transports": list(seen.transports),
        "findings": [asdict(finding) for finding in everything],
        "pulls": [
            {**asdict(pull), "gigabytes_per_second": pull.gigabytes_per_second}
            for pull in seen.pulls
        ],
    }


def main(peer: str | None, listening: str | None, seconds: float | None, as_json: bool) -> int:
    """Run the command; the exit code is 1 if something is to be mended, 2 for wrong arguments."""
    try:
        # The address of a peer is written as that of a listener.
        address = Options(listen=peer).listen_endpoint()
        options = Options(listen=listening)
        if listening is not None:
            return listen(listening, options, seconds)
        return examine(address, options, as_json)
    except (LlmError, OSError) as error:
        print(f"ucxkv doctor: {error}", file=sys.stderr)
        return 2

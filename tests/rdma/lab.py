"""Runs a command in an emulated machine that has RDMA devices.

    python -m tests.rdma.lab -- pytest tests/rdma
    python -m tests.rdma.lab --transport ud -- pytest tests/rdma
    python -m tests.rdma.lab --results out -- python perf/kv_pull.py --local --json /mnt/job/it.json

The machine is Debian's kernel under QEMU's software emulation; it has this machine's files, to be
read only, and two soft RoCE devices (rdma_rxe), each at one end of a wire.  The command runs there
with the system's UCX, which has verbs, in this folder, with this Python.  Its output and exit
status come back, and with --results whatever it has left in /mnt/job.  Wants root, x86-64 and
Debian's packages: what is missing is said, with exit status 77.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from . import wire
from .guest import QEMU, Unavailable, guest

NOT_HERE = 77
TIMED_OUT = 124
# UD of UCX looks for the version of a packet's IP where only Mellanox's devices have it.
# It also warns of settings whose transport it has not loaded yet.
_SETTINGS = {"UCX_UD_VERBS_ETH_DGID_CHECK": "n", "UCX_WARN_UNUSED_ENV_VARS": "n"}
# What UCX_TLS allows: anything, of which UCX uses rc_verbs, or no RDMA that has GETs.
TRANSPORTS = {"rc": "", "ud": "ud_verbs,tcp,self"}

_SETUP = """\
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export HOME=/run TMPDIR=/run LC_ALL=C.UTF-8 PYTHONDONTWRITEBYTECODE=1
stty -onlcr < /dev/console 2>/dev/null
ulimit -l unlimited
ip link set lo up
{fabric}
cd {folder}
{exports}
exec {command}
"""


def built_in_place() -> bool:
    """Whether the native modules are in this folder."""
    return any(Path("ucxkv").glob("engine.*.so"))


def _script(command: Sequence[str], transport: str) -> str:
    settings = {
        **_SETTINGS,
        **({"UCX_TLS": TRANSPORTS[transport]} if TRANSPORTS[transport] else {}),
        "UCXKV_UCX": "system",
        "UCXKV_TEST_RDMA": transport,
        # Everything takes some ten times as long as on the machine itself.
        "UCXKV_TEST_PATIENCE": "10",
        # An installed package is not to be covered by its source.
        **({"PYTHONPATH": str(Path.cwd())} if built_in_place() else {}),
        "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
    }
    exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in settings.items())
    return _SETUP.format(
        fabric="\n".join(shlex.join(step) for step in wire.LAY),
        folder=shlex.quote(str(Path.cwd())),
        exports=exports,
        command=shlex.join(command),
    )


def _emulator(job: Path, memory: str) -> list[str]:
    machine = guest()
    shares = []
    for tag, path in (("root", "/"), ("job", str(job))):
        shares += ["-fsdev", f"local,id={tag},path={path},security_model=none,multidevs=remap"]
        shares += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
    return [
        # It ends with this process, however that ends.
        *("setpriv", "--pdeathsig", "KILL"),
        *(QEMU, "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", memory),
        *("-kernel", str(machine.kernel), "-initrd", str(machine.initramfs)),
        *("-append", "console=ttyS0 quiet loglevel=1 panic=-1 mitigations=off no_timer_check"),
        *("-nodefaults", "-no-reboot", "-nographic", "-serial", "stdio"),
        *shares,
    ]


def run(
    command: Sequence[str],
    *,
    transport: str = "rc",
    seconds: float = 600,
    memory: str = "4G",
    results: Path | None = None,
) -> int:
    """Run `command` in the guest and return its exit status; TIMED_OUT after `seconds`.

    Raises Unavailable if there can be no guest here.
    """
    if os.geteuid() != 0:
        raise Unavailable("the guest reads this machine's files as root: run it as root")
    with tempfile.TemporaryDirectory(prefix="ucxkv-rdma-") as place:
        job = Path(place)
        (job / "run").write_text(_script(command, transport))
        emulator = subprocess.Popen(
            _emulator(job, memory), stdin=subprocess.DEVNULL, start_new_session=True
        )
        end = time.monotonic() + seconds
        try:
            emulator.wait(seconds)
        except subprocess.TimeoutExpired:
            print(f"\nthe guest was stopped after {seconds:g} s", flush=True)
        finally:
            if emulator.poll() is None:
                os.killpg(emulator.pid, signal.SIGKILL)
                emulator.wait(10)
        status = job / "status"
        if results is not None:
            results.mkdir(parents=True, exist_ok=True)
            for path in job.iterdir():
                if path.name not in ("run", "status"):
                    shutil.copy(path, results)
        if status.exists():
            return int(status.read_text())
        if time.monotonic() >= end:
            return TIMED_OUT
        print("\nthe guest has ended by itself, before the command", flush=True)
        return 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.rdma.lab", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--transport", choices=TRANSPORTS, default="rc")
    parser.add_argument("--seconds", type=float, default=600, help="time limit (default 600)")
    parser.add_argument("--memory", default="4G", help="of the guest (default 4G)")
    parser.add_argument("--results", type=Path, help="folder for what is left in /mnt/job")
    parser.add_argument("--prepare", action="store_true", help="make the guest, but run nothing")
    parser.add_argument("command", nargs="*", help="after --, the command and its arguments")
    asked = parser.parse_args(arguments)
    if not asked.command and not asked.prepare:
        parser.error("a command is needed")
    try:
        if asked.prepare:
            guest()
            return 0
        return run(
            asked.command,
            transport=asked.transport,
            seconds=asked.seconds,
            memory=asked.memory,
            results=asked.results,
        )
    except Unavailable as error:
        print(f"NO RDMA GUEST HERE: {error}", file=sys.stderr)
        return NOT_HERE


if __name__ == "__main__":
    sys.exit(main())

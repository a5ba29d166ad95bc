"""Importing the package changes nothing in the process that imports it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# What an import could change, as text that can be compared.
STATE = """
import ctypes, faulthandler, gc, locale, logging, os, signal, struct, sys, threading, warnings
libc = ctypes.CDLL(None)

def dispositions():
    found = {}
    for number in range(1, 65):
        buffer = ctypes.create_string_buffer(256)
        if libc.sigaction(number, None, buffer) == 0:
            handler, mask, flags = struct.unpack_from("P8s120xI", buffer)
            # SA_RESTORER is libc's affair.
            found[number] = handler, mask, flags & ~0x04000000
    return found

def configured(logger):
    found = [handler for handler in logger.handlers if type(handler) is not logging.NullHandler]
    return (logger.level, found, logger.propagate, logger.disabled) != (0, [], True, False)

def state():
    stack = ctypes.create_string_buffer(64)
    libc.sigaltstack(None, stack)
    return {
        "signals": dispositions(),
        "python's signals": {s: signal.getsignal(s) for s in signal.valid_signals()},
        "signal stack": stack.raw,
        "signal mask": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "environment": dict(os.environ),
        "C environment": {n: os.getenv(n) for n in ("UCX_TLS", "UCX_MODULE_DIR", "PATH")},
        "logging": (logging.root.level, list(logging.root.handlers), logging.root.manager.disable),
        # A library may have loggers, and null handlers on them; the rest is the application's.
        "loggers": {
            name: found
            for name, logger in logging.root.manager.loggerDict.items()
            if isinstance(logger, logging.Logger) and (found := configured(logger))
        },
        "warnings": list(warnings.filters),
        "threads": (threading.active_count(), len(os.listdir("/proc/self/task"))),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "directory": os.getcwd(),
        "locale": locale.setlocale(locale.LC_ALL),
        "collector": (gc.isenabled(), gc.get_threshold()),
        "umask": [os.umask(mask) for mask in (0o77, os.umask(0o77))][0],
        "switch interval": sys.getswitchinterval(),
    }
"""

COMPARE = """
# NumPy and the other dependencies are not what is tested.
import msgspec, numpy, psutil
before = state()
import ucxkv
after = state()
changed = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
assert not changed, changed
"""


def run(code: str, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    names = {k: v for k, v in os.environ.items() if not k.startswith(("UCX_", "PYTHON"))}
    # The path of this process: the package that is tested, from a built source tree too.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        # -c puts the working directory first, and the source tree may have no extensions in it.
        cwd="/",
        env={**names, "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    "prepare", ["", "faulthandler.enable()", "signal.signal(1, signal.SIG_IGN)"]
)
def test_an_import_leaves_the_process_as_it_was(prepare: str) -> None:
    done = run(f"{STATE}\n{prepare}\n{COMPARE}")
    assert done.returncode == 0, done.stderr


def test_the_comparison_sees_what_it_is_for() -> None:
    """UCX loaded without ucxkv does change the process: otherwise the test above shows nothing."""
    code = """
from importlib.util import find_spec
before = state()
folder = find_spec("libucx").submodule_search_locations[0]
ctypes.CDLL(folder + "/lib/libucp.so.0")
assert state()["signals"] != before["signals"]
"""
    done = run(STATE + code)
    assert done.returncode == 0, done.stderr


def test_an_import_is_silent() -> None:
    done = run("import ucxkv", "-X", "dev", "-W", "error")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_crash_still_shows_where_python_was() -> None:
    code = "import faulthandler; faulthandler.enable()\nimport ucxkv\nfaulthandler._sigsegv()"
    done = run(code)
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert "Caught signal" not in done.stdout + done.stderr


def test_an_interrupt_still_raises() -> None:
    code = """
import ucxkv, os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()
except KeyboardInterrupt:
    print("interrupted")
"""
    assert run(code).stdout.strip() == "interrupted"

"""What a figure depends on beside the code: machine, kernel, UCX, devices, memory."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import ucxkv


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"


def _cpu_model() -> str:
    for line in _first_line("/proc/cpuinfo").splitlines():
        if line.startswith(("model name", "Model", "CPU part")):
            return line.partition(":")[2].strip()
    return platform.machine()


def environment() -> dict[str, Any]:
    """Everything about this process's machine, as JSON values; names no host and no user."""
    from ucxkv.info import collect

    info = collect()
    governor = _first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    return {
        "kind": "environment",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "ucxkv": ucxkv.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "ucx": info.ucx_version,
        "ucx_origin": info.ucx_origin,
        "stream_transports": info.stream_transports,
        "get_transports": info.get_transports,
        "rdma_devices": info.rdma_devices,
        "native_get": info.same_host_get.native,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "governor": governor,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "huge_pages": _first_line("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load": [round(value, 2) for value in os.getloadavg()],
        "settings": {key: value for key, value in os.environ.items() if key.startswith("UCX")},
    }

"""CPU time of any process of this host, to the nanosecond."""

from __future__ import annotations

import time

# The kernel's number of the clock that counts what all threads of a process have run.
_PROCESS_CLOCK = 2


def cpu_seconds(pid: int) -> float:
    """CPU seconds that a process has used until now; another user's is an OSError."""
    return time.clock_gettime_ns((~pid << 3) | _PROCESS_CLOCK) * 1e-9

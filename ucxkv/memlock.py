"""What to say where memory could not be registered: RDMA needs it locked, and that has a limit."""

from __future__ import annotations

import resource

from ucxkv._load import rdma_devices


def advice() -> str:
    """A sentence in parentheses; nothing without RDMA or where memory is locked without limit."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY or not rdma_devices():
        return ""
    return (
        f" (RDMA needs locked memory, of which this process may have {limit >> 10} KiB: set"
        " 'ulimit -l unlimited', LimitMEMLOCK=infinity for a service, or --ulimit memlock=-1 for a"
        " container)"
    )

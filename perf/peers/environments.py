"""Virtual environments of the peers that are packages: made on request, in a cache folder."""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

PACKAGES = {
    "nixl": ["nixl", "numpy"],
    "mooncake": ["mooncake-transfer-engine-non-cuda", "numpy"],
}
_INSTALL_SECONDS = 1800


def folder() -> Path:
    """Where they are: ``ucxkv-perf`` in $XDG_CACHE_HOME, or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ucxkv-perf"


def python_of(name: str) -> Path | None:
    """The interpreter that has the peer's package, None where it was not installed."""
    done = folder() / name / "installed"
    return folder() / name / "bin" / "python" if done.exists() else None


def set_up(name: str) -> None:
    """Make the peer's environment; CalledProcessError if pip fails."""
    place = folder() / name
    venv.create(place, with_pip=True, clear=True)
    subprocess.run(
        [place / "bin" / "python", "-m", "pip", "install", "--quiet", *PACKAGES[name]],
        check=True,
        timeout=_INSTALL_SECONDS,
    )
    (place / "installed").touch()

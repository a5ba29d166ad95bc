"""The command ``ucxkv``, outside the package, which cannot be imported where no UCX can be used."""

from __future__ import annotations

import sys
import textwrap


def main() -> int:
    """Run the command line; returns the exit code, 2 where the package cannot be imported."""
    try:
        from ucxkv.cli import main as command
    except ImportError as error:
        print(textwrap.fill(f"ucxkv: {error}", 80, break_on_hyphens=False), file=sys.stderr)
        return 2
    return command()

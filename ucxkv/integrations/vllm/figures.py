"""What a worker counts between two steps."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass
class Figures:
    """Pulls that went well by their seconds and bytes; the rest by its number."""

    pull_seconds: list[float] = field(default_factory=list)
    pull_bytes: list[int] = field(default_factory=list)
    failed_pulls: int = 0
    failed_blocks: int = 0
    cancelled_pulls: int = 0
    failed_links: int = 0
    failed_notices: int = 0
    handed_off: int = 0
    noticed: int = 0
    expired_holds: int = 0

    def take(self) -> dict[str, Any]:
        """All of them; they begin anew."""
        taken = asdict(self)
        for entry in fields(self):
            value = getattr(self, entry.name)
            setattr(self, entry.name, [] if isinstance(value, list) else 0)
        return taken

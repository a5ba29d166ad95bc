"""Changing the role of an engine in a child, and what its peers see of it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from children import actions

if TYPE_CHECKING:
    from child import Context


def set_role(ctx: Context, role: str, **changes: Any) -> actions.Outcome:
    """With `changes` to the options in force, or without options at all; extra["listen"] is where
    the engine listens then, extra["role"] its role."""
    import ucxkv

    options = None
    if changes:
        options = replace(ctx.values.get("options") or ctx.engine._options, **changes)
    outcome = actions.attempt(lambda: ctx.engine.set_role(ucxkv.LlmRole[role], options))
    outcome.extra["listen"] = ctx.engine.listen_address
    outcome.extra["role"] = ctx.engine.role.name
    return outcome


def roles(ctx: Context) -> dict[int, str]:
    """The roles of linked clusters."""
    return {info.cluster_id: info.role.name for info in ctx.engine.links() if info.state == "up"}


def change_until_told(ctx: Context) -> dict[str, int]:
    """Change the role again and again; how often each outcome came."""
    import ucxkv

    ctx.stop.clear()
    counts: dict[str, int] = {}
    number = 0
    while not ctx.stop.is_set():
        number += 1
        role = ucxkv.LlmRole(1 + number % 3)
        outcome = actions.attempt(lambda role=role: ctx.engine.set_role(role))
        counts[outcome.kind] = counts.get(outcome.kind, 0) + 1
        time.sleep(0.001)
    return counts


def role(ctx: Context) -> str:
    return str(ctx.engine.role.name)

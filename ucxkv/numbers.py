"""Checks of the single numbers among the arguments of public calls."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from ucxkv.errors import ParamInvalid

# A century: what is longer would not fit the clock.
FOREVER_MS = 100 * 365 * 86400e3


def integer(value: Any, name: str) -> int:
    """`value` as an int; TypeError for anything that is not an integer."""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not a bool")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}") from None


def milliseconds(value: Any, name: str) -> float:
    """`value` as a number of milliseconds; TypeError for anything that is no number."""
    if isinstance(value, (float, np.floating)):
        return float(value)
    try:
        return float(integer(value, name))
    except OverflowError:
        raise ParamInvalid(f"{name} is too large") from None


def timeout(value: Any, name: str = "timeout_ms") -> float:
    """A timeout in milliseconds: a positive number, held within what the clock can count."""
    checked = milliseconds(value, name)
    if not checked > 0:
        raise ParamInvalid(f"{name} must be positive, not {value}")
    return min(checked, FOREVER_MS)


def patience(timeout_ms: Any) -> float | None:
    """How long somebody waits, in seconds: None for ever, not at all below 0."""
    return None if timeout_ms is None else milliseconds(timeout_ms, "timeout_ms") / 1e3

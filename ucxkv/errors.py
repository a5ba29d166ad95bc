"""Statuses and the exceptions that carry them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ucxkv.types import LinkResult


class Status(IntEnum):
    """Outcomes, with the values LLM-DataDist gives them; HOLD_ENDED is ucxkv's own."""

    SUCCESS = 0
    FAILED = 0xFFFFFFFF
    KV_CACHE_NOT_EXIST = 0x5010B002
    PARAM_INVALID = 0x5010B005
    NOT_YET_LINK = 0x5010B007
    ALREADY_LINK = 0x5010B008
    LINK_FAILED = 0x5010B009
    UNLINK_FAILED = 0x5010B00A
    DEVICE_OUT_OF_MEMORY = 0x5010B00E
    EXIST_LINK = 0x5010B018
    FEATURE_NOT_ENABLED = 0x5010B019
    TIMEOUT = 0x5010B01A
    OUT_OF_MEMORY = 0x5010B01C
    HOLD_ENDED = 0x5010B101


class LlmError(RuntimeError):
    """Base of all errors of this library; `status` says which kind.

    Raised itself, with status FAILED, for what has no kind of its own.
    """

    status: Status = Status.FAILED

    def __init__(self, message: str = "", status: Status | None = None) -> None:
        super().__init__(message)
        if status is not None:
            self.status = status


class KvCacheNotExist(LlmError, LookupError):
    """The cache is unknown, was unregistered, or may not be read by this peer."""

    status = Status.KV_CACHE_NOT_EXIST


class ParamInvalid(LlmError, ValueError):
    """A value is out of range, or does not fit the geometry of a cache."""

    status = Status.PARAM_INVALID


class NotYetLink(LlmError, ConnectionError):
    """There is no live link to the cluster."""

    status = Status.NOT_YET_LINK


class AlreadyLink(LlmError):
    """The cluster is linked already."""

    status = Status.ALREADY_LINK


class LinkFailed(LlmError, ConnectionError):
    """Some clusters could not be linked; `results` says which and why, one entry per cluster."""

    status = Status.LINK_FAILED

    def __init__(
        self, message: str = "", status: Status | None = None, results: Sequence[LinkResult] = ()
    ) -> None:
        super().__init__(message, status)
        self.results = list(results)


class UnlinkFailed(LlmError):
    """A link could not be closed."""

    status = Status.UNLINK_FAILED


class ExistLink(LlmError):
    """The operation is not allowed while links exist."""

    status = Status.EXIST_LINK


class FeatureNotEnabled(LlmError):
    """What was asked for is not available on this link, cache or machine."""

    status = Status.FEATURE_NOT_ENABLED


class LlmTimeout(LlmError, TimeoutError):
    """The deadline passed."""

    status = Status.TIMEOUT


class LlmOutOfMemory(LlmError, MemoryError):
    """Memory, or the right to lock it, has run out; `status` says whether on the device."""

    status = Status.OUT_OF_MEMORY


class HoldEnded(LlmError):
    """The hold that the pull names has ended: its memory may have been given to another use."""

    status = Status.HOLD_ENDED


_BY_STATUS: dict[Status, type[LlmError]] = {
    kind.status: kind
    for kind in (
        LlmError,
        KvCacheNotExist,
        ParamInvalid,
        NotYetLink,
        AlreadyLink,
        LinkFailed,
        UnlinkFailed,
        ExistLink,
        FeatureNotEnabled,
        LlmTimeout,
        LlmOutOfMemory,
        HoldEnded,
    )
}
_BY_STATUS[Status.DEVICE_OUT_OF_MEMORY] = LlmOutOfMemory


def error_for(status: Status, message: str) -> LlmError:
    """The exception that stands for `status`, not raised; ValueError for SUCCESS."""
    if status is Status.SUCCESS:
        raise ValueError("SUCCESS has no exception")
    return _BY_STATUS[status](message, status)

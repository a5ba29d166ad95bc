"""Holds: an owner's promise to leave a slot or blocks of a cache alone until they were pulled."""

from __future__ import annotations

import struct
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from ucxkv import numbers
from ucxkv.errors import ParamInvalid

if TYPE_CHECKING:
    from ucxkv.hold import NativeHold

_TOKEN = struct.Struct(">IQQ")
# As in pyx/ucxkv/core.pxd; word 0 is never a hold's.
MAX_WORDS = 65536
_OUTCOMES = (None, "noticed", "released", "expired", "unregistered")


class Token(NamedTuple):
    """What a hold's token says: its word, and the generation of its cache."""

    slot: int
    word: int
    generation: int

    def text(self) -> str:
        """As it travels."""
        return _TOKEN.pack(*self).hex()


def token_of(text: Any) -> Token:
    """The token that was written as `text`; TypeError or ParamInvalid if it is none."""
    if not isinstance(text, str):
        raise TypeError(f"hold must be the token of a hold, a str, not {type(text).__name__}")
    try:
        token = Token(*_TOKEN.unpack(bytes.fromhex(text)))
    except (ValueError, struct.error):
        raise ParamInvalid(f"{text!r} is not the token of a hold") from None
    if token.word == 0 or not 0 < token.slot < MAX_WORDS:
        raise ParamInvalid(f"{text!r} is not the token of a hold")
    return token


class Hold:
    """A part of a cache that its owner leaves alone for a while, for one peer to pull.

    It ends when that peer's pull has completed (with the pull's notice), by `release`, when its
    time is over, or when its cache is unregistered, whichever comes first; keeping this object is
    not needed.  From then on pulls that name it raise HoldEnded instead of returning what may be
    another's bytes, and the memory may be used again.  As a context manager it is released at the
    end of the block.
    """

    def __init__(
        self, native: NativeHold, cache_id: int, generation: int, blocks: tuple[int, ...] | None
    ) -> None:
        self._native = native
        self._token = Token(native.slot, native.word, generation).text()
        self.cache_id = cache_id
        #: The slot or blocks that are held, ascending; None: the whole cache.
        self.blocks = blocks

    def __repr__(self) -> str:
        part = "all" if self.blocks is None else f"{len(self.blocks)} blocks"
        return f"<Hold: {part} of cache {self.cache_id}, {self.outcome or 'active'}>"

    @property
    def token(self) -> str:
        """What the peer's pull has to name, as `hold=`; who has it can end the hold."""
        return self._token

    @property
    def outcome(self) -> str | None:
        """None while it is active, then "noticed", "released", "expired" or "unregistered"."""
        return _OUTCOMES[self._native.state]

    @property
    def active(self) -> bool:
        """Whether the memory has to be left alone still."""
        return self.outcome is None

    def release(self) -> None:
        """End it now; the memory may be used again when this returns.  No error if it has ended."""
        self._native.release()

    def wait(self, timeout_ms: float | None = None) -> bool:
        """Wait until it has ended, at most `timeout_ms` milliseconds; whether it has."""
        return self._native.wait(numbers.patience(timeout_ms))

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

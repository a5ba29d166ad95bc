"""Valid frames of every kind, and what can be made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import strategies as st

from ucxkv import wire

HELLO = wire.Hello(
    library="0.1.0",
    ucx="1.22.0",
    cluster_id=7,
    expected=None,
    incarnation=1 << 63,
    serial=3,
    role=2,
    address="10.0.0.1:4000",
    nonce=bytes(range(32)),
    chunk_size=262144,
    secured=False,
    intent=wire.LINK,
    link_id=b"",
)
ATTACH = wire.Attach(
    slot=5,
    token=1 << 62,
    am_address=b"am 0",
    rma_address=b"rma",
    words_address=1 << 46,
    words_rkey=b"rkey",
    word0=99,
)


def entry(cache_id: int, tensors: int = 2, **changes: Any) -> wire.CacheEntry:
    """A cache that contradicts itself in nothing."""
    fields: dict[str, Any] = {
        "cache_id": cache_id,
        "generation": 1000 + cache_id,
        "slot": 2 + cache_id % 100,
        "shape": (3, 10),
        "num_tensors": tensors,
        "data_type": "FLOAT",
        "placement": 0,
        "access": "r",
        "blocks": 3,
        "block_bytes": 40,
        "addresses": bytes(8 * tensors),
        "regions": bytes(4 * tensors),
        "rkeys": [b"rkey"],
    }
    return wire.CacheEntry(**{**fields, **changes})


OPENING: list[wire.Opening] = [
    HELLO,
    msgspec.structs.replace(
        HELLO, expected=1, secured=True, intent=wire.RESUME, link_id=bytes(16), role=1
    ),
    wire.Proof(b""),
    wire.Proof(bytes(32)),
    wire.Refusal(wire.REFUSED, "no"),
    wire.Welcome(12),
]
RUNNING: list[wire.Running] = [
    ATTACH,
    wire.Register([entry(1)]),
    wire.Register([entry(2, 64, access="rw"), entry(3, data_type="UNDEFINED", block_bytes=7)]),
    wire.Register([]),
    wire.CatalogueEnd(),
    wire.Ready(),
    wire.Retire(1),
    wire.Retired(1),
    wire.Sync(1),
    wire.Synced(0),
    wire.Unlink(),
    wire.Unlinked(),
    wire.Bye("over"),
]

# The ends of the ranges of msgpack's own kinds, and of ours.
_ENDS = [0, 1, 2, 31, 32, 127, 128, 255, 256, 65535, 65536]
_NUMBERS = st.sampled_from(
    [
        *_ENDS,
        *(
            sign * (1 << bits) - less
            for bits in (31, 32, 63)
            for sign in (1, -1)
            for less in (0, 1)
        ),
    ]
).filter(lambda number: number >= -(1 << 63)) | st.sampled_from([(1 << 64) - 1, -1, -32, -33, -128])
_TEXTS = st.sampled_from(["", "r", "rw", "w", "FLOAT", "BF16", "x" * 513, "\0", "ä", "\U0001f600"])
_LEAVES = (
    _NUMBERS
    | _TEXTS
    | st.sampled_from([b"", b"\0", bytes(16), bytes(31), bytes(33), bytes(1 << 16), None, True])
    | st.floats()
    | st.binary(max_size=40)
    | st.integers(0, 2**64 - 1)
)
_KINDS = [bytes([kind]) for kind in (0, 0x7F, *range(0x80, 0xA2), *range(0xC0, 0xE1), 0xFF)]
_BYTES = st.sampled_from(
    [
        b"",
        *_KINDS,
        *(bytes([kind]) + b"\xff" * 4 for kind in (0xC6, 0xC9, 0xDB, 0xDD, 0xDF)),
        b"\x91" * 3000,
        b"\x81\xc0" * 500,
    ]
)


def _leaves(tree: Any, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    found = [path]
    if isinstance(tree, list):
        for number, branch in enumerate(tree):
            found += _leaves(branch, (*path, number))
    return found


def _replaced(tree: Any, path: tuple[int, ...], value: Any) -> Any:
    if not path:
        return value
    return [
        _replaced(branch, path[1:], value) if number == path[0] else branch
        for number, branch in enumerate(tree)
    ]


def _with_other_values(draw: Callable[..., Any], frame: bytes) -> bytes:
    """Well-formed msgpack, of which some elements are others, too many, or missing."""
    tree = msgspec.msgpack.decode(frame)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(_leaves(tree)))
        how = draw(st.integers(0, 3))
        value = draw(_LEAVES)
        if how == 1:
            value = [value] * draw(st.integers(0, 70))
        elif how == 2:
            value = {"x": value}
        tree = _replaced(tree, path, value)
    return msgspec.msgpack.encode(tree)


def _with_other_bytes(draw: Callable[..., Any], frame: bytes) -> bytes:
    for _ in range(draw(st.integers(1, 4))):
        first = draw(st.integers(0, len(frame)))
        last = draw(st.integers(first, min(len(frame), first + 8)))
        middle = draw(_BYTES | st.binary(max_size=4))
        frame = frame[:first] + middle + frame[last:]
    return frame


@st.composite
def mutated(draw: Callable[..., Any], messages: list[Any]) -> bytes:
    """The body of a frame: a valid one, or what is left of it."""
    frame = wire.encode(draw(st.sampled_from(messages)))
    how = draw(st.integers(0, 9))
    if how < 5:
        frame = _with_other_values(draw, frame)
    elif how < 8:
        frame = _with_other_bytes(draw, frame)
    elif how == 8:
        frame = draw(st.binary(max_size=64))
    return frame


_IDS = st.sampled_from([0, 1, 2, 3, 2**63 - 1, 2**63, 2**64 - 1])


def running_messages() -> st.SearchStrategy[bytes]:
    """Frames of a link, most of them such that it goes on: the same few caches come and go."""
    entries = st.builds(
        lambda cache_id, generation, access, tensors: entry(
            cache_id, tensors, generation=generation, access=access
        ),
        _IDS,
        st.integers(0, 2),
        st.sampled_from(["r", "rw"]),
        st.integers(1, 3),
    )
    valid = st.one_of(
        st.builds(wire.Register, st.lists(entries, max_size=3)),
        st.builds(wire.Retire, _IDS),
        st.builds(wire.Retired, _IDS),
        st.builds(wire.Sync, _IDS),
        st.builds(wire.Synced, st.integers(0, 1)),
        st.sampled_from([wire.CatalogueEnd(), wire.Ready(), wire.Unlink(), wire.Unlinked()]),
        st.just(ATTACH),
    )
    return st.one_of(valid.map(wire.encode), valid.map(wire.encode), mutated(RUNNING))

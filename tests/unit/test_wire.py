"""Frames and messages: what is encoded comes back, and nothing else comes through."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucxkv import wire

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
text = st.text(max_size=512).filter(lambda value: value.isprintable())
blob = st.binary(max_size=300)

hellos = st.builds(
    wire.Hello,
    library=text,
    ucx=text,
    cluster_id=u64,
    expected=st.none() | u64,
    incarnation=u64,
    serial=u64,
    role=st.integers(1, 3),
    address=text,
    nonce=st.binary(min_size=32, max_size=32),
    chunk_size=u64,
    secured=st.booleans(),
    intent=u32,
    link_id=st.binary(max_size=16),
)
entries = st.builds(
    wire.CacheEntry,
    cache_id=u64,
    generation=u64,
    slot=u32,
    shape=st.lists(u64, max_size=64).map(tuple),
    num_tensors=u32,
    data_type=st.text(max_size=32),
    placement=u32,
    access=st.sampled_from(["r", "rw"]),
    blocks=u64,
    block_bytes=u64,
    addresses=blob,
    regions=blob,
    rkeys=st.lists(blob, max_size=5),
)
opening = (
    hellos
    | st.builds(wire.Proof, st.binary(max_size=64))
    | st.builds(wire.Refusal, u32, text)
    | st.builds(wire.Welcome, u64)
)
running = (
    st.builds(wire.Attach, u32, u64, blob, blob, u64, blob, u64)
    | st.builds(wire.Register, st.lists(entries, max_size=4))
    | st.sampled_from([wire.CatalogueEnd(), wire.Ready(), wire.Unlink(), wire.Unlinked()])
    | st.builds(wire.Retire, u64)
    | st.builds(wire.Retired, u64)
    | st.builds(wire.Sync, u64)
    | st.builds(wire.Synced, u64)
    | st.builds(wire.Bye, text)
)


@given(opening)
def test_opening_comes_back(message: Any) -> None:
    assert wire.decode_opening(wire.encode(message)) == message
    with pytest.raises(wire.ProtocolError):
        wire.decode(wire.encode(message))


@given(running)
def test_running_comes_back(message: Any) -> None:
    assert wire.decode(wire.encode(message)) == message
    with pytest.raises(wire.ProtocolError):
        wire.decode_opening(wire.encode(message))


@given(st.lists(entries, max_size=5))
def test_entries_encoded_before(told: list[wire.CacheEntry]) -> None:
    body = wire.encode_register([wire.encode(entry) for entry in told])
    assert wire.decode(body) == wire.Register(told)


@given(st.binary(max_size=400))
def test_garbage(data: bytes) -> None:
    for decode in (wire.decode, wire.decode_opening):
        try:
            message = decode(data)
        except wire.ProtocolError:
            continue
        assert isinstance(message, wire.Message)


@given(hellos, st.data())
def test_damaged(hello: wire.Hello, data: st.DataObject) -> None:
    body = bytearray(wire.encode(hello))
    place = data.draw(st.integers(0, len(body) - 1))
    body[place] ^= data.draw(st.integers(1, 255))
    try:
        message = wire.decode_opening(bytes(body))
    except wire.ProtocolError:
        return
    assert message != hello


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\x92\x07\xdd\xff\xff\xff\xff",
        b"\x92\x02\xc6\xff\xff\xff\xff",
        wire.encode(wire.Retire(1)) + b"x",
        msgspec.msgpack.encode([10, -1]),
        msgspec.msgpack.encode([10, 1, 2]),
        msgspec.msgpack.encode({"type": 10}),
        msgspec.msgpack.encode([2, bytes(65)]),
        msgspec.msgpack.encode([99]),
    ],
    ids=range(11),
)
def test_malformed(body: bytes) -> None:
    for decode in (wire.decode, wire.decode_opening):
        with pytest.raises(wire.ProtocolError):
            decode(body)


def test_preamble() -> None:
    assert len(wire.preamble()) == wire.PREAMBLE_SIZE
    assert wire.preamble_version(wire.preamble()) == wire.PROTOCOL
    assert wire.preamble_version(wire.preamble(77)) == 77
    with pytest.raises(wire.NotOurProtocol):
        wire.preamble_version(b"GET / HT")


@given(st.integers(1, wire.OPENING_LIMIT))
def test_frame_lengths(length: int) -> None:
    head = wire.frame_head(length)
    assert len(head) == wire.LENGTH_SIZE
    assert wire.frame_length(head, wire.OPENING_LIMIT) == length


@given(st.integers(wire.OPENING_LIMIT + 1, 2**32 - 1) | st.just(0))
def test_frames_that_are_too_long(length: int) -> None:
    with pytest.raises(wire.ProtocolError):
        wire.frame_length(length.to_bytes(4, "big"), wire.OPENING_LIMIT)


def test_the_longest_hello_fits() -> None:
    hello = wire.Hello(
        library="l" * 512,
        ucx="u" * 512,
        cluster_id=2**64 - 1,
        expected=2**64 - 1,
        incarnation=2**64 - 1,
        serial=2**64 - 1,
        role=3,
        address="a" * 512,
        nonce=bytes(32),
        chunk_size=2**64 - 1,
        secured=True,
        intent=3,
        link_id=bytes(16),
    )
    assert len(wire.encode(hello)) < wire.OPENING_LIMIT

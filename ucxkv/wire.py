"""What peers say to each other over the control connection, and how it is framed.

Each side begins with a preamble, which stays the same in all protocol versions: six bytes that name
the protocol and its version as u16.  Frames follow: a big-endian u32 length and a msgpack array
whose first element is the kind of message.  Before authentication only the small messages of
`Opening` are allowed, in frames of at most OPENING_LIMIT bytes.

Any change of a message's fields or meaning is a new PROTOCOL number.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Annotated, TypeVar

import msgspec

PROTOCOL = 4

OPENING_LIMIT = 4096
FRAME_LIMIT = 16 << 20
# A batch of catalogue entries is cut at this size, so that no frame holds up the others for long.
BATCH_BYTES = 256 << 10

_MAGIC = b"ucxkv\n"
_PREAMBLE = struct.Struct(">6sH")
PREAMBLE_SIZE = _PREAMBLE.size
LENGTH_SIZE = 4

# What Hello.intent says about why the dialler has come.
LINK = 1  # to make a link
RESUME = 2  # to go on with the link named by link_id, whose connection was lost
PROBE = 3  # to ask whether the link named by link_id still exists

# Refusal.code
REFUSED = 1  # for the reason in the text
CROSSED = 2  # the other side's dial makes the link
GONE = 3  # there is no such link to resume

U32 = Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]
U64 = Annotated[int, msgspec.Meta(ge=0)]  # msgpack itself has nothing above
Text = Annotated[str, msgspec.Meta(max_length=512)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
LinkId = Annotated[bytes, msgspec.Meta(max_length=16)]
Blob = Annotated[bytes, msgspec.Meta(max_length=1 << 16)]


class ProtocolError(Exception):
    """The peer sent what the protocol does not allow."""


class NotOurProtocol(ProtocolError):
    """The peer does not speak this protocol at all."""


def _printable(text: str) -> str:
    """What a peer says ends up in errors and logs: it must not pass for lines of theirs."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Hello(Message, tag=1):
    """The first message of either side; the proofs cover it."""

    library: Text
    ucx: Text
    cluster_id: U64
    expected: U64 | None  # the cluster that the dialler wants
    incarnation: U64
    serial: U64  # rises with every hello of one incarnation
    role: Annotated[int, msgspec.Meta(ge=1, le=3)]  # an LlmRole
    address: Text  # the one dialled, or the one listened at
    nonce: Nonce
    chunk_size: U64
    secured: bool  # has a secret and wants proof that the peer has it
    intent: U32
    link_id: LinkId

    def __post_init__(self) -> None:
        self.library, self.ucx = _printable(self.library), _printable(self.ucx)


class Proof(Message, tag=2):
    """Proof of knowing the secret; empty where there is none.  The dialler proves first."""

    mac: Annotated[bytes, msgspec.Meta(max_length=64)]


class Refusal(Message, tag=3):
    """Why there will be no link over this connection; it is closed afterwards."""

    code: U32
    text: Text

    def __post_init__(self) -> None:
        self.text = _printable(self.text)


class Welcome(Message, tag=4):
    """The listener grants what the dialler's hello intends; `serial` is its newest so far."""

    serial: U64


class Attach(Message, tag=5):
    """What a peer's data plane needs to reach ours."""

    slot: U32
    token: U64
    am_address: Blob
    rma_address: Blob
    words_address: U64
    words_rkey: Blob
    word0: U64


class CacheEntry(Message, tag=6):
    """One registered cache; the packed fields are those of LocalCache.export."""

    cache_id: U64
    generation: U64
    slot: U32
    shape: Annotated[tuple[U64, ...], msgspec.Meta(max_length=64)]
    num_tensors: U32
    data_type: Annotated[str, msgspec.Meta(max_length=32)]
    placement: U32
    access: Annotated[str, msgspec.Meta(max_length=2)]
    blocks: U64
    block_bytes: U64
    addresses: bytes
    regions: bytes
    rkeys: list[bytes]
    # The file of its memory, for processes of the same host: the owner's descriptor, the inode, the
    # owner's address of its first byte, and its length.
    shared: tuple[Annotated[int, msgspec.Meta(ge=0, le=0x7FFFFFFF)], U64, U64, U64] | None = None


class Register(Message, tag=7):
    """Caches that exist."""

    entries: list[CacheEntry]


class CatalogueEnd(Message, tag=8):
    """All caches that existed when the connection was made have been told."""


class Ready(Message, tag=9):
    """Our side of the link is up."""


class Retire(Message, tag=10):
    """A cache is being unregistered: no new pulls of it."""

    cache_id: U64


class Retired(Message, tag=11):
    """No pull of that cache runs any more."""

    cache_id: U64


class Sync(Message, tag=12):
    """Asks for the echo `Synced`, which comes after all that was registered before."""

    seq: U64


class Synced(Message, tag=13):
    """The echo of `Sync`."""

    seq: U64


class Unlink(Message, tag=14):
    """The link is to be closed: no new pulls, and `Unlinked` when the running ones have ended."""


class Unlinked(Message, tag=15):
    """No pull of ours runs over the link any more."""


class Bye(Message, tag=16):
    """The link ends here and now."""

    reason: Text

    def __post_init__(self) -> None:
        self.reason = _printable(self.reason)


class _RegisterOut(Message, tag=7):
    entries: list[msgspec.Raw]


Opening = Hello | Proof | Refusal | Welcome
Running = (
    Attach
    | Register
    | CatalogueEnd
    | Ready
    | Retire
    | Retired
    | Sync
    | Synced
    | Unlink
    | Unlinked
    | Bye
)

_M = TypeVar("_M")
_encoder = msgspec.msgpack.Encoder()
_opening: msgspec.msgpack.Decoder[Opening] = msgspec.msgpack.Decoder(Opening)
_running: msgspec.msgpack.Decoder[Running] = msgspec.msgpack.Decoder(Running)


def encode(message: Message) -> bytes:
    """The body of a frame."""
    return _encoder.encode(message)


def encode_register(entries: Iterable[bytes]) -> bytes:
    """The body of a `Register` frame, from entries that `encode` has made before."""
    return _encoder.encode(_RegisterOut([msgspec.Raw(entry) for entry in entries]))


def decode_opening(body: bytes) -> Opening:
    """A message that is allowed before authentication; ProtocolError for anything else."""
    return _decode(_opening, body)


def decode(body: bytes) -> Running:
    """A message that is allowed after authentication; ProtocolError for anything else."""
    return _decode(_running, body)


def _decode(decoder: msgspec.msgpack.Decoder[_M], body: bytes) -> _M:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeError, OverflowError) as error:
        raise ProtocolError(f"malformed message: {error}") from error


def preamble(version: int = PROTOCOL) -> bytes:
    """What either side sends first."""
    return _PREAMBLE.pack(_MAGIC, version)


def preamble_version(data: bytes) -> int:
    """The version that a preamble tells; NotOurProtocol if it is none."""
    magic, version = _PREAMBLE.unpack(data)
    if magic != _MAGIC:
        raise NotOurProtocol("the peer does not speak this library's protocol")
    return int(version)


def frame_length(head: bytes, limit: int) -> int:
    """The length that begins a frame; ProtocolError if a frame may not be that long."""
    length = int.from_bytes(head, "big")
    if not 0 < length <= limit:
        raise ProtocolError(f"a frame of {length} bytes, where at most {limit} are allowed")
    return length


def frame_head(length: int) -> bytes:
    """The bytes in front of a body of that length."""
    return length.to_bytes(LENGTH_SIZE, "big")

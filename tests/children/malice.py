"""A linked peer that means harm: its control plane is the library's own, its data plane is a bare
UCX worker that says whatever it likes.

It answers what it is asked for, rightly or almost, asks and offers within its rights and at and
over every limit, and sends noise.  Whatever it gets must be ASCII: what it may not see is not.
"""

from __future__ import annotations

import ctypes
import random
import struct
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from children import stranger
from children.stranger import HEAD, REQUEST, Sender
from fake_native import FakeEngine, FakeLink, FakeLocal, FakeRemote

if TYPE_CHECKING:
    from child import Context

PING, PONG, ASK, BLOCKS, DATA, END, CANCEL = range(1, 8)
OFFER, OFFER_BLOCKS, ANSWER, BARRIER, ECHO, NOTICE, NOTED = range(8, 15)
NAMES = ["PING", "PONG", "REQUEST", "BLOCKS", "DATA", "END", "CANCEL"]
NAMES += ["OFFER", "OFFER_BLOCKS", "ANSWER", "BARRIER", "ECHO", "NOTICE", "NOTED"]
# What follows the head.
POSITION = struct.Struct("<Q")
OFFERED = struct.Struct("<qQIIQqQIIQIIQQQII")
ANSWERED = struct.Struct("<QIIQ")
QUIET = struct.Struct("<QI4x")

U32 = [0, 1, 2, 3, 7, 8, 9, 65535, 65536, 65537, 2**24, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
U64 = [*U32, 2**32, 2**33, 2**40, 2**48, 2**62, 2**63 - 1, 2**63, 2**64 - 64, 2**64 - 2, 2**64 - 1]
STATUSES = [0, 1, 2, 3, 2**32 - 1, 0x5010B002, 0x5010B005, 0x5010B019, 0x5010B01A, 0x5010B101]
LENGTHS = [0, 1, 3, 4, 5, 8, 31, 32, 64, 1000, 4095, 4096, 4097, 64000, 65536]
# What it says that it has: tensors, blocks, bytes of each.
OWN = {"own": (4, 8, 512), "wide": (2, 2, 300_000)}

ASCII = bytes(value & 0x7F for value in range(256))
AM_ID, AM_FLAGS, AM_CALLBACK, AM_ARGUMENT = 1, 2, 4, 8
WHOLE = 1
CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
)


class Handler(ctypes.Structure):
    _fields_ = (
        ("mask", ctypes.c_uint64),
        ("id", ctypes.c_uint),
        ("flags", ctypes.c_uint32),
        ("callback", CALLBACK),
        ("argument", ctypes.c_void_p),
    )


class Wire(Sender):
    """A worker that keeps what it is sent."""

    error_mode = 1  # that of engines, without which UCX makes no connection to them

    def __init__(self) -> None:
        super().__init__()
        self.heard: deque[tuple[int, bytes, bytes]] = deque()
        self._callback = CALLBACK(self._hear)
        for message in range(PING, NOTED + 1):
            mask = AM_ID | AM_FLAGS | AM_CALLBACK | AM_ARGUMENT
            handler = Handler(mask, message, WHOLE, self._callback, message)
            self.check(self.ucp.ucp_worker_set_am_recv_handler(self.worker, ctypes.byref(handler)))

    def _hear(
        self, message: int, header: int, header_length: int, data: int, length: int, param: int
    ) -> int:
        head = ctypes.string_at(header, header_length)
        self.heard.append((message, head, ctypes.string_at(data, length) if length else b""))
        return 0

    def address(self) -> bytes:
        address, length = ctypes.c_void_p(), ctypes.c_size_t()
        self.check(
            self.ucp.ucp_worker_get_address(
                self.worker, ctypes.byref(address), ctypes.byref(length)
            )
        )
        return ctypes.string_at(address, length.value)

    def progress(self, count: int = 1) -> None:
        for _ in range(count):
            self.ucp.ucp_worker_progress(self.worker)


class EvilLink(FakeLink):
    def connect(self, **peer: Any) -> None:
        self.connected_to = peer
        self.engine.notify()


class EvilEngine(FakeEngine):
    """The native engine that the control plane believes in."""

    def __init__(self, wire: Wire) -> None:
        from ucxkv._load import loaded
        from ucxkv.engine import NativeEngine

        real = NativeEngine(1, None)
        super().__init__(real.chunk_size, ".".join(map(str, loaded().version)))
        real.close()
        self.address = wire.address()

    def worker_address(self, index: int) -> bytes:
        return self.address

    def new_link(self, worker: int) -> EvilLink:
        link = EvilLink(self, len(self.links))
        self.links.append(link)
        return link


class Evil:
    def __init__(self, cluster_id: int) -> None:
        from ucxkv.catalogue import LocalCatalogue, LocalEntry
        from ucxkv.options import Options
        from ucxkv.table import LinkTable
        from ucxkv.types import CacheDesc, DataType, LlmRole

        self.wire = Wire()
        self.engine = EvilEngine(self.wire)
        self.shown: list[dict[str, Any]] = []
        catalogue = LocalCatalogue()
        self.own: dict[str, LocalEntry] = {}
        for number, (name, (tensors, blocks, length)) in enumerate(OWN.items(), 1):
            self.own[name] = LocalEntry(
                cache_id=number,
                desc=CacheDesc(tensors, (blocks, length), DataType.UINT8),
                access="rw",
                native=FakeLocal(number, tensors),  # type: ignore[arg-type]
                blocks=blocks,
                block_bytes=length,
            )
            catalogue.add(self.own[name])
        self.table = LinkTable(
            cluster_id=cluster_id,
            role=LlmRole.MIX,
            options=Options(listen="127.0.0.1:0"),
            incarnation=random.getrandbits(60),
            native=self.engine,  # type: ignore[arg-type]
            catalogue=catalogue,
            remote_factory=self.see,  # type: ignore[arg-type]
        )
        self.table.start()

    def see(self, link: EvilLink, **told: Any) -> FakeRemote:
        self.shown.append(told)
        return FakeRemote(link, **told)

    @property
    def link(self) -> EvilLink | None:
        """The one that is connected."""
        found = [one for one in self.engine.links if one.connected_to is not None]
        return found[-1] if found else None  # type: ignore[return-value]

    def close(self) -> None:
        self.table.stop(1)
        self.wire.close()
        self.engine.close()


class Attack:
    """What is said over one link."""

    def __init__(self, evil: Evil, guesses: list[dict[str, Any]], seed: int) -> None:
        link = evil.link
        assert link is not None
        assert link.connected_to is not None
        self.evil = evil
        self.wire = evil.wire
        self.slot: int = link.connected_to["peer_slot"]
        self.token: int = link.connected_to["peer_token"]
        self.rng = random.Random(seed)
        # Those it is shown, and those it should know nothing of.
        self.caches = [*evil.shown, *guesses]
        self.asked: deque[tuple[int, tuple[Any, ...]]] = deque(maxlen=32)
        self.offered: deque[tuple[int, tuple[Any, ...]]] = deque(maxlen=32)
        self.made: deque[tuple[int, int]] = deque(maxlen=32)  # offers of ours: number, bytes
        self.served: dict[int, int] = {}
        self.asks: dict[int, tuple[Any, ...]] = {}
        self.past: deque[tuple[int, bytes, bytes]] = deque(maxlen=200)
        self.number = 0
        self.barrier = 0
        self.repairs = 0  # of its endpoint, as the greatest number of its pings has told
        self.sent: Counter[str] = Counter()
        self.got: Counter[str] = Counter()
        self.leaks: list[str] = []

    # Values

    def some(self, value: int, edges: list[int] = U64, chance: float = 0.06) -> int:
        """The right value, or now and then one that is not."""
        rng = self.rng
        if rng.random() > chance:
            return value
        limit = 2**64 if edges is U64 else 2**32
        return rng.choice([rng.choice(edges), (value + rng.choice([-1, 1])) % limit]) % limit

    def some32(self, value: int) -> int:
        return self.some(value & 0xFFFFFFFF, U32)

    def head(self, number: int, status: int = 0) -> bytes:
        epoch = self.repairs - (self.rng.random() < 0.02)
        slot = self.slot | (epoch & 0xFFFF) << 16
        return HEAD.pack(slot, status & 0xFFFFFFFF, self.token, number & (2**64 - 1))

    def next(self) -> int:
        self.number += 1
        return self.number

    def bytes(self, length: int) -> bytes:
        return b"evil" * (length // 4) + b"e" * (length % 4)

    def numbers(self, count: int, limit: int) -> bytes:
        rng = self.rng
        found = [rng.randrange(max(1, limit)) for _ in range(count)]
        if found and rng.random() < 0.1:
            found[rng.randrange(count)] = rng.choice([limit, 2**31, 2**32 - 1])
        return struct.pack(f"<{count}I", *found)

    # Sending and hearing

    def say(self, message: int, header: bytes, payload: bytes = b"") -> None:
        self.sent[NAMES[message - 1] if 0 < message <= NOTED else "other"] += 1
        if message == DATA and not payload.isascii():
            # It may be written where we may read.
            payload = payload.translate(ASCII)
        if message == PING and len(header) == HEAD.size:
            self.repairs = max(self.repairs, HEAD.unpack_from(header)[3])
        if message == ASK and len(header) >= HEAD.size + REQUEST.size:
            number = HEAD.unpack_from(header)[3]
            self.asks[number] = (REQUEST.unpack_from(header, HEAD.size), payload[:64])
        if len(payload) <= 4096:
            self.past.append((message, header, payload))
        self.wire.send(message, header, payload)

    def hear(self) -> None:
        self.wire.progress(2)
        while self.wire.heard:
            message, header, data = self.wire.heard.popleft()
            self.got[NAMES[message - 1]] += 1
            _, status, _, number = HEAD.unpack_from(header)
            if message == PING:
                self.say(PONG, self.head(0))
            elif message == ASK:
                asked = REQUEST.unpack_from(header, HEAD.size)
                self.asked.append((number, asked))
                if self.rng.random() < 0.4:
                    self.fulfil(number, asked)
            elif message == OFFER:
                offer = OFFERED.unpack_from(header, HEAD.size)
                self.offered.append((number, offer))
                if not offer[15] and self.rng.random() < 0.4:
                    self.accept(number, offer, b"")
            elif message == OFFER_BLOCKS and status == 1 and self.rng.random() < 0.4:
                for known, offer in self.offered:
                    if known == number:
                        self.accept(number, offer, data)
            elif message == DATA and not data.isascii():
                self.leaks.append(self.leak(number, header, data))
            elif message == ANSWER and status == 0:
                self.got["taken offers"] += 1
            elif message == BARRIER:
                self.barrier = number

    def leak(self, number: int, header: bytes, data: bytes) -> str:
        places = [place for place, value in enumerate(data) if value > 127]
        offset = POSITION.unpack_from(header, HEAD.size)
        return (
            f"{len(places)} of {len(data)} bytes at {offset}, from {places[0]} on, values"
            f" {sorted({data[place] for place in places})[:4]}: {self.asks.get(number)}"
        )

    # What it says

    def fulfil(self, number: int, asked: tuple[Any, ...]) -> None:
        """Send all that a request asks for."""
        (_, _, _, _, tensors, _, _, blocks, length, position, _, _, _) = asked
        total = tensors * blocks * length
        while position < total:
            size = min(262144, total - position)
            self.say(DATA, self.head(number) + POSITION.pack(position), self.bytes(size))
            position += size

    def accept(self, number: int, offer: tuple[Any, ...], blocks: bytes) -> None:
        """Ask for what was offered, and say that it has come."""
        (cache_id, generation, slot, first, block, *_, tensors, _, length, count, _) = offer[:15]
        listed = bool(blocks)
        body = REQUEST.pack(
            cache_id,
            generation,
            slot,
            first,
            tensors,
            listed,
            block,
            count if listed else 1,
            length if listed else length * count,
            0,
            number,
            0,
            0,
        )
        self.say(ASK, self.head(self.next()) + body, blocks)
        if self.rng.random() < 0.5:
            self.say(ANSWER, self.head(number) + ANSWERED.pack(number, 0, 2, 1))

    def answer(self) -> None:
        """Send what was asked for; or something else."""
        if not self.asked:
            return
        rng = self.rng
        number, asked = rng.choice(self.asked)
        (_, _, _, _, tensors, _, _, blocks, length, start, _, _, _) = asked
        total = tensors * blocks * length
        position = self.served.get(number, start)
        whole = rng.random() < 0.7
        for _ in range(64):
            size = min(262144 if whole else rng.choice([1, 100, 511, 513, 5000]), total - position)
            if rng.random() < 0.03:
                size = rng.choice([0, 1, size + 1, min(total - position + 1, 700_000), 262145])
            offset = self.some(position, chance=0.03)
            self.say(DATA, self.head(number) + POSITION.pack(offset), self.bytes(size))
            position = min(position + size, total)
            if rng.random() < 0.03 or position >= total:
                break
        self.served[number] = position
        if len(self.served) > 1000:
            self.served.clear()
        if rng.random() < 0.2:
            self.say(END, self.head(number, rng.choice(STATUSES)))

    def ask(self) -> None:
        """A request within its rights, or beyond."""
        rng = self.rng
        cache = rng.choice(self.caches)
        listed = rng.random() < 0.4
        count = rng.choice([1, 2, 8, 8, 100]) if listed else 1
        told = self.some(count) if listed else self.some(1, chance=0.02)
        offer = rng.choice(self.offered)[0] if self.offered and rng.random() < 0.5 else 0
        number = self.next()
        self.say(
            ASK,
            self.head(self.some(number, chance=0.02))
            + self.request(cache, count=told, listed=listed, offer=offer),
            self.numbers(count, cache["blocks"]) if listed else b"",
        )
        if listed and rng.random() < 0.3:
            place = POSITION.pack(self.some(count))
            payload = self.numbers(rng.choice([0, 1, 8, 200]), cache["blocks"])
            self.say(BLOCKS, self.head(number) + place, payload)
        if rng.random() < 0.1:
            self.say(CANCEL, self.head(number))

    def request(
        self, cache: dict[str, Any], *, count: int, listed: bool, offer: int, exact: bool = False
    ) -> bytes:
        rng = self.rng
        first = rng.randrange(cache["num_tensors"])
        tensors = rng.randint(1, cache["num_tensors"] - first)
        keep = (lambda value, *_: value) if exact else self.some
        keep32 = (lambda value: value) if exact else self.some32
        return REQUEST.pack(
            keep(cache["cache_id"]) & (2**63 - 1),
            keep(cache["generation"], chance=0.02) if not exact else cache["generation"],
            keep32(cache["slot"]),
            keep32(first),
            keep32(tensors),
            listed,
            keep(rng.randrange(cache["blocks"])),
            count,
            keep(rng.choice([cache["block_bytes"], 1, cache["block_bytes"] // 2])),
            keep(0),
            offer,
            *rng.choice([(0, 0)] * 20 + [(1, 2**32 - 1), (2**64 - 1, 65536), (7, 3)]),
        )

    def take(self) -> None:
        """Read what was offered, or a little more; and answer."""
        if not self.offered:
            return
        rng = self.rng
        number, offer = rng.choice(self.offered)
        (cache_id, generation, slot, first, block, *_, tensors, _, length, blocks, _) = offer[:15]
        listed = offer[15]
        if rng.random() < 0.8:
            body = REQUEST.pack(
                cache_id,
                generation,
                slot,
                self.some32(first),
                self.some32(tensors),
                listed,
                self.some(block),
                self.some(blocks if listed else 1),
                self.some(length if listed else length * blocks),
                self.some(0),
                self.some(number, chance=0.02),
                0,
                0,
            )
            payload = self.numbers(min(blocks, 8), 8) if listed else b""
            self.say(ASK, self.head(self.next()) + body, payload)
        if rng.random() < 0.5:
            status = rng.choice([0, 0, *STATUSES])
            spans = rng.choice(U64)
            body = ANSWERED.pack(self.some(number), status, rng.choice([0, 1, 2, 2**32 - 1]), spans)
            self.say(ANSWER, self.head(number, status) + body)

    def offer(self) -> None:
        """Offer what is ours, or is not, into what may be written, or may not."""
        rng = self.rng
        target = rng.choice(self.caches)
        own = self.evil.own[rng.choice(list(OWN))]
        number = self.next()
        lists = rng.choice([(0, 0), (0, 1), (1, 1), (1, 0)])
        count = rng.choice([1, 3, 8]) if any(lists) else 1
        length = min(target["block_bytes"], own.block_bytes)
        tensors = min(target["num_tensors"], own.desc.num_tensors)
        body = OFFERED.pack(
            self.some(own.cache_id) & (2**63 - 1),
            self.some(own.native.generation, chance=0.02),
            self.some32(own.native.slot),
            self.some32(0),
            self.some(0),
            target["cache_id"],
            self.some(target["generation"], chance=0.02),
            self.some32(target["slot"]),
            self.some32(0),
            self.some(rng.randrange(target["blocks"])),
            self.some32(tensors),
            self.some32(rng.choice([1, 2, tensors])),
            self.some(length),
            self.some(count, chance=0.03),
            rng.choice([1, 10**6, 10**7, 10**8, 2**63, 2**64 - 1]) if rng.random() < 0.2 else 10**8,
            *lists,
        )
        self.say(OFFER, self.head(number) + body)
        for which, has in enumerate(lists, 1):
            if has and rng.random() < 0.95:
                place = POSITION.pack(self.some(0, chance=0.03))
                said = rng.choice([0, 1, 9, 16000]) if rng.random() < 0.03 else count
                payload = self.numbers(said, target["blocks"])
                self.say(OFFER_BLOCKS, self.head(number, which) + place, payload)
        if rng.random() < 0.1:
            self.say(CANCEL, self.head(number))

    def small(self) -> None:
        """Messages about whatever runs."""
        rng = self.rng
        known = [number for number, _ in (*self.asked, *self.offered)] or [1]
        number = rng.choice([rng.choice(known), rng.choice(known) ^ 1, rng.choice(U64)])
        message = rng.choice([PING, PONG, END, CANCEL, ECHO, NOTED, BARRIER, NOTICE])
        if message == ECHO:
            number = rng.choice([self.barrier, self.barrier, self.barrier + 1, rng.choice(U64)])
        cache = rng.choice(self.caches)
        body = payload = b""
        if message == BARRIER:
            body = QUIET.pack(self.some(cache["generation"]), self.some32(cache["slot"]))
            payload = self.numbers(rng.choice([0, 1, 8, 16000]), 8)
        elif message == NOTICE:
            number = rng.choice([self.next() % 100, *U64])
            body = stranger.NOTICE.pack(*rng.choice([(0, 0), (1, 2**32 - 1), (2**64 - 1, 65536)]))
            payload = self.bytes(rng.choice([0, 1, 17, 4095, 4096, 4097, 60000]))
        self.say(message, self.head(number, rng.choice(STATUSES)) + body, payload)

    def mutate(self) -> None:
        """Something that was said before, with bytes changed, cut off or added."""
        if not self.past:
            return
        rng = self.rng
        message, header, payload = rng.choice(self.past)
        changed = bytearray(header)
        for _ in range(rng.choice([0, 1, 1, 2, 8])):
            # The token stays, or it would be dropped at once.
            place = rng.choice([*range(4, 8), *range(16, max(17, len(changed)))])
            if place < len(changed):
                changed[place] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        if rng.random() < 0.1:
            changed = changed[: rng.randrange(len(changed) + 1)] + rng.randbytes(rng.choice([0, 8]))
        if rng.random() < 0.2:
            payload = payload[: rng.randrange(len(payload) + 1)]
        if rng.random() < 0.05:
            message = rng.randrange(20)
        self.say(message, bytes(changed), payload)

    def noise(self) -> None:
        rng = self.rng
        header = self.head(rng.choice(U64), rng.choice(STATUSES))
        header += rng.randbytes(rng.choice([0, 0, 8, 16, 24, 88, rng.randrange(120)]))
        payload = rng.randbytes(rng.choice(LENGTHS))
        self.say(rng.randrange(20), header, payload)

    def corpus(self) -> None:
        """Everything that once went wrong, or nearly, at each of its limits."""
        for cache in self.caches:
            for count in (0, 1, 2**24, 2**24 + 1, 2**32, 2**63, 2**64 - 1):
                for listed in (False, True):
                    body = self.request(cache, count=count, listed=listed, offer=0, exact=True)
                    self.say(ASK, self.head(self.next()) + body, self.numbers(8, 8))
            for value in U32:
                head = self.head(self.next())
                self.say(BARRIER, head + QUIET.pack(cache["generation"], value), b"\xff" * 9)
        for number in U64:
            for message in range(PING, NOTED + 1):
                self.say(message, self.head(number), b"")
                self.say(message, self.head(number) + POSITION.pack(number), b"\0" * 7)

    def run(self, inputs: int) -> None:
        work = {
            self.answer: 6,
            self.ask: 6,
            self.take: 4,
            self.offer: 5,
            self.small: 3,
            self.mutate: 6,
            self.noise: 2,
        }
        actions, weights = list(work), list(work.values())
        while self.sent.total() < inputs:
            for action in self.rng.choices(actions, weights, k=4):
                action()
            self.hear()


# What the test calls


def open_evil(ctx: Context, cluster_id: int) -> tuple[str, int]:
    """Listen; where."""
    ctx.values["evil"] = evil = Evil(cluster_id)
    assert evil.table.listen_address
    return evil.table.listen_address


def attack(
    ctx: Context, victim: int, guesses: list[dict[str, Any]], seed: int, inputs: int
) -> dict[str, Any]:
    """Wait for the victim to link, then say `inputs` messages."""
    evil: Evil = ctx.values["evil"]
    end = time.monotonic() + 20
    while evil.link is None:
        if time.monotonic() > end:
            raise RuntimeError("nobody has linked")
        time.sleep(0.001)
    assert evil.link.connected_to is not None
    evil.wire.connect(evil.link.connected_to["am_address"])
    one = Attack(evil, guesses, seed)
    while not ctx.stop.is_set():
        one.hear()
        time.sleep(0.001)
    one.caches += [told for told in evil.shown if told not in one.caches]
    one.corpus()
    one.run(inputs)
    # The victim's calls are answered by nobody from now on; what it still sends is heard.
    for _ in range(200):
        one.hear()
        time.sleep(0.001)
    return {"sent": dict(one.sent), "got": dict(one.got), "leaks": one.leaks}


def begin(ctx: Context) -> None:
    """The victim has linked."""
    ctx.stop.set()


def close_evil(ctx: Context) -> None:
    ctx.values.pop("evil").close()

"""Everything that the control plane decodes, with valid frames and what is left of them.

`UCXKV_FUZZ_INPUTS=1000000 UCXKV_FUZZ_SEED=7 pytest -o timeout=0 tests/fuzz` for a long run by hand;
5,000 inputs otherwise, the same ones each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import msgspec
import pytest
from frames import ATTACH, HELLO, OPENING, RUNNING, mutated, running_messages
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ucxkv import auth, wire
from ucxkv.catalogue import LocalCatalogue
from ucxkv.connection import Connection, ConnectionLost
from ucxkv.handshake import Refused, answer
from ucxkv.links import Link

INPUTS = int(os.environ.get("UCXKV_FUZZ_INPUTS", "5000"))
SEED = int(os.environ.get("UCXKV_FUZZ_SEED", "0"))
# Of one run of Hypothesis, which remembers every input.
AT_ONCE = 20_000


def fuzz(share: float, check: Callable[..., None], *strategies: st.SearchStrategy[Any]) -> None:
    """Run a check with its share of all inputs."""

    def one(drawn: tuple[Any, ...]) -> None:
        check(*drawn)

    left = max(1, int(INPUTS * share))
    for first in range(0, left, AT_ONCE):
        limited = hypothesis.settings(
            max_examples=min(AT_ONCE, left - first),
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        hypothesis.seed(f"{SEED} {first}")(limited(given(st.tuples(*strategies))(one)))()


# Messages


def test_decode() -> None:
    for decode, messages in ((wire.decode_opening, OPENING), (wire.decode, RUNNING)):

        def check(body: bytes, decode: Callable[[bytes], wire.Message] = decode) -> None:
            with contextlib.suppress(wire.ProtocolError):
                message = decode(body)
                # Not all are equal to themselves: the text of a number that is none, for example.
                assert wire.encode(decode(wire.encode(message))) == wire.encode(message)

        fuzz(0.15, check, mutated([*OPENING, *RUNNING]))
        for message in messages:
            assert decode(wire.encode(message)) == message


def test_preamble() -> None:
    def check(data: bytes) -> None:
        try:
            version = wire.preamble_version(data)
        except wire.NotOurProtocol:
            assert not data.startswith(b"ucxkv\n")
        else:
            assert wire.preamble(version) == data

    size = wire.PREAMBLE_SIZE
    fuzz(0.05, check, st.binary(min_size=size, max_size=size))
    assert wire.preamble_version(wire.preamble(9)) == 9


# Frames


class Socket:
    """As much of a socket as a connection looks at."""

    def setsockopt(self, *arguments: object) -> None:
        pass


class Transport:
    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


class Writer:
    """Takes what is written, and keeps it."""

    def __init__(self) -> None:
        self.written = b""
        self.transport = Transport()

    def get_extra_info(self, name: str) -> Any:
        known = {
            "socket": Socket(),
            "sockname": ("127.0.0.1", 1),
            "peername": ("127.0.0.1", 2),
        }
        return known.get(name)

    def write(self, data: bytes) -> None:
        self.written += data

    async def drain(self) -> None:
        pass

    def close(self) -> None:
        pass

    async def wait_closed(self) -> None:
        pass


class Control:
    """A control thread's loop without the thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop

    def spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        return self.loop.create_task(coroutine)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


def connection_of(control: Control, said: list[bytes]) -> tuple[Connection, Writer]:
    """A connection whose peer says these pieces, and closes."""
    reader = asyncio.StreamReader(loop=control.loop)
    for piece in said:
        reader.feed_data(piece)
    reader.feed_eof()
    writer = Writer()
    return Connection(control, reader, writer), writer  # type: ignore[arg-type]


def frame(body: bytes) -> bytes:
    return wire.frame_head(len(body)) + body


@st.composite
def streams(draw: Callable[..., Any]) -> tuple[bytes, int]:
    """What a peer says, and where it is cut in two."""
    parts = [draw(st.sampled_from([wire.preamble(), wire.preamble(1), b"", b"\x16\x03\x01"]))]
    for _ in range(draw(st.integers(0, 4))):
        body = draw(mutated([*OPENING, *RUNNING]))
        how = draw(st.integers(0, 9))
        length = len(body)
        if how == 0:
            length = draw(st.sampled_from([0, 1, length + 1, 4097, 1 << 24, (1 << 24) + 1, -1]))
        parts.append((length & 0xFFFFFFFF).to_bytes(4, "big") + body)
    said = b"".join(parts)
    return said, draw(st.integers(0, len(said)))


async def hear_all(connection: Connection, opening: bool, sealed: bool) -> None:
    await connection.receive_preamble()
    if opening:
        while True:
            await connection.receive_opening()
    seals = [auth.Seal(b"key", auth.DIALLER, b"said") for _ in range(2)]
    connection.unseal(*(seals if sealed else (None, None)))
    while True:
        message = await connection.receive()
        assert not sealed, message


def test_framing(loop: asyncio.AbstractEventLoop) -> None:
    """Whatever is said before and after the handshake: messages, then a clear end."""
    control = Control(loop)

    def check(stream: tuple[bytes, int], opening: bool, sealed: bool) -> None:
        async def run() -> None:
            said, place = stream
            connection, writer = connection_of(control, [said[:place], said[place:]])
            with pytest.raises((ConnectionLost, wire.ProtocolError)):
                await hear_all(connection, opening, sealed)
            connection.abort()
            assert writer.transport.aborted

        loop.run_until_complete(run())

    fuzz(0.2, check, streams(), st.booleans(), st.booleans())


THEIRS = msgspec.structs.replace(HELLO, secured=True)
MINE = msgspec.structs.replace(HELLO, secured=True, cluster_id=8)


def test_the_listener_s_part(loop: asyncio.AbstractEventLoop) -> None:
    """Nobody gets in without the proof, whatever he says."""
    control = Control(loop)

    def check(bodies: list[bytes]) -> None:
        async def run() -> None:
            said = [wire.preamble(), frame(wire.encode(THEIRS))]
            said += [frame(body) for body in bodies if body]
            connection, _ = connection_of(control, said)
            with pytest.raises((ConnectionLost, wire.ProtocolError, Refused)):
                await answer(connection, lambda: MINE, b"key")
            connection.abort()

        loop.run_until_complete(run())

    fuzz(0.1, check, st.lists(mutated(OPENING), max_size=4))


# A link


class Native:
    """As much of a native link as one whose plane works."""

    def __init__(self) -> None:
        self.connected = False
        self.am_broken = False
        self.pulls = 0
        self.error = ""

    @property
    def ready(self) -> bool:
        return self.connected

    def connect(self, **told: Any) -> None:
        assert not self.connected
        if not told["am_address"].startswith(b"am "):
            raise ValueError("no address")
        self.connected = True

    def fail_pulls(self, status: int, reason: str) -> None:
        pass

    def close(self) -> None:
        pass


class Remote:
    """What the native class makes of an entry, without memory."""

    active = False

    def __init__(self, link: Native, **told: Any) -> None:
        for name, bits in (("cache_id", 63), ("generation", 64), ("slot", 32), ("blocks", 64)):
            if not 0 <= told[name] < 1 << bits:
                raise OverflowError(name)
        if len(told["addresses"]) != 8 * told["num_tensors"]:
            raise ValueError("addresses")
        self.retired = False

    def retire(self) -> None:
        self.retired = True


class Home:
    """What a link needs of its table."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.catalogue = LocalCatalogue()
        self.remote_factory = Remote

    def attachment(self, link: Link) -> wire.Attach:
        return ATTACH

    def changed(self, link: Link) -> None:
        pass

    def promote(self, link: Link) -> None:
        pass

    def lost(self, link: Link) -> None:
        pass


async def talk(control: Control, bodies: list[bytes]) -> tuple[Link, int]:
    """The link of a peer that says all this at once and is gone, and how many tasks it has left."""
    said = b"".join(frame(body) for body in bodies if body)
    connection, _ = connection_of(control, [said])
    connection.unseal(None, None)
    link = Link(
        Home(control),  # type: ignore[arg-type]
        HELLO,
        address="127.0.0.1:2",
        link_id=bytes(16),
        peer_serial=1,
        native=Native(),  # type: ignore[arg-type]
        worker=0,
    )
    link.begin(connection)
    for _ in range(100):
        if not link.connected:
            break
        await asyncio.sleep(0)
    assert not link.connected
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    return link, len(others)


def check_link(link: Link, tasks: int, frames: int) -> None:
    assert link.state in ("down", "reconnecting"), link
    assert link.error
    assert "internal" not in link.error, link.error
    assert len(link.remote) <= 3 * frames
    assert link.state != "down" or not link.remote
    assert tasks < 5


def test_a_link(loop: asyncio.AbstractEventLoop, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a linked peer says, in whatever order: the link goes on, or is down with a reason
    that is the peer's fault, and what it believes of the peer is bounded by what was said."""
    control = Control(loop)
    caplog.set_level(logging.ERROR)

    def check(bodies: list[bytes], attached: bool) -> None:
        async def run() -> None:
            said = [wire.encode(ATTACH), *bodies] if attached else bodies
            link, tasks = await talk(control, said)
            check_link(link, tasks, len(said))
            link.down("over")

        loop.run_until_complete(run())
        assert not caplog.records, caplog.text

    fuzz(0.35, check, st.lists(running_messages(), max_size=10), st.booleans())


@pytest.mark.parametrize("last", [wire.Bye("over"), wire.Synced(9)])
@pytest.mark.parametrize("after", RUNNING, ids=lambda message: type(message).__name__)
def test_nothing_counts_after_the_end(
    loop: asyncio.AbstractEventLoop,
    caplog: pytest.LogCaptureFixture,
    last: wire.Running,
    after: wire.Running,
) -> None:
    """Found by the fuzzer: a link that was down learned of caches from frames that were heard
    together with its end."""

    async def run() -> None:
        link, tasks = await talk(Control(loop), [wire.encode(last), wire.encode(after)])
        assert link.state == "down"
        check_link(link, tasks, 2)
        assert isinstance(link.native, Native)
        assert not link.native.connected

    loop.run_until_complete(run())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_unlinking_over_and_over(loop: asyncio.AbstractEventLoop) -> None:
    """Found by the fuzzer: each of these waited in a task of its own."""

    async def run() -> None:
        _, tasks = await talk(Control(loop), [wire.encode(wire.Unlink())] * 1000)
        assert tasks < 5

    loop.run_until_complete(run())

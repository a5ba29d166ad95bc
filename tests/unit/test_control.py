"""The listener among strangers, and the control thread's beginning and end."""

from __future__ import annotations

import _thread
import contextlib
import gc
import logging
import os
import random
import socket
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from control_pairs import Member, eventually, hears, stranger

import ucxkv
from ucxkv import connection, wire
from ucxkv.control import ControlThread, RateLimit, Waiters
from ucxkv.errors import LinkFailed, LlmError
from ucxkv.netif import endpoint, interface_of
from ucxkv.types import ClusterInfo, IpInfo


@pytest.fixture
def two() -> Iterator[tuple[Member, Member]]:
    """(owner, puller), linked."""
    with Member(1) as owner, Member(2) as puller:
        puller.link(owner)
        yield owner, puller


def works(owner: Member, puller: Member) -> None:
    entry = owner.register()
    assert puller.resolve(owner, entry.cache_id)
    owner.unregister(entry)


def hello_bytes(member: Member) -> bytes:
    body = wire.encode(member.table._linking._identity.hello("nowhere:1", 1))
    return wire.preamble() + wire.frame_head(len(body)) + body


# Strangers


def test_garbage(two: tuple[Member, Member]) -> None:
    owner, puller = two
    rng = random.Random(1)
    lengths = [*range(1, 40), 100, 4095, 4096, 4097, 70_000, 300_000]
    for length in lengths:
        with stranger(owner.address, rng.randbytes(length)) as sock:
            if length < wire.PREAMBLE_SIZE:
                sock.shutdown(socket.SHUT_WR)
            assert hears(sock) == b""
    for length in lengths:
        with stranger(owner.address, wire.preamble() + rng.randbytes(length)) as sock:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            assert hears(sock) == b""
    works(owner, puller)


def test_damaged_hellos(two: tuple[Member, Member]) -> None:
    owner, puller = two
    rng = random.Random(2)
    hello = hello_bytes(puller)
    for _ in range(300):
        damaged = bytearray(hello)
        damaged[rng.randrange(len(hello))] = rng.randrange(256)
        cut = rng.randrange(1, len(hello)) if rng.random() < 0.3 else len(hello)
        with stranger(owner.address, bytes(damaged[:cut])) as sock:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            hears(sock)
    works(owner, puller)
    assert len(owner.table.infos()) == 1


@pytest.mark.parametrize("length", [0, wire.OPENING_LIMIT + 1, 2**31, 2**32 - 1])
def test_oversized_before_the_proof(two: tuple[Member, Member], length: int) -> None:
    owner, puller = two
    with stranger(owner.address, wire.preamble() + wire.frame_head(length)) as sock:
        assert hears(sock) == b""
    works(owner, puller)


def test_oversized_after_the_proof(two: tuple[Member, Member]) -> None:
    owner, puller = two
    link = puller.to(owner)._connection
    assert link
    writer = link._writer
    puller.table.loop.call_soon_threadsafe(writer.write, wire.frame_head(wire.FRAME_LIMIT + 1))
    eventually(lambda: owner.state(puller) == "down")
    puller.link(owner)
    works(owner, puller)


def test_half_open(two: tuple[Member, Member], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HANDSHAKE_SECONDS", 0.3)
    owner, puller = two
    hello = hello_bytes(puller)
    began = time.monotonic()
    silent = [socket.create_connection(owner.address, timeout=5) for _ in range(20)]
    for number, sock in enumerate(silent):
        sock.sendall(hello[: number * len(hello) // 19])
    works(owner, puller)
    for sock in silent:
        hears(sock)
        sock.close()
    assert 0.2 < time.monotonic() - began < 2
    works(owner, puller)


def test_flood(two: tuple[Member, Member], caplog: pytest.LogCaptureFixture) -> None:
    """Silent connections are bounded, and do not keep friends out."""
    owner, puller = two
    process = psutil.Process()
    before = process.num_fds()
    silent = [socket.create_connection(owner.address, timeout=5) for _ in range(500)]
    works(owner, puller)
    eventually(lambda: process.num_fds() <= before + 500 + connection.MAX_STRANGERS)
    time.sleep(connection.STRANGER_SECONDS)
    with Member(3, listen=None) as friend:
        friend.link(owner)
        works(owner, friend)
    for sock in silent:
        sock.close()
    eventually(lambda: process.num_fds() <= before)
    assert len(owner.table._linking._listener._strangers) == 0
    assert 1 <= len(caplog.records) < 20


def test_floods_leave_nothing(two: tuple[Member, Member]) -> None:
    owner, puller = two
    process = psutil.Process()
    rng = random.Random(3)

    def flood() -> int:
        for _ in range(1000):
            with stranger(owner.address, rng.randbytes(rng.randrange(1, 2000))):
                pass
        eventually(lambda: not owner.table._linking._listener._strangers)
        gc.collect()
        return len(gc.get_objects())

    flood()
    fds, objects = process.num_fds(), flood()
    assert flood() - objects < 500
    eventually(lambda: process.num_fds() <= fds)
    works(owner, puller)


def test_warnings_are_rate_limited(
    two: tuple[Member, Member], caplog: pytest.LogCaptureFixture
) -> None:
    owner, _ = two
    for _ in range(50):
        with stranger(owner.address, b"GET / HTTP/1.1\r\n\r\n") as sock:
            hears(sock)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert 1 <= len(warnings) <= 6
    limit = RateLimit(burst=2, seconds=0.1)
    assert [limit.passes() for _ in range(4)] == [0, 0, None, None]
    time.sleep(0.12)
    assert limit.passes() == 2


# The thread


async def nothing() -> None:
    pass


def leftovers() -> tuple[int, int]:
    gc.collect()
    return psutil.Process().num_fds(), threading.active_count()


def test_nothing_is_left() -> None:
    def once() -> None:
        with Member(1) as owner, Member(2) as puller:
            puller.link(owner)
            works(owner, puller)
            with stranger(owner.address):
                pass

    once()
    before = leftovers()
    for _ in range(5):
        once()
    assert leftovers() == before


def test_nothing_waits_for_a_collection() -> None:
    """The native engine is freed with its last owner, not at some later time."""
    gc.collect()
    gc.disable()
    try:
        owner, puller = Member(1), Member(2)
        puller.link(owner)
        works(owner, puller)
        with stranger(owner.address, b"GET / HTTP/1.1") as sock:
            hears(sock)
        with socket.create_server(("127.0.0.1", 0)) as silent, Member(3, secret="x") as third:
            for cluster in (
                ClusterInfo(9, [IpInfo("127.0.0.1", 1)]),
                ClusterInfo(8, [IpInfo(*silent.getsockname()[:2])]),
                third.cluster(),
                owner.cluster(),
            ):
                with contextlib.suppress(LinkFailed):
                    puller.link(cluster, timeout_ms=100)
        engines = [weakref.ref(member.engine) for member in (owner, puller)]
        owner.close()
        puller.close()
        for link in (*owner.engine.links, *puller.engine.links):
            del link.engine
        del owner, puller, link
        assert [engine() for engine in engines] == [None, None]
    finally:
        gc.enable()


def test_stopping_twice_and_never_started() -> None:
    with Member(1) as member:
        member.table.stop(1)
        member.table.stop(1)
        with pytest.raises(LlmError, match="closed"):
            member.link(ClusterInfo(2, [IpInfo("127.0.0.1", 1)]))
        entry = member.register()
        assert member.unregister(entry) < 0.1
    before = leftovers()
    ControlThread("never").stop(nothing, lambda: None, 1)
    assert leftovers() == before


def test_stopping_while_linking() -> None:
    """Calls that wait get an error; nobody waits for ever."""
    with socket.create_server(("127.0.0.1", 0)) as silent, Member(1) as member:
        caught: list[BaseException] = []

        def link() -> None:
            try:
                member.link(ClusterInfo(2, [IpInfo(*silent.getsockname()[:2])]))
            except BaseException as error:
                caught.append(error)

        thread = threading.Thread(target=link)
        thread.start()
        time.sleep(0.1)
        began = time.monotonic()
        member.table.stop(2)
        thread.join(1)
        assert not thread.is_alive()
        assert time.monotonic() - began < 0.5
        assert isinstance(caught[0], LlmError)


def test_stopping_beside_a_peer_that_does_not_read() -> None:
    with Member(1) as owner, Member(2) as puller:
        puller.link(owner)
        link = puller.to(owner)._connection
        assert link
        puller.table.loop.call_soon_threadsafe(link._writer.transport.pause_reading)  # type: ignore[attr-defined]
        time.sleep(0.05)
        for _ in range(3000):
            owner.register(tensors=2000)
        began = time.monotonic()
        owner.table.stop(2)
        assert time.monotonic() - began < 1.5
        assert not owner.table._control._thread.is_alive()


def test_stopping_on_the_control_thread() -> None:
    """A collection may finalize the engine there."""
    with Member(1) as member:
        member.table.loop.call_soon_threadsafe(member.table.stop, 1)
        member.table._control._thread.join(2)
        assert not member.table._control._thread.is_alive()


def test_interrupted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, Member(1) as member:
        threading.Timer(0.1, _thread.interrupt_main).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            member.link(ClusterInfo(2, [IpInfo(*silent.getsockname()[:2])]), timeout_ms=10_000)
        assert time.monotonic() - began < 1
        eventually(lambda: not member.table._linking.dialling(2))


def test_a_task_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise KeyError("a bug")

    with Member(1) as member:
        member.table.loop.call_soon_threadsafe(lambda: member.table._control.spawn(fail()))
        eventually(lambda: "a bug" in caplog.text)
        member.table.loop.call_soon_threadsafe(lambda: 1 / 0)
        eventually(lambda: "ZeroDivisionError" in caplog.text)


def test_an_error_inside_takes_the_link_down(
    two: tuple[Member, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, puller = two

    def broken(*args: object, **more: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(puller.table._linking, "remote_factory", broken)
    owner.register()
    eventually(lambda: puller.state(owner) == "down")
    assert "a bug" in puller.to(owner).error
    eventually(lambda: owner.state(puller) == "down")
    monkeypatch.undo()
    puller.link(owner)
    works(owner, puller)


def test_waiters() -> None:
    control = ControlThread("test")
    control.start()
    waiters = Waiters(control.loop)
    box: list[int] = []

    async def until(seconds: float) -> bool:
        return await waiters.until(lambda: box, control.loop.time() + seconds)

    assert not control.call(until(0.02))
    future = control.submit(until(5))
    control.post(waiters.touch)
    time.sleep(0.02)
    assert not future.done()
    box.append(1)
    control.post(waiters.touch)
    assert future.result(1)
    assert control.stop(nothing, lambda: None, 1)


def test_interfaces() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("127.7.7.7") == "lo"
    assert interface_of("::ffff:127.0.0.1") == "lo"
    assert interface_of("203.0.113.99") is None
    assert endpoint("::1", 5) == "[::1]:5"
    assert endpoint("host", 5) == "host:5"


FORKED = """
    import os, sys, time, warnings
    sys.path[:0] = {folders!r}
    from control_pairs import Member, eventually
    owner, puller = Member(1), Member(2)
    puller.link(owner)
    child = os.fork()
    if child == 0:
        del owner, puller
        import gc
        gc.collect()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for _ in range(20):
        entry = owner.register()
        assert puller.resolve(owner, entry.cache_id)
        owner.unregister(entry)
    assert owner.to(puller).up and puller.to(owner).up
    third = Member(3)
    third.link(owner)
    for member in (third, puller, owner):
        member.close()
    print("well")
"""
DROPPED = """
    import sys
    sys.path[:0] = {folders!r}
    from control_pairs import Member
    owner, puller = Member(1), Member(2)
    puller.link(owner)
    print("well")
"""


@pytest.mark.parametrize("script", [FORKED, DROPPED], ids=["fork", "exit without stop"])
def test_processes(script: str) -> None:
    """A forked child touches nothing of its parent's; an exit without a stop is quiet."""
    here = Path(__file__).resolve().parent
    folders = [str(here), str(here.parent)]
    result = subprocess.run(
        [sys.executable, "-X", "dev", "-c", textwrap.dedent(script.format(folders=folders))],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(ucxkv.__file__).parents[1])},
        cwd=here,
        check=False,
    )
    assert (result.stdout, result.stderr, result.returncode) == ("well\n", "", 0)


def test_import_configures_no_logging() -> None:
    handlers = logging.getLogger("ucxkv").handlers
    assert all(isinstance(handler, logging.NullHandler) for handler in handlers)
    assert len(handlers) == 1


def test_link_failure_is_no_surprise_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with Member(1) as member, pytest.raises(LinkFailed):
        member.link(ClusterInfo(2, [IpInfo("127.0.0.1", 1)]))
    assert not caplog.records

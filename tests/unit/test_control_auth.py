"""Who knows the secret links; who does not, replays, or alters, does not."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator

import pytest
from control_pairs import Member, Proxy, eventually, hears, stranger

from ucxkv import auth, wire
from ucxkv.errors import LinkFailed, Status

SECRET = "open sesame"


@pytest.fixture
def owner() -> Iterator[Member]:
    with Member(1, secret=SECRET) as member:
        yield member


def refused(member: Member, *clusters: object) -> str:
    with pytest.raises(LinkFailed) as caught:
        member.link(*clusters)  # type: ignore[arg-type]
    (result,) = caught.value.results
    assert result.status == Status.LINK_FAILED
    assert SECRET not in result.message
    return result.message


def test_proofs() -> None:
    said = auth.transcript(b"a", b"bc")
    assert said != auth.transcript(b"ab", b"c")
    mac = auth.proof(b"key", auth.DIALLER, said)
    assert auth.proves(mac, b"key", auth.DIALLER, said)
    assert not auth.proves(mac, b"key", auth.LISTENER, said)
    assert not auth.proves(mac, b"other", auth.DIALLER, said)
    assert not auth.proves(b"", b"key", auth.DIALLER, said)
    assert auth.proves(b"", None, auth.DIALLER, said)
    assert not auth.proves(mac, None, auth.DIALLER, said)
    assert auth.key_of("ä") == auth.key_of("ä".encode())


def test_seals() -> None:
    mine = auth.Seal(b"key", auth.DIALLER, b"said")
    theirs = auth.Seal(b"key", auth.DIALLER, b"said")
    first, second = mine.next(b"body"), mine.next(b"body")
    assert first != second
    assert theirs.check(b"body", first)
    assert not theirs.check(b"body", first)
    assert theirs.next(b"x") != auth.Seal(b"key", auth.LISTENER, b"said").next(b"x")


@pytest.mark.parametrize("secret", [SECRET, SECRET.encode()])
def test_right_secret(owner: Member, secret: str | bytes) -> None:
    with Member(2, listen=None, secret=secret) as friend:
        entry = owner.register()
        friend.link(owner)
        assert friend.resolve(owner, entry.cache_id)[1].cache_id == entry.cache_id


@pytest.mark.parametrize("secret", ["open barley", None])
def test_wrong_secret(owner: Member, secret: str | None, caplog: pytest.LogCaptureFixture) -> None:
    with Member(2, listen=None, secret=secret) as someone:
        assert "secret" in refused(someone, owner)
    assert owner.table.infos() == []

    def warnings() -> int:
        return sum(record.levelno >= logging.WARNING for record in caplog.records)

    # The dialler may know before the listener has written it down.
    eventually(lambda: warnings() > 0)
    assert warnings() == 1
    assert SECRET not in caplog.text


def test_a_listener_without_the_secret(owner: Member) -> None:
    with Member(2) as plain, Member(3, secret="other") as other:
        assert "secret" in refused(owner, plain)
        assert "secret" in refused(owner, other)
        assert plain.table.infos() == []


def test_no_news_before_the_proof(owner: Member) -> None:
    """Whether a cluster is linked already is told to those who know the secret."""
    with Member(2, secret=SECRET) as friend, Member(2, secret="wrong") as impostor:
        friend.link(owner)
        assert "already" not in refused(impostor, owner)
        assert owner.to(friend).up


def test_replayed_hello(owner: Member, caplog: pytest.LogCaptureFixture) -> None:
    with Member(2, secret=SECRET) as friend, Proxy(owner.address) as proxy:
        friend.link(owner.cluster(proxy.address))
        friend.unlink(owner)
        eventually(lambda: not proxy.open)
        said = bytes(proxy.said[0])
        with stranger(owner.address, said) as replayer:
            hears(replayer)
        assert owner.state(friend) == "down"
        assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
        friend.link(owner)


def test_replayed_answer(owner: Member) -> None:
    with Member(2, secret=SECRET) as friend, Proxy(owner.address) as proxy:
        friend.link(owner.cluster(proxy.address))
        friend.unlink(owner)
        eventually(lambda: not proxy.open)
        answer = bytes(proxy.answered[0])
        with socket.create_server(("127.0.0.1", 0)) as impostor:

            def repeat() -> None:
                connection, _ = impostor.accept()
                with connection, contextlib.suppress(OSError):
                    connection.sendall(answer)
                    hears(connection)

            thread = threading.Thread(target=repeat)
            thread.start()
            refused(friend, owner.cluster(impostor.getsockname()[:2]))
            thread.join()


def test_reflected(owner: Member) -> None:
    """A peer that only sends back what it hears."""
    with socket.create_server(("127.0.0.1", 0)) as mirror:

        def reflect() -> None:
            connection, _ = mirror.accept()
            with connection, contextlib.suppress(OSError):
                while data := connection.recv(65536):
                    connection.sendall(data)

        thread = threading.Thread(target=reflect)
        thread.start()
        with Member(2) as target:
            refused(owner, target.cluster(mirror.getsockname()[:2]))
        thread.join()


def test_altered_on_the_way(owner: Member) -> None:
    """No byte of what the dialler says up to the end of the link may change unnoticed."""
    with Member(2, secret=SECRET) as friend:
        with Proxy(owner.address) as proxy:
            friend.link(owner.cluster(proxy.address))
            length = len(proxy.said[0])
            friend.unlink(owner)
        for place in range(0, length - 60, 7):
            with Proxy(owner.address) as proxy:
                proxy.alter = place
                with pytest.raises(LinkFailed):
                    friend.link(owner.cluster(proxy.address), timeout_ms=300)


def test_altered_later(owner: Member) -> None:
    """A frame altered in an established link costs the connection, not more."""
    with Member(2, secret=SECRET) as friend, Proxy(owner.address) as proxy:
        friend.link(owner.cluster(proxy.address))
        native = owner.to(friend).native
        proxy.alter = len(proxy.said[0]) + 10
        entry = friend.register()
        assert owner.resolve(friend, entry.cache_id)[1].cache_id == entry.cache_id
        assert owner.to(friend).native is native
        assert proxy.accepted == 2


def test_hello_of_the_wrong_kind(owner: Member) -> None:
    body = wire.encode(wire.Proof(b""))
    with stranger(owner.address, wire.preamble() + wire.frame_head(len(body)) + body) as sock:
        assert hears(sock) == b""

"""The control plane with certificates: who links, who does not, and what is said about it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from control_pairs import Member, Proxy, eventually, hears, stranger, together

from certificates import DAY, Authority
from ucxkv import connection, wire
from ucxkv.errors import LinkFailed, ParamInvalid, Status
from ucxkv.options import Options
from ucxkv.tls import Tls
from ucxkv.types import LlmRole


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def tls(authority: Authority) -> Tls:
    return Tls(**authority.files())  # type: ignore[arg-type]


@pytest.fixture
def owner(tls: Tls) -> Iterator[Member]:
    with Member(1, tls=tls) as member:
        yield member


def other(authority: Authority, *names: str, **how: object) -> Tls:
    return Tls(**authority.files(*names, **how))  # type: ignore[arg-type]


def refused(member: Member, target: Member, seconds: float = 2.0) -> str:
    began = time.monotonic()
    with pytest.raises(LinkFailed) as caught:
        member.link(target)
    assert time.monotonic() - began < seconds
    (result,) = caught.value.results
    assert result.status == Status.LINK_FAILED
    return result.message


def works(owner: Member, puller: Member) -> None:
    entry = owner.register()
    assert puller.resolve(owner, entry.cache_id)[1].cache_id == entry.cache_id


# Who links


def test_links_and_tells_nothing_to_listeners_in(
    owner: Member, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    with Member(2, listen=None, tls=other(authority)) as friend, Proxy(owner.address) as proxy:
        friend.link(owner.cluster(proxy.address))
        works(owner, friend)
        works(friend, owner)
        said, answered = bytes(proxy.said[0]), bytes(proxy.answered[0])
    for heard in (said, answered):
        assert len(heard) > 1000
        for word in (b"ucxkv", b"rkey", b"127.0.0.1", b"FLOAT"):
            assert word not in heard
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_with_a_secret_too(authority: Authority) -> None:
    with (
        Member(1, tls=other(authority), secret="s") as owner,
        Member(2, tls=other(authority), secret="s") as friend,
        Member(3, tls=other(authority), secret="t") as wrong,
    ):
        friend.link(owner)
        works(owner, friend)
        assert "secret" in refused(wrong, owner)


def test_both_dial(owner: Member, authority: Authority) -> None:
    with Member(2, tls=other(authority)) as friend:
        results = together(lambda: friend.link(owner), lambda: owner.link(friend))
        assert [one.status for (one,) in results] == [Status.SUCCESS] * 2
        works(owner, friend)
        works(friend, owner)


def test_a_large_catalogue(owner: Member, authority: Authority) -> None:
    """Many full frames, either way."""
    entries = [owner.register(tensors=500) for _ in range(500)]
    with Member(2, tls=other(authority)) as friend:
        for _ in range(500):
            friend.register(tensors=500)
        friend.link(owner)
        assert len(friend.to(owner).remote) == len(entries)
        assert len(owner.to(friend).remote) == 500


def test_reconnects(owner: Member, authority: Authority) -> None:
    with Member(2, listen=None, tls=other(authority)) as friend, Proxy(owner.address) as proxy:
        friend.link(owner.cluster(proxy.address))
        native = friend.to(owner).native
        for _ in range(3):
            proxy.cut()
            works(owner, friend)
            assert friend.to(owner).native is native
        assert proxy.accepted == 4


def test_moves(owner: Member, authority: Authority) -> None:
    """The listener of another role is as closed as the one before."""
    before = owner.address
    options = owner.table._options
    with Member(2, listen=None, tls=other(authority)) as friend, Member(3, listen=None) as plain:
        for listen in (None, "127.0.0.1:0", f"127.0.0.1:{before[1]}"):
            moved = Options(listen=listen, tls=options.tls)
            owner.table.set_role(LlmRole.PROMPT, moved)
        assert owner.address == before
        friend.link(owner)
        works(owner, friend)
        assert "TLS" in refused(plain, owner)


def test_an_end_is_noticed(owner: Member, authority: Authority) -> None:
    with Member(2, listen=None, tls=other(authority)) as friend:
        friend.link(owner)
    eventually(lambda: owner.state(friend) == "down", 1.0)
    assert "finalized" in owner.to(friend).error


# Who does not


def test_a_plain_dialler(owner: Member, caplog: pytest.LogCaptureFixture) -> None:
    with Member(2, listen=None) as plain:
        assert "takes connections with TLS only" in refused(plain, owner)
    eventually(lambda: "TLS only" in caplog.text)
    assert owner.table.infos() == []


def test_a_plain_listener(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    with Member(1) as plain, Member(2, listen=None, tls=other(authority)) as dialler:
        text = refused(dialler, plain)
        assert "it may not use TLS" in text
        assert "in the TLS handshake" in text
        eventually(lambda: "the peer speaks TLS, this side does not" in caplog.text)


FOREIGN = {
    "expired": ({"since": -3 * DAY, "until": -DAY}, "certificate has expired"),
    "too early": ({"since": DAY / 2, "until": DAY}, "certificate is not yet valid"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_dialler_out_of_date(
    owner: Member, authority: Authority, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    how, text = FOREIGN[kind]
    with Member(2, listen=None, tls=other(authority, **how)) as friend:
        assert "not accept this side's certificate" in refused(friend, owner)
    eventually(lambda: text in caplog.text)
    assert owner.table.infos() == []


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_listener_out_of_date(tls: Tls, authority: Authority, kind: str) -> None:
    how, text = FOREIGN[kind]
    with Member(1, tls=other(authority, **how)) as owner, Member(2, tls=tls) as friend:
        message = refused(friend, owner)
        assert "the peer's certificate is not accepted" in message
        assert text in message


def test_another_authority(owner: Member, tmp_path: Path, authority: Authority) -> None:
    """Whichever side it is that does not know the other's authority."""
    foreign = Authority(tmp_path, "foreign")
    with Member(2, tls=other(foreign, ca=authority.ca)) as half:
        assert "not accept this side's certificate" in refused(half, owner)
        assert "the peer's certificate is not accepted" in refused(owner, half)
    with Member(3, tls=other(foreign)) as whole:
        assert "the peer's certificate is not accepted" in refused(whole, owner)
        assert "the peer's certificate is not accepted" in refused(owner, whole)
    assert all(info.state == "down" for info in owner.table.infos())


def anonymous(version: ssl.TLSVersion | None = None) -> ssl.SSLContext:
    """Of a client that trusts anybody and shows nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if version is not None:
        context.maximum_version = version
    return context


def hears_nothing(context: ssl.SSLContext, owner: Member) -> None:
    """A client gets no word of ours, whether it is told why or not."""
    heard = b""
    with (
        contextlib.suppress(ConnectionError, ssl.SSLError),
        socket.create_connection(owner.address, timeout=5) as sock,
        context.wrap_socket(sock) as secured,
    ):
        secured.sendall(wire.preamble())
        heard = secured.recv(100)
    assert heard == b""


def test_no_certificate(owner: Member, caplog: pytest.LogCaptureFixture) -> None:
    hears_nothing(anonymous(), owner)
    eventually(lambda: "peer did not return a certificate" in caplog.text)


def test_an_older_version(owner: Member, caplog: pytest.LogCaptureFixture) -> None:
    hears_nothing(anonymous(ssl.TLSVersion.TLSv1_2), owner)
    eventually(lambda: "unsupported protocol" in caplog.text)


# Names


def test_names(tmp_path: Path, authority: Authority) -> None:
    wanted = "kv-{cluster_id}.example"
    with (
        Member(1, tls=other(authority, "kv-1.example", peer_name=wanted)) as owner,
        Member(2, tls=other(authority, "other", "kv-2.example", peer_name=wanted)) as friend,
        Member(4, tls=other(authority, "kv-2.example", peer_name=wanted)) as impostor,
        Member(5, tls=other(authority)) as nameless,
        Member(22, tls=other(authority, "kv-2.example", peer_name=wanted)) as similar,
    ):
        friend.link(owner)
        works(owner, friend)
        expected = "the certificate of cluster 4 should name kv-4.example, but has kv-2.example"
        assert expected in refused(impostor, owner)
        assert expected in refused(owner, impostor)
        assert "kv-22.example" in refused(similar, owner)
        assert "no name at all" in refused(nameless, owner)
        assert "no name at all" in refused(owner, nameless)
        assert owner.state(friend) == "up"


def test_one_name_for_all(authority: Authority) -> None:
    with (
        Member(1, tls=other(authority, "kv.example", peer_name="kv.example")) as owner,
        Member(2, tls=other(authority, "kv.example", peer_name="kv.example")) as friend,
        Member(3, tls=other(authority, "KV.example", peer_name="kv.example")) as wrong,
    ):
        friend.link(owner)
        assert "kv.example" in refused(wrong, owner)


def test_an_impostor_does_not_resume(authority: Authority) -> None:
    """Nor end another's link, or learn whether there is one."""
    wanted = "kv-{cluster_id}.example"
    with (
        Member(1, tls=other(authority, "kv-1.example", peer_name=wanted)) as owner,
        Member(2, tls=other(authority, "kv-2.example", peer_name=wanted)) as friend,
        Member(2, tls=other(authority, "kv-3.example", peer_name=wanted)) as impostor,
    ):
        friend.link(owner)
        native = owner.to(friend).native
        assert "kv-2.example" in refused(impostor, owner)
        assert owner.to(friend).native is native
        works(owner, friend)


# Strangers


@pytest.mark.parametrize(
    "say",
    [
        b"",
        b"\x16",
        b"\x16\x03\x01\x02\x00\x01" + b"\0" * 600,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 99,
    ],
)
def test_strangers_are_dropped(
    owner: Member, authority: Authority, say: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HANDSHAKE_SECONDS", 0.5)
    began = time.monotonic()
    with stranger(owner.address, say) as sock:
        heard = hears(sock)
        # An alert of TLS at most.
        assert len(heard) < 10
    assert time.monotonic() - began < 3
    with Member(2, listen=None, tls=other(authority)) as friend:
        friend.link(owner)


def test_the_number_of_handshakes_is_bounded(owner: Member, authority: Authority) -> None:
    process = psutil.Process()
    before = process.num_fds()
    silent = [socket.create_connection(owner.address, timeout=5) for _ in range(300)]
    for number, sock in enumerate(silent):
        with contextlib.suppress(OSError):
            sock.sendall(b"\x16\x03\x01"[: 1 + number % 3])
    eventually(lambda: process.num_fds() <= before + 300 + connection.MAX_STRANGERS)
    time.sleep(connection.STRANGER_SECONDS)
    with Member(2, listen=None, tls=other(authority)) as friend:
        friend.link(owner)
        works(owner, friend)
    for sock in silent:
        sock.close()
    eventually(lambda: process.num_fds() <= before)


def test_stopping_in_mid_handshake(authority: Authority) -> None:
    process = psutil.Process()
    before = process.num_fds()
    with Member(1, tls=other(authority)) as owner:
        silent = [socket.create_connection(owner.address, timeout=5) for _ in range(20)]
        for sock in silent[::2]:
            sock.sendall(b"\x16\x03\x01")
        began = time.monotonic()
    assert time.monotonic() - began < 2
    for sock in silent:
        sock.close()
    eventually(lambda: process.num_fds() <= before)


def test_a_listener_that_says_nothing(authority: Authority) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        Member(1, tls=other(authority)) as target,
        Member(2, listen=None, tls=other(authority)) as dialler,
    ):
        began = time.monotonic()
        with pytest.raises(LinkFailed) as caught:
            dialler.link(target.cluster(silent.getsockname()[:2]), timeout_ms=500)
        assert 0.4 < time.monotonic() - began < 2
        assert "TLS handshake" in caught.value.results[0].message


# Files


def test_changed_files_are_read_again(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """The next connection has the new certificate; a half replaced one is not used."""
    files = authority.files(since=-3 * DAY, until=-DAY)
    fresh = authority.files()
    tls = Tls(**files)  # type: ignore[arg-type]
    with Member(1, tls=tls) as owner, Member(2, listen=None, tls=other(authority)) as friend:
        assert "expired" in refused(friend, owner)
        shutil.copy(str(fresh["certificate"]), tls.certificate)
        assert "expired" in refused(friend, owner)
        eventually(lambda: "the changed certificate is not used" in caplog.text)
        shutil.copy(str(fresh["key"]), tls.key)
        friend.link(owner)
        works(owner, friend)


def broken(authority: Authority, tmp_path: Path, how: str) -> Tls:
    files = authority.files(password=b"open sesame" if how == "encrypted" else None)
    if how in ("certificate", "key", "ca"):
        os.unlink(str(files[how]))
        if how == "ca":
            files["ca"] = str(tmp_path / "nothing")
    elif how == "mismatch":
        files["key"] = authority.files()["key"]
    elif how == "rubbish":
        Path(str(files["certificate"])).write_text("rubbish")
    elif how == "no authority":
        Path(str(files["ca"])).write_text("rubbish")
    return Tls(**files)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "how", ["certificate", "key", "ca", "mismatch", "rubbish", "no authority", "encrypted"]
)
def test_useless_files(authority: Authority, tmp_path: Path, how: str) -> None:
    tls = broken(authority, tmp_path, how)
    for listen in ("127.0.0.1:0", None):
        with pytest.raises(ParamInvalid, match="Tls: ") as caught:
            Member(1, listen=listen, tls=tls)
        assert "sesame" not in str(caught.value)


def test_options() -> None:
    tls = Tls("c", Path("k"), "a")
    assert Options(tls=tls).tls is tls
    with pytest.raises(TypeError, match="tls"):
        Options(tls="c")  # type: ignore[arg-type]
    for arguments in ((1, "k", "a"), ("c", None, "a"), ("c", "k", b"a")):
        with pytest.raises(TypeError):
            Tls(*arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Tls("c", "k", "a", 1)  # type: ignore[arg-type]
    for arguments in (("", "k", "a"), ("c", "k", "a", "")):
        with pytest.raises(ParamInvalid):
            Tls(*arguments)  # type: ignore[arg-type]

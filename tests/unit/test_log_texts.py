"""What others say ends up in errors and logs: neither as lines of their own nor without bound."""

from __future__ import annotations

import logging
import socket
import threading

import msgspec
import pytest
from control_pairs import Member, eventually, hears, stranger

from ucxkv import wire
from ucxkv.errors import LinkFailed

FORGED = "no\nERROR:ucxkv:all is lost\x1b[2J\r\u2028\u202e"


def test_texts_of_peers_are_single_lines() -> None:
    refusal = wire.decode_opening(wire.encode(wire.Refusal(wire.REFUSED, FORGED)))
    bye = wire.decode(wire.encode(wire.Bye(FORGED)))
    assert isinstance(refusal, wire.Refusal)
    assert isinstance(bye, wire.Bye)
    for text in (refusal.text, bye.reason):
        assert text.isprintable()
        assert len(text) == len(FORGED)
    assert wire.Refusal(1, "für 7 Cluster").text == "für 7 Cluster"


def test_a_refusal_that_forges_a_line(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(server: socket.socket) -> None:
        sock, _ = server.accept()
        with sock:
            body = msgspec.msgpack.encode([3, wire.REFUSED, FORGED])
            sock.sendall(wire.preamble() + wire.frame_head(len(body)) + body)
            hears(sock)

    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        Member(1) as dialler,
        Member(2) as target,
    ):
        thread = threading.Thread(target=refuse, args=(server,))
        thread.start()
        with pytest.raises(LinkFailed) as caught:
            dialler.link(target.cluster(server.getsockname()[:2]))
        thread.join()
    assert "all is lost" in str(caught.value)
    assert str(caught.value).isprintable()
    assert "\n" not in "".join(record.getMessage() for record in caplog.records)


def test_refusals_are_logged_at_a_bounded_rate(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with Member(1) as owner:
        hello = msgspec.structs.replace(
            owner.table._linking._identity.hello(""), cluster_id=2, expected=3
        )
        body = wire.encode(hello)
        for _ in range(100):
            with stranger(
                owner.address, wire.preamble() + wire.frame_head(len(body)) + body
            ) as sock:
                assert b"answers here" in hears(sock)
        eventually(lambda: any("refused" in record.getMessage() for record in caplog.records))
    assert len([record for record in caplog.records if "refused" in record.getMessage()]) <= 6

"""Making and ending links: results, messages, and what the other side sees."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from control_pairs import Member, eventually, hears, stranger, together

from fake_native import FakeEngine
from ucxkv import handshake, wire
from ucxkv.errors import LinkFailed, LlmError, Status
from ucxkv.types import ClusterInfo, IpInfo, LinkResult, LlmRole


@pytest.fixture
def two() -> Iterator[tuple[Member, Member]]:
    with Member(1) as first, Member(2) as second:
        yield first, second


def failure(member: Member, *clusters: object, timeout_ms: float = 5000) -> LinkResult:
    with pytest.raises(LinkFailed) as caught:
        member.link(*clusters, timeout_ms=timeout_ms)  # type: ignore[arg-type]
    (result,) = caught.value.results
    assert result.message
    assert result.message in str(caught.value)
    return result


def test_up_on_both_sides(two: tuple[Member, Member]) -> None:
    first, second = two
    (result,) = first.link(second)
    assert result == LinkResult(2, Status.SUCCESS)
    for mine, other in (two, two[::-1]):
        link = mine.to(other)
        assert link.up
        assert link.state == "up"
        assert link.native.connected_to["peer_token"] == other.to(mine).native.token  # type: ignore[attr-defined]
        (info,) = mine.table.infos()
        assert (info.cluster_id, info.state, info.path) == (other.cluster_id, "up", "stream")
        assert info.role is LlmRole.MIX
    assert first.to(second).address == "{}:{}".format(*second.address)


def test_usable_from_the_other_side_at_once(two: tuple[Member, Member]) -> None:
    first, second = two
    for _ in range(100):
        first.link(second)
        assert second.to(first).up
        assert first.unlink(second).status == Status.SUCCESS


def test_already_linked(two: tuple[Member, Member]) -> None:
    first, second = two
    first.link(second)
    for mine, other in (two, two[::-1]):
        link = mine.to(other)
        assert failure(mine, other).status == Status.ALREADY_LINK
        assert mine.to(other) is link
        assert link.up
    # What is wrong with a given address does not matter any more.
    assert failure(first, second.cluster(("127.0.0.1", 1))).status == Status.ALREADY_LINK


def test_another_cluster_answers(two: tuple[Member, Member]) -> None:
    first, second = two
    result = failure(first, ClusterInfo(3, [IpInfo(*second.address)]))
    assert result.status == Status.LINK_FAILED
    assert "cluster 2" in result.message
    assert "cluster 3" in result.message
    assert first.table.infos() == second.table.infos() == []


def test_itself(two: tuple[Member, Member]) -> None:
    first, _ = two
    assert "itself" in failure(first, first).message
    with Member(1) as namesake:
        result = failure(first, ClusterInfo(9, [IpInfo(*namesake.address)]))
        assert result.status == Status.LINK_FAILED


def test_bad_addresses(two: tuple[Member, Member]) -> None:
    first, second = two
    with socket.create_server(("127.0.0.1", 0)) as silent:
        closed = socket.create_server(("127.0.0.1", 0))
        gone = closed.getsockname()[:2]
        closed.close()
        began = time.monotonic()
        with pytest.raises(LinkFailed) as caught:
            first.link(
                ClusterInfo(10, [IpInfo(*silent.getsockname()[:2])]),
                ClusterInfo(11, [IpInfo(*gone)]),
                ClusterInfo(12, [IpInfo("no-such-host.invalid", 1)]),
                ClusterInfo(13, []),
                ClusterInfo(14, [IpInfo("127.0.0.1", 99999)]),
                second,
                timeout_ms=700,
            )
        assert time.monotonic() - began < 2
    results = {result.cluster_id: result for result in caught.value.results}
    assert results[2].status == Status.SUCCESS
    assert results[10].status == Status.TIMEOUT
    assert "waiting for the peer's hello" in results[10].message
    assert all(results[bad].status == Status.LINK_FAILED for bad in (11, 13, 14))
    assert results[12].status in (Status.LINK_FAILED, Status.TIMEOUT)
    assert f"127.0.0.1:{gone[1]}" in results[11].message
    assert "refused" in results[11].message
    assert "no-such-host.invalid" in results[12].message
    assert first.to(second).up


def answering(*said: bytes) -> tuple[socket.socket, threading.Thread]:
    """A server that says something to its first client."""
    server = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            for data in said:
                connection.sendall(data)
                time.sleep(0.02)
            connection.shutdown(socket.SHUT_WR)
            hears(connection)

    thread = threading.Thread(target=run)
    thread.start()
    return server, thread


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([b"HTTP/1.1 400 Bad Request\r\n\r\n"], "protocol"),
        ([b""], "closed by the peer"),
        ([wire.preamble()[:4]], "closed by the peer"),
        ([wire.preamble(99)], "99"),
        ([wire.preamble(), b"\xff\xff\xff\xff"], "4294967295 bytes"),
        ([wire.preamble(), b"\0\0\0\x05hello"], "malformed"),
    ],
)
def test_not_our_protocol(said: list[bytes], message: str) -> None:
    server, thread = answering(*said)
    with server, Member(1, listen=None) as member:
        result = failure(member, ClusterInfo(2, [IpInfo(*server.getsockname()[:2])]))
        assert result.status == Status.LINK_FAILED
        assert message in result.message
        assert str(server.getsockname()[1]) in result.message
    thread.join()


def test_another_protocol_version_knocks(two: tuple[Member, Member]) -> None:
    first, _ = two
    with stranger(first.address, wire.preamble(99)) as sock:
        assert hears(sock) == wire.preamble()


def test_several_addresses(two: tuple[Member, Member]) -> None:
    first, second = two
    with socket.create_server(("127.0.0.1", 0)) as silent:
        addresses = [("127.0.0.1", 1), silent.getsockname()[:2], second.address]
        first.link(ClusterInfo(2, [IpInfo(*address) for address in addresses]), timeout_ms=900)
    assert first.to(second).address == "{}:{}".format(*second.address)


def test_local_address(two: tuple[Member, Member]) -> None:
    first, second = two
    info = ClusterInfo(2, [IpInfo(*second.address)], None, [IpInfo("127.0.0.5", 0)])
    first.link(info)
    assert second.to(first).address.startswith("127.0.0.5:")


def test_role(two: tuple[Member, Member]) -> None:
    first, second = two
    info = ClusterInfo(2, [IpInfo(*second.address)], LlmRole.PROMPT)
    assert "PROMPT" in failure(first, info).message
    first.link(ClusterInfo(2, [IpInfo(*second.address)], LlmRole.MIX))


def ipv6_works() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("listen", "hosts"),
    [
        ("127.0.0.1:0", ["127.0.0.1", "localhost"]),
        ("localhost:0", ["localhost"]),
        ("0.0.0.0:0", ["127.0.0.1", "127.0.0.9"]),
        ("[::1]:0", ["::1"]),
        (":0", ["127.0.0.1", "::1", "localhost"]),
        ("[::]:0", ["127.0.0.1", "::1"]),
    ],
)
def test_listening(listen: str, hosts: list[str]) -> None:
    if any("::1" in host for host in hosts) and not ipv6_works():
        pytest.skip("no IPv6")
    with Member(1, listen=listen) as first, Member(2, listen=None) as second:
        for host in hosts:
            second.link(first.cluster((host, first.address[1])))
            assert second.unlink(first).status == Status.SUCCESS
        assert [values["NET_DEVICES"] for values in first.engine.workers] == ["lo"]
        assert first.engine.workers == second.engine.workers


def test_port_taken(two: tuple[Member, Member]) -> None:
    first, _ = two
    with pytest.raises(LlmError, match=str(first.address[1])):
        Member(3, listen="{}:{}".format(*first.address))
    with pytest.raises(LlmError, match="no-such-host"):
        Member(3, listen="no-such-host.invalid:0")


def test_ucx_versions(two: tuple[Member, Member]) -> None:
    first, _ = two
    with Member(3, engine=FakeEngine(ucx_version="1.20.0")) as other:
        result = failure(first, other)
        assert result.status == Status.LINK_FAILED
        assert "1.22.0" in result.message
        assert "1.20.0" in result.message
        assert "1.20.0" in failure(other, first).message
    with Member(4, engine=FakeEngine(ucx_version="1.22.7")) as patch:
        first.link(patch)
    assert handshake.compatible("1.20.0", "1.20.1")
    assert not handshake.compatible("1.20.0", "1.21.0")


def test_chunk_sizes(two: tuple[Member, Member]) -> None:
    first, _ = two
    with Member(3, engine=FakeEngine(chunk_size=2000)) as other:
        message = failure(first, other).message
        assert "1000" in message
        assert "2000" in message


def test_forced_settings(two: tuple[Member, Member]) -> None:
    first, _ = two
    with Member(3, ucx={"ADDRESS_VERSION": "v1"}) as other:
        for mine, theirs in ((first, other), (other, first)):
            result = failure(mine, theirs)
            assert result.status == Status.LINK_FAILED
            assert "ADDRESS_VERSION" in result.message


def test_the_data_plane_is_not_proven(two: tuple[Member, Member]) -> None:
    first, second = two
    second.engine.proves = False
    result = failure(first, second, timeout_ms=300)
    assert result.status == Status.TIMEOUT
    assert "ready" in result.message
    assert not first.to(second).up
    eventually(lambda: second.table.infos() == [])
    assert all(link.closed for link in first.engine.links + second.engine.links)
    second.engine.prove()
    first.engine.proves = False
    assert "data plane" in failure(first, second, timeout_ms=300).message
    first.engine.prove()
    first.link(second)


def test_no_native_link(two: tuple[Member, Member], monkeypatch: pytest.MonkeyPatch) -> None:
    _, second = two

    def full(worker: int) -> None:
        raise RuntimeError("all 8192 are taken")

    monkeypatch.setattr(second.engine, "new_link", full)
    for mine, other in (two, two[::-1]):
        result = failure(mine, other)
        assert result.status == Status.LINK_FAILED
        assert "8192" in result.message or "lost" in result.message


def test_no_worker(two: tuple[Member, Member], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = two

    def broken(values: dict[str, str]) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(first.engine, "add_worker", broken)
    for mine, other in (two, two[::-1]):
        assert "no such device" in failure(mine, other).message
    monkeypatch.undo()
    first.link(second)


def test_an_error_inside_is_told(
    two: tuple[Member, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = two

    def broken(worker: int) -> None:
        raise KeyError("bug")

    monkeypatch.setattr(second.engine, "new_link", broken)
    for mine, other in (two, two[::-1]):
        assert failure(mine, other).status == Status.LINK_FAILED


def test_many_at_once() -> None:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(Member(1))
        others = [stack.enter_context(Member(10 + number)) for number in range(15)]
        results = first.link(*others)
        assert [result.cluster_id for result in results] == list(range(10, 25))
        assert all(other.to(first).up for other in others)
        assert len(first.engine.workers) == 1


def test_the_same_cluster_twice(two: tuple[Member, Member]) -> None:
    first, second = two
    results = first.link(second, second)
    assert [result.status for result in results] == [Status.SUCCESS] * 2
    assert len(first.engine.links) == 1


# Unlinking


def test_unlink(two: tuple[Member, Member]) -> None:
    first, second = two
    assert first.unlink(second).status == Status.SUCCESS
    first.link(second)
    native = second.to(first).native
    assert first.unlink(second).status == Status.SUCCESS
    assert first.table.lookup(2) is None
    eventually(lambda: second.state(first) == "down")
    eventually(lambda: native.closed)
    assert "unlinked" in second.table.infos()[0].error
    assert first.unlink(second).status == Status.SUCCESS
    second.link(first)
    assert first.to(second).up


@pytest.mark.parametrize("who", [0, 1], ids=["unlinker pulls", "other pulls"])
def test_unlink_waits_for_pulls(two: tuple[Member, Member], who: int) -> None:
    first, second = two
    first.link(second)
    natives = [first.to(second).native, second.to(first).native]
    natives[who].pulls = 1  # type: ignore[misc]
    thread = threading.Thread(target=first.unlink, args=(second,))
    thread.start()
    eventually(lambda: not second.to(first).up)
    time.sleep(0.1)
    assert thread.is_alive()
    assert not first.to(second).up
    assert not any(native.closed for native in natives)
    natives[who].pulls = 0  # type: ignore[misc]
    thread.join(2)
    assert not thread.is_alive()
    # The side that did not unlink hears of it a moment later.
    eventually(lambda: natives[who].failed)  # type: ignore[attr-defined]
    assert natives[who].failed[0][1]  # type: ignore[attr-defined]
    eventually(lambda: all(native.closed for native in natives))


@pytest.mark.parametrize("force", [False, True])
def test_unlink_ends_pulls(two: tuple[Member, Member], force: bool) -> None:
    first, second = two
    first.link(second)
    natives = [first.to(second).native, second.to(first).native]
    for native in natives:
        native.pulls = 1  # type: ignore[misc]
    began = time.monotonic()
    result = first.unlink(second, timeout_ms=10_000 if force else 200, force=force)
    assert result.status == Status.SUCCESS
    seconds = time.monotonic() - began
    assert seconds < 2 if force else seconds >= 0.2
    eventually(lambda: all(native.closed for native in natives))
    for native in natives:
        ((status, reason),) = native.failed  # type: ignore[attr-defined]
        assert status == Status.NOT_YET_LINK
        assert "unlinked" in reason


def test_unlink_that_fails(two: tuple[Member, Member]) -> None:
    first, second = two
    first.link(second)
    first.engine.stuck = True
    assert first.unlink(second).status == Status.UNLINK_FAILED


def test_both_unlink_at_once(two: tuple[Member, Member]) -> None:
    first, second = two
    for _ in range(30):
        first.link(second)
        results = together(lambda: first.unlink(second), lambda: second.unlink(first))
        assert [result.status for result in results] == [Status.SUCCESS] * 2


def test_unlink_while_linking(two: tuple[Member, Member]) -> None:
    first, second = two
    first.engine.proves = False
    caught: list[Exception] = []

    def link() -> None:
        try:
            first.link(second)
        except LinkFailed as error:
            caught.append(error)

    thread = threading.Thread(target=link)
    thread.start()
    eventually(lambda: first.state(second) == "connecting")
    assert first.unlink(second).status == Status.SUCCESS
    thread.join(2)
    assert not thread.is_alive()
    assert len(caught) == 1
    assert "unlinked" in str(caught[0])


def test_bye(two: tuple[Member, Member]) -> None:
    first, second = two
    first.link(second)
    native = second.to(first).native
    native.pulls = 1  # type: ignore[misc]
    first.close()
    eventually(lambda: second.state(first) == "down")
    ((status, reason),) = native.failed  # type: ignore[attr-defined]
    assert status == Status.NOT_YET_LINK
    assert "finalized" in reason
    assert "finalized" in second.table.infos()[0].error


def test_ended_links_are_not_remembered_for_ever() -> None:
    with Member(1) as first:
        for number in range(80):
            with Member(100 + number, listen=None) as other:
                other.link(first)
        eventually(lambda: all(info.state == "down" for info in first.table.infos()))
        assert len(first.table.infos()) <= 66

"""Control connections that are cut, peers that die, and peers that come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from control_pairs import Member, Proxy, eventually

from ucxkv import links
from ucxkv.errors import LinkFailed, LlmTimeout, NotYetLink, Status


@pytest.fixture
def three() -> Iterator[tuple[Member, Member, Proxy]]:
    """(listener, dialler, the proxy between them), linked."""
    with Member(1) as listener, Member(2) as dialler, Proxy(listener.address) as proxy:
        dialler.link(listener.cluster(proxy.address))
        yield listener, dialler, proxy


Three = tuple[Member, Member, Proxy]


def both_up(first: Member, second: Member) -> None:
    eventually(lambda: first.to(second).settled and second.to(first).settled)
    assert first.to(second).up
    assert second.to(first).up


def test_cut(three: Three) -> None:
    """The link, its endpoints and tokens stay; caches that stay are not made anew."""
    listener, dialler, proxy = three
    mine, theirs = dialler.to(listener), listener.to(dialler)
    entry = listener.register()
    told = dialler.resolve(listener, entry.cache_id)[1]
    for number in range(20):
        proxy.cut()
        eventually(lambda n=number: proxy.accepted == 2 + n)
        both_up(listener, dialler)
        assert dialler.resolve(listener, entry.cache_id)[1] is told
    assert dialler.to(listener) is mine
    assert listener.to(dialler) is theirs
    assert not told.native.retired
    for link in (mine, theirs):
        assert link.error == ""
        assert not link.native.failed
        assert not link.native.closed


def test_changes_while_cut(three: Three) -> None:
    listener, dialler, proxy = three
    for owner, puller in ((listener, dialler), (dialler, listener)):
        stays, goes = owner.register(), owner.register()
        native: Any = puller.resolve(owner, goes.cache_id)[1].native
        native.active = 1
        proxy.hold()
        proxy.cut()
        eventually(lambda o=owner, p=puller: o.state(p) == "reconnecting")
        later = owner.register()
        thread = threading.Thread(target=owner.unregister, args=(goes, 5))
        thread.start()
        time.sleep(0.1)
        proxy.held = False
        eventually(lambda n=native: n.retired)
        # The one who unregisters waits for a pull that goes on over the data plane.
        assert thread.is_alive()
        native.active = 0
        thread.join(2)
        assert not thread.is_alive()
        assert puller.resolve(owner, later.cache_id)
        assert puller.resolve(owner, stays.cache_id)
        assert goes.cache_id not in puller.to(owner).remote
        both_up(listener, dialler)


def test_questions_survive_a_cut(three: Three) -> None:
    listener, dialler, proxy = three
    proxy.hold()
    time.sleep(0.02)
    found: list[Any] = []
    entry = listener.register()
    thread = threading.Thread(
        target=lambda: found.append(dialler.resolve(listener, entry.cache_id, 5))
    )
    thread.start()
    time.sleep(0.05)
    proxy.cut()
    proxy.held = False
    thread.join(5)
    assert found


def test_new_pulls_wait_for_the_connection(three: Three) -> None:
    listener, dialler, proxy = three
    entry = listener.register()
    dialler.resolve(listener, entry.cache_id)
    proxy.hold()
    proxy.cut()
    eventually(lambda: not dialler.to(listener).up)
    with pytest.raises(LlmTimeout, match="reconnecting"):
        dialler.resolve(listener, entry.cache_id, 0.1)
    threading.Timer(0.1, setattr, (proxy, "held", False)).start()
    assert dialler.resolve(listener, entry.cache_id, 5)


def test_gives_up_in_the_end(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "RECONNECT_SECONDS", 0.4)
    listener, dialler, proxy = three
    natives: list[Any] = [listener.to(dialler).native, dialler.to(listener).native]
    proxy.hold()
    proxy.cut()
    eventually(lambda: listener.state(dialler) == dialler.state(listener) == "down", 2)
    for native in natives:
        assert native.failed[0][0] == Status.NOT_YET_LINK
        assert native.closed
    with pytest.raises(NotYetLink, match="connection"):
        dialler.resolve(listener, 1)


def test_nobody_listens_any_more(three: Three) -> None:
    listener, dialler, proxy = three
    proxy.close_door()
    began = time.monotonic()
    proxy.cut()
    eventually(lambda: dialler.state(listener) == "down")
    assert time.monotonic() - began < 0.5
    assert "gone" in dialler.to(listener).error
    assert "refused" in dialler.to(listener).error


def test_both_planes_broken(three: Three) -> None:
    """Waiting pulls fail within a second, on the side that cannot dial too."""
    listener, dialler, proxy = three
    native: Any = listener.to(dialler).native
    native.pulls = 1
    proxy.hold()
    began = time.monotonic()
    proxy.cut()
    native.am_broken = True
    eventually(lambda: native.failed)
    assert time.monotonic() - began < 0.9
    assert listener.state(dialler) == "down"
    assert "gone" in listener.to(dialler).error
    proxy.held = False
    # Who comes back finds that the other has given the link up, and links anew.
    eventually(lambda: dialler.state(listener) == "down")
    dialler.link(listener.cluster(proxy.address))
    both_up(listener, dialler)


def test_data_plane_broken(three: Three) -> None:
    """A living control connection: the link is repaired for as long as it takes."""
    listener, dialler, _ = three
    native: Any = dialler.to(listener).native
    native.am_broken = True
    eventually(lambda: dialler.state(listener) == "repairing")
    time.sleep(0.8)
    assert dialler.to(listener).up
    assert not native.failed
    native.am_broken = False
    eventually(lambda: dialler.state(listener) == "up")


def test_data_plane_broken_in_both_but_back_in_time(three: Three) -> None:
    listener, dialler, proxy = three
    native: Any = listener.to(dialler).native
    native.am_broken = True
    proxy.cut()
    both_up(listener, dialler)
    assert listener.state(dialler) == "repairing"
    time.sleep(0.8)
    assert not native.failed


def reborn(member: Member) -> Member:
    """The peer's process dies and another takes its port."""
    address = member.address
    # As by SIGKILL: no goodbye.
    for link in member.table._linking.everyone():
        link._connection, lost = None, link._connection
        if lost is not None:
            member.table.loop.call_soon_threadsafe(lost.abort)
    member.close()
    return Member(member.cluster_id, listen="{}:{}".format(*address))


def test_restarted(three: Three) -> None:
    """The old link is replaced without any clean-up, whoever dials."""
    listener, dialler, _ = three
    dialler.link(dialler_free := Member(7))
    dialler_free.close()
    old: Any = dialler.to(listener).native
    with reborn(listener) as again:
        dialler.link(again)
        both_up(dialler, again)
        assert old.closed
        assert dialler.to(again).incarnation == again.table._linking._identity.incarnation


def test_restarted_dialler() -> None:
    with Member(1) as listener, Member(2) as dialler:
        dialler.link(listener)
        for _ in range(3):
            old: Any = listener.to(dialler).native
            old.pulls = 1
            again = reborn(dialler)
            again.link(listener)
            assert listener.to(again).up
            assert listener.to(again).native is not old
            eventually(lambda o=old: o.failed and o.closed)
            dialler = again
        dialler.close()


def test_restarted_while_the_link_looks_up(three: Three) -> None:
    """The death of the old process is not seen, as when a host vanishes."""
    listener, dialler, proxy = three
    proxy.hold()
    old: Any = dialler.to(listener).native
    with reborn(listener) as again:
        assert dialler.to(listener).up
        dialler.link(again)
        both_up(dialler, again)
        assert old.closed


def test_the_restarted_one_dials_while_the_link_looks_up(three: Three) -> None:
    listener, dialler, proxy = three
    proxy.hold()
    old: Any = dialler.to(listener).native
    with reborn(listener) as again:
        again.link(dialler)
        assert dialler.to(again).up
        assert old.closed
        assert "restarted" in old.failed[0][1]


def test_an_impostor_does_not_replace_the_living(three: Three) -> None:
    """Without a secret anyone may say that he is the successor, but he has to be linked first."""
    listener, dialler, _ = three
    with Member(2) as impostor:
        impostor.engine.proves = listener.engine.proves = False
        with pytest.raises(LinkFailed):
            impostor.link(listener, timeout_ms=200)
        assert listener.to(dialler).up
        assert listener.to(dialler).incarnation == dialler.table._linking._identity.incarnation


def test_link_while_reconnecting(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    listener, dialler, proxy = three
    link = dialler.to(listener)
    proxy.hold()
    proxy.cut()
    eventually(lambda: dialler.state(listener) == "reconnecting")
    # Another address of the same process.
    with pytest.raises(LinkFailed) as caught:
        dialler.link(listener)
    assert caught.value.results[0].status == Status.ALREADY_LINK
    assert dialler.to(listener) is link
    both_up(listener, dialler)
    # The side that was dialled knows an address too.
    monkeypatch.setattr(dialler.table._linking, "lost", lambda link: None)
    connection = dialler.to(listener)._connection
    assert connection
    dialler.table.loop.call_soon_threadsafe(connection.abort)
    eventually(lambda: listener.state(dialler) == "reconnecting")
    with pytest.raises(LinkFailed) as caught:
        listener.link(dialler)
    assert caught.value.results[0].status == Status.ALREADY_LINK
    both_up(listener, dialler)


def test_unlink_while_reconnecting(three: Three) -> None:
    listener, dialler, proxy = three
    proxy.hold()
    proxy.cut()
    eventually(lambda: dialler.state(listener) == "reconnecting")
    assert dialler.unlink(listener, timeout_ms=300).status == Status.SUCCESS
    assert dialler.table.lookup(1) is None
    proxy.held = False
    dialler.link(listener)
    both_up(listener, dialler)


def test_linking_anew_after_losing_the_link(three: Three) -> None:
    """One side has ended the link while the other could not hear of it."""
    listener, dialler, proxy = three
    proxy.hold()
    old: Any = listener.to(dialler).native
    assert dialler.unlink(listener, force=True).status == Status.SUCCESS
    assert listener.to(dialler).up
    dialler.link(listener)
    both_up(listener, dialler)
    assert old.closed


def test_cut_at_any_moment() -> None:
    """Whatever moment of linking or resuming a cut hits, both sides agree in the end."""
    with Member(1) as listener, Member(2) as dialler, Proxy(listener.address) as proxy:
        for number in range(60):
            timer = threading.Timer(number % 20 * 3e-4, proxy.cut)
            timer.start()
            try:
                dialler.link(listener.cluster(proxy.address))
            except LinkFailed as error:
                assert error.results[0].status == Status.LINK_FAILED  # noqa: PT017
            timer.join()
            # A listener that had been ready waits its 10 s for a dialler that has given up.
            eventually(
                lambda: (
                    {listener.state(dialler), dialler.state(listener)} <= {"up", "down", "none"}
                ),
                seconds=12,
            )
            states = {listener.state(dialler), dialler.state(listener)}
            assert states == {"up"} or "up" not in states
            dialler.unlink(listener)

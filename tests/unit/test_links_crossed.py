"""Both sides link at once: one connection remains and both calls succeed on it."""

from __future__ import annotations

import random
import socket
import threading
import time

import pytest
from control_pairs import Member, eventually, together

from ucxkv.errors import LinkFailed, Status


def statuses(outcome: object) -> list[Status]:
    results = outcome.results if isinstance(outcome, LinkFailed) else outcome
    return [result.status for result in results]  # type: ignore[attr-defined]


def linked_once(first: Member, second: Member) -> None:
    """Both have the same link, and nothing else is left of the other dial."""
    mine, theirs = first.to(second), second.to(first)
    eventually(lambda: mine.up and theirs.up)
    assert first.to(second) is mine
    assert second.to(first) is theirs
    assert mine.link_id == theirs.link_id
    for link, peer in ((mine, theirs), (theirs, mine)):
        told = link.native.connected_to  # type: ignore[attr-defined]
        assert (told["peer_slot"], told["peer_token"]) == (peer.native.slot, peer.native.token)


def test_hundreds_of_rounds() -> None:
    rng = random.Random(1)
    with Member(1) as first, Member(2) as second:
        for number in range(300):
            delays = (0.0, 0.0) if number % 2 else (rng.random() * 4e-3, rng.random() * 4e-3)

            def link(mine: Member, other: Member, delay: float) -> object:
                time.sleep(delay)
                return mine.link(other)

            outcomes = together(
                lambda d=delays[0]: link(first, second, d),
                lambda d=delays[1]: link(second, first, d),
            )
            for outcome in outcomes:
                # Whoever comes when the link is there already is told so.
                assert statuses(outcome)[0] in (Status.SUCCESS, Status.ALREADY_LINK), outcome
            linked_once(first, second)
            unlinker, other = (first, second) if number % 3 else (second, first)
            assert unlinker.unlink(other).status == Status.SUCCESS
            assert not first.table.infos() or not second.table.infos()


def test_many_pairs_at_once() -> None:
    members = [Member(number) for number in range(1, 7)]
    try:
        for _ in range(3):
            outcomes = together(
                *(
                    lambda mine=mine: mine.link(*(o for o in members if o is not mine))
                    for mine in members
                )
            )
            for outcome in outcomes:
                assert set(statuses(outcome)) <= {Status.SUCCESS, Status.ALREADY_LINK}, outcome
            for mine in members:
                for other in members:
                    if mine is not other:
                        linked_once(mine, other)
            for mine in members:
                for other in members:
                    mine.unlink(other)
    finally:
        for member in members:
            member.close()


@pytest.mark.parametrize("lower_is_lost", [True, False])
def test_one_of_two_addresses_is_wrong(lower_is_lost: bool) -> None:
    """The dial that leads nowhere does not hold up the one that arrives."""
    with (
        Member(1) as first,
        Member(2) as second,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        lost, other = (first, second) if lower_is_lost else (second, first)
        nowhere = other.cluster(silent.getsockname()[:2])
        outcomes = together(lambda: lost.link(nowhere), lambda: other.link(lost))
        for outcome in outcomes:
            assert statuses(outcome) == [Status.SUCCESS]
        linked_once(first, second)


def test_one_dial_is_refused() -> None:
    with Member(1) as first, Member(2) as second:
        nowhere = second.cluster(("127.0.0.1", 1))
        for _ in range(20):
            outcomes = together(lambda: first.link(nowhere), lambda: second.link(first))
            assert statuses(outcomes[1]) == [Status.SUCCESS]
            linked_once(first, second)
            second.unlink(first)


def test_crossing_while_the_data_plane_is_slow() -> None:
    with Member(1) as first, Member(2) as second:
        first.engine.proves = second.engine.proves = False
        timer = threading.Timer(0.3, lambda: (first.engine.prove(), second.engine.prove()))
        timer.start()
        for outcome in together(lambda: first.link(second), lambda: second.link(first)):
            assert statuses(outcome) == [Status.SUCCESS]
        timer.join()
        linked_once(first, second)

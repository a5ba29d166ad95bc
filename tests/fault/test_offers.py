"""While a cache that the peer may not read is pushed to it, the peer may read what is offered, for
as long as it is offered, and nothing else of it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from children import actions, prying
from children.prying import Ask
from harness import Peer, wait_until

BLOCKS = 8
LENGTH = 100_000
# The push is of layers 1 and 2, of one tensor each, and of block 0 or of these.
LIST = [5, 2, 6]
OFFERED = Ask(1, 2, 0, LENGTH)
OFFERED_LIST = Ask(1, 2, 0, LENGTH, LIST)
NEVER = [
    Ask(1, 2, 3, LENGTH),
    Ask(0, 2, 0, LENGTH),
    Ask(1, 3, 0, LENGTH),
    Ask(1, 1, 0, LENGTH),
    Ask(1, 2, 0, LENGTH - 1),
    Ask(1, 2, 0, LENGTH, [0]),
    Ask(1, 2, 0, LENGTH, [5, 2, 7]),
    Ask(1, 2, 0, LENGTH, [2, 5, 6]),
    Ask(1, 2, 0, LENGTH, [5, 2]),
    Ask(1, 2, 0, LENGTH, [5, 2, 6, 0]),
    Ask(0, 4, 0, LENGTH, [5, 2, 6]),
]


@pytest.fixture(params=["private", "for others"], scope="module")
def three(request: pytest.FixtureRequest) -> Iterator[tuple[Peer, Peer, Peer, int]]:
    """(receiver, sender, what asks in the receiver's name, the destination).

    The sender's cache is "secret".
    """
    access = {"private": {"access": ""}, "for others": {"access": "r", "peers": [9]}}
    with (
        Peer(1, name="receiver") as receiver,
        Peer(2, name="sender") as sender,
        Peer(3, name="prying", engine=False, fresh=True) as prier,
    ):
        sender.link(receiver)
        target = receiver.call(actions.make_cache, "into", 4, (BLOCKS, LENGTH), access="rw")
        sender.call(prying.make_secret, "secret", 4, (BLOCKS, LENGTH), **access[request.param])
        yield receiver, sender, prier, target


def served(three: tuple[Peer, Peer, Peer, int], *asks: Ask, least: int = 0) -> int:
    """Bytes that the sender has streamed because of what was asked, once they are `least`."""
    _, sender, prier, _ = three
    before = sender.call(prying.bytes_served)
    prier.call(prying.ask, sender.call(prying.plane_for, "secret", 1), asks)
    time.sleep(0.1)
    wait_until(lambda: sender.call(prying.bytes_served) >= before + least)
    return int(sender.call(prying.bytes_served)) - before


def test_without_an_offer(three: tuple[Peer, Peer, Peer, int]) -> None:
    assert served(three, OFFERED, OFFERED_LIST, *NEVER) == 0


@pytest.mark.parametrize("blocks", [False, True], ids=["slot", "blocks"])
def test_withheld(three: tuple[Peer, Peer, Peer, int], blocks: bool) -> None:
    _, sender, _, target = three
    lists = (LIST, [0, 1, 2]) if blocks else None
    sender.call(prying.push, "secret", 1, target, lists, withheld=True)
    assert served(three, OFFERED, OFFERED_LIST, *NEVER) == 0
    sender.call(prying.cancel)


@pytest.mark.parametrize("blocks", [False, True], ids=["slot", "blocks"])
def test_offered(three: tuple[Peer, Peer, Peer, int], blocks: bool) -> None:
    receiver, sender, _, target = three
    lists = (LIST, [0, 1, 2]) if blocks else None
    right, wrong = (OFFERED_LIST, OFFERED) if blocks else (OFFERED, OFFERED_LIST)
    with receiver.stopped():
        sender.call(prying.push, "secret", 1, target, lists, withheld=False)
        assert served(three, wrong, *NEVER) == 0
        # Or else nothing is shown by all this.
        moved = 2 * LENGTH * (3 if blocks else 1)
        assert served(three, right, least=moved) == moved
        sender.call(prying.cancel)
        assert served(three, OFFERED, OFFERED_LIST, *NEVER) == 0


def test_what_is_on_its_way_ends_with_the_push(three: tuple[Peer, Peer, Peer, int]) -> None:
    receiver, sender, _, _ = three
    large = (1, 40 << 20)
    target = receiver.call(actions.make_cache, "large", 4, large, access="rw")
    sender.call(prying.make_secret, "secret", 4, large, access="")
    with receiver.stopped():
        sender.call(prying.push, "secret", 1, target, None, withheld=False)
        begun = served(three, Ask(1, 2, 0, large[1]), least=1)
        assert begun < 16 << 20, "as much as fits between the two"
        before = sender.call(prying.bytes_served)
        sender.call(prying.cancel)
    # The receiver reads again: there is room for more.
    time.sleep(0.3)
    assert sender.call(prying.bytes_served) == before

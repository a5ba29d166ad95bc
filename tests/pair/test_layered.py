"""Pushes layer by layer: each layer goes as soon as it is ready, and not a moment earlier."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from children import actions, landing, layering, pushing
from children.layering import BLANK, Piece
from harness import Peer, rounds

# In this module the "owner" of the pair receives, the "puller" sends.

LAYERS = 6
SLOTS, SLOT = 3, 20_001
SEED = 4


@pytest.fixture(scope="module")
def target(pair: tuple[Peer, Peer]) -> int:
    receiver, sender = pair
    sender.call(actions.make_cache, "from", 2 * LAYERS, (SLOTS, SLOT), seed=SEED)
    return int(receiver.call(actions.make_cache, "into", 2 * LAYERS, (SLOTS, SLOT), access="rw"))


@pytest.fixture(autouse=True)
def blank(request: pytest.FixtureRequest) -> None:
    if "target" in request.fixturenames:
        request.getfixturevalue("target")
        request.getfixturevalue("pair")[0].call(actions.paint, "into", BLANK)


def layer_pieces(
    layers: Sequence[int],
    *,
    n: int = 2,
    src_first: int = 0,
    dst_first: int = 0,
    src_slot: int = 0,
    dst_slot: int = 0,
    length: int = SLOT,
) -> list[Piece]:
    """What layers of the pushed range bring."""
    return [
        Piece(
            (src_first + layer) * n + t,
            src_slot * SLOT,
            (dst_first + layer) * n + t,
            dst_slot * SLOT,
            length,
        )
        for layer in layers
        for t in range(n)
    ]


def order_of(kind: str) -> list[int]:
    order = list(range(LAYERS))
    if kind == "reversed":
        order.reverse()
    elif kind == "random":
        random.Random(11).shuffle(order)
    return order


WAYS = ["told", "events", "asyncio", "multiprocessing", "query", "asked"]


@pytest.mark.parametrize("kind", ["forward", "reversed", "random"])
@pytest.mark.parametrize("way", WAYS)
def test_each_layer_before_the_next_is_ready(
    pair: tuple[Peer, Peer], target: int, path: str, way: str, kind: str
) -> None:
    receiver, sender = pair
    order = order_of(kind)
    slots = {"src_slot": 1, "dst_slot": 2}
    sender.call(layering.begin, "push", way, LAYERS, "from", 1, target, timeout_ms=20000, **slots)
    for count, layer in enumerate(order):
        found = sender.call(layering.look, "push")
        assert not found["done"]
        assert found["bytes"] == count * 2 * SLOT
        assert sender.call(layering.land, "push", layer).ok
        landed = order[: count + 1]
        pieces = layer_pieces(landed, **slots)
        assert receiver.call(layering.difference, "into", pieces, SEED) == ""
        found = sender.call(layering.look, "push")
        assert found["results"] == [2 * SLOT if n in landed else None for n in range(LAYERS)]
        first_missing = next((n for n in range(LAYERS) if n not in landed), LAYERS)
        assert found["layers"] == first_missing
    outcome = sender.call(layering.finish, "push")
    assert outcome.ok, outcome
    assert outcome.bytes == outcome.extra["bytes"] == 2 * LAYERS * SLOT
    assert outcome.path == path
    assert outcome.spans >= LAYERS


@pytest.mark.parametrize("kind", ["forward", "reversed", "random"])
def test_layers_come_in_order(pair: tuple[Peer, Peer], target: int, kind: str) -> None:
    receiver, sender = pair
    sender.call(layering.begin, "push", "told", LAYERS, "from", 1, target, timeout_ms=20000)
    assert sender.call(layering.follow, "push", order_of(kind)) == list(range(LAYERS))
    assert sender.call(layering.finish, "push").ok
    pieces = layer_pieces(range(LAYERS))
    assert receiver.call(layering.difference, "into", pieces, SEED) == ""


def test_what_is_withheld_stays_at_home(pair: tuple[Peer, Peer], target: int) -> None:
    receiver, sender = pair
    sender.call(layering.begin, "push", "asked", LAYERS, "from", 1, target, timeout_ms=20000)
    time.sleep(0.2)
    assert receiver.call(layering.difference, "into", [], SEED) == ""
    assert sender.call(layering.wait_layer, "push", 0, 20).kind == "TimeoutError"
    assert sender.call(actions.cancel, "push").ok


def test_telling_twice_and_telling_nonsense(pair: tuple[Peer, Peer], target: int) -> None:
    receiver, sender = pair
    sender.call(layering.begin, "push", "told", LAYERS, "from", 1, target, timeout_ms=20000)
    for layer in (3, 3, 0, 3):
        assert sender.call(layering.tell, "push", layer).ok
    for layer in (LAYERS, -1, 10**20):
        assert sender.call(layering.tell, "push", layer).kind == "IndexError"
        assert sender.call(layering.wait_layer, "push", layer).kind == "IndexError"
    for wrong in ("1", 1.0, None):
        assert sender.call(layering.tell, "push", wrong).kind == "TypeError"
        assert sender.call(layering.wait_layer, "push", wrong).kind == "TypeError"
    assert sender.call(layering.wait_layer, "push", 0, 10**400).kind == "ParamInvalid"
    assert sender.call(layering.wait_layer, "push", 1, -(10**18)).kind == "TimeoutError"
    for layer in (3, 0):
        assert sender.call(layering.wait_layer, "push", layer).ok
    assert receiver.call(layering.difference, "into", layer_pieces([0, 3]), SEED) == ""
    sender.call(layering.say_ready, "push", *range(LAYERS))
    outcome = sender.call(layering.finish, "push")
    assert outcome.ok
    assert outcome.bytes == 2 * LAYERS * SLOT
    assert sender.call(layering.tell, "push", 0).ok


@pytest.mark.parametrize("way", ["told", "events"])
@pytest.mark.parametrize(
    ("n", "src", "dst"),
    [(2, (1, 3), (2, 4)), (3, (1, 2), (0, 1)), (4, (-1, -1), (0, 2)), (1, (5, 5), (11, 11))],
)
def test_layer_ranges(
    pair: tuple[Peer, Peer],
    target: int,
    way: str,
    n: int,
    src: tuple[int, int],
    dst: tuple[int, int],
) -> None:
    receiver, sender = pair
    count = dst[1] - dst[0] + 1
    more = {"per_layer": n, "src_layers": src, "dst_layers": dst, "size": 777}
    sender.call(layering.begin, "push", way, count, "from", 1, target, timeout_ms=20000, **more)
    landed: list[int] = []
    for layer in reversed(range(count)):
        landed.append(layer)
        assert sender.call(layering.land, "push", layer).ok
        pieces = layer_pieces(landed, n=n, src_first=max(src[0], 0), dst_first=dst[0], length=777)
        assert receiver.call(layering.difference, "into", pieces, SEED) == ""
    outcome = sender.call(layering.finish, "push")
    assert outcome.ok
    assert outcome.bytes == count * n * 777


def test_a_last_layer_of_fewer_tensors(pair: tuple[Peer, Peer]) -> None:
    receiver, sender = pair
    sender.call(actions.make_cache, "odd", 5, (1, 999), seed=SEED)
    target = receiver.call(actions.make_cache, "odd", 5, (1, 999), access="rw")
    receiver.call(actions.paint, "odd", BLANK)
    sender.call(layering.begin, "push", "events", 3, "odd", 1, target, timeout_ms=20000)
    assert sender.call(layering.land, "push", 2).ok
    assert receiver.call(layering.difference, "odd", [Piece(4, 0, 4, 0, 999)], SEED) == ""
    sender.call(layering.say_ready, "push", 0, 1)
    outcome = sender.call(layering.finish, "push")
    assert outcome.extra["results"] == [1998, 1998, 999]
    assert receiver.call(actions.wrong_tensors, "odd", SEED) == []
    for peer in pair:
        peer.call(actions.drop_cache, "odd")


@pytest.mark.parametrize("way", ["told", "query"])
@pytest.mark.parametrize("continuous", [False, True], ids=["blocks", "continuous"])
def test_blocks(pair: tuple[Peer, Peer], way: str, continuous: bool) -> None:
    receiver, sender = pair
    block, layers = 500, 4
    shape = (2, 4 * block) if continuous else (9, block)
    sender.call(actions.make_cache, "paged", 2 * layers, shape, seed=SEED)
    target = receiver.call(actions.make_cache, "paged", 2 * layers, (7, block), access="rw")
    receiver.call(actions.paint, "paged", BLANK)
    sources, targets = [8, 0, 3, 4], [1, 6, 2, 3]
    blocks = (None if continuous else sources, targets)
    starts = range(4) if continuous else sources
    sender.call(
        layering.begin, "push", way, layers, "paged", 1, target, timeout_ms=20000, blocks=blocks
    )
    landed: list[int] = []
    for layer in (2, 0, 3, 1):
        landed += (2 * layer, 2 * layer + 1)
        assert sender.call(layering.land, "push", layer).ok
        pieces = [
            Piece(t, start * block, t, place * block, block)
            for t in landed
            for start, place in zip(starts, targets, strict=True)
        ]
        assert receiver.call(layering.difference, "paged", pieces, SEED) == ""
    outcome = sender.call(layering.finish, "push")
    assert outcome.extra["results"] == [8 * block] * layers
    sender.call(
        layering.begin,
        "push",
        way,
        4,
        "paged",
        1,
        target,
        timeout_ms=20000,
        blocks=(None if continuous else [], []),
    )
    sender.call(layering.say_ready, "push", *range(layers))
    outcome = sender.call(layering.finish, "push")
    assert outcome.ok
    assert outcome.bytes == 0
    for peer in pair:
        peer.call(actions.drop_cache, "paged")


def test_several_at_once(pair: tuple[Peer, Peer], target: int) -> None:
    """Pushes of different ways and slots, whose layers become ready in turns."""
    receiver, sender = pair
    ways = ("asked", "events", "told")
    for slot, way in enumerate(ways):
        slots = {"src_slot": slot, "dst_slot": slot}
        sender.call(layering.begin, way, way, LAYERS, "from", 1, target, timeout_ms=20000, **slots)
    turns = [(way, layer) for way in ways for layer in range(LAYERS)]
    random.Random(5).shuffle(turns)
    landed: list[Piece] = []
    for way, layer in turns:
        assert sender.call(layering.land, way, layer).ok
        slot = ways.index(way)
        landed += layer_pieces([layer], src_slot=slot, dst_slot=slot)
        assert receiver.call(layering.difference, "into", landed, SEED) == ""
    for way in ways:
        assert sender.call(layering.finish, way, 1).ok


# Checks


def test_checks(pair: tuple[Peer, Peer], target: int) -> None:
    receiver, sender = pair
    right: dict[str, Any] = {
        "cluster_id": 1,
        "src": "from",
        "dst_id": target,
        "dst_slot": 0,
        "size": -1,
    }
    for wrong in (False, 5, "events", b"", 2.0, [1], [None] * LAYERS, {1: 2}):
        outcome = sender.call(layering.raw_push, wrong, {**right, "size": 0})
        assert outcome.kind == "TypeError", (wrong, outcome)
    outcome = sender.call(layering.raw_push, layering.ready_some_day, {**right, "size": 0})
    assert outcome.kind == "TypeError", outcome
    outcome = sender.call(layering.raw_push, layering.ready_later, right)
    assert outcome.kind == "LlmError", outcome
    assert "TypeError" in outcome.message
    for count in (0, LAYERS - 1, LAYERS + 1):
        outcome = sender.call(layering.raw_push_with_events, count, right)
        assert outcome.kind == "ParamInvalid", outcome
        assert str(LAYERS) in outcome.message
    # All other checks come first, and none of them waits for a layer.
    for changes, kind in (
        ({"size": 0}, "ParamInvalid"),
        ({"cluster_id": 9}, "NotYetLink"),
        ({"dst_id": 987_654}, "KvCacheNotExist"),
        ({"dst_slot": SLOTS}, "ParamInvalid"),
        ({"size": SLOT + 1}, "ParamInvalid"),
    ):
        for count in (LAYERS, 1):
            outcome = sender.call(layering.raw_push_with_events, count, {**right, **changes})
            assert outcome.kind == kind, (changes, outcome)
            assert outcome.seconds < 1, "it has waited for the deadline"
    readable = receiver.call(actions.make_cache, "readable", 2 * LAYERS, (SLOTS, SLOT))
    outcome = sender.call(layering.raw_push, True, {**right, "dst_id": readable})
    assert outcome.kind == "FeatureNotEnabled", outcome
    receiver.call(actions.drop_cache, "readable")
    assert receiver.call(layering.difference, "into", [], SEED) == ""


@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong number of events"])
def test_begun_while_the_link_is_being_made(path: str, right: bool) -> None:
    with (
        Peer(31, path=path, name="receiver") as receiver,
        Peer(32, path=path, name="sender", listen=False) as sender,
    ):
        target = receiver.call(actions.make_cache, "into", 8, (1, 5000), access="rw")
        receiver.call(actions.paint, "into", BLANK)
        sender.call(actions.make_cache, "from", 8, (1, 5000), seed=SEED)
        with receiver.stopped():
            linking = sender.start(actions.link, 31, receiver.address)
            time.sleep(0.2)
            layers = 4 if right else 5
            sender.call(
                layering.begin, "push", "events", layers, "from", 31, target, timeout_ms=10000
            )
            sender.call(layering.say_ready, "push", 2)
        linking.result()
        if not right:
            outcome = sender.call(layering.finish, "push")
            assert outcome.kind == "ParamInvalid", outcome
            assert receiver.call(layering.difference, "into", [], SEED) == ""
            return
        assert sender.call(layering.wait_layer, "push", 2).ok
        pieces = [Piece(t, 0, t, 0, 5000) for t in (4, 5)]
        assert receiver.call(layering.difference, "into", pieces, SEED) == ""
        sender.call(layering.say_ready, "push", 0, 1, 3)
        assert sender.call(layering.finish, "push").ok
        assert receiver.call(actions.wrong_tensors, "into", SEED) == []


# Endings


def check_half(
    pair: tuple[Peer, Peer], outcome: actions.Outcome, landed: Sequence[int], kind: str
) -> None:
    """Landed layers keep their results and their bytes, the others have failed and are blank."""
    receiver, sender = pair
    results = [2 * SLOT if layer in landed else kind for layer in range(LAYERS)]
    assert outcome.extra["results"] == results
    assert outcome.extra["bytes"] == 2 * SLOT * len(landed)
    # Told too late, they change nothing.
    sender.call(layering.say_ready, "push", *range(LAYERS))
    time.sleep(0.1)
    assert receiver.call(layering.difference, "into", layer_pieces(landed), SEED) == ""


@pytest.mark.parametrize("way", ["told", "events", "asked"])
def test_deadline_with_a_withheld_layer(pair: tuple[Peer, Peer], target: int, way: str) -> None:
    _, sender = pair
    sender.call(layering.begin, "push", way, LAYERS, "from", 1, target, timeout_ms=400)
    landed = [0, 1, 4]
    sender.call(layering.say_ready, "push", *landed)
    outcome = sender.call(layering.finish, "push")
    assert outcome.kind == "LlmTimeout", outcome
    assert outcome.seconds < 0.6
    assert "layer 2 " in outcome.message
    assert "not ready within 400 ms" in outcome.message
    assert outcome.extra["layers"] == 2
    assert sender.call(layering.wait_layer, "push", 4).ok
    late = sender.call(layering.wait_layer, "push", 5)
    assert late.kind == "LlmTimeout"
    assert "layer 5 " in late.message
    check_half(pair, outcome, landed, "LlmTimeout")
    again = sender.call(pushing.push, "from", 1, target, timeout_ms=5000)
    assert again.ok, again


def test_deadline_while_the_gil_is_held(pair: tuple[Peer, Peer], target: int) -> None:
    _, sender = pair
    sender.call(layering.begin, "push", "asked", LAYERS, "from", 1, target, timeout_ms=200)
    assert sender.call(layering.land, "push", 0).ok
    assert sender.call(layering.hold_gil_past_deadline, "push", 0.4)
    outcome = sender.call(layering.finish, "push")
    check_half(pair, outcome, [0], "LlmTimeout")


@pytest.mark.parametrize("error", sorted(layering.ERRORS))
def test_a_function_that_raises(pair: tuple[Peer, Peer], target: int, error: str) -> None:
    _, sender = pair
    sender.call(layering.begin_raising, "push", LAYERS, 2, error, "from", 1, target)
    for layer in (0, 1, 5):
        assert sender.call(layering.land, "push", layer).ok
    assert sender.call(layering.land, "push", 2).kind == "LlmError"
    outcome = sender.call(layering.finish, "push", 1)
    assert outcome.kind == "LlmError", outcome
    assert outcome.extra["cause"] == [error]
    assert error in outcome.message
    asked = sender.call(layering.times_asked, "push")
    check_half(pair, outcome, [0, 1, 5], "LlmError")
    assert sender.call(layering.times_asked, "push") == asked, "it is still being asked"
    # The thread that asked goes on for others.
    sender.call(layering.begin, "next", "asked", LAYERS, "from", 1, target, timeout_ms=5000)
    sender.call(layering.say_ready, "next", *range(LAYERS))
    assert sender.call(layering.finish, "next").ok


@pytest.mark.parametrize("way", ["told", "asked"])
def test_cancel(pair: tuple[Peer, Peer], target: int, way: str) -> None:
    _, sender = pair
    sender.call(layering.begin, "push", way, LAYERS, "from", 1, target, timeout_ms=20000)
    for layer in (3, 1):
        assert sender.call(layering.land, "push", layer).ok
    assert sender.call(actions.cancel, "push").value is True
    assert sender.call(actions.cancel, "push").value is False
    outcome = sender.call(layering.finish, "push", 0)
    assert outcome.kind == "LlmError", outcome
    assert "cancelled" in outcome.message
    if way == "asked":
        asked = sender.call(layering.times_asked, "push")
    check_half(pair, outcome, [1, 3], "LlmError")
    if way == "asked":
        assert sender.call(layering.times_asked, "push") <= asked + 1


@pytest.mark.parametrize("give_up", [False, True], ids=["to the end", "cancelled"])
def test_await(pair: tuple[Peer, Peer], target: int, give_up: bool) -> None:
    receiver, sender = pair
    found = sender.call(layering.awaited, LAYERS, "from", 1, target, give_up)
    if give_up:
        assert found == {"kind": "CancelledError", "done": True}
        return
    assert found == {"kind": "TransferReport", "layers": LAYERS}
    pieces = layer_pieces(range(LAYERS))
    assert receiver.call(layering.difference, "into", pieces, SEED) == ""


@pytest.mark.parametrize("way", ["told", "asked"])
@pytest.mark.parametrize("what", ["source", "destination"])
def test_unregister(pair: tuple[Peer, Peer], what: str, way: str) -> None:
    receiver, sender = pair
    target = receiver.call(actions.make_cache, "short", 8, (1, 5000), access="rw")
    receiver.call(actions.paint, "short", BLANK)
    sender.call(actions.make_cache, "lived", 8, (1, 5000), seed=SEED)
    sender.call(layering.begin, "push", way, 4, "lived", 1, target, timeout_ms=20000)
    assert sender.call(layering.land, "push", 1).ok
    peer, name, other = (
        (sender, "lived", receiver) if what == "source" else (receiver, "short", sender)
    )
    assert peer.call(actions.drop_cache, name, 200) < 0.5
    outcome = sender.call(layering.finish, "push", 5)
    assert outcome.kind == "KvCacheNotExist", outcome
    assert outcome.extra["results"].count(10_000) == 1
    sender.call(layering.say_ready, "push", 0)
    time.sleep(0.05)
    pieces = [Piece(t, 0, t, 0, 5000) for t in (2, 3)]
    assert receiver.call(layering.difference, "short", pieces, SEED) == ""
    other.call(actions.drop_cache, "short" if what == "source" else "lived")


@pytest.mark.parametrize("how", ["unlink", "force", "by the receiver", "death"])
def test_the_link_ends(path: str, how: str) -> None:
    with (
        Peer(41, path=path, name="receiver") as receiver,
        Peer(42, path=path, name="sender", listen=False) as sender,
    ):
        sender.link(receiver)
        target = receiver.call(actions.make_cache, "into", 8, (1, 5000), access="rw")
        receiver.call(actions.paint, "into", BLANK)
        sender.call(actions.make_cache, "from", 8, (1, 5000), seed=SEED)
        for key, way in (("told", "told"), ("asked", "asked")):
            sender.call(layering.begin, key, way, 4, "from", 41, target, timeout_ms=20000)
        assert sender.call(layering.land, "told", 1).ok
        began = time.monotonic()
        if how == "death":
            receiver.kill()
        elif how == "by the receiver":
            receiver.unlink(sender)
        else:
            sender.unlink(receiver, force=how == "force")
        for key in ("told", "asked"):
            outcome = sender.call(layering.finish, key, 5)
            assert outcome.kind == "NotYetLink", outcome
            assert "41" in outcome.message
        assert time.monotonic() - began < 2
        if how != "death":
            pieces = [Piece(t, 0, t, 0, 5000) for t in (2, 3)]
            assert receiver.call(layering.difference, "into", pieces, SEED) == ""


def test_a_layer_that_fails_ends_the_others(pair: tuple[Peer, Peer]) -> None:
    receiver, sender = pair
    large = 2, (1, 16 << 20)
    target = receiver.call(actions.make_cache, "large", *large, access="rw", aliases=400)
    sender.call(actions.make_cache, "large", *large, seed=1, aliases=400)
    receiver.call(actions.paint, "large", 0)
    sender.call(
        layering.begin, "push", "told", 2, "large", 1, target, per_layer=400, timeout_ms=20000
    )
    sender.call(layering.say_ready, "push", 1)
    assert receiver.call(pushing.wait_written, "large", 0)
    receiver.call(pushing.quiesce_and_reuse, "large", 0, large[1][1], BLANK, 1000)
    outcome = sender.call(layering.finish, "push", 5)
    assert outcome.kind == "LlmError", outcome
    assert "quiesced" in outcome.message
    assert outcome.extra["results"] == ["LlmError", "LlmError"]
    for peer in pair:
        peer.call(actions.drop_cache, "large")
        peer.call(actions.forget_arena, "large")


@pytest.mark.parametrize(
    "blocks", [0, [0, 2], [], None], ids=["slot", "blocks", "nothing", "cache"]
)
def test_quiesce_ends_what_is_withheld(pair: tuple[Peer, Peer], target: int, blocks: Any) -> None:
    """The destination keeps the bytes of its next use; pushes into other slots go on."""
    receiver, sender = pair
    for slot in range(SLOTS):
        key = f"slot {slot}"
        slots = {"src_slot": slot, "dst_slot": slot}
        sender.call(
            layering.begin, key, "told", LAYERS, "from", 1, target, timeout_ms=9000, **slots
        )
        assert sender.call(layering.land, key, 3).ok
    receiver.call(layering.quiesce_and_paint, "into", blocks)
    hit = range(SLOTS) if blocks is None else [blocks] if isinstance(blocks, int) else blocks
    expected: list[Piece] = []
    for slot in range(SLOTS):
        sender.call(layering.say_ready, f"slot {slot}", *range(LAYERS))
        outcome = sender.call(layering.finish, f"slot {slot}", 5)
        assert outcome.kind == ("LlmError" if slot in hit else "ok"), (slot, outcome)
        if slot in hit:
            assert "quiesced" in outcome.message
        else:
            layers = [layer for layer in range(LAYERS) if layer != 3]
            expected += layer_pieces(layers, src_slot=slot, dst_slot=slot)
    assert receiver.call(layering.difference, "into", expected, SEED) == ""
    assert sender.call(pushing.push, "from", 1, target, timeout_ms=5000).ok


def test_quiesce_of_a_long_list(pair: tuple[Peer, Peer]) -> None:
    """Longer than one message: what it does not name goes on all the same."""
    receiver, sender = pair
    count = 40_000
    sender.call(actions.make_cache, "short", 2, (1, 3), seed=SEED)
    target = receiver.call(actions.make_cache, "long", 2, (count, 3), access="rw")
    places = {0: "ok", 1: "LlmError", 16_001: "LlmError", 35_000: "LlmError", count - 1: "ok"}
    for block in places:
        lists = ([0], [block])
        sender.call(
            layering.begin,
            f"to {block}",
            "told",
            1,
            "short",
            1,
            target,
            timeout_ms=9000,
            blocks=lists,
        )
    receiver.call(layering.quiesce_and_paint, "long", list(range(1, count - 1)))
    for block, kind in places.items():
        sender.call(layering.say_ready, f"to {block}", 0)
        outcome = sender.call(layering.finish, f"to {block}", 5)
        assert outcome.kind == kind, (block, outcome)
    for peer, name in ((receiver, "long"), (sender, "short")):
        peer.call(actions.drop_cache, name)
        peer.call(actions.forget_arena, name)


def test_unlink_waits_for_layers(path: str) -> None:
    with (
        Peer(41, path=path, name="receiver") as receiver,
        Peer(42, path=path, name="sender", listen=False) as sender,
    ):
        sender.link(receiver)
        target = receiver.call(actions.make_cache, "into", 8, (1, 5000), access="rw")
        sender.call(actions.make_cache, "from", 8, (1, 5000), seed=SEED)
        sender.call(layering.begin, "push", "told", 4, "from", 41, target, timeout_ms=20000)
        unlinking = sender.start(actions.unlink, 41, 10000)
        time.sleep(0.2)
        sender.call(layering.say_ready, "push", *range(4))
        assert sender.call(layering.finish, "push", 5).ok
        unlinking.result(5)
        assert receiver.call(actions.wrong_tensors, "into", SEED) == []


def test_stats_count_layers(pair: tuple[Peer, Peer], target: int) -> None:
    _, sender = pair
    before = sender.call(landing.totals)
    sender.call(layering.begin, "push", "told", LAYERS, "from", 1, target, timeout_ms=20000)
    sender.call(layering.say_ready, "push", *range(LAYERS))
    assert sender.call(layering.finish, "push").ok
    between = sender.call(landing.totals)
    assert between["transfers"] - before["transfers"] == LAYERS
    assert between["bytes"] - before["bytes"] == LAYERS * 2 * SLOT
    assert between["failures"] == before["failures"]
    sender.call(layering.begin, "push", "told", LAYERS, "from", 1, target, timeout_ms=20000)
    assert sender.call(layering.land, "push", 0).ok
    sender.call(actions.cancel, "push")
    after = sender.call(landing.totals)
    assert after["transfers"] - between["transfers"] == LAYERS
    failed = sum(after["failures"].values()) - sum(between["failures"].values())
    assert failed == LAYERS - 1


# Threads


def test_the_feeder(path: str) -> None:
    """It starts when it is needed, sleeps when it is not, and ends with the engine."""
    with (
        Peer(51, path=path, name="receiver") as receiver,
        Peer(52, path=path, name="sender", listen=False) as sender,
    ):
        sender.link(receiver)
        target = receiver.call(actions.make_cache, "into", 8, (1, 5000), access="rw")
        sender.call(actions.make_cache, "from", 8, (1, 5000), seed=SEED)
        assert sender.call(pushing.push, "from", 51, target, timeout_ms=5000).ok
        assert sender.call(layering.feeders) == []
        for way in ("asked", "events", "told"):
            sender.call(layering.begin, "push", way, 4, "from", 51, target, timeout_ms=5000)
            sender.call(layering.say_ready, "push", 0, 1, 2, 3)
            assert sender.call(layering.finish, "push").ok
        assert len(sender.call(layering.feeders)) == 1
        time.sleep(0.1)
        assert sender.call(layering.feeder_wakes, 0.5) == 0
        sender.call(layering.begin, "push", "asked", 4, "from", 51, target, timeout_ms=20000)
        assert sender.call(layering.land, "push", 2).ok
        found = sender.call(layering.finalize_amid, "push")
        assert found["seconds"] < 5
        assert found["feeders"] == []
        assert found["outcome"].kind in ("LlmError", "NotYetLink"), found
        assert "finalized" in found["outcome"].message
        assert found["outcome"].extra["results"].count(10_000) == 1
        assert found["told"].ok


def test_finalize_by_the_function_that_is_asked(path: str) -> None:
    with (
        Peer(51, path=path, name="receiver") as receiver,
        Peer(52, path=path, name="sender", listen=False) as sender,
    ):
        sender.link(receiver)
        target = receiver.call(actions.make_cache, "into", 8, (1, 5000), access="rw")
        sender.call(actions.make_cache, "from", 8, (1, 5000), seed=SEED)
        found = sender.call(layering.finalize_from_feeder, "from", 51, target)
        assert found["took"][0] < 5
        assert found["feeders"] == []
        assert found["outcome"].kind in ("LlmError", "NotYetLink"), found


def test_finalize_beside_a_function_that_does_not_return(path: str) -> None:
    with (
        Peer(51, path=path, name="receiver") as receiver,
        Peer(52, path=path, name="sender", listen=False) as sender,
    ):
        sender.link(receiver)
        target = receiver.call(actions.make_cache, "into", 8, (1, 5000), access="rw")
        receiver.call(actions.paint, "into", BLANK)
        sender.call(actions.make_cache, "from", 8, (1, 5000), seed=SEED)
        found = sender.call(layering.finalize_beside_a_blocked_function, "from", 51, target, 3.0)
        assert found["took"] < 5
        assert found["outcome"].kind in ("LlmError", "NotYetLink"), found
        assert found["feeders"] == [], "it has not ended after its function has returned"
        assert receiver.call(layering.difference, "into", [], SEED) == ""


def test_a_push_does_not_keep_its_engine(path: str) -> None:
    with Peer(61, path=path, allow="ResourceWarning|was not finalized") as peer:
        found = peer.call(layering.drop_engine_amid, path)
        assert found["gone"]
        assert "ResourceWarning" in found["warnings"]
        assert found["outcome"].kind in ("LlmError", "NotYetLink"), found
        assert found["feeders"] == []


def test_fork(pair: tuple[Peer, Peer], target: int) -> None:
    receiver, sender = pair
    sender.call(layering.begin, "push", "told", LAYERS, "from", 1, target, timeout_ms=20000)
    assert sender.call(layering.land, "push", 0).ok
    said, status = sender.call(layering.tell_in_fork, "push")
    assert status == 0
    assert {kind for _, kind in said} == {"LlmError"}, said
    assert receiver.call(layering.difference, "into", layer_pieces([0]), SEED) == ""
    sender.call(layering.say_ready, "push", *range(LAYERS))
    assert sender.call(layering.finish, "push").ok


@pytest.mark.timeout(120)
def test_race_with_cancel(pair: tuple[Peer, Peer]) -> None:
    receiver, sender = pair
    layers = 16
    sender.call(actions.make_cache, "racing", 2 * layers, (1, 100_000), seed=SEED)
    target = receiver.call(actions.make_cache, "racing", 2 * layers, (1, 100_000), access="rw")
    problems, kinds = sender.call(
        layering.race, layers, "racing", 1, target, rounds(60), 1, timeout=90
    )
    assert problems == []
    assert set(kinds) <= {"ok", "LlmError"}
    outcome = sender.call(pushing.push, "racing", 1, target, timeout_ms=5000)
    assert outcome.ok
    assert receiver.call(actions.wrong_tensors, "racing", SEED) == []
    for peer in pair:
        peer.call(actions.drop_cache, "racing")


@pytest.mark.parametrize("seed", range(3))
def test_race_with_finalize(path: str, seed: int) -> None:
    with (
        Peer(51, path=path, name="receiver") as receiver,
        Peer(52, path=path, name="sender", listen=False) as sender,
    ):
        sender.link(receiver)
        target = receiver.call(actions.make_cache, "into", 16, (1, 20_000), access="rw")
        sender.call(actions.make_cache, "from", 16, (1, 20_000), seed=SEED)
        problems, seconds = sender.call(
            layering.race_with_finalize, 8, "from", 51, target, seed, timeout=25
        )
        assert problems == []
        assert seconds < 5
        assert sender.call(layering.feeders) == []

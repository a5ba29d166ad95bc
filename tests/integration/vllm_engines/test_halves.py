"""The two halves of a worker between processes, without vLLM: whatever can go wrong with a pull."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from children import handing_over
from harness import Peer

TENSORS, BLOCKS, BLOCK_BYTES = 4, 48, 1000
BIG = 256 << 10
SEED = 5
NOBODY = ("127.0.0.1", 1)


@pytest.fixture
def pair(path: str) -> Iterator[tuple[Peer, Peer]]:
    with Peer(1, path=path) as prefill, Peer(2, path=path, listen=False) as decode:
        yield prefill, decode
        decode.call(handing_over.close_pulls)


def opened(
    pair: tuple[Peer, Peer], block_bytes: int = BLOCK_BYTES, **settings: object
) -> tuple[int, str, int, int]:
    prefill, decode = pair
    decode.call(handing_over.open_pulls, TENSORS, BLOCKS, block_bytes, **settings)
    return prefill.call(handing_over.serve, TENSORS, BLOCKS, block_bytes, SEED)  # type: ignore[no-any-return]


def shuffled(count: int, seed: int) -> list[int]:
    import random

    return random.Random(seed).sample(range(BLOCKS), count)


def is_over(prefill: Peer, request_id: str, timeout: float = 5) -> dict[str, int]:
    deadline = time.monotonic() + timeout
    while True:
        over, figures = prefill.call(handing_over.ended)
        if request_id in over:
            return figures  # type: ignore[no-any-return]
        assert time.monotonic() < deadline, f"{request_id} is still held"
        time.sleep(0.01)


@pytest.mark.parametrize("per_pull", [1, 7, 256])
def test_blocks_are_pulled_and_prefill_is_told(pair: tuple[Peer, Peer], per_pull: int) -> None:
    prefill, decode = pair
    rank = opened(pair, blocks_per_pull=per_pull)
    theirs, ours = shuffled(20, 1), shuffled(20, 2)
    token = prefill.call(handing_over.hand_off, "r", 30)
    assert prefill.call(handing_over.ended)[0] == set()
    decode.call(handing_over.begin, "r", [(*rank, token)], theirs, ours)
    assert decode.call(handing_over.finish, 1) == ({"r"}, set())
    assert decode.call(handing_over.wrong_blocks, SEED, BLOCKS, theirs, ours) == set()
    figures = is_over(prefill, "r") if not decode.call(handing_over.poll)[0] else {}
    assert figures["noticed"] == 1
    assert prefill.call(handing_over.holds) == 0
    counted = decode.call(handing_over.counted)
    assert counted["pull_bytes"] == [20 * TENSORS * BLOCK_BYTES]
    assert counted["failed_pulls"] == counted["failed_notices"] == 0


def test_a_hold_that_is_over_fails_all_its_blocks(pair: tuple[Peer, Peer]) -> None:
    prefill, decode = pair
    rank = opened(pair)
    token = prefill.call(handing_over.hand_off, "r", 0.1)
    time.sleep(0.15)
    assert is_over(prefill, "r")["expired_holds"] == 1
    decode.call(handing_over.begin, "r", [(*rank, token)], [1, 2, 3], [4, 5, 6])
    assert decode.call(handing_over.finish, 1) == ({"r"}, {4, 5, 6})
    counted = decode.call(handing_over.counted)
    assert (counted["failed_pulls"], counted["failed_blocks"]) == (1, 3)


def test_exactly_the_blocks_that_did_not_come_have_failed(pair: tuple[Peer, Peer]) -> None:
    """Prefill stands still in mid-pull, so the pull ends at its deadline."""
    prefill, decode = pair
    if prefill.path == "get":
        pytest.skip("a pull by GET goes on while its owner stands still")
    rank = opened(pair, BIG, blocks_per_pull=4, pull_seconds=1)
    token = prefill.call(handing_over.hand_off, "r", 30)
    theirs, ours = shuffled(BLOCKS, 1), shuffled(BLOCKS, 2)
    decode.call(handing_over.begin, "r", [(*rank, token)], theirs, ours)
    decode.call(handing_over.wait_pieces, "r", 1)
    with prefill.stopped():
        over, failed = decode.call(handing_over.finish, 1)
        assert over == {"r"}
        wrong = decode.call(handing_over.wrong_blocks, SEED, BLOCKS, theirs, ours)
        assert wrong <= failed
        assert 0 < len(failed) < BLOCKS
        before = decode.call(handing_over.content)
    # What is whole and yet failed had come, but was not known to be right.
    assert len(failed - wrong) < BLOCKS / 2
    time.sleep(0.3)
    assert decode.call(handing_over.content) == before


def test_nothing_is_written_after_cancel(pair: tuple[Peer, Peer]) -> None:
    prefill, decode = pair
    rank = opened(pair, BIG, blocks_per_pull=4)
    token = prefill.call(handing_over.hand_off, "r", 30)
    blocks = list(range(BLOCKS))
    decode.call(handing_over.begin, "r", [(*rank, token)], blocks, blocks)
    decode.call(handing_over.wait_pieces, "r", 1)
    cancelled = decode.call(handing_over.cancel, "r")
    assert cancelled.ok
    before = decode.call(handing_over.content)
    assert decode.call(handing_over.poll) == ({"r"}, set())
    # The notice tells that nobody wants them any more.
    deadline = time.monotonic() + 5
    while "r" not in prefill.call(handing_over.ended)[0]:
        assert time.monotonic() < deadline
        decode.call(handing_over.poll)
    assert decode.call(handing_over.content) == before
    assert decode.call(handing_over.counted)["cancelled_pulls"] == 1


def test_prefill_that_is_not_there_holds_nobody_up(pair: tuple[Peer, Peer]) -> None:
    prefill, decode = pair
    rank = opened(pair, link_seconds=0.5)
    token = prefill.call(handing_over.hand_off, "there", 30)
    decode.call(handing_over.begin, "gone", [(9, *NOBODY, 1, token)], [1], [10])
    decode.call(handing_over.begin, "there", [(*rank, token)], [1, 2], [11, 12])
    over, failed = decode.call(handing_over.finish, 2)
    assert over == {"gone", "there"}
    assert failed == {10}
    assert decode.call(handing_over.wrong_blocks, SEED, BLOCKS, [1, 2], [11, 12]) == set()
    assert decode.call(handing_over.counted)["failed_links"] == 1


def test_prefill_that_has_died_fails_its_blocks_within_a_second(path: str) -> None:
    with Peer(2, path=path, listen=False) as decode:
        with Peer(1, path=path, fresh=True) as prefill:
            rank = opened((prefill, decode))
            token = prefill.call(handing_over.hand_off, "r", 30)
            decode.call(handing_over.begin, "r", [(*rank, token)], [1], [1])
            assert decode.call(handing_over.finish, 1) == ({"r"}, set())
            prefill.kill()
        began = time.monotonic()
        decode.call(handing_over.begin, "s", [(*rank, token)], [1, 2], [3, 4])
        assert decode.call(handing_over.finish, 1) == ({"s"}, {3, 4})
        assert time.monotonic() - began < 7
        decode.call(handing_over.close_pulls)


def test_other_blocks_are_refused_with_the_reason(pair: tuple[Peer, Peer]) -> None:
    prefill, decode = pair
    rank = opened(pair)
    token = prefill.call(handing_over.hand_off, "r", 30)
    decode.allow = re.compile("not compatible: block_size 16 here, 32 there")
    decode.call(
        handing_over.begin,
        "r",
        [(*rank, token)],
        [1, 2],
        [3, 4],
        compatibility="other",
        factors={"block_size": 32},
    )
    assert decode.call(handing_over.finish, 1) == ({"r"}, {3, 4})
    deadline = time.monotonic() + 5
    while "r" not in prefill.call(handing_over.ended)[0]:
        assert time.monotonic() < deadline
        decode.call(handing_over.poll)


def test_each_rank_pulls_from_its_like(path: str) -> None:
    """Tensor-parallel engines: rank 1 of decode, and only rank 1 of prefill."""
    with (
        Peer(1, path=path, name="rank 0") as first,
        Peer(2, path=path, name="rank 1") as second,
        Peer(3, path=path, listen=False) as decode,
    ):
        decode.call(handing_over.open_pulls, TENSORS, BLOCKS, BLOCK_BYTES, 1)
        ranks = [
            (
                *peer.call(handing_over.serve, TENSORS, BLOCKS, BLOCK_BYTES, seed),
                peer.call(handing_over.hand_off, "r", 30),
            )
            for seed, peer in ((SEED, first), (SEED + 1, second))
        ]
        decode.call(handing_over.begin, "r", ranks, [7, 8], [1, 2])
        assert decode.call(handing_over.finish, 1) == ({"r"}, set())
        assert decode.call(handing_over.wrong_blocks, SEED + 1, BLOCKS, [7, 8], [1, 2]) == set()
        decode.call(handing_over.poll)
        is_over(second, "r")
        assert first.call(handing_over.ended)[0] == set()
        # A third rank would find nobody.
        decode.call(handing_over.close_pulls)


def test_layers_are_waited_for_one_by_one(pair: tuple[Peer, Peer]) -> None:
    prefill, decode = pair
    rank = opened(pair, BIG, blocks_per_pull=16)
    token = prefill.call(handing_over.hand_off, "r", 30)
    blocks = list(range(BLOCKS))
    decode.call(handing_over.begin, "r", [(*rank, token)], blocks, blocks, True)
    landed = decode.call(handing_over.landed_layers)
    assert all(count > layer for layer, count in enumerate(landed))
    assert decode.call(handing_over.wrong_blocks, SEED, BLOCKS, blocks, blocks) == set()
    # The step has waited for it: nobody else is to be told.
    assert decode.call(handing_over.poll) == (set(), set())

"""Notices: once each for every pull that has returned, never twice, in the order of completion."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import pytest

from children import actions, noticing
from children.noticing import Told
from harness import Peer, Proxy, rounds, wait_until

PULLS = rounds(10_000)
SMALL = 4, (2, 1000)
# Of 32 MiB: so large, in little memory, that a pull runs for seconds.
ENDLESS_ALIASES = 400
WINDOW = 64


class Trio:
    """An owner and two pullers, each linked through a proxy of its own, with a small cache."""

    def __init__(self, stack: ExitStack, path: str) -> None:
        self.owner = stack.enter_context(Peer(1, path=path, name="owner"))
        self.pullers = [
            stack.enter_context(Peer(number, path=path, name=f"puller {number}", listen=False))
            for number in (2, 3)
        ]
        assert self.owner.address
        self.proxies = [stack.enter_context(Proxy(self.owner.address)) for _ in self.pullers]
        self.ports = [self.owner.address[1], *(proxy.address[1] for proxy in self.proxies)]
        self.cache_id = self.owner.call(actions.make_cache, "kv", *SMALL, seed=1)
        for puller, proxy in zip(self.pullers, self.proxies, strict=True):
            puller.link(self.owner, address=proxy.address)
            puller.call(actions.make_cache, "kv", *SMALL, access="")


@pytest.fixture(scope="module")
def trio(path: str) -> Iterator[Trio]:
    with ExitStack() as stack:
        yield Trio(stack, path)


@pytest.fixture(scope="module")
def cache(pair: tuple[Peer, Peer]) -> int:
    """A small cache of the pair's owner, with one to pull it into."""
    owner, puller = pair
    puller.call(actions.make_cache, "kv", *SMALL, access="")
    return int(owner.call(actions.make_cache, "kv", *SMALL, seed=1))


@contextlib.contextmanager
def narrow_pair(path: str) -> Iterator[tuple[Peer, Peer, int]]:
    """(owner with room for 4 notices, puller, id of a cache)."""
    with (
        Peer(1, path=path, name="owner", options={"notice_queue": 4}) as owner,
        Peer(2, path=path, name="puller", listen=False) as puller,
    ):
        puller.link(owner)
        puller.call(actions.make_cache, "kv", *SMALL, access="")
        yield owner, puller, owner.call(actions.make_cache, "kv", *SMALL, seed=1)


@pytest.fixture(scope="module")
def narrow(path: str) -> Iterator[tuple[Peer, Peer, int]]:
    with narrow_pair(path) as found:
        yield found


@pytest.fixture
def doomed(path: str) -> Iterator[tuple[Peer, Peer, int]]:
    with narrow_pair(path) as found:
        yield found


class Counts:
    """The owner's counters of notices; those received are counted from now on."""

    def __init__(self, owner: Peer) -> None:
        self.owner = owner
        self.before = owner.call(noticing.counts)[0]

    def __call__(self) -> tuple[int, int, int]:
        received, queued, waiting = self.owner.call(noticing.counts)
        return received - self.before, queued, waiting


def check_storm(
    told: Sequence[Told], taken: Sequence[bytes], *, all_well: bool, least: float = 0.5
) -> None:
    """Once each for those that returned, at most once for the others, in order of completion."""
    count = Counter(taken)
    twice = [notice for notice, times in count.items() if times > 1]
    assert twice == []
    lost = [one.notice for one in told if one.kind == "ok" and not count[one.notice]]
    assert lost == []
    assert set(taken) <= {one.notice for one in told}
    kinds = Counter(one.kind for one in told)
    assert kinds["ok"] == len(told) if all_well else kinds["ok"] > least * len(told), kinds
    by_notice = {one.notice: one for one in told if one.kind == "ok"}
    # None may come before one that had returned when it began.
    earliest = float("inf")
    for notice in reversed(taken):
        if (one := by_notice.get(notice)) is not None:
            assert earliest >= one.began, f"{notice!r} has overtaken an earlier one"
            earliest = min(earliest, one.ended)


def run_storms(
    trio: Trio,
    pullers: Sequence[Peer],
    count: int,
    width: int,
    trouble: Callable[[random.Random], None] | None,
    *,
    least: float = 0.5,
) -> None:
    collecting = trio.owner.start(noticing.collect)
    storms = [
        puller.start(noticing.storm, "kv", 1, trio.cache_id, puller.name, count, width, 20_000)
        for puller in pullers
    ]
    rng = random.Random(4)
    troubles = 0
    while trouble and not all(storm.done() for storm in storms):
        trouble(rng)
        troubles += 1
    assert trouble is None or troubles > 2, "the storm was over too soon"
    told = [storm.result(60) for storm in storms]
    trio.owner.side(noticing.end_collecting)
    taken = collecting.result()
    for puller, ours in zip(pullers, told, strict=True):
        theirs = [data for number, data in taken if number == puller.cluster_id]
        check_storm(ours, theirs, all_well=trouble is None, least=least)
    assert sum(len(ours) for ours in told) == count * len(pullers)
    assert {number for number, _ in taken} == {puller.cluster_id for puller in pullers}
    for puller in pullers:
        # The link has recovered.
        outcome = puller.call(noticing.pull, "kv", 1, trio.cache_id, b"after", timeout_ms=15_000)
        assert outcome.ok, outcome
        assert trio.owner.call(noticing.take, 2000, 1) == [(puller.cluster_id, b"after")]


@pytest.mark.timeout(120)
def test_one_after_the_other(trio: Trio) -> None:
    run_storms(trio, trio.pullers[:1], PULLS, 0, None)


@pytest.mark.timeout(120)
def test_many_at_once_from_two(trio: Trio) -> None:
    run_storms(trio, trio.pullers, PULLS // 2, 100, None)


@pytest.mark.timeout(120)
def test_control_connections_cut_at_random(trio: Trio) -> None:
    def cut(rng: random.Random) -> None:
        time.sleep(rng.uniform(0.01, 0.1))
        rng.choice(trio.proxies).cut(reset=rng.random() < 0.5)

    run_storms(trio, trio.pullers, PULLS // 2, 20, cut)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("control_too", [False, True], ids=["data", "data and control"])
def test_data_connections_broken_at_random(trio: Trio, control_too: bool) -> None:
    def break_data(rng: random.Random) -> None:
        time.sleep(rng.uniform(0.02, 0.15))
        peer = rng.choice([trio.owner, *trio.pullers])
        broken.append(peer.side(noticing.break_data, trio.ports))
        if control_too and rng.random() < 0.3:
            rng.choice(trio.proxies).cut()

    broken: list[int] = []
    run_storms(trio, trio.pullers, PULLS // 2, 20, break_data)
    assert sum(broken) > 3


def test_the_sooner_complete_comes_first(pair: tuple[Peer, Peer], cache: int) -> None:
    owner, puller = pair
    large = owner.call(actions.make_cache, "large", 2, (1, 16 << 20), aliases=16)
    puller.call(actions.make_cache, "large", 2, (1, 16 << 20), access="", aliases=16)
    overtaken = 0
    for _ in range(5):
        puller.call(noticing.begin, "large", "large", 1, large, b"large", timeout_ms=20_000)
        assert puller.call(noticing.pull, "kv", 1, cache, b"small", timeout_ms=20_000).ok
        first = not puller.call(actions.progress, "large")[2]
        assert puller.call(actions.finish, "large").ok
        if first:
            overtaken += 1
            assert owner.call(noticing.take, 0) == [(2, b"small"), (2, b"large")]
        owner.call(noticing.take)
    assert overtaken
    for peer in pair:
        peer.call(actions.drop_cache, "large")
        peer.call(actions.forget_arena, "large")


def test_it_is_there_when_the_pull_returns(pair: tuple[Peer, Peer], cache: int) -> None:
    owner, puller = pair
    before = owner.call(noticing.counts)[0]
    for number in range(50):
        notice = b"%d" % number
        assert puller.call(noticing.pull, "kv", 1, cache, notice, timeout_ms=5000).ok
        assert owner.call(noticing.counts) == (before + number + 1, 1, 0)
        assert owner.call(noticing.take, 0) == [(2, notice)]


def test_contents(pair: tuple[Peer, Peer], cache: int) -> None:
    owner, puller = pair
    largest = random.Random(5).randbytes(4096)
    for notice in (b"", b"\0", largest, bytearray(b"changing"), b"x" * 4095):
        assert puller.call(noticing.pull, "kv", 1, cache, notice, timeout_ms=5000).ok
        assert owner.call(noticing.take, 0) == [(2, bytes(notice))]
    for notice, kind in ((b"x" * 4097, "ParamInvalid"), ("text", "TypeError"), (5, "TypeError")):
        outcome = puller.call(noticing.pull, "kv", 1, cache, notice, timeout_ms=5000)
        assert outcome.kind == kind, outcome
    assert puller.call(noticing.pull, "kv", 1, cache, None, timeout_ms=5000).ok
    assert owner.call(noticing.take, 0) == []


def test_no_blocks(pair: tuple[Peer, Peer], cache: int) -> None:
    owner, puller = pair
    outcome = puller.call(noticing.pull_no_blocks, "kv", 1, cache, b"nothing")
    assert outcome.ok, outcome
    assert outcome.bytes == 0
    assert owner.call(noticing.take, 0) == [(2, b"nothing")]


def test_pulls_that_fail_tell_nothing(pair: tuple[Peer, Peer], cache: int) -> None:
    owner, puller = pair
    before = owner.call(noticing.counts)[0]
    gone = owner.call(actions.make_cache, "gone", *SMALL, seed=2)
    owner.call(actions.drop_cache, "gone")
    outcome = puller.call(noticing.pull, "kv", 1, gone, b"gone", timeout_ms=5000)
    assert outcome.kind == "KvCacheNotExist", outcome
    outcome = puller.call(noticing.pull, "kv", 1, cache, b"slot", src_slot=2, timeout_ms=5000)
    assert outcome.kind == "ParamInvalid", outcome
    endless = make_endless(owner, puller)
    outcome = puller.call(noticing.pull, "endless", 1, endless, b"late", timeout_ms=100)
    assert outcome.kind == "LlmTimeout", outcome
    puller.call(noticing.begin, "gone", "endless", 1, endless, b"unregistered", timeout_ms=20_000)
    assert puller.call(actions.wait_moving, "gone")
    owner.call(actions.drop_cache, "endless", 50)
    assert puller.call(actions.finish, "gone").kind == "KvCacheNotExist"
    endless = owner.call(actions.make_cache, "again", 2, (1, 16 << 20), aliases=ENDLESS_ALIASES)
    puller.call(noticing.begin, "cancelled", "endless", 1, endless, b"no", timeout_ms=20_000)
    assert puller.call(actions.wait_moving, "cancelled")
    assert puller.call(actions.cancel, "cancelled").ok
    assert puller.call(actions.finish, "cancelled").kind == "LlmError"
    assert owner.call(noticing.take, 300) == []
    assert owner.call(noticing.counts) == (before, 0, 0)
    owner.call(actions.drop_cache, "again")
    puller.call(actions.drop_cache, "endless")
    for peer, name in ((owner, "endless"), (owner, "again"), (puller, "endless")):
        peer.call(actions.forget_arena, name)


def make_endless(owner: Peer, puller: Peer) -> int:
    aliases = ENDLESS_ALIASES
    puller.call(actions.make_cache, "endless", 2, (1, 16 << 20), access="", aliases=aliases)
    return int(owner.call(actions.make_cache, "endless", 2, (1, 16 << 20), aliases=aliases))


def test_killed_before_completion(path: str) -> None:
    with Peer(1, path=path, name="owner") as owner:
        for stopped in ("owner", "puller"):
            with Peer(2, path=path, name="puller", listen=False) as puller:
                puller.link(owner)
                endless = make_endless(owner, puller)
                puller.call(
                    noticing.begin, "pull", "endless", 1, endless, b"never", timeout_ms=30_000
                )
                assert puller.call(actions.wait_moving, "pull", 1 << 20)
                (owner if stopped == "owner" else puller).stop()
                time.sleep(0.05)
                puller.kill()
                owner.resume()
                assert owner.call(noticing.take, 500) == []
                assert owner.call(noticing.counts) == (0, 0, 0)
                owner.call(actions.drop_cache, "endless")


def test_a_full_queue(narrow: tuple[Peer, Peer, int]) -> None:
    """Pulls wait for room, within their deadlines; what was confirmed is not lost."""
    owner, puller, cache_id = narrow
    counts = Counts(owner)
    for number in range(4):
        notice = b"%d" % number
        assert puller.call(noticing.pull, "kv", 1, cache_id, notice, timeout_ms=5000).ok
    outcome = puller.call(noticing.pull_beside_sleeper, "kv", 1, cache_id, b"4", 200)
    assert outcome.kind == "LlmTimeout", outcome
    assert "notice" in outcome.message
    assert 0.2 <= outcome.seconds <= 0.25 + outcome.extra["late"], outcome
    assert counts() == (5, 4, 1)
    waiting = puller.start(noticing.pull, "kv", 1, cache_id, b"5", timeout_ms=20_000)
    wait_until(lambda: counts() == (6, 4, 2))
    assert owner.call(noticing.take, 0, 1) == [(2, b"0")]
    # That of the pull that timed out has come before, and takes the place.
    wait_until(lambda: counts() == (6, 4, 1))
    time.sleep(0.05)
    assert not waiting.done()
    assert owner.call(noticing.take, 0, 1) == [(2, b"1")]
    assert waiting.result().ok
    assert owner.call(noticing.take, 0) == [(2, b"%d" % number) for number in (2, 3, 4, 5)]
    assert puller.call(noticing.pull, "kv", 1, cache_id, b"6", timeout_ms=5000).ok
    assert owner.call(noticing.take, 0) == [(2, b"6")]


def test_an_owner_that_never_reads(narrow: tuple[Peer, Peer, int]) -> None:
    """What it has to keep is bounded, and what it was never told it does not hear later."""
    owner, puller, cache_id = narrow
    counts = Counts(owner)
    puller.call(noticing.begin_many, "kv", 1, cache_id, "first", 200, timeout_ms=1000)
    wait_until(lambda: puller.call(noticing.landed, "first") == 200)
    outcomes = puller.call(noticing.finish_many, "first")
    kinds = [outcome.kind for outcome in outcomes]
    assert Counter(kinds) == {"ok": 4, "LlmTimeout": 196}
    received, queued, waiting = counts()
    assert (received, queued, waiting) == (4 + WINDOW, 4, WINDOW)
    # The others' bytes and deadlines are not affected by those that wait.
    assert puller.call(actions.pull, "kv", 1, cache_id, timeout_ms=5000).ok
    taken = [data for _, data in owner.call(noticing.take, 300)]
    assert len(taken) == 4 + WINDOW
    assert {b"first-%d" % n for n, kind in enumerate(kinds) if kind == "ok"} <= set(taken)
    assert counts() == (4 + WINDOW, 0, 0)
    told = puller.start(noticing.storm, "kv", 1, cache_id, "then", 500, 50, 10_000)
    taken = [data for _, data in owner.call(noticing.take, 500)]
    check_storm(told.result(), taken, all_well=True)


def test_counters_are_right_at_every_moment(narrow: tuple[Peer, Peer, int]) -> None:
    owner, puller, cache_id = narrow
    counts = Counts(owner)
    collecting = owner.start(noticing.collect)
    watching = owner.start_main(noticing.watch_counts)
    told = puller.call(noticing.storm, "kv", 1, cache_id, "count", rounds(3000), 70, 20_000)
    owner.side(noticing.end_collecting)
    most_queued, most_waiting, reads = watching.result()
    taken = [data for _, data in collecting.result()]
    check_storm(told, taken, all_well=True)
    assert reads > 100
    assert 0 < most_queued <= 4
    assert most_waiting <= WINDOW
    assert counts() == (len(told), 0, 0)


def test_the_owner_dies_with_notices_waiting(doomed: tuple[Peer, Peer, int]) -> None:
    owner, puller, cache_id = doomed
    puller.call(noticing.begin_many, "kv", 1, cache_id, "kept", 10, timeout_ms=20_000)
    wait_until(lambda: owner.call(noticing.counts) == (10, 4, 6))
    killed = time.monotonic()
    owner.kill()
    outcomes = puller.call(noticing.finish_many, "kept")
    assert Counter(outcome.ok for outcome in outcomes) == {True: 4, False: 6}
    for outcome in outcomes:
        assert outcome.ok or outcome.kind in ("NotYetLink", "LlmError"), outcome
        assert outcome.ended - killed < 2, outcome


def test_both_ends_close_with_notices_waiting(doomed: tuple[Peer, Peer, int]) -> None:
    owner, puller, cache_id = doomed
    puller.call(noticing.begin_many, "kv", 1, cache_id, "kept", 100, timeout_ms=20_000)
    wait_until(lambda: owner.call(noticing.counts) == (4 + WINDOW, 4, WINDOW))
    assert owner.call(actions.finalize) < 5
    outcomes = puller.call(noticing.finish_many, "kept")
    assert Counter(outcome.ok for outcome in outcomes) == {True: 4, False: 96}
    assert {outcome.kind for outcome in outcomes if not outcome.ok} <= {"NotYetLink", "LlmError"}


def test_unlinked_with_notices_waiting(narrow: tuple[Peer, Peer, int]) -> None:
    """What is confirmed goes to the application, also when the puller has gone.  The others fail
    with their link and are told to nobody; so the queue has its bound however often that happens.
    """
    owner, puller, cache_id = narrow
    counts = Counts(owner)
    for number in range(3):
        puller.call(noticing.begin_many, "kv", 1, cache_id, f"{number}", 10, timeout_ms=20_000)
        confirmed = 4 if number == 0 else 0
        wait_until(lambda least=10 * number + 10: counts() == (least, 4, 6 + (least > 10) * 4))
        puller.unlink(owner, force=True)
        outcomes = puller.call(noticing.finish_many, f"{number}")
        assert [outcome.ok for outcome in outcomes].count(True) == confirmed
        wait_until(lambda: owner.call(actions.links).get(2) != "up")
        wait_until(lambda least=10 * number + 10: counts() == (least, 4, 0))
        puller.link(owner)
    waiting = puller.start(noticing.pull, "kv", 1, cache_id, b"new", timeout_ms=20_000)
    wait_until(lambda: counts() == (31, 4, 1))
    taken = [data for _, data in owner.call(noticing.take, 500)]
    assert waiting.result().ok
    assert taken == [b"0-0", b"0-1", b"0-2", b"0-3", b"new"]


def test_one_of_two_leaves_a_full_queue(path: str, narrow: tuple[Peer, Peer, int]) -> None:
    """The other's notices stay in their order, and its pulls complete."""
    owner, puller, cache_id = narrow
    counts = Counts(owner)
    with Peer(3, path=path, name="other", listen=False) as other:
        other.link(owner)
        other.call(actions.make_cache, "kv", *SMALL, access="")
        for number, (peer, key) in enumerate([(puller, "a"), (other, "b"), (puller, "c")]):
            peer.call(noticing.begin_many, "kv", 1, cache_id, key, 3, timeout_ms=20_000)
            wait_until(lambda least=3 * number + 3: counts()[0] == least)
        assert counts() == (9, 4, 5)
        other.unlink(owner, force=True)
        wait_until(lambda: counts() == (9, 4, 3))
        taken = [data for _, data in owner.call(noticing.take, 500)]
        assert sorted(taken[:3]) == [b"a-0", b"a-1", b"a-2"]
        assert taken[3].startswith(b"b-")
        assert sorted(taken[4:]) == [b"c-0", b"c-1", b"c-2"]
        for key in "ac":
            assert all(one.ok for one in puller.call(noticing.finish_many, key))
        ended = [one.ok for one in other.call(noticing.finish_many, "b")]
        assert sorted(ended) == [False, False, True]


def test_broken_while_the_queue_is_full(narrow: tuple[Peer, Peer, int]) -> None:
    """What waits for room is sent again and again meanwhile, and comes out once, in order."""
    owner, puller, cache_id = narrow
    counts = Counts(owner)
    assert owner.address
    ports = [owner.address[1]]
    rng = random.Random(7)
    storm = puller.start(noticing.storm, "kv", 1, cache_id, "full", 400, 80, 25_000)
    taken: list[bytes] = []
    broken = 0
    wait_until(lambda: counts()[2] > 50)
    while not storm.done():
        broken += rng.choice((owner, puller)).side(noticing.break_data, ports)
        time.sleep(rng.uniform(0.005, 0.05))
        taken += [data for _, data in owner.call(noticing.take, 20, 12)]
    assert broken > 5
    taken += [data for _, data in owner.call(noticing.take, 500)]
    check_storm(storm.result(), taken, all_well=False, least=0.9)


def test_two_share_a_full_queue(path: str, narrow: tuple[Peer, Peer, int]) -> None:
    owner, puller, cache_id = narrow
    counts = Counts(owner)
    with Peer(3, path=path, name="other", listen=False) as other:
        other.link(owner)
        other.call(actions.make_cache, "kv", *SMALL, access="")
        for peer in (puller, other):
            peer.call(noticing.begin_many, "kv", 1, cache_id, peer.name, 150, timeout_ms=20_000)
        wait_until(lambda: counts()[0] >= 2 * WINDOW)
        taken = owner.call(noticing.take, 5000, 200)
        shares = Counter(number for number, _ in taken)
        assert min(shares[2], shares[3]) > 60, shares
        taken += owner.call(noticing.take, 500)
        for peer in (puller, other):
            assert all(outcome.ok for outcome in peer.call(noticing.finish_many, peer.name))
            ours = [data for number, data in taken if number == peer.cluster_id]
            assert len(ours) == len(set(ours)) == 150


def test_the_interpreter_of_the_owner_is_busy(pair: tuple[Peer, Peer], cache: int) -> None:
    owner, puller = pair
    holding = owner.start_main(actions.hold_gil, 1.0)
    time.sleep(0.1)
    outcome = puller.call(noticing.pull, "kv", 1, cache, b"busy", timeout_ms=5000)
    assert outcome.ok, outcome
    assert not holding.done()
    holding.result()
    assert owner.call(noticing.take, 0) == [(2, b"busy")]


# The iterators


def test_timeouts(pair: tuple[Peer, Peer]) -> None:
    owner, _ = pair
    for timeout_ms in (0, 1, 150):
        outcome = owner.call(noticing.iterate, timeout_ms)
        assert outcome.ok, outcome
        assert outcome.value == []
        seconds = timeout_ms / 1e3
        assert seconds <= outcome.seconds <= seconds + 0.05 + outcome.extra["late"], outcome
    for timeout_ms, kind in (
        ("1", "TypeError"),
        (-1, "ParamInvalid"),
        (float("nan"), "ParamInvalid"),
    ):
        assert owner.call(noticing.try_notices, timeout_ms).kind == kind


@pytest.mark.parametrize("timeout_ms", [None, 1e12, float("inf"), 2**70])
def test_long_timeouts(pair: tuple[Peer, Peer], cache: int, timeout_ms: float | None) -> None:
    owner, puller = pair
    waiting = owner.start(noticing.next_within, timeout_ms)
    time.sleep(0.05)
    assert puller.call(noticing.pull, "kv", 1, cache, b"long", timeout_ms=5000).ok
    assert waiting.result() == (2, b"long")


def test_the_descriptor(pair: tuple[Peer, Peer], cache: int) -> None:
    owner, puller = pair
    polling = owner.start(noticing.poll_descriptor, 20)
    for number in range(20):
        assert puller.call(noticing.pull, "kv", 1, cache, b"%d" % number, timeout_ms=5000).ok
    found = polling.result()
    assert found == {"taken": [b"%d" % number for number in range(20)], "empty": True, "same": True}


@pytest.mark.parametrize("descriptors", [True, False], ids=["", "no descriptor left"])
def test_tasks(pair: tuple[Peer, Peer], cache: int, descriptors: bool) -> None:
    owner, puller = pair
    count = 300
    watching = owner.start_main(noticing.iterate_in_tasks, 4, count, 500, descriptors)
    wait_until(lambda: owner.side(noticing.tasks_run))
    told = puller.call(noticing.storm, "kv", 1, cache, "task", count, 8, 10_000)
    found = watching.result()
    check_storm(told, found["taken"], all_well=True)
    assert found["shares"][4:] == [0, 0]
    assert min(found["shares"][:4]) > 0, found["shares"]


def test_threads_share_the_queue(pair: tuple[Peer, Peer], cache: int) -> None:
    owner, puller = pair
    takers = [owner.start(noticing.take, 1000) for _ in range(4)]
    told = puller.call(noticing.storm, "kv", 1, cache, "thread", 400, 8, 10_000)
    taken = [data for taker in takers for _, data in taker.result()]
    assert sorted(taken) == sorted(one.notice for one in told)
    assert {one.kind for one in told} == {"ok"}


def test_descriptors_go_with_their_object(pair: tuple[Peer, Peer], cache: int) -> None:
    owner, puller = pair
    owner.call(noticing.take, 0)
    owner.call(actions.collect)
    before = owner.sample().fds
    for _ in range(20):
        assert puller.call(noticing.pull, "kv", 1, cache, b"x", timeout_ms=5000).ok
        owner.call(noticing.take, 1)
    owner.call(actions.collect)
    assert owner.sample().fds == before


def test_finalized_under_iterators(path: str) -> None:
    with Peer(1, path=path, name="owner") as owner:
        found = owner.call(noticing.finalize_under_iterators)
        assert set(found["ended"]) == {"thread", "task", "poll"}
        assert max(found["ended"].values()) < 3, found
        after = found["after"]
        assert after == {
            "kept": "ok",
            "polled": "ok",
            "readable": True,
            "fileno": "LlmError",
            "new": "LlmError",
        }


def test_finalized_beside_calls() -> None:
    """Iterations end, and there is a descriptor or the engine was finalized, at any moment."""
    with Peer(1, name="caller", engine=False) as caller:
        assert caller.call(noticing.finalize_beside_calls, rounds(25)) == []


def test_a_forked_child_takes_none(pair: tuple[Peer, Peer], cache: int) -> None:
    owner, puller = pair
    assert puller.call(noticing.pull, "kv", 1, cache, b"ours", timeout_ms=5000).ok
    said = owner.call(noticing.take_in_fork)
    assert [name for name, _, _ in said] == ["next", "notices"]
    for name, kind, message in said:
        assert kind == "LlmError", (name, kind, message)
        assert "fork" in message
    # The parent's descriptor says so still.
    assert owner.call(noticing.poll_descriptor, 1)["taken"] == [b"ours"]

"""The scheduler's half, with workers of several ranks that are made up."""

from __future__ import annotations

import importlib.util
import pickle
import warnings
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("VLLM CONNECTOR NOT TESTED: no vLLM here", allow_module_level=True)

with warnings.catch_warnings():
    # What torch and vLLM warn of when they are imported is theirs.
    warnings.simplefilter("ignore")
    from ucxkv.integrations.vllm.metadata import NewHolds, WorkerInfo
    from ucxkv.integrations.vllm.params import read_params
    from ucxkv.integrations.vllm.scheduler import SchedulerSide
    from ucxkv.integrations.vllm.stats import UcxKvPromMetrics, UcxKvStats

pytestmark = pytest.mark.vllm

BLOCK = 16
LENGTH_CAPPED = SimpleNamespace(name="FINISHED_LENGTH_CAPPED")
ABORTED = SimpleNamespace(name="FINISHED_ABORTED")


@dataclass
class Request:
    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None
    status: Any = field(default_factory=lambda: LENGTH_CAPPED)
    num_computed_tokens: int = field(default=0)

    def __post_init__(self) -> None:
        self.num_computed_tokens = self.num_prompt_tokens


def worker(rank: int, holds: int = 2, port: int | None = 7000) -> WorkerInfo:
    return WorkerInfo(
        100 + rank,
        "host",
        None if port is None else port + rank,
        1,
        "hash",
        {"a": 1},
        [f"{rank}-{number}" for number in range(holds)],
    )


def prefill(ranks: int = 2, **settings: Any) -> SchedulerSide:
    side = SchedulerSide("engine", BLOCK, False)
    side.introduce({rank: worker(rank, **settings) for rank in range(ranks)})
    return side


def decode(layerwise: bool = False) -> SchedulerSide:
    return SchedulerSide("other", BLOCK, layerwise)


def handed_over(tokens: int = 40) -> dict[str, Any]:
    request = Request("r", tokens, {"do_remote_decode": True})
    keep, params = prefill().finished(request, list(range(10, 10 + -(-tokens // BLOCK))))
    assert keep
    assert params is not None
    return params


def test_each_rank_holds_and_is_named() -> None:
    side = prefill()
    keep, params = side.finished(Request("r", 40, {"do_remote_decode": True}), [7, 8, 9])
    assert keep
    assert params is not None
    remote = read_params(params)
    assert remote.blocks == (7, 8, 9)
    assert remote.tokens == 40
    ranks = remote.source.ranks
    assert [(rank.cluster, rank.port, rank.hold) for rank in ranks] == [
        (100, 7000, "0-0"),
        (101, 7001, "1-0"),
    ]
    assert side.step_metadata().handed_off == {"r": ("0-0", "1-0")}
    assert side.step_metadata().handed_off == {}


def test_holds_run_out_and_come_again() -> None:
    side = prefill(holds=1)
    asked = {"do_remote_decode": True}
    assert side.finished(Request("a", 20, asked), [1, 2])[0]
    assert side.finished(Request("b", 20, asked), [3, 4]) == (False, None)
    # Workers are heard of one by one, or joined by vLLM.
    holds = NewHolds({0: ["0-9"]}).aggregate(NewHolds({1: ["1-9"]}))
    assert isinstance(holds, NewHolds)
    side.heard(None, holds)
    keep, params = side.finished(Request("c", 20, asked), [5, 6])
    assert keep
    assert params is not None
    assert [rank.hold for rank in read_params(params).source.ranks] == ["0-9", "1-9"]


@pytest.mark.parametrize(
    ("side", "request_"),
    [
        (prefill(), Request("r", 20, None)),
        (prefill(), Request("r", 20, {"do_remote_decode": False})),
        (prefill(), Request("r", 20, {"do_remote_decode": True}, ABORTED)),
        (prefill(port=None), Request("r", 20, {"do_remote_decode": True})),
        (decode(), Request("r", 20, {"do_remote_decode": True})),
    ],
)
def test_not_handed_over(side: SchedulerSide, request_: Request) -> None:
    assert side.finished(request_, [1, 2]) == (False, None)
    assert side.step_metadata().handed_off == {}


def test_all_of_a_prompt_is_pulled_between_steps() -> None:
    side = decode()
    request = Request("r", 40, handed_over(40))
    assert side.matched_tokens(request, 0) == (40, True)
    assert side.matched_tokens(request, 16) == (24, True)
    side.allocated(request, [1, 2, 3], 24)
    (load,) = side.step_metadata().loads
    assert (load.remote_blocks, load.local_blocks) == ((11, 12), (2, 3))
    assert not load.layerwise
    # Once is enough: a request that was preempted is computed.
    assert side.matched_tokens(request, 0) == (0, False)
    side.allocated(request, [4, 5, 6], 0)
    assert side.step_metadata().released == []


@pytest.mark.parametrize(
    ("prompt", "pulled", "blocks"),
    [(40, 32, (10, 11)), (33, 32, (10, 11)), (32, 16, (10,)), (16, 0, ()), (5, 0, ())],
)
def test_layerwise_leaves_the_block_that_the_step_writes_to(
    prompt: int, pulled: int, blocks: tuple[int, ...]
) -> None:
    side = decode(layerwise=True)
    request = Request("r", prompt, handed_over(prompt))
    assert side.matched_tokens(request, 0) == (pulled, False)
    side.allocated(request, [1, 2, 3], pulled)
    step = side.step_metadata()
    if pulled:
        (load,) = step.loads
        assert load.layerwise
        assert load.remote_blocks == blocks
    else:
        assert step.loads == []
        assert len(step.released) == 1


def test_a_prompt_that_is_here_already_is_released() -> None:
    side = decode()
    request = Request("r", 40, handed_over(40))
    assert side.matched_tokens(request, 40) == (0, False)
    side.allocated(request, [1, 2, 3], 0)
    step = side.step_metadata()
    assert [source.request_id for source in step.released] == ["r"]
    assert step.loads == []
    side.finished(request, [1, 2, 3])
    assert side.step_metadata().released == []


def test_an_abort_before_the_pull_releases() -> None:
    side = decode()
    request = Request("r", 40, handed_over(40), ABORTED)
    assert side.matched_tokens(request, 0) == (40, True)
    side.finished(request, [])
    step = side.step_metadata()
    assert len(step.released) == 1
    assert step.cancelled == []


def test_an_abort_in_mid_pull_cancels() -> None:
    side = decode()
    request = Request("r", 40, handed_over(40), ABORTED)
    side.allocated(request, [1, 2, 3], 40)
    assert len(side.step_metadata().loads) == 1
    assert side.finished(request, [1, 2, 3]) == (False, None)
    step = side.step_metadata()
    assert step.cancelled == ["r"]
    assert step.released == []


def test_an_abort_after_the_pull_does_nothing() -> None:
    side = decode()
    request = Request("r", 40, handed_over(40), ABORTED)
    side.allocated(request, [1, 2, 3], 40)
    side.step_metadata()
    side.heard({"r"}, None)
    side.finished(request, [1, 2, 3])
    step = side.step_metadata()
    assert (step.cancelled, step.released) == ([], [])


def test_one_engine_pulls_and_hands_over() -> None:
    """Decode of one request may be prefill of the next turn."""
    side = prefill()
    params = {**handed_over(40), "do_remote_decode": True}
    request = Request("r", 40, params)
    assert side.matched_tokens(request, 0) == (40, True)
    side.allocated(request, [1, 2, 3], 40)
    side.heard({"r"}, None)
    request.num_computed_tokens = 50
    keep, given = side.finished(request, [1, 2, 3, 4])
    assert keep
    assert given is not None
    assert read_params(given).tokens == 50


def test_what_is_said_can_be_sent() -> None:
    side = decode()
    request = Request("r", 40, handed_over(40))
    side.allocated(request, [1, 2, 3], 40)
    step = side.step_metadata()
    assert pickle.loads(pickle.dumps(step)) == step
    assert pickle.loads(pickle.dumps(worker(0))) == worker(0)


def test_statistics() -> None:
    from prometheus_client import Counter, Gauge, Histogram, generate_latest

    from ucxkv.integrations.vllm.figures import Figures

    figures = Figures(pull_seconds=[0.002, 0.004], pull_bytes=[10, 20], failed_blocks=3)
    stats = UcxKvStats(data=figures.take())
    assert UcxKvStats(data=figures.take()).is_empty()
    empty = UcxKvStats()
    empty.reset()
    assert empty.is_empty()
    both = empty.aggregate(stats).aggregate(UcxKvStats(data=Figures(failed_blocks=1).take()))
    assert both.reduce() == {
        "Pulls": 2,
        "MB pulled": 0.0,
        "Median pull (ms)": 4.0,
        "Longest pull (ms)": 4.0,
        "failed_blocks": 4,
    }
    config = SimpleNamespace(kv_transfer_config=None)
    types = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    metrics = UcxKvPromMetrics(config, types, ["engine"], {0: ["0"]})
    metrics.observe(both.data)
    text = generate_latest().decode()
    assert 'vllm:ucxkv_failed_blocks_total{engine="0"} 4.0' in text
    assert 'vllm:ucxkv_pull_bytes_sum{engine="0"} 30.0' in text

"""A prefill and decode engines of vLLM, each a process, over TCP and on one host."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from engines import (
    Engine,
    Launch,
    blocks_of,
    bytes_landed,
    digest_of_blocks,
    free_blocks,
    is_idle,
    is_pulling,
    link_paths,
    transfers,
)

pytestmark = pytest.mark.vllm

HOLD_SECONDS = 10
DECODE_BLOCKS = 96
LONG = 1900
# Tokens and bytes, in all layers.
BLOCK, BLOCK_BYTES = 32, 6 * 8 * 64 * 4 * 32


def prompts(count: int, longest: int, seed: int = 11) -> list[list[int]]:
    from tiny_llama import prompts as made

    return made(count, longest, seed)


def long_prompt(seed: int) -> list[int]:
    """One that takes some time to be pulled."""
    from tiny_llama import VOCABULARY

    return np.random.default_rng(seed).integers(3, VOCABULARY, LONG).tolist()


@dataclass
class Deployment:
    """Both decode engines recompute what they cannot pull, but for `failing`."""

    prefill: Engine
    decode: Engine
    layerwise: Engine
    failing: Engine
    path: str
    launch: Launch

    def held(self, name: str, prompt: list[int]) -> dict[str, object]:
        """Have a prompt computed by prefill; the parameters for decode."""
        self.prefill.add(name, prompt, 1, {"do_remote_decode": True})
        params = self.prefill.answer(name).params
        assert params is not None
        return params

    def alone(self, name: str, prompt: list[int], tokens: int = 16) -> list[int]:
        """What an engine makes of a prompt without any other."""
        self.failing.add(name, prompt, tokens)
        return self.failing.answer(name).tokens


@pytest.fixture(scope="module", params=["stream", "get"])
def deployment(
    request: pytest.FixtureRequest, model: str, start: Callable[[Launch], Engine]
) -> Deployment:
    path = str(request.param)
    tcp = {"UCX_TLS": "tcp,self"} if path == "stream" else {}
    pieces = {"blocks_per_pull": 4, "pull_seconds": 30}

    def decode(policy: str = "recompute", **extra: object) -> Launch:
        return Launch(
            model,
            "kv_consumer",
            {**pieces, **extra},
            policy=policy,
            blocks=DECODE_BLOCKS,
            environment=tcp,
        )

    prefill = Launch(model, "kv_producer", {"hold_seconds": HOLD_SECONDS}, environment=tcp)
    launches = [prefill, decode(), decode(load="layerwise"), decode("fail")]
    engines = [start(launch) for launch in launches]
    for engine in engines:
        engine.ready()
    return Deployment(*engines, path, decode())


@pytest.fixture
def slow_deployment(deployment: Deployment) -> Deployment:
    """One whose pulls stop with prefill: on one host a puller reads without the owner."""
    if deployment.path == "get":
        pytest.skip("pulls by GET go on while prefill stands still")
    return deployment


@pytest.mark.parametrize("how", ["decode", "layerwise"])
def test_tokens_are_those_of_one_engine(
    deployment: Deployment, reference: list[list[int]], how: str
) -> None:
    prefill, decode = deployment.prefill, getattr(deployment, how)
    before = prefill.call(transfers)
    asked = prompts(32, 1000)
    for number, prompt in enumerate(asked):
        prefill.add(f"{how} {number}", prompt, 1, {"do_remote_decode": True})
    for number, prompt in enumerate(asked):
        params = prefill.answer(f"{how} {number}").params
        decode.add(f"{how} {number}", prompt, 16, params)
    tokens = [decode.answer(f"{how} {number}").tokens for number in range(32)]
    assert tokens == reference
    assert decode.call(link_paths) == [f"{deployment.path} up"]
    moved = decode.call(transfers)
    assert moved[deployment.path] > 5_000_000
    assert moved["failures"] == 0
    # All were told of, so that none is held any longer.
    assert prefill.wait_for(is_idle) < HOLD_SECONDS - 1
    after = prefill.call(transfers)
    assert after["notices"] - before["notices"] == 32
    assert after["holds"] == before["holds"]
    decode.wait_for(is_idle)
    assert prefill.call(free_blocks) == 255
    assert decode.call(free_blocks) == DECODE_BLOCKS - 1


def test_tokens_tell_what_was_pulled(deployment: Deployment) -> None:
    """The blocks of another prompt make other tokens: equal ones do prove something."""
    asked, other = long_prompt(21), long_prompt(22)
    wrong = deployment.held("other", other)
    deployment.decode.add("mixed up", asked, 16, wrong)
    mixed = deployment.decode.answer("mixed up").tokens
    assert mixed != deployment.alone("not mixed up", asked)


def test_a_prompt_that_is_cached_here_is_not_pulled(deployment: Deployment) -> None:
    """Where decode has the blocks already, prefill's are let go of at once."""
    prompt = long_prompt(23)[:321]
    deployment.decode.add("first", prompt, 4, deployment.held("first", prompt))
    first = deployment.decode.answer("first").tokens
    before = deployment.decode.call(transfers)
    deployment.decode.add("second", prompt[:320], 4, deployment.held("second", prompt[:320]))
    deployment.decode.answer("second")
    deployment.decode.add("third", prompt, 4, deployment.held("third", prompt))
    assert deployment.decode.answer("third").tokens == first
    after = deployment.decode.call(transfers)
    # At most the last, partly filled block of each.
    assert after[deployment.path] - before[deployment.path] <= 2 * BLOCK_BYTES
    assert deployment.prefill.wait_for(is_idle) < HOLD_SECONDS - 1


def test_preempted_requests_are_computed_again(deployment: Deployment) -> None:
    """More tokens than decode has blocks for: some requests lose theirs, and pull nothing again."""
    asked = [tokens[:300] for tokens in (long_prompt(seed) for seed in range(30, 40))]
    expected = [deployment.alone(f"alone {i}", prompt, 60) for i, prompt in enumerate(asked)]
    for i, prompt in enumerate(asked):
        params = deployment.held(f"crowd {i}", prompt)
        deployment.decode.add(f"crowd {i}", prompt, 60, params)
    tokens = [deployment.decode.answer(f"crowd {i}").tokens for i in range(len(asked))]
    assert tokens == expected
    assert deployment.prefill.wait_for(is_idle) < HOLD_SECONDS - 1


def test_engines_that_do_not_match_refuse_each_other(deployment: Deployment) -> None:
    prompt = long_prompt(24)[:200]
    params = deployment.held("mismatch", prompt)
    ours = params["ucxkv"]
    assert isinstance(ours, dict)
    changed = {**params, "ucxkv": {**ours, "compatibility": "x"}}
    changed["ucxkv"]["factors"] = {**ours["factors"], "block_size": 64}
    deployment.failing.add("mismatch", prompt, 4, changed)
    assert deployment.failing.answer("mismatch").reason == "error"
    # Prefill need not keep what nobody can use.
    assert deployment.prefill.wait_for(is_idle) < HOLD_SECONDS - 1
    assert "block_size 32 here, 64 there" in deployment.failing.tail()
    expected = deployment.alone("mismatch alone", prompt, 4)
    deployment.decode.add("mismatch", prompt, 4, changed)
    assert deployment.decode.answer("mismatch").tokens == expected


@pytest.mark.parametrize("broken", [{}, {"remote_block_ids": "x"}, {"ucxkv": {"ranks": 3}}])
def test_parameters_that_are_none_are_ignored(
    deployment: Deployment, broken: dict[str, object]
) -> None:
    prompt = long_prompt(25)[:100]
    expected = deployment.alone(f"plain {broken}", prompt, 4)
    deployment.decode.add(f"broken {broken}", prompt, 4, {"do_remote_prefill": True, **broken})
    assert deployment.decode.answer(f"broken {broken}").tokens == expected


def test_aborted_before_it_was_scheduled(deployment: Deployment) -> None:
    """Prefill is told, though nothing was pulled."""
    prompt = long_prompt(26)[:200]
    params = deployment.held("early", prompt)
    assert deployment.prefill.call(free_blocks) == 255 - 7
    deployment.decode.add("early", prompt, 4, params)
    deployment.decode.abort("early")
    assert deployment.prefill.wait_for(is_idle) < HOLD_SECONDS - 1


def stop_in_mid_pull(
    prefill: Engine, decode: Engine, name: str, prompt: list[int], params: dict[str, object]
) -> None:
    """Have a prompt pulled, and stop prefill when some of it has come."""
    prefill.stop()
    decode.add(name, prompt, 16, params)
    total = -(-len(prompt) // BLOCK) * BLOCK_BYTES
    decode.wait_for(is_pulling, 1)
    pulse = 0.001
    while not sum(decode.call(bytes_landed).values()):
        assert pulse < 1, "prefill sends nothing"
        prefill.resume()
        time.sleep(pulse)
        prefill.stop()
        pulse *= 1.5
    landed = sum(decode.call(bytes_landed).values())
    assert 0 < landed < total, "all of it came at once"


def test_aborted_in_mid_pull(slow_deployment: Deployment) -> None:
    """Its blocks are used again at once, while prefill still has bytes for them to send."""
    prefill, decode = slow_deployment.prefill, slow_deployment.decode
    local = long_prompt(41)
    expected = slow_deployment.alone("local", local)
    prompt = long_prompt(42)
    params = slow_deployment.held("aborted", prompt)
    stop_in_mid_pull(prefill, decode, "aborted", prompt, params)
    blocks = decode.call(blocks_of, "aborted")
    assert len(blocks) == 60
    decode.abort("aborted")
    # Prefill stands still: nothing that decode does now can be its doing.
    assert decode.wait_for(is_idle) < 1
    assert decode.call(free_blocks) == DECODE_BLOCKS - 1
    decode.add("local", local, 16)
    reused = decode.call(blocks_of, "local")
    while not reused:
        reused = decode.call(blocks_of, "local")
    assert decode.answer("local").tokens == expected
    assert len(set(reused) & set(blocks)) > 20
    everything = list(range(DECODE_BLOCKS))
    content = decode.call(digest_of_blocks, everything)
    prefill.resume()
    # By notice, long before the end of its time.
    assert prefill.wait_for(is_idle) < HOLD_SECONDS / 2
    time.sleep(0.5)
    assert decode.call(digest_of_blocks, everything) == content


def test_decode_killed_in_mid_pull(
    slow_deployment: Deployment, start: Callable[[Launch], Engine]
) -> None:
    """Prefill keeps its blocks until their time is over, no longer, and goes on."""
    prefill, decode = slow_deployment.prefill, start(slow_deployment.launch).ready()
    prompt = long_prompt(44)[:500]
    decode.add("link", prompt, 1, slow_deployment.held("link", prompt))
    decode.answer("link")
    params = slow_deployment.held("orphan", long_prompt(43))
    answered = prefill.answer("orphan").at
    stop_in_mid_pull(prefill, decode, "orphan", long_prompt(43), params)
    decode.kill()
    prefill.resume()
    assert prefill.call(free_blocks) < 255
    prefill.wait_for(is_idle, timeout=HOLD_SECONDS + 2)
    held = time.monotonic() - answered
    assert HOLD_SECONDS - 0.5 < held < HOLD_SECONDS + 2
    assert prefill.call(free_blocks) == 255
    slow_deployment.decode.add("next", prompt, 16, slow_deployment.held("next", prompt))
    assert slow_deployment.decode.answer("next").tokens == slow_deployment.alone("next", prompt)


def test_prefill_killed_in_mid_pull(slow_deployment: Deployment) -> None:
    """Those requests are recomputed, or fail, as configured; others do not notice."""
    decode, failing = slow_deployment.decode, slow_deployment.failing
    prefill = slow_deployment.prefill
    lost, other = long_prompt(45), long_prompt(46)[:200]
    expected = slow_deployment.alone("lost alone", lost)
    expected_other = slow_deployment.alone("other alone", other)
    params = slow_deployment.held("lost", lost)
    more = slow_deployment.held("lost too", lost)
    stop_in_mid_pull(prefill, decode, "lost too", lost, more)
    failing.add("lost", lost, 16, params)
    failing.wait_for(is_pulling, 1)
    prefill.kill()
    killed = time.monotonic()
    for engine in (decode, failing):
        engine.add("meanwhile", other, 16)
    assert decode.answer("lost too").tokens == expected
    assert failing.answer("lost").reason == "error"
    assert time.monotonic() - killed < 10
    for engine in (decode, failing):
        assert engine.answer("meanwhile").tokens == expected_other
        engine.wait_for(is_idle)
        assert engine.call(free_blocks) == DECODE_BLOCKS - 1

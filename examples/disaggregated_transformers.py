"""A model of Hugging Face's transformers reads prompts in one process and answers in another.

    pip install 'ucxkv[transformers]'
    python examples/disaggregated_transformers.py --cache dynamic

Prefill reads a batch of prompts of different lengths and offers its cache.  Decode receives it
layer by layer, in another order of rows, and generates.  This process does both by itself, and
compares the tokens.  The weights are random, from a seed: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import inspect
import multiprocessing
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    QuantizedCache,
    Qwen2Config,
    Qwen2ForCausalLM,
    StaticCache,
)

from ucxkv import ClusterInfo, IpInfo, LlmDataDist, LlmRole, Options
from ucxkv.integrations.transformers import offer, receive

PREFILL, DECODE = 1, 2
# Llama has no windows: Mistral has them in all layers, Qwen in some.
MODELS = {
    "dynamic": (LlamaConfig, LlamaForCausalLM),
    "static": (LlamaConfig, LlamaForCausalLM),
    "quantized": (LlamaConfig, LlamaForCausalLM),
    "sliding": (MistralConfig, MistralForCausalLM),
    "hybrid": (Qwen2Config, Qwen2ForCausalLM),
    "static-hybrid": (Qwen2Config, Qwen2ForCausalLM),
}
# Newer releases of transformers call it so.
CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in inspect.signature(LlamaForCausalLM.forward).parameters
)


@dataclass(frozen=True)
class Task:
    """What all three processes know: the model, its prompts, and how many tokens are wanted."""

    cache: str = "dynamic"
    layers: int = 4
    hidden: int = 128
    lengths: tuple[int, ...] = (37, 12, 50, 1)
    tokens: int = 16
    window: int = 16
    dtype: str = "float32"
    path: str = "auto"
    seed: int = 0
    timeout: float = 300.0

    @property
    def rows(self) -> list[int]:
        """The order in which decode has the prompts: not prefill's."""
        return list(reversed(range(len(self.lengths))))

    def model(self) -> Any:
        # What runs on different numbers of threads may differ in the last bit.
        torch.set_num_threads(1)
        torch.manual_seed(self.seed)
        config_of, model_of = MODELS[self.cache]
        config = config_of(
            vocab_size=512,
            hidden_size=self.hidden,
            intermediate_size=2 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=4096,
            # So large that what is generated depends on the cache, as it does in trained models.
            initializer_range=0.3,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=None,
        )
        if config_of is MistralConfig:
            config.sliding_window = self.window
        if config_of is Qwen2Config:
            config.sliding_window = self.window
            kinds = ("sliding_attention", "full_attention")
            config.layer_types = [kinds[layer % 2] for layer in range(self.layers)]
        return model_of(config).to(getattr(torch, self.dtype)).eval()

    def empty_cache(self, config: Any) -> Any:
        if self.cache == "quantized":
            return QuantizedCache("fp8", config)
        if self.cache.startswith("static"):
            return StaticCache(config, max_cache_len=max(self.lengths) + self.tokens)
        return DynamicCache(config=config)

    def prompts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids, padded on the left, and the mask that says which of them count."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        longest = max(self.lengths)
        ids = torch.zeros(len(self.lengths), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, length in enumerate(self.lengths):
            ids[row, longest - length :] = torch.randint(1, 512, (length,), generator=generator)
            mask[row, longest - length :] = 1
        return ids, mask


def generate(
    model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor, tokens: int
) -> torch.Tensor:
    """`tokens` more tokens after `ids`, of which those in the cache are not read again."""
    with torch.inference_mode():
        found = model.generate(
            ids,
            attention_mask=mask,
            **{CACHE: cache},
            max_new_tokens=tokens,
            do_sample=False,
        )
    return found[:, ids.shape[1] :]


def prefill(task: Task, pipe: Connection) -> None:
    model = task.model()
    ids, mask = task.prompts()
    cache = task.empty_cache(model.config)
    # One token comes of the reading itself.
    first = generate(model, cache, ids, mask, 1)
    options = Options(listen="127.0.0.1:0", path=task.path)
    with LlmDataDist(PREFILL, LlmRole.PROMPT, options) as engine, offer(engine, cache) as offered:
        pipe.send((engine.listen_address, offered.told, first))
        # Prefill does nothing more: its cache is taken, not sent.
        pipe.recv()


def decode(task: Task, pipe: Connection) -> None:
    model = task.model()
    ids, mask = task.prompts()
    cache = task.empty_cache(model.config)
    (host, port), told, first = pipe.recv()
    rows = task.rows
    with LlmDataDist(DECODE, LlmRole.DECODER, Options(path=task.path)) as engine:
        engine.link_llm_clusters([ClusterInfo(PREFILL, [IpInfo(host, port)])], timeout_ms=10_000)
        began = time.perf_counter()
        with receive(engine, PREFILL, told, cache, rows=rows, timeout_ms=30_000) as arriving:
            ids = torch.cat([ids[rows], first[rows]], 1)
            mask = torch.cat([mask[rows], torch.ones_like(first)], 1)
            answers = generate(model, cache, ids, mask, task.tokens - 1)
            report = arriving.result()
        seconds = time.perf_counter() - began
    pipe.send((torch.cat([first[rows], answers], 1), report, seconds))
    pipe.recv()


def run(task: Task) -> tuple[torch.Tensor, torch.Tensor, Any, float]:
    """The tokens of a single process, those of the two, the report of the pull, and the seconds
    from its beginning to the last token."""
    context = multiprocessing.get_context("spawn")
    pipes = []
    processes = []
    try:
        for side in (prefill, decode):
            ours, theirs = context.Pipe()
            process = context.Process(target=side, args=(task, theirs), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        prefilling, decoding = pipes
        model = task.model()
        alone = generate(model, task.empty_cache(model.config), *task.prompts(), task.tokens)
        decoding.send(take(prefilling, task.timeout))
        together, report, seconds = take(decoding, task.timeout)
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join(task.timeout)
        return alone[task.rows], together, report, seconds
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
        for pipe in pipes:
            pipe.close()


def take(pipe: Connection, timeout: float) -> Any:
    if not pipe.poll(timeout):
        raise TimeoutError(f"nothing has come for {timeout:g} s")
    return pipe.recv()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", choices=MODELS, default="dynamic", help="the kind of cache")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512, help="width of the model")
    parser.add_argument("--tokens", type=int, default=16, help="tokens to generate for each prompt")
    parser.add_argument("--lengths", type=int, nargs="+", default=[300, 120, 411, 7],
                        help="tokens of each prompt")  # fmt: skip
    parser.add_argument("--window", type=int, default=64, help="tokens that a sliding window has")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--path", choices=("auto", "get", "stream"), default="auto")
    arguments = vars(parser.parse_args())
    task = Task(**{**arguments, "lengths": tuple(arguments["lengths"])})
    alone, together, report, seconds = run(task)
    print(f"cache      {task.cache}, {report.bytes / 1e6:.1f} MB by path {report.path}")
    print(f"time       {report.seconds * 1e3:.1f} ms for it all to arrive,"
          f" {seconds * 1e3:.0f} ms to the last token")  # fmt: skip
    for row, tokens in zip(task.rows, together.tolist(), strict=True):
        print(f"prompt {row}   {' '.join(map(str, tokens))}")
    equal = torch.equal(alone, together)
    print("The tokens are those of a single process." if equal else "THE TOKENS DIFFER.")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())

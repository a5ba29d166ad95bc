"""A Llama of random weights, small enough for any CPU, in a directory that vLLM can load.

Plain random weights make tokens that hardly depend on what came before.  Here queries are scaled up
until attention is as selective as in trained models, so that a wrong byte of the KV cache shows in
the tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

VOCABULARY = 1024


def make_model(directory: Path, *, layers: int = 4, heads: int = 4, seed: int = 7) -> Path:
    """Write configuration and weights; returns `directory`.

    A token has `layers` * `heads` * 64 floats of keys and values.
    """
    head, ffn = 32, 512
    hidden = 2 * heads * head
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": 2 * heads,
        "num_key_value_heads": heads,
        "head_dim": head,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
    }
    random = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        values = random.standard_normal(shape, np.float32)
        return values * np.float32(scale / np.sqrt(shape[-1]))

    ones = np.ones(hidden, np.float32)
    weights = {
        "model.embed_tokens.weight": normal(VOCABULARY, hidden, scale=np.sqrt(hidden)),
        "model.norm.weight": ones,
        "lm_head.weight": normal(VOCABULARY, hidden),
    }
    for number in range(layers):
        name = f"model.layers.{number}"
        weights |= {
            f"{name}.input_layernorm.weight": ones.copy(),
            f"{name}.post_attention_layernorm.weight": ones.copy(),
            f"{name}.self_attn.q_proj.weight": normal(hidden, hidden, scale=3.0),
            f"{name}.self_attn.k_proj.weight": normal(heads * head, hidden),
            f"{name}.self_attn.v_proj.weight": normal(heads * head, hidden),
            f"{name}.self_attn.o_proj.weight": normal(hidden, hidden, scale=3.0),
            f"{name}.mlp.gate_proj.weight": normal(ffn, hidden),
            f"{name}.mlp.up_proj.weight": normal(ffn, hidden),
            f"{name}.mlp.down_proj.weight": normal(hidden, ffn),
        }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def prompts(count: int, longest: int, seed: int = 11) -> list[list[int]]:
    """Prompts of mixed lengths, from 1 to `longest` tokens; every fourth begins like another."""
    random = np.random.default_rng(seed)
    lengths = np.geomspace(1, longest, count).astype(int)
    made: list[list[int]] = []
    for number, length in enumerate(random.permutation(lengths)):
        tokens = random.integers(3, VOCABULARY, length).tolist()
        if number % 4 == 3:
            shared = made[number - 2]
            tokens = (shared + tokens)[:length] if length > len(shared) else tokens
        made.append(tokens)
    return made

"""KV cache layouts of models, from the config.json that each publisher has put beside its weights.

Values per token and layer are `kv_heads` x `head_dim` for keys and as many for values, or, where
`tensors` is 1, one latent vector of `head_dim` values that all heads share and no tensor
parallelism divides.
"""

from __future__ import annotations

from dataclasses import dataclass

_BF16_BYTES = 2


@dataclass(frozen=True)
class Model:
    """`layers` x `tensors` tensors; `source` is where the layout was published."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    source: str
    tensors: int = 2
    value_bytes: int = _BF16_BYTES

    def token_bytes(self, tensor_parallel: int) -> int:
        """Bytes of one token in one tensor, at one rank of `tensor_parallel`.

        A rank has at least one head: with more ranks than heads, heads are repeated.
        """
        heads = max(1, self.kv_heads // tensor_parallel)
        return heads * self.head_dim * self.value_bytes


# In each: num_hidden_layers, num_key_value_heads, head_dim (hidden_size / num_attention_heads where
# it is not given), torch_dtype bfloat16.
MODELS = (
    Model("llama3-8b", 32, 8, 128, "meta-llama/Meta-Llama-3-8B: 32 layers, 8 KV heads, 4096/32"),
    Model("llama3-70b", 80, 8, 128, "meta-llama/Meta-Llama-3-70B: 80 layers, 8 KV heads, 8192/64"),
    Model("qwen2.5-7b", 28, 4, 128, "Qwen/Qwen2.5-7B: 28 layers, 4 KV heads, 3584/28"),
    Model("qwen2.5-72b", 80, 8, 128, "Qwen/Qwen2.5-72B: 80 layers, 8 KV heads, 8192/64"),
    Model("qwen3-8b", 36, 8, 128, "Qwen/Qwen3-8B: 36 layers, 8 KV heads, head_dim 128"),
    Model("qwen3-235b", 94, 4, 128, "Qwen/Qwen3-235B-A22B: 94 layers, 4 KV heads, head_dim 128"),
    Model("mistral-7b", 32, 8, 128, "mistralai/Mistral-7B-v0.3: 32 layers, 8 KV heads, 4096/32"),
    # Multi-head latent attention: kv_lora_rank 512 and qk_rope_head_dim 64 values a token.
    Model(
        "deepseek-v3",
        61,
        1,
        576,
        "deepseek-ai/DeepSeek-V3: 61 layers, kv_lora_rank 512 + qk_rope_head_dim 64",
        tensors=1,
    ),
    Model("gpt-oss-20b", 24, 8, 64, "openai/gpt-oss-20b: 24 layers, 8 KV heads, head_dim 64"),
    Model("gpt-oss-120b", 36, 8, 64, "openai/gpt-oss-120b: 36 layers, 8 KV heads, head_dim 64"),
    # Four layers of little, to try scripts out.
    Model("tiny", 4, 2, 32, "no model"),
)
BY_NAME = {model.name: model for model in MODELS}

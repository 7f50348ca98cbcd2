"""Tiny models with random weights, of every architecture and kind of RoPE that blending supports."""

from __future__ import annotations

from functools import cache

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 300
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
ROPES = {
    "plain": {"rope_type": "default", "rope_theta": 1e4},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_CONFIGS = {
    "llama": lambda **kw: LlamaConfig(**kw, head_dim=16, tie_word_embeddings=True),
    "mistral": lambda **kw: MistralConfig(**kw, head_dim=32, sliding_window=None),
    "qwen2": lambda **kw: Qwen2Config(**kw),
    "qwen3": lambda **kw: Qwen3Config(**kw, head_dim=32),
}


@cache
def tiny_model(architecture: str = "llama", rope: str = "plain", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model from a fixed seed; weights are scaled up so that attention is far from uniform."""
    torch.manual_seed(7)
    config = _CONFIGS[architecture](**_SIZES, rope_parameters=dict(ROPES[rope]))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.mul_(4.0)
            elif name.endswith("bias"):
                weight.normal_(std=0.5)
    return model.to(dtype)

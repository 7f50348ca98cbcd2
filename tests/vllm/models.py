"""Tiny models of several architectures in folders that vLLM can load, and prompts over them."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from blend_rag.layout import PromptLayout, Segment, SegmentKind

VOCABULARY = 512
_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_SCALED = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = {
    "llama3": lambda: LlamaConfig(**_SIZES, rope_parameters=dict(_SCALED)),
    "mistral": lambda: MistralConfig(**_SIZES, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**_SIZES),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=32),
    "sliding": lambda: MistralConfig(**_SIZES, sliding_window=64),
}


def make_model(architecture: str, folder: Path) -> Path:
    """Save a model with random weights, scaled up so that attention is far from uniform."""
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(CONFIGS[architecture](), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.mul_(4.0)
            elif name.endswith("bias"):
                weight.normal_(std=0.5)
    model.save_pretrained(folder)
    return folder


def bare_layout(spec: list[tuple[str, int]], seed: int = 0, share: dict[int, int] | None = None) -> PromptLayout:
    """A layout of random ids; `share` names the seed of some segments' ids, so that prompts have them in common."""
    ids: list[int] = []
    segments: list[Segment] = []
    for index, (kind, size) in enumerate(spec):
        rng = random.Random((share or {}).get(index, seed * 1000 + index))
        segments.append(Segment(SegmentKind(kind), len(ids), len(ids) + size, ""))
        ids += [rng.randrange(3, VOCABULARY) for _ in range(size)]
    context = tuple(ids[: spec[0][1]]) if spec[0][0] == "prefix" else ()
    return PromptLayout(tuple(ids), tuple(segments), context)

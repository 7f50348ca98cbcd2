"""Models that blending would get wrong are refused, by their settings or by the self-test."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, MistralConfig, Qwen2Config

from blend_rag.blend.decoder import rotate, unrotate
from blend_rag.blend.passes import compute_chunk_kv
from blend_rag.engines.decoder import TransformersDecoder, check_supported
from blend_rag.engines.fingerprint import model_fingerprint
from blend_rag.engines.self_test import run_self_test
from blend_rag.errors import SelfTestError, UnsupportedModelError
from tests.tiny_models import ARCHITECTURES, ROPES, tiny_model

REFUSED = {
    "architecture 'gpt2'": GPT2Config(),
    "sliding window of 4096": MistralConfig(sliding_window=4096),
    "attention of kind sliding_attention": Qwen2Config(
        use_sliding_window=True, sliding_window=64, max_window_layers=0, num_hidden_layers=2
    ),
    "RoPE of type 'dynamic'": LlamaConfig(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, num_hidden_layers=2
    ),
    "RoPE on a part": LlamaConfig(
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, num_hidden_layers=2
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_unsupported_models_are_refused_in_words(words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        check_supported(REFUSED[words])


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_self_test_passes_on_every_supported_kind(architecture: str, rope: str) -> None:
    report = run_self_test(TransformersDecoder(tiny_model(architecture, rope)))
    assert report.passed
    assert 0 < report.tolerance < 0.05


@pytest.mark.parametrize("fault", ["rotation", "unscaled", "future"])
def test_self_test_refuses_a_model_that_would_be_blended_wrongly(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = TransformersDecoder(tiny_model("llama", "yarn"))
    right = decoder.rotary
    if fault == "rotation":
        monkeypatch.setattr(decoder, "rotary", lambda positions: right(positions + positions // 8))
    elif fault == "unscaled":
        monkeypatch.setattr(decoder, "rotary", lambda positions: tuple(table * 0.9 for table in right(positions)))
    else:
        monkeypatch.setattr(
            "blend_rag.blend.prompt_kv.position_attention",
            lambda query, keys, values, rows, scale: torch.nn.functional.scaled_dot_product_attention(
                query.transpose(0, 1)[None], keys[None], values[None], scale=scale, enable_gqa=True
            )[0].transpose(0, 1),
        )
    with pytest.raises(SelfTestError, match="cannot be blended"):
        run_self_test(decoder)


@pytest.mark.parametrize("rope", ROPES)
def test_unrotating_gives_back_what_was_rotated(rope: str) -> None:
    decoder = TransformersDecoder(tiny_model("llama", rope))
    cos, sin = decoder.rotary(torch.arange(100, 130))
    key = torch.randn(2, 30, decoder.shape.head_dim)
    turned = torch.empty_like(key)
    rotate(key, cos, sin, out=turned)
    assert not torch.allclose(turned, key)
    torch.testing.assert_close(unrotate(turned, cos, sin), key, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rope", ROPES)
def test_k_without_a_hook_is_turned_back(rope: str) -> None:
    """Fused projections offer no place to see K before RoPE: un-rotating gives the same chunk KV."""
    chunk = [list(range(3, 40))]
    hooked = TransformersDecoder(copy.deepcopy(tiny_model("qwen2", rope)))
    bare = TransformersDecoder(copy.deepcopy(tiny_model("qwen2", rope)))
    for layer in bare.model.model.layers:
        layer.self_attn.k_proj._forward_hooks.clear()
    [expected], [found] = (compute_chunk_kv(each, chunk, None, torch.float32) for each in (hooked, bare))
    torch.testing.assert_close(found.data, expected.data, atol=1e-4, rtol=1e-4)


def test_fingerprint_is_stable_and_sees_weights_and_rope() -> None:
    model = tiny_model("llama")
    same, weights, rope = copy.deepcopy(model), copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        weights.model.layers[2].mlp.down_proj.weight[3, 3] += 1e-3
    rope.config.rope_parameters["rope_theta"] = 2e4
    prints = [model_fingerprint(each) for each in (model, same, weights, rope, tiny_model("qwen2"))]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4

"""Where nothing is approximated, blending equals transformers' own forward."""

from __future__ import annotations

import pytest
import torch

from blend_rag.blend.passes import blend, compute_chunk_kv
from blend_rag.blend.selectors import SELECTORS
from blend_rag.engines.decoder import TransformersDecoder
from blend_rag.errors import PolicyError
from tests.bare_prompts import RAG, bare_layout, exact_kv, make_plan, plain_logits, stored_kv
from tests.tiny_models import ARCHITECTURES, ROPES, tiny_model

TOLERANCE = 1e-3


def decoder_of(architecture: str = "llama", rope: str = "plain") -> TransformersDecoder:
    return TransformersDecoder(tiny_model(architecture, rope))


def blended_logits(decoder: TransformersDecoder, plan) -> torch.Tensor:
    return decoder.logits(blend(decoder, [plan])[0].last_hidden)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_full_recompute_equals_plain_forward(architecture: str, rope: str) -> None:
    decoder, layout = decoder_of(architecture, rope), bare_layout()
    plan = make_plan(layout, stored_kv(decoder, layout), ratio=1.0)
    assert len(plan.candidates) == 34
    assert (blended_logits(decoder, plan) - plain_logits(decoder, layout)).abs().max() < TOLERANCE


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_reuse_of_exact_kv_equals_plain_forward(architecture: str, rope: str) -> None:
    """All chunks hot: only the question runs, so this checks the subset forward and the mask by position."""
    decoder, layout = decoder_of(architecture, rope), bare_layout()
    with torch.no_grad():
        hot = exact_kv(decoder, layout.token_ids[:41])
    plan = make_plan(layout, {}, hot, ratio=0.0)
    assert plan.computed.tolist() == [41, 42, 43, 44, 45]
    assert (blended_logits(decoder, plan) - plain_logits(decoder, layout)).abs().max() < TOLERANCE


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_chunk_alone_in_the_prompt_is_exact_at_any_ratio(architecture: str, rope: str) -> None:
    decoder = decoder_of(architecture, rope)
    layout = bare_layout((("chunk", 20), ("question", 5)))
    for ratio in (0.0, 0.15, 1.0):
        plan = make_plan(layout, stored_kv(decoder, layout), ratio=ratio)
        assert (blended_logits(decoder, plan) - plain_logits(decoder, layout)).abs().max() < TOLERANCE


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prefix_keyed_chunk_directly_behind_its_prefix_is_exact_at_any_ratio(architecture: str, rope: str) -> None:
    decoder = decoder_of(architecture, rope)
    layout = bare_layout((("prefix", 7), ("chunk", 20), ("question", 5)))
    for ratio in (0.0, 0.15, 1.0):
        plan = make_plan(layout, stored_kv(decoder, layout, context="prefix"), ratio=ratio)
        assert plan.exact_length == len(layout)
        assert (blended_logits(decoder, plan) - plain_logits(decoder, layout)).abs().max() < TOLERANCE


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_chunk_at_another_position_without_context_has_zero_deviation(architecture: str, rope: str) -> None:
    decoder, chunk = decoder_of(architecture, rope), bare_layout((("chunk", 20),)).token_ids
    [stored] = compute_chunk_kv(decoder, [chunk], None, torch.float32)
    seen = {}

    def attend(inputs):
        key, value = inputs.key.transpose(0, 1)[None], inputs.value.transpose(0, 1)[None]
        seen[inputs.layer] = torch.stack([inputs.key_unrotated, inputs.value])
        query = inputs.query.transpose(0, 1)[None]
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=decoder.shape.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    decoder.forward(torch.tensor(chunk), torch.arange(100, 120), attend)
    worst = max((seen[layer] - stored.data[layer]).abs().max().item() for layer in range(4))
    scale = stored.data.abs().max().item()
    assert worst < 1e-4 * scale


@pytest.mark.parametrize("selector", SELECTORS)
def test_every_selector_gets_the_whole_budget_and_differs_from_full_prefill(selector: str) -> None:
    """The counterpart of exactness: at r < 1 something is approximated, so these tests can fail."""
    decoder, layout = decoder_of(), bare_layout()
    plan = make_plan(layout, stored_kv(decoder, layout), ratio=0.3, selector=selector)
    [result] = blend(decoder, [plan])
    assert len(result.recomputed) == round(0.3 * 34)
    assert set(result.recomputed.tolist()) <= set(plan.candidates.tolist())
    assert (decoder.logits(result.last_hidden) - plain_logits(decoder, layout)).abs().max() > TOLERANCE


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 0.02), (torch.bfloat16, 0.15)])
def test_stores_in_half_precision_stay_within_their_tolerance(dtype: torch.dtype, tolerance: float) -> None:
    """A prefix-keyed chunk would be exact in float32; half precision adds its rounding alone (relative to logits)."""
    decoder = decoder_of("qwen2", "yarn")
    layout = bare_layout((("prefix", 7), ("chunk", 40), ("question", 5)))
    plan = make_plan(layout, stored_kv(decoder, layout, context="prefix", dtype=dtype), ratio=0.0)
    plain = plain_logits(decoder, layout)
    error = (blended_logits(decoder, plan) - plain).abs().max() / plain.abs().max()
    assert 0 < error < tolerance


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_hot_prefix_stored_chunks_and_a_new_chunk_in_one_prompt_are_exact_at_full_ratio(architecture: str) -> None:
    decoder, layout = decoder_of(architecture), bare_layout()
    with torch.no_grad():
        hot = exact_kv(decoder, layout.context_ids)
    hits = stored_kv(decoder, layout, only=[1, 4])  # segment 3 is a new chunk between two stored ones
    plan = make_plan(layout, hits, hot, ratio=1.0)
    assert plan.hot_length == 5
    assert plan.unseen.tolist() == list(range(17, 26))
    assert plan.candidates.tolist() == [*range(5, 16), *range(26, 40)]
    assert (blended_logits(decoder, plan) - plain_logits(decoder, layout)).abs().max() < TOLERANCE


def test_hot_kv_may_end_inside_a_stored_chunk() -> None:
    """The engine's own cache and the store overlap at any token: nothing clashes, every token has one source."""
    decoder, layout = decoder_of(), bare_layout()
    with torch.no_grad():
        hot = exact_kv(decoder, layout.token_ids[:9])
    plan = make_plan(layout, stored_kv(decoder, layout), hot, ratio=1.0)
    assert plan.candidates.tolist() == [*range(9, 16), *range(17, 40)]
    assert (blended_logits(decoder, plan) - plain_logits(decoder, layout)).abs().max() < TOLERANCE


LAYOUTS = {
    "question first": (("question", 5), ("chunk", 9), ("separator", 1), ("chunk", 8), ("glue", 2)),
    "history before": (("prefix", 4), ("history", 6), ("glue", 2), ("chunk", 9), ("chunk", 8), ("question", 5)),
    "history after": (("prefix", 4), ("chunk", 9), ("chunk", 8), ("history", 6), ("glue", 2), ("question", 5)),
    "two tool results": (
        ("prefix", 4),
        ("question", 5),
        ("glue", 2),
        ("chunk", 9),
        ("glue", 3),
        ("chunk", 8),
        ("chunk", 7),
        ("glue", 2),
    ),
    "no chunks": (("prefix", 4), ("question", 5)),
    "ends in a chunk": (("question", 5), ("chunk", 9)),
    "one token": (("question", 1),),
}


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_blends_and_is_exact_at_full_ratio(name: str, selector: str) -> None:
    decoder, layout = decoder_of(), bare_layout(LAYOUTS[name])
    hits = stored_kv(decoder, layout)
    plain = plain_logits(decoder, layout)
    whole = make_plan(layout, hits, ratio=1.0, selector=selector)
    assert (blended_logits(decoder, whole) - plain).abs().max() < TOLERANCE
    part = make_plan(layout, hits, ratio=0.3, selector=selector)
    [result] = blend(decoder, [part])
    assert len(result.recomputed) == part.budget
    assert torch.isfinite(result.last_hidden).all()


def test_narrowed_candidates_end_with_the_same_budget_and_reuse_fresh_layers() -> None:
    decoder, layout = decoder_of(), bare_layout()
    hits = stored_kv(decoder, layout)
    plan = make_plan(layout, hits, ratio=0.2, selector="k-deviation", check_layer=3, schedule=((1, 0.6), (2, 0.4)))
    [result] = blend(decoder, [plan])
    assert len(result.recomputed) == round(0.2 * 34)


def test_check_layer_beyond_the_model_is_refused_in_words() -> None:
    decoder, layout = decoder_of(), bare_layout()
    plan = make_plan(layout, stored_kv(decoder, layout), ratio=0.2, selector="k-deviation", check_layer=4)
    with pytest.raises(PolicyError, match="choose 1 to 3 for this model"):
        blend(decoder, [plan])


def test_deviation_keeps_fresh_kv_of_the_layers_it_computed() -> None:
    """Layers up to the check layer are exact for every token after a full score pass, whatever is selected."""
    decoder, layout = decoder_of(), bare_layout(RAG)
    plan = make_plan(layout, stored_kv(decoder, layout), ratio=0.1, selector="k-deviation")
    [result] = blend(decoder, [plan])
    with torch.no_grad():
        exact = exact_kv(decoder, layout.token_ids)
    for layer in (0, 1):
        keys, values = result.kv.layer(layer)
        assert (keys - exact.keys[layer]).abs().max() < TOLERANCE
        assert (values - exact.values[layer]).abs().max() < TOLERANCE
    assert (result.kv.layer(3)[0] - exact.keys[3]).abs().max() > TOLERANCE

"""No query sees a key behind its own position or of another prompt, and the store is only read."""

from __future__ import annotations

import hashlib

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blend_rag.blend.attention import CausalRows, attention_mass, position_attention
from blend_rag.blend.passes import blend, compute_chunk_kv
from blend_rag.blend.selectors import SELECTORS
from blend_rag.engines.decoder import TransformersDecoder
from blend_rag.layout import PromptLayout
from tests.bare_prompts import bare_layout, make_plan, plain_logits, stored_kv
from tests.tiny_models import VOCABULARY, tiny_model

KINDS = ("chunk", "history", "separator")
SPECS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 90)), min_size=1, max_size=4).map(
    lambda middle: (("prefix", 4), *middle, ("question", 5))
)
FEW = settings(max_examples=25, deadline=None)


def decoder() -> TransformersDecoder:
    return TransformersDecoder(tiny_model())


def kv_of(result) -> torch.Tensor:
    """[layers, 2, kv_heads, tokens, head_dim]."""
    return torch.stack([torch.stack(result.kv.layer(layer)) for layer in range(4)])


def with_other_token(layout: PromptLayout, position: int) -> PromptLayout:
    ids = list(layout.token_ids)
    ids[position] = 3 + (ids[position] + 1) % (VOCABULARY - 3)
    return PromptLayout(tuple(ids), layout.segments, layout.context_ids)


@FEW
@given(spec=SPECS, where=st.floats(0, 0.999), selector=st.sampled_from(("first-k", "random")), ratio=st.floats(0, 1))
def test_token_after_p_never_changes_kv_up_to_p(spec, where: float, selector: str, ratio: float) -> None:
    model, layout = decoder(), bare_layout(spec)
    changed_at = 4 + int(where * (len(layout) - 4))
    other = with_other_token(layout, changed_at)
    kvs = []
    for prompt in (layout, other):
        plan = make_plan(prompt, stored_kv(model, prompt, context="prefix"), ratio=ratio, selector=selector)
        kvs.append(kv_of(blend(model, [plan])[0]))
    torch.testing.assert_close(kvs[0][..., :changed_at, :], kvs[1][..., :changed_at, :], atol=2e-4, rtol=1e-4)
    assert not torch.equal(kvs[0][..., changed_at:, :], kvs[1][..., changed_at:, :])


@FEW
@given(specs=st.lists(SPECS, min_size=2, max_size=3), ratio=st.floats(0, 1), seed=st.integers(1, 99))
def test_other_prompts_of_a_batch_never_change_a_prompt(specs, ratio: float, seed: int) -> None:
    model = decoder()
    first = bare_layout(specs[0])
    batches = []
    for offset in (0, seed):
        layouts = [first, *(bare_layout(spec, seed=i + offset) for i, spec in enumerate(specs[1:], 1))]
        plans = [make_plan(layout, stored_kv(model, layout), ratio=ratio, selector="first-k") for layout in layouts]
        batches.append(kv_of(blend(model, plans)[0]))
    torch.testing.assert_close(batches[0], batches[1], atol=2e-4, rtol=1e-4)


def test_batch_of_three_unequal_layouts_equals_three_single_calls() -> None:
    model = decoder()
    specs = [
        (("prefix", 4), ("chunk", 70), ("question", 5)),
        (("prefix", 4), ("chunk", 9), ("chunk", 130), ("history", 7), ("question", 3)),
        (("question", 6),),
    ]
    for selector in ("first-k", "k-deviation", "query-guided"):
        plans = [
            make_plan(layout, stored_kv(model, layout), ratio=0.2, selector=selector)
            for layout in (bare_layout(spec, seed) for seed, spec in enumerate(specs))
        ]
        together = blend(model, plans)
        for plan, joint in zip(plans, together, strict=True):
            [alone] = blend(model, [plan])
            assert torch.equal(alone.recomputed, joint.recomputed)
            torch.testing.assert_close(kv_of(alone), kv_of(joint), atol=2e-4, rtol=1e-4)
            torch.testing.assert_close(alone.last_hidden, joint.last_hidden, atol=2e-4, rtol=1e-4)


def test_two_runs_give_the_same_bits() -> None:
    model, layout = decoder(), bare_layout()
    hits = stored_kv(model, layout)
    for selector in SELECTORS:
        one, two = (blend(model, [make_plan(layout, hits, ratio=0.3, selector=selector)])[0] for _ in range(2))
        assert torch.equal(one.recomputed, two.recomputed)
        assert torch.equal(kv_of(one), kv_of(two))


def test_blending_leaves_stored_kv_byte_identical() -> None:
    model, layout = decoder(), bare_layout()
    hits = stored_kv(model, layout, context="prefix", dtype=torch.float16)

    def digest() -> str:
        data = b"".join(hit.kv.data.view(torch.uint8).numpy().tobytes() for hit in hits.values())
        return hashlib.sha256(data).hexdigest()

    before = digest()
    for selector in ("first-k", "k-deviation", "query-guided", "oracle"):
        for ratio in (0.0, 0.3, 1.0):
            blend(model, [make_plan(layout, hits, ratio=ratio, selector=selector)])
    assert digest() == before


def test_chunks_warmed_together_do_not_see_each_other() -> None:
    model = decoder()
    chunks = [bare_layout((("chunk", size),), seed=size).token_ids for size in (5, 70, 12)]
    together = compute_chunk_kv(model, chunks, None, torch.float32)
    for chunk, kv in zip(chunks, together, strict=True):
        [alone] = compute_chunk_kv(model, [chunk], None, torch.float32)
        torch.testing.assert_close(alone.data, kv.data, atol=2e-4, rtol=1e-4)


def test_new_chunk_does_not_hide_stored_ones_behind_it_from_the_question() -> None:
    """Guidance runs without the new chunk's KV, which is not known yet, and must not read uninitialised memory."""
    model, layout = decoder(), bare_layout()
    hits = stored_kv(model, layout, only=[1, 4])
    for _ in range(3):
        torch.empty(1 << 20).fill_(float("nan"))  # likely to be handed out again by the allocator
        [result] = blend(model, [make_plan(layout, hits, ratio=0.3)])
        assert torch.isfinite(kv_of(result)).all()
    assert len(result.recomputed) == round(0.3 * 25)


def test_question_put_behind_the_prompt_for_scoring_leaves_no_trace() -> None:
    """With the question first, its echo guides selection and is then forgotten."""
    model = decoder()
    layout = bare_layout((("question", 5), ("chunk", 9), ("chunk", 8), ("glue", 2)))
    hits = stored_kv(model, layout)
    plan = make_plan(layout, hits, ratio=1.0)
    partial = make_plan(layout, hits, ratio=0.3)
    assert not partial.question_is_last
    [result] = blend(model, [partial])
    assert kv_of(result).shape[-2] == len(layout)
    logits = model.logits(blend(model, [plan])[0].last_hidden)
    assert (logits - plain_logits(model, layout)).abs().max() < 1e-3


@settings(max_examples=60, deadline=None)
@given(
    rows=st.sets(st.integers(0, 299), min_size=1, max_size=200).map(sorted),
    holes=st.sets(st.integers(0, 299), max_size=100),
    groups=st.sampled_from((1, 2, 3)),
    seed=st.integers(0, 9),
)
def test_packed_attention_equals_attention_with_a_dense_mask(rows, holes, groups: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    key_positions = torch.tensor([p for p in range(300) if p not in holes or p in rows])
    positions = torch.tensor(rows)
    query = torch.randn(len(rows), 2 * groups, 16, generator=generator)
    keys, values = torch.randn(2, 2, len(key_positions), 16, generator=generator)
    who = CausalRows.of(positions, key_positions, torch.device("cpu"))
    out = position_attention(query, keys, values, who, 0.25)
    scores = torch.einsum("rhd,hkd->hrk", query, keys.repeat_interleave(groups, 0)) * 0.25
    seen = key_positions[None] <= positions[:, None]
    probabilities = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    expected = torch.einsum("hrk,hkd->rhd", probabilities, values.repeat_interleave(groups, 0))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    mass = attention_mass(query, keys, positions, key_positions, 0.25)
    torch.testing.assert_close(mass, probabilities.sum((0, 1)), atol=1e-4, rtol=1e-4)


def test_key_blocks_no_query_may_see_are_never_read() -> None:
    """Poisoned keys behind the last query of every block do no harm: they are not touched."""
    positions = torch.arange(10, 90)
    who = CausalRows.of(positions, torch.arange(500), torch.device("cpu"))
    assert max(block.keys for block in who.blocks) == 90
    keys, values = torch.randn(2, 2, 500, 16)
    keys[:, 90:], values[:, 90:] = float("nan"), float("nan")
    assert torch.isfinite(position_attention(torch.randn(80, 4, 16), keys, values, who, 0.25)).all()

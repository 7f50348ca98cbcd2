"""The same promises on a CUDA device, in float32 and in the half precision that models have there."""

from __future__ import annotations

import copy

import pytest
import torch

from blend_rag import FULL_PREFILL, PromptBuilder, RecomputePolicy
from blend_rag.blend.passes import blend
from blend_rag.blend.selectors import SELECTORS
from blend_rag.engines.decoder import TransformersDecoder
from blend_rag.engines.self_test import run_self_test
from blend_rag.engines.transformers import TransformersEngine
from tests.bare_prompts import bare_layout, make_plan, plain_logits, stored_kv
from tests.tiny_models import ARCHITECTURES, ROPES, tiny_model
from tests.tokenizers_for_tests import byte_level

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def decoder_of(architecture: str = "llama", rope: str = "plain", dtype: torch.dtype = torch.float32):
    return TransformersDecoder(copy.deepcopy(tiny_model(architecture, rope)).to("cuda", dtype))


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_full_recompute_equals_plain_forward_on_cuda(architecture: str, rope: str) -> None:
    decoder, layout = decoder_of(architecture, rope), bare_layout()
    plan = make_plan(layout, stored_kv(decoder, layout), ratio=1.0)
    logits = decoder.logits(blend(decoder, [plan])[0].last_hidden)
    assert (logits - plain_logits(decoder, layout)).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_self_test_passes_on_cuda(architecture: str, dtype: torch.dtype) -> None:
    assert run_self_test(decoder_of(architecture, "llama3", dtype)).passed


@pytest.mark.parametrize("selector", SELECTORS)
def test_cuda_selects_and_blends_like_the_cpu(selector: str) -> None:
    spec = (("prefix", 5), ("chunk", 200), ("chunk", 150), ("question", 6))
    layout = bare_layout(spec)
    gpu, cpu = decoder_of(), TransformersDecoder(tiny_model())
    results = [
        blend(decoder, [make_plan(layout, stored_kv(decoder, layout), ratio=0.2, selector=selector)])[0]
        for decoder in (gpu, cpu)
    ]
    common = set(results[0].recomputed.tolist()) & set(results[1].recomputed.tolist())
    assert len(common) >= 0.95 * len(results[0].recomputed)  # near ties may fall either way
    assert torch.isfinite(results[0].last_hidden).all()


def test_engine_answers_streams_and_batches_on_cuda() -> None:
    model = copy.deepcopy(tiny_model()).to("cuda")
    model.resize_token_embeddings(600)
    tokenizer = byte_level()
    engine = TransformersEngine.from_loaded(model, tokenizer)
    prompts = PromptBuilder(tokenizer, system="Be brief.")
    passages = ["alpha beta gamma", "one two three four", "red green blue"]
    assert engine.warm(prompts, passages).computed == 3
    layouts = [prompts.build(passages=order, question="Which?") for order in (passages, passages[::-1], passages[1:])]
    batch = engine.generate(layouts, max_tokens=6, ignore_eos=True)
    alone = [engine.generate(layout, max_tokens=6, ignore_eos=True) for layout in layouts]
    assert [answer.token_ids for answer in batch] == [answer.token_ids for answer in alone]
    assert all(answer.report.misses == {} for answer in batch)
    streamed = "".join(piece.text for piece in engine.stream(layouts[1], max_tokens=6, ignore_eos=True))
    assert streamed == alone[1].text
    whole = engine.generate(layouts[1], max_tokens=6, ignore_eos=True, policy=RecomputePolicy(ratio=1.0))
    assert whole.token_ids == engine.generate(layouts[1], max_tokens=6, ignore_eos=True, policy=FULL_PREFILL).token_ids

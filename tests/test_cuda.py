"""The same promises on a CUDA device, in float32 and in the half precision that models have there."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from blend_rag import FULL_PREFILL, PromptBuilder, RecomputePolicy
from blend_rag.blend.decoder import AttentionShape
from blend_rag.blend.passes import blend
from blend_rag.blend.plan import BlendPlan, Hit, HotKV
from blend_rag.blend.prompt_kv import PromptKV
from blend_rag.blend.selectors import SELECTORS
from blend_rag.engines.decoder import TransformersDecoder
from blend_rag.engines.self_test import run_self_test
from blend_rag.engines.transformers import TransformersEngine
from blend_rag.kv import ChunkKV
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


@dataclass
class BareDecoder:
    """What placing stored KV needs of a model."""

    device: torch.device
    dtype = torch.float32
    shape = AttentionShape(layers=13, heads=4, kv_heads=2, head_dim=32, scale=1.0)

    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = (positions[:, None] * torch.linspace(1.0, 0.01, 16)).repeat(1, 2).to(self.device)
        return angles.cos(), angles.sin()


@pytest.mark.parametrize("order", [range(13), (12, 0, 5, 4, 9, 1)], ids=["in order", "out of order"])
@pytest.mark.parametrize("places", ["host", "pinned", "gpu", "mixed"])
def test_stored_kv_gets_to_its_place_from_wherever_it_lies(places: str, order: Sequence[int]) -> None:
    layout = bare_layout((("prefix", 70), ("chunk", 200), ("chunk", 33), ("chunk", 150), ("question", 6)))
    generator = torch.Generator().manual_seed(0)
    stored = {i: torch.randn(13, 2, len(layout.segments[i]), 2, 32, generator=generator).half() for i in (1, 2, 3)}
    hot_kv = torch.randn(2, 13, 2, 100, 32, generator=generator)  # ends inside the first chunk
    moves = {"host": torch.clone, "pinned": torch.Tensor.pin_memory, "gpu": torch.Tensor.cuda}

    def placed(device: str) -> PromptKV:
        def put(index: int) -> Hit:
            if device == "cpu":
                return Hit(ChunkKV(stored[index]))
            return Hit(ChunkKV(moves[places if places != "mixed" else list(moves)[index - 1]](stored[index])))

        keys, values = hot_kv.to(device)
        plan = BlendPlan.of(
            layout, {i: put(i) for i in stored}, RecomputePolicy(), HotKV(100, tuple(keys), tuple(values))
        )
        return PromptKV(plan, BareDecoder(torch.device(device)))  # type: ignore[arg-type]

    found, expected = placed("cuda"), placed("cpu")
    known = slice(0, len(layout) - 6)
    for layer in order:
        for one, other in zip(found.layer(layer), expected.layer(layer), strict=True):
            torch.testing.assert_close(one[:, known].cpu(), other[:, known], atol=1e-6, rtol=1e-5)


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

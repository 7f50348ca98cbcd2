"""Proof, at load, that blending this very model on this very device gives what plain prefill gives."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blend_rag.blend.passes import blend, compute_chunk_kv
from blend_rag.blend.plan import BlendPlan, Hit
from blend_rag.blend.policy import RecomputePolicy
from blend_rag.blend.sample import sample_layout
from blend_rag.engines.decoder import TransformersDecoder
from blend_rag.errors import SelfTestError
from blend_rag.layout import PromptLayout, Segment, SegmentKind

_NOISE_FACTOR = 10.0


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """Largest differences of last logits, and what is allowed.

    Attributes:
        noise: between two exact plain prefills, one of them split in two.
        full_recompute_error: r = 1 over stored chunks against plain prefill.
        shift_error: one chunk stored at one position and used at another against plain prefill there.
        tolerance: a small multiple of the noise.
    """

    noise: float
    full_recompute_error: float
    shift_error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return max(self.full_recompute_error, self.shift_error) <= self.tolerance


@torch.no_grad()
def run_self_test(decoder: TransformersDecoder) -> SelfTestReport:
    """Compare blended with stock forward on a few dozen tokens.

    Raises:
        SelfTestError: blending this model would give wrong answers.
    """
    layout = sample_layout(decoder.model.config.vocab_size)
    ids = torch.tensor([layout.token_ids], device=decoder.device)
    plain = decoder.model(input_ids=ids, use_cache=False).logits[0, -1].float()
    noise = (_split_prefill(decoder, ids) - plain).abs().max().item()
    chunks = [segment for segment in layout.segments if segment.kind is SegmentKind.CHUNK]
    stored = compute_chunk_kv(decoder, [layout.ids(chunk) for chunk in chunks], None, torch.float32)
    hits = {layout.segments.index(chunk): Hit(kv) for chunk, kv in zip(chunks, stored, strict=True)}
    plan = BlendPlan.of(layout, hits, RecomputePolicy(ratio=1.0))
    blended = decoder.logits(blend(decoder, [plan])[0].last_hidden)
    scale = max(noise, torch.finfo(decoder.dtype).eps * plain.abs().max().item())
    report = SelfTestReport(
        noise=noise,
        full_recompute_error=(blended - plain).abs().max().item(),
        shift_error=_shift_error(decoder, layout.ids(chunks[0])),
        tolerance=_NOISE_FACTOR * scale,
    )
    if not report.passed:
        msg = (
            f"self-test failed: blended logits are off by {report.full_recompute_error:.2g} at r = 1 and by "
            f"{report.shift_error:.2g} for a moved chunk, {report.tolerance:.2g} is allowed; "
            "this model cannot be blended, use another one"
        )
        raise SelfTestError(msg)
    return report


def _shift_error(decoder: TransformersDecoder, chunk: tuple[int, ...], offset: int = 37) -> float:
    """A chunk alone at `offset`, stock, against the same chunk from KV that was computed at position 0."""
    size = len(chunk)
    ids = torch.tensor([chunk], device=decoder.device)
    positions = torch.arange(offset, offset + size, device=decoder.device)[None]
    moved = decoder.model(input_ids=ids, position_ids=positions, use_cache=True)
    plain = decoder.model(input_ids=ids, use_cache=False).logits[0, -1].float()
    [kv] = compute_chunk_kv(decoder, [chunk], None, torch.float32)
    layout = PromptLayout(chunk, (Segment(SegmentKind.CHUNK, 0, size, ""),))
    result = blend(decoder, [BlendPlan.of(layout, {0: Hit(kv)}, RecomputePolicy(ratio=0.0))])[0]
    cos, sin = decoder.rotary(positions[0])
    worst = (decoder.logits(result.last_hidden) - plain).abs().max()
    for layer in range(decoder.shape.layers):
        key = kv.keys(layer).to(decoder.device).transpose(0, 1)
        half = key.shape[-1] // 2
        turned = torch.cat([-key[..., half:], key[..., :half]], -1)
        difference = key * cos + turned * sin - moved.cache.layers[layer].keys[0].float()
        worst = torch.maximum(worst, difference.abs().max())
    return float(worst)


def _split_prefill(decoder: TransformersDecoder, ids: torch.Tensor) -> torch.Tensor:
    cut = ids.shape[1] // 2
    first = decoder.model(input_ids=ids[:, :cut], use_cache=True)
    logits: torch.Tensor = decoder.model(input_ids=ids[:, cut:], cache=first.cache, use_cache=True).logits[0, -1]
    return logits.float()

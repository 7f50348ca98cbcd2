"""Proof, at start, that blending the served model on this device gives what its own forward gives."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blend_rag.blend.attention import CausalRows, position_attention
from blend_rag.blend.decoder import LayerInputs, rotate
from blend_rag.blend.passes import blend, compute_chunk_kv
from blend_rag.blend.plan import BlendPlan, Hit, HotKV
from blend_rag.blend.policy import FULL_PREFILL, RecomputePolicy
from blend_rag.blend.sample import sample_layout
from blend_rag.errors import SelfTestError
from blend_rag.kv import ChunkKV
from blend_rag.layout import SegmentKind
from blend_rag.vllm.decoder import VLLMDecoder

_OFFSET = 37
NOISE_FACTOR = 10.0


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Largest differences, each as a share of the largest number compared.

    Attributes:
        noise: between the same computed together with other tokens and apart, in last hidden states and in K of every
            layer; at least the dtype's precision.
        full_recompute_error: r = 1 over stored chunks against the full forward.
        shift_error: K of a chunk computed at one position and moved to another, against K computed there.
    """

    noise: float
    full_recompute_error: float
    shift_error: float

    @property
    def passed(self) -> bool:
        return max(self.full_recompute_error, self.shift_error) <= NOISE_FACTOR * self.noise


@torch.inference_mode()
def check_blending(decoder: VLLMDecoder, vocabulary: int) -> SelfCheck:
    """Blend a few dozen tokens every way and compare.

    Raises:
        SelfTestError: blending this model would give wrong answers.
    """
    layout = sample_layout(vocabulary)
    full = blend(decoder, [BlendPlan.of(layout, {}, FULL_PREFILL)])[0].last_hidden.float()
    halves = blend(decoder, [BlendPlan.of(layout, {}, FULL_PREFILL)], max_rows=len(layout) // 2)[0].last_hidden
    chunks = layout.of_kind(SegmentKind.CHUNK)
    stored = compute_chunk_kv(
        decoder, [layout.ids(chunk) for chunk in chunks], None, torch.float32, device=decoder.device
    )
    hits = {layout.segments.index(chunk): Hit(kv) for chunk, kv in zip(chunks, stored, strict=True)}
    blended = blend(decoder, [BlendPlan.of(layout, hits, RecomputePolicy(ratio=1.0))])[0].last_hidden
    [home] = compute_chunk_kv(decoder, [layout.ids(chunks[0])], None, torch.float32, device=decoder.device)
    check = SelfCheck(
        noise=max(_difference(halves, full), _key_noise(decoder, home, layout.ids(chunks[0])), precision(decoder)),
        full_recompute_error=_difference(blended, full),
        shift_error=_shift_error(decoder, home, layout.ids(chunks[0])),
    )
    if not check.passed:
        msg = (
            f"self-check failed: blended hidden states are off by {check.full_recompute_error:.2g} at r = 1, moved "
            f"keys by {check.shift_error:.2g}, {NOISE_FACTOR * check.noise:.2g} is allowed; "
            "this model cannot be blended on this device: serve it without BlendConnector"
        )
        raise SelfTestError(msg)
    return check


def precision(decoder: VLLMDecoder) -> float:
    """Of the dtype, and of angles: at position 57 float32 holds an angle to about 32 times its own precision."""
    return float(max(torch.finfo(decoder.dtype).eps, 8 * torch.finfo(torch.float32).eps))


def _key_noise(decoder: VLLMDecoder, home: ChunkKV, chunk: tuple[int, ...]) -> float:
    """K of a chunk computed beside another one, against K computed by itself; the worst layer."""
    [again, _] = compute_chunk_kv(decoder, [chunk, chunk[::-1]], None, torch.float32, device=decoder.device)
    return max(_difference(again.keys(layer), home.keys(layer)) for layer in range(decoder.shape.layers))


def _shift_error(decoder: VLLMDecoder, home: ChunkKV, chunk: tuple[int, ...]) -> float:
    """K of a chunk alone at an offset against its stored K turned there; the worst layer."""
    at = torch.arange(_OFFSET, _OFFSET + len(chunk))
    cos, sin = decoder.rotary(at)
    worst = 0.0
    for layer, key in enumerate(_keys_alone(decoder, torch.tensor(chunk), at)):
        turned = torch.empty_like(home.keys(layer).transpose(0, 1))
        rotate(home.keys(layer).transpose(0, 1), cos, sin, out=turned)
        worst = max(worst, _difference(turned, key))
    return worst


def _keys_alone(decoder: VLLMDecoder, token_ids: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
    """Rotated K of every layer [kv_heads, tokens, head_dim] for tokens that see each other and nothing before them."""
    rows = CausalRows.of(positions, positions, decoder.device)
    found: list[torch.Tensor] = []

    def attend(inputs: LayerInputs) -> torch.Tensor:
        keys, values = inputs.key.transpose(0, 1), inputs.value.transpose(0, 1)
        found.append(keys.clone())
        return position_attention(inputs.query, keys, values, rows, decoder.shape.scale)

    decoder.forward(token_ids, positions, attend, stop_after=decoder.shape.layers - 1)
    return found


def kv_difference(left: HotKV, right: HotKV) -> float:
    """Largest difference of K and V of the same tokens over all layers, as a share of the layer's largest number."""
    pairs = [*zip(left.keys, right.keys, strict=True), *zip(left.values, right.values, strict=True)]
    return max(_difference(one[:, : right.length], other[:, : right.length]) for one, other in pairs)


def _difference(left: torch.Tensor, right: torch.Tensor) -> float:
    left, right = left.float(), right.float()
    return float((left - right).abs().max() / right.abs().max().clamp_min(1e-30))

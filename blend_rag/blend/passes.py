"""The blend: a score pass where the selector needs one, and the recompute pass.

Written once against the `Decoder` protocol. Both passes are the model's own forward over a subset of tokens; K and V of
all other tokens are stored or hot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from blend_rag.blend.attention import CausalRows, position_attention
from blend_rag.blend.decoder import AttentionShape, Decoder, LayerInputs
from blend_rag.blend.plan import BlendPlan, HotKV
from blend_rag.blend.probe import Probe
from blend_rag.blend.prompt_kv import PromptKV
from blend_rag.blend.selectors import make_selector
from blend_rag.kv import ChunkKV


@dataclass(frozen=True, slots=True)
class BlendResult:
    """What a blend leaves behind for one prompt.

    Attributes:
        last_hidden: normed last hidden state of the last token, [hidden].
        kv: K and V of every token of the prompt.
        recomputed: positions of reused chunk tokens that were computed again, rising.
    """

    last_hidden: torch.Tensor
    kv: PromptKV
    recomputed: torch.Tensor


def blend(decoder: Decoder, plans: Sequence[BlendPlan]) -> list[BlendResult]:
    """Blend several prompts in one packed recompute pass; they never see each other.

    Selection runs per prompt, then all prompts' question, unknown and selected tokens go through the model together.
    """
    prompts = [PromptKV(plan, decoder) for plan in plans]
    selected = [select(decoder, plan, kv) for plan, kv in zip(plans, prompts, strict=True)]
    rows = [torch.cat([plan.computed, chosen]).sort().values for plan, chosen in zip(plans, selected, strict=True)]
    hidden = _run_packed(decoder, prompts, rows)
    ends = torch.tensor([len(run) for run in rows]).cumsum(0) - 1
    return [
        BlendResult(hidden[end], kv, chosen) for end, kv, chosen in zip(ends.tolist(), prompts, selected, strict=True)
    ]


def select(decoder: Decoder, plan: BlendPlan, kv: PromptKV) -> torch.Tensor:
    """Positions of the candidates to recompute, rising; exactly `plan.budget` of them."""
    if plan.budget == 0:
        return plan.candidates[:0]
    if plan.budget == len(plan.candidates):
        return plan.candidates
    return make_selector(plan.policy).select(Probe(decoder, plan, kv), plan.budget)


def continue_from(decoder: Decoder, kv: PromptKV, token_ids: Sequence[int]) -> torch.Tensor:
    """Last hidden states [n, hidden] of `token_ids` [n] put behind a blended prompt, all seen at once.

    For scoring a given continuation; the prompt's KV is not changed.
    """
    length = len(kv.plan)
    positions = torch.arange(length, length + len(token_ids))
    rows = CausalRows.of(positions, torch.arange(length + len(token_ids)), decoder.device)

    def attend(inputs: LayerInputs) -> torch.Tensor:
        known = kv.layer(inputs.layer)
        fresh = (inputs.key, inputs.value)
        keys, values = (torch.cat([old, new.transpose(0, 1)], dim=1) for old, new in zip(known, fresh, strict=True))
        return position_attention(inputs.query, keys, values, rows, decoder.shape.scale)

    return _hidden(decoder.forward(torch.tensor(list(token_ids)), positions, attend))


def compute_chunk_kv(
    decoder: Decoder, chunks: Sequence[Sequence[int]], context: HotKV | None, dtype: torch.dtype
) -> list[ChunkKV]:
    """Un-rotated KV of chunks, each computed alone or behind the same context and blind to the others.

    Args:
        chunks: token ids of each.
        context: exact KV of the context; None computes the chunks alone.
        dtype: of the result, which lies on the CPU.
    """
    length = context.length if context else 0
    sizes = [len(chunk) for chunk in chunks]
    store = [_empty_chunk(decoder.shape, size, dtype) for size in sizes]
    rows = {size: _chunk_rows(length, size, decoder.device) for size in set(sizes)}

    def attend(inputs: LayerInputs) -> torch.Tensor:
        out = torch.empty_like(inputs.query)
        for data, part in zip(store, _split(sizes), strict=True):
            keys, values = inputs.key[part].transpose(0, 1), inputs.value[part].transpose(0, 1)
            data[inputs.layer, 0].copy_(inputs.key_unrotated[part])
            data[inputs.layer, 1].copy_(inputs.value[part])
            if context:
                keys = torch.cat([context.keys[inputs.layer][:, :length], keys], dim=1)
                values = torch.cat([context.values[inputs.layer][:, :length], values], dim=1)
            size = part.stop - part.start
            out[part] = position_attention(inputs.query[part], keys, values, rows[size], decoder.shape.scale)
        return out

    token_ids = torch.tensor([token_id for chunk in chunks for token_id in chunk])
    positions = torch.cat([torch.arange(length, length + size) for size in sizes])
    decoder.forward(token_ids, positions, attend, stop_after=decoder.shape.layers - 1)
    return [ChunkKV(data) for data in store]


def _run_packed(decoder: Decoder, prompts: Sequence[PromptKV], rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Run the given rows of every prompt through the whole model; hidden states of all rows, packed."""
    causal = [
        CausalRows.of(run, torch.arange(len(kv.plan)), decoder.device) for kv, run in zip(prompts, rows, strict=True)
    ]
    parts = _split([len(run) for run in rows])

    def attend(inputs: LayerInputs) -> torch.Tensor:
        out = torch.empty_like(inputs.query)
        for kv, part, who in zip(prompts, parts, causal, strict=True):
            out[part] = kv.attend(inputs.layer, who, inputs.query[part], (inputs.key[part], inputs.value[part]))
        return out

    token_ids = torch.cat([kv.plan.token_ids[run] for kv, run in zip(prompts, rows, strict=True)])
    return _hidden(decoder.forward(token_ids, torch.cat(list(rows)), attend))


def _hidden(states: torch.Tensor | None) -> torch.Tensor:
    assert states is not None, "a forward that is not stopped returns hidden states"
    return states


def _split(sizes: Sequence[int]) -> list[slice]:
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return [slice(start, end) for start, end in pairwise(ends)]


def _empty_chunk(shape: AttentionShape, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape.layers, 2, size, shape.kv_heads, shape.head_dim, dtype=dtype)


def _chunk_rows(length: int, size: int, device: torch.device) -> CausalRows:
    return CausalRows.of(torch.arange(length, length + size), torch.arange(length + size), device)

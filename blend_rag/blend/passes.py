"""The blend: a score pass where the selector needs one, and the recompute pass.

Written once against the `Decoder` protocol. Both passes are the model's own forward over a subset of tokens; K and V of
all other tokens are stored or hot.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch

from blend_rag.blend.attention import CausalRows, position_attention
from blend_rag.blend.decoder import Decoder, LayerInputs, rotate
from blend_rag.blend.plan import BlendPlan, HotKV
from blend_rag.blend.probe import Probe
from blend_rag.blend.prompt_kv import PromptKV
from blend_rag.blend.selectors import make_selector
from blend_rag.kv import ChunkKV

Result = TypeVar("Result")


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


BlendSteps = Generator[int, None, list[BlendResult]]
"""A blend under way: advance it to compute more; it yields how many tokens went through the model, returns results."""


def blend(decoder: Decoder, plans: Sequence[BlendPlan], max_rows: int | None = None) -> list[BlendResult]:
    """Blend several prompts in one packed recompute pass; they never see each other.

    Selection runs per prompt, then all prompts' question, unknown and selected tokens go through the model together.

    Args:
        decoder: the model.
        plans: one per prompt.
        max_rows: tokens that go through the model at once, which bounds memory; by default all.
    """
    return finish(blend_in_steps(decoder, plans, max_rows))


def blend_in_steps(decoder: Decoder, plans: Sequence[BlendPlan], max_rows: int | None = None) -> BlendSteps:
    """The same, stopping after each selection and each tile of `max_rows` tokens, so that others get their turn.

    Tiles follow the order of positions, so no token needs the fresh KV of a later tile: the result is that of one pass.
    """
    prompts = [PromptKV(plan, decoder) for plan in plans]
    selected = []
    for plan, kv in zip(plans, prompts, strict=True):
        selected.append(decoder.from_first_rank(select(decoder, plan, kv, max_rows)))
        yield 1
    rows = [torch.cat([plan.computed, chosen]).sort().values for plan, chosen in zip(plans, selected, strict=True)]
    last_hidden: dict[int, torch.Tensor] = {}
    for tile in _tiles(rows, max_rows):
        hidden = _run_packed(decoder, [(prompts[index], run) for index, run in tile.parts])
        ends = torch.tensor([len(run) for _, run in tile.parts]).cumsum(0) - 1
        for (index, _), end in zip(tile.parts, ends.tolist(), strict=True):
            last_hidden[index] = hidden[end]
        yield len(hidden)
    return [
        BlendResult(last_hidden[index], kv, chosen)
        for index, (kv, chosen) in enumerate(zip(prompts, selected, strict=True))
    ]


def finish(steps: Generator[object, None, Result]) -> Result:
    """Run something under way to its end."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: Result = done.value
            return result


def select(decoder: Decoder, plan: BlendPlan, kv: PromptKV, max_rows: int | None = None) -> torch.Tensor:
    """Positions of the candidates to recompute, rising; exactly `plan.budget` of them."""
    if plan.budget == 0:
        return plan.candidates[:0]
    if plan.budget == len(plan.candidates):
        return plan.candidates
    return make_selector(plan.policy).select(Probe(decoder, plan, kv, max_rows), plan.budget)


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
    decoder: Decoder,
    chunks: Sequence[Sequence[int]],
    context: HotKV | None,
    dtype: torch.dtype,
    *,
    device: torch.device | str = "cpu",
    max_rows: int | None = None,
) -> list[ChunkKV]:
    """Un-rotated KV of chunks, each computed alone or behind the same context and blind to the others.

    Args:
        decoder: the model.
        chunks: token ids of each.
        context: exact KV of the context; None computes the chunks alone.
        dtype: of the result.
        device: of the result.
        max_rows: tokens that go through the model at once, which bounds memory; by default all.
    """
    size = max_rows or max(1, sum(map(len, chunks)))
    found: list[ChunkKV] = []
    batch: list[Sequence[int]] = []
    for chunk in [*chunks, None]:
        if batch and (chunk is None or sum(map(len, batch)) + len(chunk) > size):
            found += [ChunkKV(kv.data.to(device, dtype)) for kv in _compute_batch(decoder, batch, context, size)]
            batch = []
        if chunk is not None:
            batch.append(chunk)
    return found


def _compute_batch(
    decoder: Decoder, chunks: Sequence[Sequence[int]], context: HotKV | None, size: int
) -> list[ChunkKV]:
    """KV of chunks that fit into one pass, or of one chunk piece by piece, each behind the pieces before it."""
    if len(chunks) > 1 or len(chunks[0]) <= size:
        return _compute_together(decoder, chunks, context)
    [chunk] = chunks
    pieces: list[ChunkKV] = []
    for start in range(0, len(chunk), size):
        if pieces:
            context = _extend(decoder, context, pieces[-1])
        pieces += _compute_together(decoder, [chunk[start : start + size]], context)
    return [ChunkKV(torch.cat([piece.data for piece in pieces], dim=2))]


def _extend(decoder: Decoder, context: HotKV | None, kv: ChunkKV) -> HotKV:
    """Exact KV of a context and of the chunk that was computed behind it."""
    length = context.length if context else 0
    cos, sin = decoder.rotary(torch.arange(length, length + kv.num_tokens))
    keys, values = [], []
    for layer in range(decoder.shape.layers):
        key, value = kv.data[layer].transpose(1, 2)  # each [kv_heads, tokens, head_dim]
        rotated = torch.empty_like(key)
        rotate(key, cos, sin, out=rotated)
        keys.append(torch.cat([context.keys[layer][:, :length], rotated], dim=1) if context else rotated)
        values.append(torch.cat([context.values[layer][:, :length], value], dim=1) if context else value)
    return HotKV(length + kv.num_tokens, tuple(keys), tuple(values))


def _compute_together(decoder: Decoder, chunks: Sequence[Sequence[int]], context: HotKV | None) -> list[ChunkKV]:
    """KV of chunks in one pass, in the model's dtype, where the model runs."""
    length = context.length if context else 0
    sizes = [len(chunk) for chunk in chunks]
    shape = decoder.shape
    store = [
        torch.empty(shape.layers, 2, size, shape.kv_heads, shape.head_dim, dtype=decoder.dtype, device=decoder.device)
        for size in sizes
    ]
    rows = {size: _chunk_rows(length, size, decoder.device) for size in set(sizes)}

    def attend(inputs: LayerInputs) -> torch.Tensor:
        out = torch.empty_like(inputs.query)
        for data, part in zip(store, _split(sizes), strict=True):
            keys, values = inputs.key[part].transpose(0, 1), inputs.value[part].transpose(0, 1)
            data[inputs.layer, 0].copy_(inputs.unrotated()[part])
            data[inputs.layer, 1].copy_(inputs.value[part])
            if context:
                keys = torch.cat([context.keys[inputs.layer][:, :length], keys], dim=1)
                values = torch.cat([context.values[inputs.layer][:, :length], values], dim=1)
            size = part.stop - part.start
            out[part] = position_attention(inputs.query[part], keys, values, rows[size], decoder.shape.scale)
        return out

    token_ids = torch.tensor([token_id for chunk in chunks for token_id in chunk])
    positions = torch.cat([torch.arange(length, length + size) for size in sizes])
    decoder.forward(token_ids, positions, attend, stop_after=decoder.shape.layers - 1, unrotated=True)
    return [ChunkKV(data) for data in store]


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows that go through the model together, by prompt."""

    parts: list[tuple[int, torch.Tensor]]


def _tiles(rows: Sequence[torch.Tensor], max_rows: int | None) -> Iterator[_Tile]:
    """All rows in tiles, prompt after prompt, each prompt's in rising order."""
    size = max_rows or max(1, sum(map(len, rows)))
    parts: list[tuple[int, torch.Tensor]] = []
    filled = 0
    for index, run in enumerate(rows):
        while len(run):
            part, run = run[: size - filled], run[size - filled :]
            parts.append((index, part))
            filled += len(part)
            if filled == size:
                yield _Tile(parts)
                filled, parts = 0, []
    if parts:
        yield _Tile(parts)


def _run_packed(decoder: Decoder, parts: Sequence[tuple[PromptKV, torch.Tensor]]) -> torch.Tensor:
    """Run the given rows of prompts through the whole model; hidden states of all rows, packed."""
    causal = [CausalRows.of(run, torch.arange(len(kv.plan)), decoder.device) for kv, run in parts]
    slices = _split([len(run) for _, run in parts])

    def attend(inputs: LayerInputs) -> torch.Tensor:
        if len(parts) == 1:
            return parts[0][0].attend(inputs.layer, causal[0], inputs.query, (inputs.key, inputs.value))
        out = torch.empty_like(inputs.query)
        for (kv, _), part, who in zip(parts, slices, causal, strict=True):
            out[part] = kv.attend(inputs.layer, who, inputs.query[part], (inputs.key[part], inputs.value[part]))
        return out

    token_ids = torch.cat([kv.plan.token_ids[run] for kv, run in parts])
    return _hidden(decoder.forward(token_ids, torch.cat([run for _, run in parts]), attend))


def _hidden(states: torch.Tensor | None) -> torch.Tensor:
    assert states is not None, "a forward that is not stopped returns hidden states"
    return states


def _split(sizes: Sequence[int]) -> list[slice]:
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return [slice(start, end) for start, end in pairwise(ends)]


def _chunk_rows(length: int, size: int, device: torch.device) -> CausalRows:
    return CausalRows.of(torch.arange(length, length + size), torch.arange(length + size), device)

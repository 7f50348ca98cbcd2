"""Triton kernels of the blend for GPUs: attention with a bound per row, and stored KV turned and put in its place.

Imported only where Triton is; the same is written in plain torch beside each use.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["rows"])
def _attention_kernel(
    query, keys, values, limits, out, logs,
    rows, scale,
    query_row, query_head, key_head, key_token, value_head, value_token, out_row, out_head,
    GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
    LOGS: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    row = block * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    is_row = row < rows
    limit = tl.load(limits + row, mask=is_row, other=0)
    least = tl.load(limits + block * ROWS)
    most = tl.load(limits + tl.minimum(block * ROWS + ROWS, rows) - 1)
    q = tl.load(query + row[:, None] * query_row + head * query_head + dim[None, :], mask=is_row[:, None], other=0.0)
    key_base = keys + (head // GROUP) * key_head + dim[:, None]
    value_base = values + (head // GROUP) * value_head + dim[None, :]
    total = tl.zeros([ROWS, DIM], tl.float32)
    peak = tl.full([ROWS], -1e30, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    unmasked = (least // KEYS) * KEYS
    for start in range(0, unmasked, KEYS):
        at = start + tl.arange(0, KEYS)
        k = tl.load(key_base + at[None, :] * key_token)
        score = tl.dot(q, k, input_precision=PRECISION) * scale
        new_peak = tl.maximum(peak, tl.max(score, 1))
        p = tl.exp2(score - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        mass = mass * shrink + tl.sum(p, 1)
        v = tl.load(value_base + at[:, None] * value_token)
        total = total * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        peak = new_peak
    for start in range(unmasked, most, KEYS):
        at = start + tl.arange(0, KEYS)
        is_key = at < most
        k = tl.load(key_base + at[None, :] * key_token, mask=is_key[None, :], other=0.0)
        score = tl.dot(q, k, input_precision=PRECISION) * scale
        score = tl.where(at[None, :] < limit[:, None], score, -1e30)
        new_peak = tl.maximum(peak, tl.max(score, 1))
        p = tl.where(at[None, :] < limit[:, None], tl.exp2(score - new_peak[:, None]), 0.0)
        shrink = tl.exp2(peak - new_peak)
        mass = mass * shrink + tl.sum(p, 1)
        v = tl.load(value_base + at[:, None] * value_token, mask=is_key[:, None], other=0.0)
        total = total * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        peak = new_peak
    result = total / tl.maximum(mass, 1e-30)[:, None]
    place = out + row[:, None] * out_row + head * out_head + dim[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=is_row[:, None])
    if LOGS:
        tl.store(logs + row * tl.num_programs(1) + head, peak + tl.log2(mass), mask=is_row)


def limited_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    limits: torch.Tensor,
    scale: float,
    logs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention in which row i sees keys [0, limits[i]). Blocks of keys beyond a block's limit are not read.

    Args:
        query: [rows, heads, head_dim], the last axis contiguous.
        keys, values: [kv_heads, keys, head_dim], the last axis contiguous.
        limits: [rows], int32, rising, each at least 1.
        scale: multiplies query-key products.
        logs: [rows, heads], float32; if given, log2 of each row's softmax denominator is written to it.

    Returns:
        [rows, heads, head_dim].
    """
    rows, heads, dim = query.shape
    out = torch.empty(rows, heads, dim, dtype=query.dtype, device=query.device)
    row_block, key_block, warps, stages = (128, 64, 8, 3) if query.dtype.itemsize == 2 else (32, 32, 4, 2)
    if rows <= 64 and query.dtype.itemsize == 2:
        row_block, warps = (64, 4) if rows > 16 else (16, 4)
    _attention_kernel[(triton.cdiv(rows, row_block), heads)](
        query, keys, values, limits, out, out if logs is None else logs,
        rows, scale * _LOG2_E,
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        out.stride(0), out.stride(1),
        GROUP=heads // keys.shape[0], DIM=dim, ROWS=row_block, KEYS=key_block,
        PRECISION="ieee" if query.dtype is torch.float32 else "tf32",
        LOGS=logs is not None,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["count", "most"])
def _mass_kernel(
    query, keys, limits, logs, asking, mass,
    count, most, scale, heads,
    query_row, query_head, key_head, key_token, mass_head,
    GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    kv_head = tl.program_id(1)
    dim = tl.arange(0, DIM)
    is_key = at < most
    k = tl.load(keys + kv_head * key_head + at[None, :] * key_token + dim[:, None], mask=is_key[None, :], other=0.0)
    found = tl.zeros([KEYS], tl.float32)
    for start in range(0, count * GROUP, ROWS):
        pair = start + tl.arange(0, ROWS)  # a row that asks, and one of the heads that share these keys
        is_pair = pair < count * GROUP
        row = tl.load(asking + pair // GROUP, mask=is_pair, other=0)
        head = kv_head * GROUP + pair % GROUP
        place = query + row[:, None] * query_row + head[:, None] * query_head + dim[None, :]
        q = tl.load(place, mask=is_pair[:, None], other=0.0)
        limit = tl.load(limits + row, mask=is_pair, other=0)
        log = tl.load(logs + row * heads + head, mask=is_pair, other=0.0)
        score = tl.dot(q, k, input_precision=PRECISION) * scale
        share = tl.where((at[None, :] < limit[:, None]) & is_pair[:, None], tl.exp2(score - log[:, None]), 0.0)
        found += tl.sum(share, 0)
    place = mass + kv_head * mass_head + at
    tl.store(place, tl.load(place, mask=is_key, other=0.0) + found, mask=is_key)


def add_mass(
    query: torch.Tensor,
    keys: torch.Tensor,
    limits: torch.Tensor,
    logs: torch.Tensor,
    asking: torch.Tensor,
    scale: float,
    mass: torch.Tensor,
) -> None:
    """Add the attention that rows give to each key, summed over the heads that share it.

    Args:
        query: [rows, heads, head_dim], the last axis contiguous.
        keys: [kv_heads, keys, head_dim], the last axis contiguous.
        limits: how many leading keys each row sees, [rows], int32.
        logs: as `limited_attention` wrote it, [rows, heads].
        asking: rows that count, [n].
        scale: multiplies query-key products.
        mass: [kv_heads, keys], float32; added to.
    """
    _, heads, dim = query.shape
    kv_heads, total, _ = keys.shape
    key_block = 128 if query.dtype.itemsize == 2 else 32
    _mass_kernel[(triton.cdiv(total, key_block), kv_heads)](
        query, keys, limits, logs, asking, mass,
        len(asking), total, scale * _LOG2_E, heads,
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), mass.stride(0),
        GROUP=heads // kv_heads, DIM=dim, ROWS=64 if query.dtype.itemsize == 2 else 16, KEYS=key_block,
        PRECISION="ieee" if query.dtype is torch.float32 else "tf32",
        num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "first"])
def _place_kernel(
    table, cos, sin, keys, values,
    tokens, first, key_layer, key_head, value_layer, value_head,
    HALF: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    keys += layer * key_layer
    values += layer * value_layer
    half = tl.arange(0, PADDED)
    is_token = token < tokens
    address = tl.multiple_of(tl.load(table + token, mask=is_token, other=0), 16)
    layer_stride = tl.multiple_of(tl.load(table + tokens + token, mask=is_token, other=0), 8)
    side_stride = tl.multiple_of(tl.load(table + 2 * tokens + token, mask=is_token, other=0), 8)
    position = tl.load(table + 3 * tokens + token, mask=is_token, other=0)
    is_number = is_token[:, None] & (half < HALF)[None, :]
    angle = token[:, None] * (2 * HALF) + half[None, :]
    c = tl.load(cos + angle, mask=is_number, other=0.0)
    s = tl.load(sin + angle, mask=is_number, other=0.0)
    offset = (first + layer) * layer_stride + head * (2 * HALF)
    source = address.to(tl.pointer_type(TYPE))[:, None] + offset[:, None] + half[None, :]
    one = tl.load(source, mask=is_number, other=0.0).to(tl.float32)
    other = tl.load(source + HALF, mask=is_number, other=0.0).to(tl.float32)
    place = keys + head * key_head + position[:, None] * (2 * HALF) + half[None, :]
    tl.store(place, (one * c - other * s).to(keys.dtype.element_ty), mask=is_number)
    tl.store(place + HALF, (other * c + one * s).to(keys.dtype.element_ty), mask=is_number)
    place = values + head * value_head + position[:, None] * (2 * HALF) + half[None, :]
    source += side_stride[:, None]
    v = tl.load(source, mask=is_number, other=0.0)
    tl.store(place, v.to(values.dtype.element_ty), mask=is_number)
    v = tl.load(source + HALF, mask=is_number, other=0.0)
    tl.store(place + HALF, v.to(values.dtype.element_ty), mask=is_number)


_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def place_stored(
    table: torch.Tensor,
    dtype: torch.dtype,
    first: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Rotate stored K of some layers in float32 and put K and V to their positions, from wherever they lie.

    Args:
        table: for every token its K's address in the first stored layer, the distances to the next layer's K and to
            its own V in numbers, and where it goes, [4, tokens], int64, contiguous. Heads and their numbers follow
            each other there.
        dtype: of the stored numbers.
        first: stored layer that the first of `keys` is.
        cos, sin: [tokens, head_dim], float32, contiguous.
        keys, values: [layers, kv_heads, prompt tokens, head_dim], contiguous; written.
    """
    layers, heads, _, dim = keys.shape
    tokens, block = table.shape[1], 16
    grid: Any = (triton.cdiv(tokens, block), heads, layers)
    _place_kernel[grid](
        table, cos, sin, keys, values,
        tokens, first, keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        HALF=dim // 2, PADDED=triton.next_power_of_2(dim // 2), TOKENS=block, TYPE=_TYPES[dtype], num_warps=4,
    )  # fmt: skip

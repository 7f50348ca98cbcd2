"""Triton's interpreter runs the GPU kernels on CPU tensors; plain torch says what is right."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

from blend_rag.blend.attention import CausalRows, attention_mass, position_attention
from blend_rag.blend.decoder import rotate

kernels = pytest.importorskip("blend_rag.blend.kernels")

SHAPES = [(50, 200, 4, 2, 64), (7, 33, 3, 1, 32), (130, 300, 9, 3, 64), (1, 1, 2, 2, 16), (64, 64, 2, 1, 16)]


def inputs(rows: int, keys: int, heads: int, kv_heads: int, dim: int):
    generator = torch.Generator().manual_seed(rows)
    positions = torch.randperm(keys, generator=generator)[:rows].sort().values
    query = torch.randn(rows, heads, dim, generator=generator)
    key, value = torch.randn(2, kv_heads, keys, dim, generator=generator)
    return CausalRows.of(positions, torch.arange(keys), torch.device("cpu")), query, key, value


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_kernel_shows_each_row_its_own_past_and_no_more(shape: tuple[int, ...]) -> None:
    rows, query, key, value = inputs(*shape)
    expected = position_attention(query, key, value, rows, shape[-1] ** -0.5)
    found = kernels.limited_attention(query, key, value, rows.limits, shape[-1] ** -0.5)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


def test_attention_kernel_does_not_read_the_future() -> None:
    rows, query, key, value = inputs(20, 100, 4, 2, 32)
    first = kernels.limited_attention(query, key, value, rows.limits, 0.2)
    cut = int(rows.positions[9]) + 1
    key[:, cut:], value[:, cut:] = float("nan"), float("nan")
    again = kernels.limited_attention(query[:10], key, value, rows.limits[:10], 0.2)
    assert torch.equal(first[:10], again)


@pytest.mark.parametrize("shape", SHAPES)
def test_mass_kernel_adds_what_asking_rows_give(shape: tuple[int, ...]) -> None:
    rows, query, key, value = inputs(*shape)
    asking = torch.arange(0, shape[0], 2)
    scale = shape[-1] ** -0.5
    logs = torch.empty(query.shape[:2])
    kernels.limited_attention(query, key, value, rows.limits, scale, logs)
    mass = torch.ones(shape[3], shape[1])
    kernels.add_mass(query, key, rows.limits, logs, asking, scale, mass)
    expected = attention_mass(query[asking], key, rows.positions[asking], torch.arange(shape[1]), scale)
    torch.testing.assert_close(mass.sum(0) - shape[3], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dim", [32, 80])
def test_place_kernel_turns_and_places_stored_kv_and_touches_nothing_else(dim: int) -> None:
    """Of two chunks that lie apart, the second in a larger object with other heads around it; from layer 1 on."""
    generator = torch.Generator().manual_seed(0)
    chunks = [torch.randn(3, 2, 20, 3, dim, generator=generator).half()]
    chunks.append(torch.randn(3, 2, 17, 6, dim, generator=generator).half()[:, :, :, 2:5])
    angles = torch.rand(37, dim // 2, generator=generator).repeat(1, 2)
    positions = torch.randperm(90, generator=generator)[:37].sort().values
    rows = [
        [chunk.data_ptr() + chunk.stride(2) * 2 * token, chunk.stride(0), chunk.stride(1)]
        for chunk in chunks
        for token in range(chunk.shape[2])
    ]
    table = torch.cat([torch.tensor(rows).T, positions[None]]).contiguous()
    keys, values = torch.zeros(2, 2, 3, 90, dim)
    kernels.place_stored(table, torch.float16, 1, angles.cos(), angles.sin(), keys, values)
    stored = torch.cat(chunks, dim=2)[1:]
    for layer in range(2):
        expected = torch.zeros(3, 37, dim)
        rotate(stored[layer, 0].transpose(0, 1), angles.cos(), angles.sin(), out=expected)
        assert torch.equal(keys[layer][:, positions], expected)
        assert torch.equal(values[layer][:, positions], stored[layer, 1].transpose(0, 1).float())
        assert int((keys[layer] != 0).any(-1).any(0).sum()) == 37

"""Content keys are the same everywhere and differ where anything that decides KV differs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from blend_rag.kv import ChunkKey, ChunkKV

BASE = {"fingerprint": "f", "dtype": "float16", "namespace": "n", "context_ids": (1, 2)}


def test_key_is_the_same_in_another_process_with_another_hash_seed() -> None:
    code = (
        "from blend_rag.kv import ChunkKey;"
        "print(ChunkKey.of((5, 6), fingerprint='f', dtype='float16', namespace='n', context_ids=(1, 2)).digest)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("0", "1", "random")
    }
    assert digests == {ChunkKey.of((5, 6), **BASE).digest}


@pytest.mark.parametrize(
    "change",
    [{"fingerprint": "g"}, {"dtype": "float32"}, {"namespace": "m"}, {"context_ids": (1,)}, {"context_ids": ()}],
)
def test_key_differs_with_everything_that_decides_kv(change: dict) -> None:
    assert ChunkKey.of((5, 6), **{**BASE, **change}).digest != ChunkKey.of((5, 6), **BASE).digest


def test_key_differs_with_ids_and_with_where_the_border_lies() -> None:
    keys = {
        ChunkKey.of(chunk, **{**BASE, "context_ids": context}).digest
        for chunk, context in [((5, 6), (1, 2)), ((6,), (1, 2, 5)), ((5, 6, 0), (1, 2)), ((6, 5), (1, 2))]
    }
    assert len(keys) == 4


def test_chunk_kv_refuses_another_shape() -> None:
    with pytest.raises(ValueError, match=r"\[layers, 2, tokens, kv_heads, head_dim\]"):
        ChunkKV(torch.zeros(4, 3, 7, 2, 8))


def test_chunk_kv_tells_its_size() -> None:
    kv = ChunkKV(torch.zeros(4, 2, 7, 2, 8, dtype=torch.float16))
    assert (kv.num_tokens, kv.nbytes) == (7, 4 * 2 * 7 * 2 * 8 * 2)

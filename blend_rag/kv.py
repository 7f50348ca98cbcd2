"""Chunk KV: position-free keys and values of one chunk, and the key they are kept under.

Knows tensors and hashes; knows neither a model nor a store. K is kept *before* RoPE, so a chunk has no position
until it is loaded into a prompt.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

FORMAT_VERSION = 1
"""Part of every key: raise it whenever the meaning of stored bytes changes."""

STORE_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def hash_token_ids(token_ids: Sequence[int]) -> str:
    """sha256 over the ids as little-endian int64, hex: the same in every process and on every machine."""
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}q", *token_ids)).hexdigest()


NO_CONTEXT = hash_token_ids(())
"""Context hash of a chunk computed alone."""


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """Content address of a chunk's KV.

    The digest covers format version, model fingerprint, dtype, namespace, context ids and chunk ids, and no position;
    the parts stay readable so that a store can say why a key is missing.
    """

    fingerprint: str
    dtype: str
    namespace: str
    context_hash: str
    chunk_hash: str
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        parts = (str(FORMAT_VERSION), self.fingerprint, self.dtype, self.namespace, self.context_hash, self.chunk_hash)
        hasher = hashlib.sha256()
        for part in parts:
            data = part.encode()
            hasher.update(struct.pack("<q", len(data)) + data)  # length first: no two part lists collide
        object.__setattr__(self, "digest", hasher.hexdigest())

    @classmethod
    def of(
        cls,
        chunk_ids: Sequence[int],
        *,
        fingerprint: str,
        dtype: str,
        namespace: str = "",
        context_ids: Sequence[int] = (),
    ) -> ChunkKey:
        """Key of `chunk_ids` computed behind `context_ids` (empty: alone)."""
        return cls(fingerprint, dtype, namespace, hash_token_ids(context_ids), hash_token_ids(chunk_ids))


@dataclass(frozen=True, slots=True)
class ChunkKV:
    """Un-rotated K and V of one chunk.

    `data` has shape [layers, 2, tokens, kv_heads, head_dim]; index 0 of the second axis is K before RoPE (after
    QK-norm), index 1 is V. It is never written to after creation.
    """

    data: torch.Tensor

    def __post_init__(self) -> None:
        if self.data.dim() != 5 or self.data.shape[1] != 2:
            msg = f"chunk KV needs shape [layers, 2, tokens, kv_heads, head_dim], got {tuple(self.data.shape)}"
            raise ValueError(msg)

    @property
    def num_tokens(self) -> int:
        return self.data.shape[2]

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def keys(self, layer: int) -> torch.Tensor:
        """Un-rotated K of one layer, [tokens, kv_heads, head_dim]."""
        return self.data[layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """V of one layer, [tokens, kv_heads, head_dim]."""
        return self.data[layer, 1]

"""What an object in a shared tier looks like, and how it is signed. Knows bytes and keys, no transport.

A chunk is a header object of fixed size and payload objects (its KV, split into parts). The header binds key, dtype,
shape and payload: HMAC-SHA256 with a secret of the deployment, derived per namespace, or plain SHA-256 where unsigned
objects are allowed. Nothing of an object is used before the tag over all of it was compared.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
import zlib
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from blend_rag.errors import StoreError
from blend_rag.kv import FORMAT_VERSION, STORE_DTYPES, ChunkKey, ChunkKV

HEADER_BYTES = 4096
_MAGIC = b"BLENDKV1"
_TAG_BYTES = 32
_FIXED = struct.Struct(f"<8sI?{_TAG_BYTES}sI")  # magic, CRC of the rest, signed, tag, length of the JSON that follows
_AFTER_CRC = 12
_MIN_SECRET_BYTES = 16


class RejectedError(Exception):
    """An object is not what its key says. `forged` tells a wrong signature from damage."""

    def __init__(self, why: str, *, forged: bool = False) -> None:
        super().__init__(why)
        self.forged = forged


class Secret:
    """A deployment's secret; never shown.

    Raises:
        StoreError: shorter than 16 bytes.
    """

    __slots__ = ("_value",)

    def __init__(self, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        if len(data) < _MIN_SECRET_BYTES:
            msg = f"the store secret is too short: use at least {_MIN_SECRET_BYTES} random bytes"
            raise StoreError(msg)
        self._value = data

    def __repr__(self) -> str:
        return "Secret(…)"

    def __reduce__(self) -> str:
        msg = "a secret is not pickled: pass it to the other process by an environment variable"
        raise TypeError(msg)

    def derive(self, purpose: str) -> bytes:
        """A key for one purpose, from which neither the secret nor other keys can be found."""
        return hmac.digest(self._value, purpose.encode(), "sha256")


@dataclass(frozen=True, slots=True)
class Header:
    """What a header object says; checked against the key asked for, and trusted only once the tag was compared."""

    key: ChunkKey
    shape: tuple[int, ...]
    part_bytes: int
    signed: bool
    tag: bytes

    @property
    def dtype(self) -> torch.dtype:
        return STORE_DTYPES[self.key.dtype]

    @property
    def payload_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def part_sizes(self) -> list[int]:
        """Bytes of each payload object."""
        full, rest = divmod(self.payload_bytes, self.part_bytes)
        return [self.part_bytes] * full + [rest] * (rest > 0)

    def part_name(self, name: str, number: int) -> str:
        """Name of a payload object; holds the tag, so parts of two writers never mix."""
        return f"{name}.{self.tag.hex()[:16]}.{number}"


class Sealer:
    """Signs and checks objects.

    Args:
        secret: the deployment's, or None.
        allow_unsigned: work without a secret; objects then carry a checksum, which anyone can make.

    Raises:
        StoreError: neither is given.
    """

    def __init__(self, secret: Secret | None, *, allow_unsigned: bool = False) -> None:
        if secret is None and not allow_unsigned:
            msg = (
                "a shared tier needs a secret, or others could change answers by writing to it: set "
                "BLEND_RAG_STORE_SECRET on every machine of the deployment, or open it with allow_unsigned=True"
            )
            raise StoreError(msg)
        self._secret = secret

    @property
    def signed(self) -> bool:
        return self._secret is not None

    def prefix(self, namespace: str) -> str:
        """What the names of a namespace's objects begin with; with a secret, others cannot guess it."""
        return self._hasher("names", namespace).hexdigest()[:32]

    def name(self, key: ChunkKey) -> str:
        return f"{self.prefix(key.namespace)}.{key.digest}"

    def related_name(self, key: ChunkKey) -> str:
        """Name of the list of what is known of a chunk's text in its namespace."""
        return f"{self.prefix(key.namespace)}.related.{key.chunk_hash}"

    def seal(self, key: ChunkKey, kv: ChunkKV, part_bytes: int) -> tuple[Header, bytes, memoryview]:
        """Header, header object and payload of a chunk.

        Raises:
            StoreError: the key's parts do not fit into a header.
        """
        data = kv.data.detach().cpu().contiguous()
        if data.dtype is not STORE_DTYPES[key.dtype]:
            msg = f"chunk KV is {data.dtype}, its key says {key.dtype}"
            raise StoreError(msg)
        payload = data.view(-1).view(torch.uint8).numpy().data
        said = json.dumps(
            {
                "format": FORMAT_VERSION,
                "key": [key.fingerprint, key.dtype, key.namespace, key.context_hash, key.chunk_hash],
                "shape": list(data.shape),
                "part_bytes": part_bytes,
            }
        ).encode()
        if _FIXED.size + len(said) > HEADER_BYTES:
            msg = f"namespace and model fingerprint are too long for a shared tier: {HEADER_BYTES:,} bytes are allowed"
            raise StoreError(msg)
        tag = self._tag(key.namespace, said, payload)
        rest = _FIXED.pack(b"", 0, self.signed, tag, len(said))[_AFTER_CRC:] + said
        packed = struct.pack("<8sI", _MAGIC, zlib.crc32(rest)) + rest
        header = Header(key, tuple(data.shape), part_bytes, self.signed, tag)
        return header, packed.ljust(HEADER_BYTES, b"\0"), payload

    def read_header(self, packed: bytes | bytearray, key: ChunkKey | None = None) -> Header:
        """What a header object says, for the key asked for (None while listing).

        Raises:
            RejectedError: it is damaged, of another format, or of another key.
        """
        try:
            magic, crc, signed, tag, length = _FIXED.unpack_from(packed)
            said = bytes(packed[_FIXED.size : _FIXED.size + length])
            if magic != _MAGIC or crc != zlib.crc32(packed[_AFTER_CRC : _FIXED.size] + said):
                raise RejectedError("header")  # flipped by accident: with the tag parts' names would be lost
            fields = json.loads(said)
            key_said, shape = ChunkKey(*map(str, fields["key"])), tuple(map(int, fields["shape"]))
            header = Header(key_said, shape, int(fields["part_bytes"]), signed, tag)
            if len(header.shape) != 5 or min(header.shape) < 1 or header.part_bytes < 1:
                raise RejectedError("shape")
            header.dtype  # noqa: B018 - an unknown dtype is damage
        except (struct.error, ValueError, KeyError, TypeError) as error:
            raise RejectedError("header") from error
        if fields["format"] != FORMAT_VERSION or any(packed[_FIXED.size + length :]):
            raise RejectedError("format")
        if key is not None and header.key != key:
            raise RejectedError("key of another object", forged=True)
        if header.signed != self.signed:
            raise RejectedError("signed" if header.signed else "not signed", forged=True)
        return header

    def open(self, header: Header, packed: bytes | bytearray, payload: np.ndarray) -> ChunkKV:
        """Chunk KV of a header object and its payload, [bytes], once the tag over both was compared.

        Raises:
            RejectedError: any bit differs from what was sealed with the secret.
        """
        length = _FIXED.unpack_from(packed)[4]
        said = bytes(packed[_FIXED.size : _FIXED.size + length])
        tag = self._tag(header.key.namespace, said, payload.data)
        if not hmac.compare_digest(tag, header.tag):
            raise RejectedError("signature" if self.signed else "checksum", forged=self.signed)
        return ChunkKV(torch.from_numpy(payload).view(header.dtype).view(header.shape))

    def _tag(self, namespace: str, said: bytes, payload: memoryview) -> bytes:
        hasher = self._hasher("objects", namespace)
        hasher.update(struct.pack("<Q", len(said)) + said)
        hasher.update(payload)
        return hasher.digest()

    def _hasher(self, purpose: str, namespace: str) -> hmac.HMAC | hashlib._Hash:
        if self._secret is None:
            return hashlib.sha256(f"blend-rag {purpose} {namespace}\0".encode())
        return hmac.new(self._secret.derive(f"blend-rag {purpose} {namespace}"), digestmod="sha256")

"""Objects in Redis or Valkey, through redis-py with hiredis. Eviction by `maxmemory` or TTL is a miss."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from blend_rag.errors import StoreError
from blend_rag.stores.envelope import RejectedError

logger = logging.getLogger(__name__)

_PREFIX = "blend-rag:"
_BATCH = 500


class RedisTransport:
    """Objects as Redis strings.

    Args:
        url: `redis://[user:password@]host:port/db`, `rediss://…` for TLS, or `unix://…`.
        timeout_s: of connecting and of each read from the socket.
        ttl_s: objects vanish that long after they were written; None keeps them.
        max_part_bytes: larger chunks are split; a Redis value is limited to 512 MiB.

    Raises:
        StoreError: redis-py is not installed, or the URL makes no sense.
    """

    def __init__(
        self, url: str, *, timeout_s: float = 2.0, ttl_s: int | None = None, max_part_bytes: int = 256 << 20
    ) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            msg = "Redis needs redis-py: pip install 'blend-rag[redis]'"
            raise StoreError(msg) from error
        try:
            self._client: Any = redis.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 1),  # once and at once: a pooled connection may be stale
            )
        except (ValueError, TypeError):
            msg = "the Redis URL makes no sense: write redis://[user:password@]host:port/db?option=value"
            raise StoreError(msg) from None  # the cause's text may hold the password
        where = self._client.connection_pool.connection_kwargs
        address = where.get("path") or f"{where.get('host')}:{where.get('port')}"
        self.tier = f"redis {address}/{where.get('db') or 0}"
        self._ttl_s = ttl_s
        self.max_part_bytes = min(max_part_bytes, 512 << 20)
        self._refusals = redis.exceptions.ResponseError
        try:
            self._client.ping()
        except (redis.exceptions.AuthenticationError, redis.exceptions.ResponseError) as error:
            msg = f"{self.tier} refuses the connection ({error}): check user and password in the URL"
            raise StoreError(msg) from None
        except TypeError as error:  # names an option, never a value
            msg = f"redis-py does not know a setting of the URL: {error}"
            raise StoreError(msg) from None
        except (redis.exceptions.RedisError, OSError) as error:
            logger.warning("%s is not reachable yet: %s", self.tier, error)  # costs time, not answers

    def __repr__(self) -> str:
        return f"RedisTransport({self.tier})"

    def read(self, name: str, size: int) -> np.ndarray | None:
        content = self._client.get(_PREFIX + name)
        if content is None:
            return None
        if len(content) != size:
            raise RejectedError("size")
        return np.frombuffer(content, np.uint8).copy()  # writable, as tensors want it

    def write(self, name: str, content: bytes | memoryview) -> None:
        try:
            self._client.set(_PREFIX + name, content, ex=self._ttl_s)
        except self._refusals as error:  # such as out of memory
            msg = f"{self.tier} refuses chunk KV: {error}"
            raise StoreError(msg) from error

    def exists(self, name: str) -> bool:
        return bool(self._client.exists(_PREFIX + name))

    def remove(self, names: Sequence[str]) -> None:
        for start in range(0, len(names), _BATCH):
            self._client.unlink(*(_PREFIX + name for name in names[start : start + _BATCH]))

    def names(self, prefix: str) -> Iterator[str]:
        for name in self._client.scan_iter(match=f"{_PREFIX}{prefix}*", count=_BATCH):
            yield name.decode().removeprefix(_PREFIX)

    def note(self, name: str, member: str) -> None:
        self._client.sadd(_PREFIX + name, member)
        if self._ttl_s:
            self._client.expire(_PREFIX + name, self._ttl_s)

    def noted(self, name: str) -> list[str]:
        return [member.decode() for member in self._client.smembers(_PREFIX + name)]

    def interrupt(self) -> None:
        self._client.connection_pool.disconnect()

    def close(self) -> None:
        self._client.close()

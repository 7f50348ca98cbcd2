"""Stores by URL: what a command line or a configuration file names a store by."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from blend_rag.errors import StoreError
from blend_rag.folders import cache_folder
from blend_rag.stores.base import KVStore
from blend_rag.stores.disk import DiskStore
from blend_rag.stores.envelope import Sealer, Secret
from blend_rag.stores.memory import MemoryStore
from blend_rag.stores.shared import SharedStore, Transport
from blend_rag.stores.tiered import TieredStore

FORMS = (
    "memory://",
    "file:///folder",
    "redis://[user:password@]host:port/db",
    "rediss://…",
    "lmcache+resp://[user:password@]host:port",
    "lmcache+fs:///folder",
    "lmcache+KIND://?setting=value",
)
SECRET_VARIABLE = "BLEND_RAG_STORE_SECRET"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_LMCACHE_KINDS = {"fs": "fs_native"}


def open_store(
    urls: str | Sequence[str], *, secret: str | bytes | None = None, allow_unsigned: bool = False
) -> KVStore:
    """The store that URLs name.

    A sequence gives exactly these tiers, front to back. A single `file://` URL gets memory in front of it, a single
    shared tier memory and a disk cache.

    | URL | settings after `?` |
    | --- | --- |
    | `memory://` | `max_bytes=4GiB` |
    | `file:///folder` | `max_bytes=20GiB` |
    | `redis://…`, `rediss://…`, `unix://…` | `deadline`, `put_deadline`, `pause`, `ttl` in seconds, `part_bytes` |
    | `lmcache+resp://host:port`, `lmcache+fs:///folder` | the same but `ttl` |
    | `lmcache+KIND://` (`s3`, `mooncake-store`, …) | the same but `ttl` |

    Other settings go to redis-py (such as `ssl_ca_certs`) or, as JSON values, to LMCache's adapter.

    Args:
        urls: one URL or several.
        secret: signs objects in shared tiers; by default `BLEND_RAG_STORE_SECRET`, or the content of the file that
            `BLEND_RAG_STORE_SECRET_FILE` names.
        allow_unsigned: open a shared tier without a secret.

    Raises:
        StoreError: a URL makes no sense, a tier cannot be opened, or a shared tier has no secret.
    """
    given = [urls] if isinstance(urls, str) else list(urls)
    parts = [_split(url) for url in given]
    if isinstance(urls, str) and parts[0].scheme != "memory":
        in_front = [_split("memory://")]
        if parts[0].scheme != "file":
            in_front.append(_split((cache_folder() / "kv").absolute().as_uri()))
        parts = [*in_front, *parts]
    tiers: list[KVStore] = []
    try:
        tiers.extend(_open(part, secret, allow_unsigned) for part in parts)
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    return tiers[0] if len(tiers) == 1 else TieredStore(tiers)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        port_is_right = parts.port is None or parts.port >= 0
    except ValueError:
        port_is_right = False
    if not port_is_right or not parts.scheme or "://" not in url:
        msg = f"this is no store URL: write one of {', '.join(FORMS)}"  # without the text: it may hold a password
        raise StoreError(msg)
    return parts


def _open(url: SplitResult, secret: str | bytes | None, allow_unsigned: bool) -> KVStore:
    options = dict(parse_qsl(url.query, keep_blank_values=True))
    if url.scheme == "memory":
        store: KVStore = MemoryStore(**_only(url, _take(options, max_bytes=parse_bytes), options))
    elif url.scheme == "file":
        if url.netloc not in ("", "localhost") or not url.path.strip("/"):
            msg = "a file URL needs an absolute folder: write file:///folder"
            raise StoreError(msg)
        settings = _only(url, _take(options, max_bytes=parse_bytes), options)
        store = DiskStore(Path(unquote(url.path)), **settings)
    elif url.scheme in ("redis", "rediss", "unix") or url.scheme.startswith("lmcache+"):
        sealer = Sealer(_secret(secret), allow_unsigned=allow_unsigned)
        store = _open_shared(url, options, sealer)
    else:
        msg = f"{url.scheme}:// is no kind of store: write one of {', '.join(FORMS)}"
        raise StoreError(msg)
    return store


def _open_shared(url: SplitResult, options: dict[str, str], sealer: Sealer) -> KVStore:
    waits = _take(options, deadline=_seconds, put_deadline=_seconds, pause=_seconds)
    settings = _take(options, part_bytes=parse_bytes)
    shared: dict[str, Any] = {"max_part_bytes": settings["part_bytes"]} if settings else {}
    shared["timeout_s"] = waits.get("deadline", 2.0)
    if url.scheme.startswith("lmcache+"):
        from blend_rag.stores.lmcache import LMCacheTransport

        kind = url.scheme.removeprefix("lmcache+").replace("-", "_")
        transport: Transport = LMCacheTransport(
            _LMCACHE_KINDS.get(kind, kind), {**_place(url, kind), **_values(options)}, **shared
        )
    else:
        from blend_rag.stores.redis import RedisTransport

        ttl = _take(options, ttl=_seconds).get("ttl")
        shared["ttl_s"] = int(ttl) if ttl else None
        transport = RedisTransport(urlunsplit(url._replace(query=urlencode(options))), **shared)
    return SharedStore(transport, sealer, **{f"{name}_s": value for name, value in waits.items()})


def _place(url: SplitResult, kind: str) -> dict[str, Any]:
    """Settings of an adapter that a URL's own parts give."""
    if kind == "fs":
        return {"base_path": unquote(url.path)}
    if kind != "resp":
        return {}
    found = {"host": url.hostname, "port": url.port or 6379, "username": url.username, "password": url.password}
    return {name: unquote(value) if isinstance(value, str) else value for name, value in found.items() if value}


def _values(options: Mapping[str, str]) -> dict[str, Any]:
    """Settings as JSON values where they are JSON, else as text."""
    found: dict[str, Any] = {}
    for name, text in options.items():
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


def _take(options: dict[str, str], **parsers: Callable[[str], Any]) -> dict[str, Any]:
    """Parsed settings; what is taken is no longer in `options`."""
    return {name: parse(options.pop(name)) for name, parse in parsers.items() if name in options}


def _only(url: SplitResult, settings: dict[str, Any], left: Mapping[str, str]) -> dict[str, Any]:
    if left:
        msg = f"{url.scheme}:// has no setting {', '.join(left)}: leave it out (there is max_bytes)"
        raise StoreError(msg)
    return settings


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `20GiB`, `500MB` or `4096`.

    Raises:
        StoreError: it is no positive size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in _UNITS or not (size := int(float(match[1]) * _UNITS[match[2].upper()])):
        msg = f"{text!r} is no size: write for example 20GiB, 500MB or 4096"
        raise StoreError(msg)
    return size


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        msg = f"{text!r} is no time: write seconds, for example 2.5"
        raise StoreError(msg)
    return seconds


def _secret(given: str | bytes | None) -> Secret | None:
    if given is not None:
        return Secret(given)
    if value := os.environ.get(SECRET_VARIABLE):
        return Secret(value)
    if path := os.environ.get(f"{SECRET_VARIABLE}_FILE"):
        try:
            return Secret(Path(path).read_bytes().strip())
        except OSError as error:
            msg = f"the secret file {path} cannot be read: {error.strerror}"
            raise StoreError(msg) from error
    return None

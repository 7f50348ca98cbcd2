"""Where chunk KV is kept."""

from blend_rag.stores.base import KVStore, MissReason, StoreStats, VerifyReport
from blend_rag.stores.disk import DiskStore
from blend_rag.stores.memory import MemoryStore
from blend_rag.stores.tiered import TieredStore
from blend_rag.stores.url import open_store

__all__ = [
    "DiskStore",
    "KVStore",
    "MemoryStore",
    "MissReason",
    "StoreStats",
    "TieredStore",
    "VerifyReport",
    "open_store",
]

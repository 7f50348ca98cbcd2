"""Where chunk KV is kept."""

from blend_rag.stores.base import KVStore, MissReason, StoreStats
from blend_rag.stores.memory import MemoryStore

__all__ = ["KVStore", "MemoryStore", "MissReason", "StoreStats"]

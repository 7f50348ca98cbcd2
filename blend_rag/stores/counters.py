"""Counts of what a store did, by namespace, so that no tenant can count another's."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Counters:
    """Events by namespace; safe to use from several threads."""

    _counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, namespace: str, event: str, count: int = 1) -> None:
        """Count an event; events are the field names of `StoreStats`."""
        with self._lock:
            self._counts[namespace, event] += count

    def of(self, namespace: str | None) -> dict[str, Any]:
        """Counts of one namespace, or of all, by event."""
        events: dict[str, Any] = dict.fromkeys(("hits", "misses", "evictions", "damaged", "faults"), 0)
        with self._lock:
            for (owner, event), count in self._counts.items():
                if namespace in (None, owner):
                    events[event] += count
        return events

"""Where this package keeps things on a user's machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`BLEND_RAG_CACHE`, else `blend-rag` in the user's cache folder."""
    if own := os.environ.get("BLEND_RAG_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blend-rag"

"""A connector that misbehaves when a request asks it to; tests load it in the place of the real one."""

from __future__ import annotations

from typing import Any

from blend_rag.vllm import scheduler
from blend_rag.vllm.connector import BlendConnector


class FaultyConnector(BlendConnector):
    """Takes `test` in a request's parameters: "unsalted", or "fail" in its worker."""

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params or {}
        test = params.pop("test", None)
        salt = scheduler._salt
        if test == "unsalted":
            scheduler._salt = lambda *args: None
        try:
            super().on_new_request(request)
        finally:
            scheduler._salt = salt

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        worker = self._worker
        assert worker
        write = worker._write

        def failing(job: Any, result: Any) -> None:
            if any(segment.document == "fail" for segment in job.request.layout.segments):
                raise RuntimeError("injected")
            write(job, result)

        worker._write = failing  # type: ignore[method-assign]

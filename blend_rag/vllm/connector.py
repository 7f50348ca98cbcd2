"""`BlendConnector`: what vLLM loads with `kv_connector_module_path`; it only passes calls on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.logger import init_logger

import blend_rag
from blend_rag.engines.wire import policy_parameters
from blend_rag.errors import ConnectorError
from blend_rag.vllm.checks import check_config
from blend_rag.vllm.messages import StepNews, StepOrders
from blend_rag.vllm.metrics import BlendPrometheus, BlendStats
from blend_rag.vllm.request import BorderFinder, RequestParser
from blend_rag.vllm.scheduler import BlendScheduler
from blend_rag.vllm.settings import BlendSettings
from blend_rag.vllm.worker import BlendWorker

logger = init_logger(f"vllm.{__name__}")  # below vLLM's own, so that it is shown


class BlendConnector(KVConnectorBase_V1):
    """Blends chunk KV into vLLM's pages before a request is scheduled.

    Source of the method: CacheBlend (arXiv 2405.16444).

    Args:
        vllm_config: vLLM's; settings are in `kv_transfer_config.kv_connector_extra_config`.
        role: scheduler or worker.
        kv_cache_config: vLLM's.

    Raises:
        ConnectorError: a setting makes no sense, or vLLM is configured in a way that cannot be blended.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._settings = BlendSettings.of(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
        check_config(vllm_config, kv_cache_config, self._settings)
        self._block_size = int(vllm_config.cache_config.block_size)
        self._worker: BlendWorker | None = None
        self._scheduler: BlendScheduler | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = self._make_scheduler(vllm_config)

    def _make_scheduler(self, vllm_config: Any) -> BlendScheduler:
        borders = None
        if self._settings.separator:
            from vllm.tokenizers import get_tokenizer

            model = vllm_config.model_config
            tokenizer = get_tokenizer(
                model.tokenizer, revision=model.tokenizer_revision, trust_remote_code=model.trust_remote_code
            )
            borders = BorderFinder(self._settings.separator, lambda token_id: str(tokenizer.decode([token_id])))
        model_config = vllm_config.model_config
        parser = RequestParser(self._settings, borders, model_config.max_model_len, model_config.get_vocab_size())
        return BlendScheduler(
            self._settings,
            parser,
            self._block_size,
            bool(vllm_config.cache_config.enable_prefix_caching),
            self._about(model_config),
        )

    def _about(self, model_config: Any) -> dict[str, Any]:
        """What clients may know of this server."""
        return {
            "blend_rag": blend_rag.__version__,
            "vllm": vllm.__version__,
            "policy": policy_parameters(self._settings.policy),
            "separator": self._settings.separator,
            "lasting_store": bool(self._settings.store),
            "dtype": str(model_config.dtype).removeprefix("torch."),
            "max_model_len": model_config.max_model_len,
        }

    # Worker

    @property
    def worker(self) -> BlendWorker | None:
        """What blends on this rank, once pages are registered."""
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Pages are there: get ready, and prove that blending is right."""
        model = _served_model()
        self._worker = _make_outside_pools(
            lambda: BlendWorker(self._settings, self._vllm_config, self._block_size, model),
            next(model.parameters()).device,
        )
        if check := self._worker.self_check:
            logger.info(
                "self-check passed: r = 1 off by %.2g, moved keys by %.2g, noise %.2g",
                check.full_recompute_error,
                check.shift_error,
                check.noise,
            )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """One step of blending."""
        orders = self._get_connector_metadata()
        assert isinstance(orders, StepOrders)
        if self._worker:
            self._worker.step(orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: requests are scheduled when their pages are filled."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Pages are not saved: they depend on the whole prompt."""

    def wait_for_save(self) -> None:
        """Nothing is saved from pages."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose pages are filled (or will not be)."""
        return None, (self._worker.finished(finished_req_ids) or None) if self._worker else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Pages that vLLM has to compute itself."""
        return self._worker.failed_pages() if self._worker else set()

    def build_connector_worker_meta(self) -> StepNews | None:
        """What the scheduler's half needs to know."""
        return self._worker.news() if self._worker else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Counts since the last call."""
        if self._worker:
            return self._worker.take_stats()
        return self._scheduler.stats.take() if self._scheduler else None

    def shutdown(self) -> None:
        """Stop threads and close the store."""
        if self._worker:
            self._worker.close()
            self._worker = None

    # Scheduler

    def on_new_request(self, request: Any) -> None:
        """A request has arrived."""
        if self._scheduler:
            self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens the blend will supply."""
        return self._scheduling.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Pages are allocated."""
        self._scheduling.after_alloc(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Orders of this step."""
        return self._scheduling.orders(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """News from the workers."""
        news = getattr(connector_output, "kv_connector_worker_meta", None)
        if isinstance(news, StepNews):
            self._scheduling.hear(news)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Pages may be freed at once; the answer is told how its prompt was blended."""
        return False, self._scheduling.finished(request)

    def has_pending_push_work(self) -> bool:
        """Keep stepping while new chunks are still computed and stored."""
        return self._scheduling.has_unfinished_work

    def reset_cache(self) -> bool | None:
        """Forget KV in memory; vLLM calls this when it sleeps and when weights are about to change."""
        self._scheduling.reset()
        return True

    @property
    def _scheduling(self) -> BlendScheduler:
        assert self._scheduler is not None, "a call for the scheduler's half reached a worker"
        return self._scheduler

    # Both

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Counts from plain data."""
        return BlendStats(data=data) if data else BlendStats()

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> KVConnectorPromMetrics | None:
        """Metrics on `/metrics`."""
        return BlendPrometheus(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _make_outside_pools(make: Callable[[], BlendWorker], device: torch.device) -> BlendWorker:
    """Make the worker's half where its GPU memory does not come from the pool that vLLM registers pages in.

    That pool is emptied when vLLM sleeps, and what CUDA graphs hold must not lie in it. A pool serves one thread.
    """
    if device.type != "cuda":
        return make()

    def on_device() -> BlendWorker:
        torch.cuda.set_device(device)
        return make()

    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(on_device).result()


def _served_model() -> torch.nn.Module:
    """The model of the runner that is registering its pages: vLLM hands connectors no reference to it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        runner: Any = frame.f_locals.get("self")
        if not isinstance(runner, KVConnectorBase_V1) and hasattr(runner, "get_model"):
            model: torch.nn.Module = runner.get_model()
            return model
        frame = frame.f_back
    raise ConnectorError("this version of vLLM registers KV pages in an unknown way: use one that is listed as tested")

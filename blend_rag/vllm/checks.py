"""What of vLLM's configuration cannot be blended, refused at start in words."""

from __future__ import annotations

from typing import Any

from blend_rag.errors import ConnectorError
from blend_rag.vllm.settings import BlendSettings


def check_config(vllm_config: Any, kv_cache_config: Any, settings: BlendSettings) -> None:
    """Refuse what would give wrong answers, or would fail requests.

    Raises:
        ConnectorError: with what to change.
    """
    model, parallel, transfer = vllm_config.model_config, vllm_config.parallel_config, vllm_config.kv_transfer_config
    groups = getattr(kv_cache_config, "kv_cache_groups", None) or []
    speculative = getattr(vllm_config, "speculative_config", None)
    obstacles = {
        "kv_role must be kv_both: chunk KV is both read and written": transfer.kv_role != "kv_both",
        'add "kv_load_failure_policy":"recompute" to --kv-transfer-config: without it a cache problem fails requests': (
            transfer.kv_load_failure_policy != "recompute"
        ),
        "pipeline parallelism is not supported: use --tensor-parallel-size": parallel.pipeline_parallel_size > 1,
        "context parallelism is not supported: use --tensor-parallel-size": _context_ranks(parallel) > 1,
        "data parallelism with expert parallelism is not supported: start one server per replica": (
            parallel.data_parallel_size > 1 and bool(getattr(parallel, "enable_expert_parallel", False))
        ),
        "LoRA is not supported: chunk KV depends on the adapter; leave out --enable-lora": (
            vllm_config.lora_config is not None
        ),
        "multi-head latent attention is not supported: use a model with plain attention": bool(model.use_mla),
        "multi-axis RoPE is not supported: use a text model": bool(getattr(model, "uses_mrope", False)),
        "encoder-decoder models are not supported": bool(model.is_encoder_decoder),
        "draft models that share the KV cache are not supported: leave out --speculative-config, or use ngram": (
            speculative is not None and getattr(speculative, "method", "") not in ("ngram", "ngram_gpu", "suffix")
        ),
        "several kinds of KV cache in one model are not supported: use a model with full attention only": (
            len(groups) > 1
        ),
        f"selector {settings.policy.selector!r} needs a check layer below the model's number of layers": (
            settings.policy.selector.endswith("deviation")
            and settings.policy.check_layer >= model.get_total_num_hidden_layers()
        ),
    }
    for message, present in obstacles.items():
        if present:
            raise ConnectorError(f"BlendConnector: {message}")


def _context_ranks(parallel: Any) -> int:
    names = ("decode_context_parallel_size", "prefill_context_parallel_size")
    return max(int(getattr(parallel, name, 1) or 1) for name in names)

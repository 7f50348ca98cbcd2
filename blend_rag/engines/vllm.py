"""An engine that runs vLLM with the connector in this process.

One asynchronous vLLM serves batches, streams and concurrent calls alike: a second, synchronous one would load the model
twice, and vLLM batches what arrives together anyway.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from blend_rag.blend.policy import RecomputePolicy
from blend_rag.engines.base import Engine, SamplingParams
from blend_rag.engines.loading import DEFAULT_MODEL_NAME, load_tokenizer, resolve_model
from blend_rag.engines.requests import Ask, Piece, RequestEngine
from blend_rag.engines.vllm_setup import Machine, Memory, connector_config
from blend_rag.engines.wire import Command
from blend_rag.errors import ConnectorError, ModelError, PolicyError, ServerError

_SHUTDOWN_S = 10.0


class VLLMEngine(RequestEngine):
    """Answers prompts with vLLM and the connector, in this process (vLLM starts workers of its own).

    Guard a script's main part by `if __name__ == "__main__":`, as vLLM's workers may import it again.

    Args:
        model: a local folder or GGUF file, a hub id, or None for the packaged SmolLM2-135M-Instruct.
        policy: what is recomputed where a call does not say.
        store: URL or URLs of a lasting store behind the tiers in memory, as `open_store` takes them.
        allow_unsigned: open a shared store without a secret.
        store_dtype: of kept KV: "float16", "bfloat16", "float32", or "auto" for 16 bits like the model's.
        namespace: KV of one namespace is never seen by another.
        gpu_bytes: chunk KV kept on each GPU; by default a twelfth of it.
        host_bytes: chunk KV kept in each worker's host memory; by default a quarter of it.
        dtype: of weights and computation; by default float32 on a CPU and the model's own elsewhere.
        max_model_len: bound on prompt and answer; by default the model's.
        show_progress: progress bars while a model is fetched or converted.
        vllm_options: further arguments of vLLM's `AsyncEngineArgs`, such as `tensor_parallel_size`.

    Raises:
        ModelError: vLLM is not installed, or the model cannot be loaded or blended.
        PolicyError: an argument makes no sense.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        policy: RecomputePolicy | None = None,
        store: str | Sequence[str] | None = None,
        allow_unsigned: bool = False,
        store_dtype: str = "auto",
        namespace: str = "",
        gpu_bytes: int | None = None,
        host_bytes: int | None = None,
        dtype: str | None = None,
        max_model_len: int | None = None,
        show_progress: bool = False,
        **vllm_options: Any,
    ) -> None:
        if store is not None and not isinstance(store, (str, list, tuple)):
            msg = "vLLM's workers open the store themselves: pass its URL, not an open store"
            raise PolicyError(msg)
        super().__init__("blend-rag-vllm")
        try:
            self.policy = policy or RecomputePolicy()
            self._checked(None)
            self._vllm = _import_vllm()
            dummy = vllm_options.get("load_format") == "dummy" and model is not None  # needs no weights
            path = Path(str(model)) if dummy else resolve_model(model, show_progress=show_progress)
            self.model_name = str(model) if model is not None else DEFAULT_MODEL_NAME
            self.tokenizer = load_tokenizer(path)
            self.namespace = namespace
            machine = Machine.here()
            memory = Memory.of(machine, int(vllm_options.get("tensor_parallel_size", 1)))
            on_cpu = bool(self._vllm.platforms.current_platform.is_cpu())
            given: dict[str, Any] = {
                "model": str(path),
                "dtype": dtype or ("float32" if on_cpu else "auto"),
                "max_model_len": max_model_len,
                "disable_log_stats": True,
                "kv_transfer_config": connector_config(
                    policy=self.policy,
                    store=store,
                    allow_unsigned=allow_unsigned,
                    namespace=namespace,
                    store_dtype=store_dtype,
                    gpu_bytes=(0 if on_cpu else memory.gpu_bytes) if gpu_bytes is None else gpu_bytes,
                    host_bytes=memory.host_bytes if host_bytes is None else host_bytes,
                ),
            }
            if not on_cpu:
                given["gpu_memory_utilization"] = memory.gpu_memory_utilization
            self._loop.run(self._open({**given, **vllm_options}))
        except BaseException:
            self._closed = True
            self._loop.close()
            raise

    async def _open(self, given: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**given))
        except Exception as error:  # what vLLM raises for a model or an option it cannot take has many types
            msg = f"vLLM cannot be started ({type(error).__name__}: {error}); its log above says more"
            raise ModelError(msg) from error
        self.max_model_len = int(self._llm.model_config.max_model_len)
        about = await self._command(Command.ABOUT)
        if not about:
            msg = "vLLM runs without blend-rag's connector: leave kv_transfer_config out of the options"
            raise ConnectorError(msg)
        self.about: dict[str, Any] = about

    async def _aclose(self) -> None:
        self._llm.shutdown(timeout=_SHUTDOWN_S)
        del self._llm

    async def _pieces(self, ask: Ask) -> AsyncIterator[Piece]:
        answer = self._llm.generate(
            {"prompt_token_ids": list(ask.token_ids)},
            vllm_sampling(self._vllm, ask.sampling, ask.params),
            request_id=uuid.uuid4().hex,
        )
        try:
            async for output in answer:
                one = output.outputs[0]
                yield Piece(one.token_ids, one.finish_reason, one.stop_reason, output.kv_transfer_params)
        except Exception as error:  # of many types, where vLLM refuses a request or has died
            msg = f"vLLM does not answer ({type(error).__name__}: {error})"
            raise ServerError(msg) from error
        finally:
            await answer.aclose()


def vllm_sampling(vllm: Any, sampling: SamplingParams, params: dict[str, Any]) -> Any:
    """Parameters for the installed vLLM: a neutral value that it has no name for is left out.

    Raises:
        PolicyError: it has no name for a value that matters.
    """
    known = set(vllm.SamplingParams.__struct_fields__)
    given = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
        "stop": list(sampling.stop),
        "ignore_eos": sampling.ignore_eos,
        "output_kind": vllm.sampling_params.RequestOutputKind.DELTA,
        "extra_args": {"kv_transfer_params": params},
    }
    neutral: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "seed": None, "stop": [], "ignore_eos": False}
    for name in sorted(given.keys() - known):
        if name not in neutral or given[name] != neutral[name]:
            msg = f"the installed vLLM {vllm.__version__} has no sampling parameter {name}: use a tested release"
            raise PolicyError(msg)
        del given[name]
    return vllm.SamplingParams(**given)


def _import_vllm() -> Any:
    try:
        import vllm
        import vllm.platforms
        import vllm.sampling_params
    except ImportError as error:
        msg = f"vLLM is not installed here ({error}): pip install vllm, or name a running server's URL as the engine"
        raise ModelError(msg) from error
    return vllm


_engine_type: type[Engine] = VLLMEngine  # keeps the class true to the protocol

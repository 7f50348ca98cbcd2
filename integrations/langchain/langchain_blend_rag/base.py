"""What the chat model and the text model share: engine, sampling parameters, metadata."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal

from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr, model_validator
from typing_extensions import Self

from blend_rag import Engine, Generation, PromptLayout, RecomputePolicy, SamplingParams, load_engine
from blend_rag.evaluation.calibration import chosen_policy
from blend_rag.in_band import IN_BAND_SEPARATOR
from blend_rag.layout import DEFAULT_SEPARATOR
from langchain_blend_rag.runtime import BlendRuntime

CONFIG = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=(), extra="forbid")
"""Named in every model: LangChain's own base classes would let misspelt arguments pass."""
_SAMPLING = ("temperature", "top_p", "top_k", "seed", "max_tokens", "ignore_eos")


@dataclass(frozen=True)
class Call:
    """What a call asks for: sampling, policy and number of answers per prompt."""

    sampling: SamplingParams
    policy: RecomputePolicy | None
    n: int


class BlendModel(BaseModel):
    """Fields and helpers of models over a blend-rag engine."""

    model_config = CONFIG

    engine: Any = Field(default=None, exclude=True, repr=False)
    """An engine of the core, or the name of one to load from `model` and to close with this object: "transformers" (the
    default), "vllm", or the URL of a vLLM server with the connector."""
    model: str | None = None
    """Model folder, GGUF file or hub id; left out, the packaged SmolLM2-135M-Instruct."""
    policy: RecomputePolicy | None = None
    """What is recomputed; by default the engine's policy. A call may bring its own `policy`, another `ratio`, or a
    `target`."""
    calibration: str | None = None
    """Report of `blend-rag fidelity` on this model, from which a call's `target` (share of the gap to full prefill to
    close) is looked up."""
    store: str | list[str] | None = Field(default=None, exclude=True, repr=False)
    """Where chunk KV is kept, as `blend_rag.open_store` takes it; only where the engine is loaded here."""
    namespace: str = ""
    """KV of one namespace is never seen by another; only where the engine is loaded here."""
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    """Of the server whose URL `engine` is; by default `VLLM_API_KEY` of the environment."""
    engine_options: dict[str, Any] = Field(default_factory=dict, exclude=True, repr=False)
    """Further arguments of the engine that is loaded here."""
    separator: str = DEFAULT_SEPARATOR
    """What stands between chunks where a prompt does not say."""
    in_band_separator: str = IN_BAND_SEPARATOR
    """What marks chunks inside plain text."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the chat template, such as `enable_thinking`."""

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Nucleus sampling."""
    top_k: int = 0
    """0 is off."""
    seed: int | None = None
    """Makes sampling repeatable."""
    max_tokens: int = 256
    """Longest answer."""
    n: int = 1
    """Answers per prompt."""
    stop: list[str] | None = None
    """Strings that end an answer; a call's own replace them."""
    timeout: float | None = None
    """Longest time for a call, in seconds; generation is stopped and TimeoutError raised."""
    max_retries: int = 0
    """How often a call is repeated whose connection failed; an engine in this process has none."""

    _runtime: BlendRuntime = PrivateAttr()
    _owns_engine: bool = PrivateAttr(default=False)

    @model_validator(mode="after")
    def _open(self) -> Self:
        self._sampling(None, {})  # bad values are said now
        if self.engine is None or isinstance(self.engine, str):
            key = self.api_key.get_secret_value() if self.api_key else None
            given = {"store": self.store, "namespace": self.namespace, "policy": self.policy, "api_key": key}
            options: dict[str, Any] = {name: value for name, value in given.items() if value}
            self.engine = load_engine(self.model, engine=self.engine, **{**options, **self.engine_options})
            self._owns_engine = True
        self._runtime = BlendRuntime(
            self.engine.tokenizer,
            separator=self.separator,
            in_band=self.in_band_separator,
            chat=self._use_chat_template(),
            template_kwargs=self.template_kwargs,
        )
        return self

    def _use_chat_template(self) -> bool | None:
        return None

    @property
    def runtime(self) -> BlendRuntime:
        """Layouts of messages and the builders behind them."""
        return self._runtime

    @property
    def model_name(self) -> str:
        """The engine's model."""
        engine: Engine = self.engine
        return engine.model_name

    def close(self) -> None:
        """Close the engine, if it was loaded here."""
        if self._owns_engine:
            self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of plain text by the model's own tokenizer."""
        return list(self._runtime.tokenizer.literal(text))

    def _sampling(self, stop: list[str] | None, kwargs: dict[str, Any]) -> SamplingParams:
        """Sampling parameters of a call; takes what it uses out of `kwargs`.

        Raises:
            PolicyError: a value makes no sense.
        """
        chosen = {name: kwargs.pop(name) for name in _SAMPLING if name in kwargs}
        fields = {name: getattr(self, name) for name in _SAMPLING if hasattr(self, name)}
        words = stop if stop is not None else self.stop
        return SamplingParams(**{**fields, **chosen}, stop=tuple(words or ()))

    def _call(self, stop: list[str] | None, kwargs: dict[str, Any]) -> Call:
        """What a call asks for.

        Raises:
            TypeError: an argument is unknown.
        """
        left = dict(kwargs)
        n = left.pop("n", self.n)
        policy = self._policy(left)
        sampling = self._sampling(stop, left)
        if left:
            msg = (
                f"unknown argument {', '.join(left)}: there are n, policy, ratio, target, stop, {', '.join(_SAMPLING)}"
            )
            raise TypeError(msg)
        if n < 1:
            msg = "n must be at least 1"
            raise ValueError(msg)
        return Call(sampling, policy, n)

    def _policy(self, kwargs: dict[str, Any]) -> RecomputePolicy | None:
        """A call's policy; takes what it uses out of `kwargs`.

        Raises:
            PolicyError: ratio or target make no sense.
        """
        policy: RecomputePolicy | None = kwargs.pop("policy", self.policy)
        ratio, target = kwargs.pop("ratio", None), kwargs.pop("target", None)
        if ratio is None and target is None:
            return policy
        return chosen_policy(
            policy or self.engine.policy,
            ratio=ratio,
            target=target,
            calibration=self.calibration,
            model=self.model_name,
        )

    def _tracing(self, kind: Literal["chat", "llm"], stop: list[str] | None, kwargs: dict[str, Any]) -> LangSmithParams:
        """What LangSmith is told of a call."""
        params = LangSmithParams(
            ls_provider="blend_rag",
            ls_model_name=kwargs.get("model", self.model_name),
            ls_model_type=kind,
            ls_temperature=kwargs.get("temperature", self.temperature),
            ls_max_tokens=kwargs.get("max_tokens", self.max_tokens),
        )
        if words := stop if stop is not None else self.stop:
            params["ls_stop"] = words
        return params

    def _run(self, layouts: Sequence[PromptLayout], call: Call) -> list[Generation]:
        """Answers of the engine, within the time limit.

        Raises:
            TimeoutError: they took too long.
        """
        if self.timeout is None:
            return self._again(lambda: self.engine.generate(list(layouts), call.sampling, policy=call.policy))
        with ThreadPoolExecutor(1) as pool:  # a loop of its own, wherever this is called from
            return pool.submit(lambda: asyncio.run(self._arun(layouts, call))).result()

    async def _arun(self, layouts: Sequence[PromptLayout], call: Call) -> list[Generation]:
        """Async twin of `_run`."""
        for attempt in range(self.max_retries + 1):
            try:
                work = self.engine.agenerate(list(layouts), call.sampling, policy=call.policy)
                answers: list[Generation] = await asyncio.wait_for(work, self.timeout)
                return answers
            except ConnectionError:
                if attempt == self.max_retries:
                    raise
        raise AssertionError("unreachable")

    def _again(self, work: Callable[[], list[Generation]]) -> list[Generation]:
        for attempt in range(self.max_retries + 1):
            try:
                return work()
            except ConnectionError:
                if attempt == self.max_retries:
                    raise
        raise AssertionError("unreachable")

    def _check_time(self, started: float) -> None:
        if self.timeout is not None and time.monotonic() - started > self.timeout:
            msg = f"the answer took longer than timeout={self.timeout:g} s"
            raise TimeoutError(msg)

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What decides an answer; part of the key of LangChain's caches."""
        policy = self.policy or self.engine.policy
        return {
            "model_name": self.model_name,
            "fingerprint": getattr(self.engine, "fingerprint", None),
            "namespace": getattr(self.engine, "namespace", self.namespace),
            "policy": asdict(policy),
            "separator": self.separator,
            "in_band_separator": self.in_band_separator,
            "template_kwargs": self.template_kwargs,
            "n": self.n,
            "default_stop": self.stop,
            **{name: getattr(self, name) for name in _SAMPLING if hasattr(self, name)},
        }


def usage_of(generation: Generation) -> UsageMetadata:
    """Token counts of an answer: `cache_read` are reused tokens; `recomputed` and `computed` tell the rest."""
    report = generation.report
    details: dict[str, int] = {
        "cache_read": report.reused_tokens,
        "recomputed": report.recomputed_tokens,
        "computed": report.computed_tokens,
    }
    answer = len(generation.token_ids)
    return UsageMetadata(
        input_tokens=report.prompt_tokens,
        output_tokens=answer,
        total_tokens=report.prompt_tokens + answer,
        input_token_details=InputTokenDetails(**details),  # type: ignore[typeddict-item]
    )


def metadata_of(generation: Generation, model_name: str, **extra: Any) -> dict[str, Any]:
    """Response metadata of an answer."""
    return {
        "model_name": model_name,
        "model_provider": "blend_rag",
        "finish_reason": generation.finish_reason,
        "ttft_s": generation.report.ttft_s,
        "blend_rag": {**generation.report.as_dict(), **extra},
    }

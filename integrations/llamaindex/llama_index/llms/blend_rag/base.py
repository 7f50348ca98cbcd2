"""`BlendLLM`: a LlamaIndex LLM that reuses the KV of passages in its prompts."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import llama_index.core.instrumentation as instrumentation
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import LLM

from blend_rag import Generation, Message, PromptLayout, RecomputePolicy, SamplingParams, load_engine
from blend_rag.builders import PromptBuilders
from blend_rag.errors import PromptError
from blend_rag.evaluation.calibration import chosen_policy
from blend_rag.in_band import IN_BAND_SEPARATOR, split
from blend_rag.layout import DEFAULT_SEPARATOR, Markup

dispatcher = instrumentation.get_dispatcher(__name__)  # type: ignore[attr-defined]

_SAMPLING = ("temperature", "top_p", "top_k", "seed", "max_tokens", "ignore_eos", "stop")
_ROLES = {MessageRole.USER: "user", MessageRole.ASSISTANT: "assistant", MessageRole.TOOL: "tool"}
_ROLES |= {MessageRole.SYSTEM: "system", MessageRole.DEVELOPER: "system", MessageRole.MODEL: "assistant"}
_ROLES |= {MessageRole.CHATBOT: "assistant", MessageRole.FUNCTION: "tool"}


class BlendReuseEvent(BaseEvent):
    """What an answer reused, and when its first token was there."""

    model_name: str
    ttft_s: float
    report: dict[str, Any]

    @classmethod
    def class_name(cls) -> str:
        """Name of the event."""
        return "BlendReuseEvent"


class SegmentedPrompt(str):
    """A prompt as text, for events and logs, and as the layout that is answered."""

    __slots__ = ("layout",)
    layout: PromptLayout

    @classmethod
    def of(cls, layout: PromptLayout) -> SegmentedPrompt:
        prompt = cls("".join(segment.text for segment in layout.segments))
        prompt.layout = layout
        return prompt


class BlendLLM(LLM):
    """LLM over a blend-rag engine.

    Text goes through the model's chat template; `messages_to_prompt` and `completion_to_prompt` replace it. Passages
    are known in prompts of `BlendSynthesizer` and in text that carries separators (`BlendPostprocessor`).

    Args:
        model: model folder, GGUF file or hub id; left out, the packaged SmolLM2-135M-Instruct.
        engine: an engine of the core, or the name of one to load: "transformers" (the default), "vllm", or the URL of
            a vLLM server with the connector.
        policy: what is recomputed; by default the engine's. A call may bring its own `policy`, another `ratio`, or a
            `target`: the share of the gap to full prefill to close, looked up in `calibration`.
        store: where chunk KV is kept, as `blend_rag.open_store` takes it.
        namespace: KV of one namespace is never seen by another.
        api_key: of the server whose URL `engine` is; by default `VLLM_API_KEY` of the environment.
        engine_options: further arguments of the engine that is loaded here.
        kwargs: fields of this class and of LlamaIndex's `LLM`.

    Raises:
        BlendRagError: the model cannot be loaded, or a sampling parameter makes no sense.

    Example:
        ```python
        llm = BlendLLM(max_tokens=64)
        engine = index.as_query_engine(llm=llm, response_synthesizer=BlendSynthesizer(llm=llm))
        ```
    """

    model: str | None = Field(default=None, description="Model folder, GGUF file or hub id.")
    temperature: float = Field(default=0.0, description="0 is greedy.")
    top_p: float = Field(default=1.0, description="Nucleus sampling.")
    top_k: int = Field(default=0, description="0 is off.")
    seed: int | None = Field(default=None, description="Makes sampling repeatable.")
    max_tokens: int = Field(default=256, description="Longest answer.")
    stop: list[str] = Field(default_factory=list, description="Strings that end an answer.")
    separator: str = Field(default=DEFAULT_SEPARATOR, description="What stands between chunks.")
    in_band_separator: str = Field(default=IN_BAND_SEPARATOR, description="What marks chunks inside plain text.")
    template_kwargs: dict[str, Any] = Field(default_factory=dict, description="Arguments of the chat template.")
    namespace: str = Field(default="", description="KV of one namespace is never seen by another.")
    calibration: str | None = Field(
        default=None, description="Report of `blend-rag fidelity`, from which a call's `target` is looked up."
    )

    _engine: Any = PrivateAttr()
    _policy: RecomputePolicy | None = PrivateAttr()
    _builders: PromptBuilders = PrivateAttr()
    _raw_builders: PromptBuilders = PrivateAttr()
    _owns_engine: bool = PrivateAttr()
    _own_hooks: tuple[bool, bool] = PrivateAttr()

    def __init__(
        self,
        model: str | None = None,
        *,
        engine: Any = None,
        policy: RecomputePolicy | None = None,
        store: Any = None,
        api_key: str | None = None,
        engine_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        hooks = [kwargs.get(name) is not None for name in ("messages_to_prompt", "completion_to_prompt")]
        super().__init__(model=model, **kwargs)  # type: ignore[call-arg]
        self._sampling({})  # bad values are said now
        self._owns_engine = engine is None or isinstance(engine, str)
        if self._owns_engine:
            given = {"store": store, "namespace": self.namespace, "policy": policy, "api_key": api_key}
            loaded: dict[str, Any] = {name: value for name, value in given.items() if value}
            engine = load_engine(model, engine=engine, **{**loaded, **(engine_options or {})})
        self._engine = engine
        self._policy = policy
        self._own_hooks = (hooks[0], hooks[1])
        self._builders = PromptBuilders(
            self._engine.tokenizer, separator=self.separator, template_kwargs=self.template_kwargs
        )
        self._raw_builders = PromptBuilders(self._engine.tokenizer, separator=self.separator, chat=False)

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex serialises it."""
        return "BlendLLM"

    @property
    def engine(self) -> Any:
        """The engine of the core."""
        return self._engine

    @property
    def builders(self) -> PromptBuilders:
        """Prompt builders of this model."""
        return self._builders

    @property
    def metadata(self) -> LLMMetadata:
        """Context window, name and kind of the model."""
        return LLMMetadata(
            context_window=self._engine.max_model_len,
            num_output=self.max_tokens,
            is_chat_model=bool(self._builders.chat_template),
            model_name=self._engine.model_name,
        )

    def close(self) -> None:
        """Close the engine, if it was loaded here."""
        if self._owns_engine:
            self._engine.close()

    def __enter__(self) -> BlendLLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # LlamaIndex's calls

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer one prompt."""
        return self._completion(self._generate(self.completion_layout(prompt, formatted=formatted), kwargs))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Async twin of `complete`."""
        return self._completion(await self._agenerate(self.completion_layout(prompt, formatted=formatted), kwargs))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Answer one prompt piece by piece."""
        return self._stream(self.completion_layout(prompt, formatted=formatted), kwargs)

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Async twin of `stream_complete`."""
        return self._astream(self.completion_layout(prompt, formatted=formatted), kwargs)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        return _as_chat(self._completion(self._generate(self.chat_layout(messages), kwargs)))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Async twin of `chat`."""
        return _as_chat(self._completion(await self._agenerate(self.chat_layout(messages), kwargs)))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a conversation piece by piece."""
        pieces = self._stream(self.chat_layout(messages), kwargs)

        def gen() -> ChatResponseGen:
            for piece in pieces:
                yield _as_chat(piece)

        return gen()

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Async twin of `stream_chat`."""
        pieces = self._astream(self.chat_layout(messages), kwargs)

        async def gen() -> ChatResponseAsyncGen:
            async for piece in pieces:
                yield _as_chat(piece)

        return gen()

    # Layouts

    def complete_segments(self, layout: PromptLayout, **kwargs: Any) -> CompletionResponse:
        """Answer a layout, through the same events as `complete`."""
        response: CompletionResponse = self.complete(SegmentedPrompt.of(layout), formatted=True, **kwargs)
        return response

    async def acomplete_segments(self, layout: PromptLayout, **kwargs: Any) -> CompletionResponse:
        """Async twin of `complete_segments`."""
        response: CompletionResponse = await self.acomplete(SegmentedPrompt.of(layout), formatted=True, **kwargs)
        return response

    def stream_segments(self, layout: PromptLayout, **kwargs: Any) -> CompletionResponseGen:
        """Answer a layout piece by piece."""
        pieces: CompletionResponseGen = self.stream_complete(SegmentedPrompt.of(layout), formatted=True, **kwargs)
        return pieces

    async def astream_segments(self, layout: PromptLayout, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Async twin of `stream_segments`."""
        prompt = SegmentedPrompt.of(layout)
        pieces: CompletionResponseAsyncGen = await self.astream_complete(prompt, formatted=True, **kwargs)
        return pieces

    def completion_layout(self, prompt: str, *, formatted: bool = False) -> PromptLayout:
        """The prompt as the core lays it out.

        Raises:
            PromptError: it cannot be laid out.
        """
        if isinstance(prompt, SegmentedPrompt):
            return prompt.layout
        if formatted:
            return self._rendered([Markup(prompt)])
        if self._own_hooks[1]:
            return self._hooked(lambda marks: self.completion_to_prompt(marks[0]), [prompt])  # type: ignore[misc]
        system = [ChatMessage(role=MessageRole.SYSTEM, content=self.system_prompt)] if self.system_prompt else []
        return self.chat_layout([*system, ChatMessage(role=MessageRole.USER, content=prompt)])

    def chat_layout(self, messages: Sequence[ChatMessage]) -> PromptLayout:
        """A conversation as the core lays it out.

        Raises:
            PromptError: it cannot be laid out.
        """
        if self._own_hooks[0]:
            texts = [_text(message) for message in messages]

            def render(marks: list[str]) -> str:
                pairs = zip(messages, marks, strict=True)
                marked = [ChatMessage(role=one.role, content=mark) for one, mark in pairs]
                return str(self.messages_to_prompt(marked))  # type: ignore[misc]

            return self._hooked(render, texts)
        system, rest = self._leading_system(messages)
        builder = self._builders.builder(system)
        return builder.build_messages([self.core_message(message) for message in rest])

    def core_message(self, message: ChatMessage) -> Message:
        """A message as the core takes it; separators in it make passages, unless it is the model's own.

        Raises:
            PromptError: it holds more than text.
        """
        role = _ROLES[message.role]
        text = _text(message)
        parts = (text,) if role == "assistant" else split(text, self.in_band_separator, self.separator)
        return Message(role, parts)

    def _leading_system(self, messages: Sequence[ChatMessage]) -> tuple[str | None, list[ChatMessage]]:
        if messages and _ROLES[messages[0].role] == "system":
            text = _text(messages[0])
            if self.in_band_separator not in text:
                return text, list(messages[1:])
        return None, list(messages)

    def _hooked(self, render: Any, texts: list[str]) -> PromptLayout:
        """What a user's hook makes of texts; it sees marks in their place, so that nothing in a text becomes markup."""
        nonce = secrets.token_hex(8)
        marks = [f"@@{nonce}-{number}@@" for number in range(len(texts))]
        rest = str(render(marks))
        parts: list[Any] = []
        for mark, text in sorted(zip(marks, texts, strict=True), key=lambda pair: rest.find(pair[0])):
            before, found, rest = rest.partition(mark)
            if not found:
                msg = "messages_to_prompt or completion_to_prompt drops, repeats or changes a message's text"
                raise PromptError(msg)
            parts += [Markup(before), *split(text, self.in_band_separator, self.separator)]
        return self._rendered([*parts, Markup(rest)])

    def _rendered(self, parts: list[Any]) -> PromptLayout:
        made: list[Any] = []
        for part in parts:
            if isinstance(part, Markup):
                pieces = split(part.text, self.in_band_separator, self.separator)
                made += [Markup(piece) if isinstance(piece, str) else piece for piece in pieces if piece]
            else:
                made.append(part)
        return self._raw_builders.builder().build_rendered(made)

    # Answers

    def _sampling(self, kwargs: dict[str, Any]) -> tuple[SamplingParams, RecomputePolicy | None]:
        left = dict(kwargs)
        policy: RecomputePolicy | None = left.pop("policy", self._policy if self.__pydantic_private__ else None)
        ratio, target = left.pop("ratio", None), left.pop("target", None)
        if ratio is not None or target is not None:
            policy = chosen_policy(
                policy or self._engine.policy,
                ratio=ratio,
                target=target,
                calibration=self.calibration,
                model=self._engine.model_name,
            )
        fields = {name: getattr(self, name) for name in _SAMPLING if hasattr(self, name)}
        fields |= {name: left.pop(name) for name in _SAMPLING if name in left}
        if left:
            msg = f"unknown argument {', '.join(left)}: there are policy, ratio, target, {', '.join(_SAMPLING)}"
            raise TypeError(msg)
        return replace(SamplingParams(), **{**fields, "stop": tuple(fields["stop"] or ())}), policy

    def _generate(self, layout: PromptLayout, kwargs: dict[str, Any]) -> Generation:
        sampling, policy = self._sampling(kwargs)
        answer: Generation = self._engine.generate(layout, sampling, policy=policy)
        return answer

    async def _agenerate(self, layout: PromptLayout, kwargs: dict[str, Any]) -> Generation:
        sampling, policy = self._sampling(kwargs)
        answer: Generation = await self._engine.agenerate(layout, sampling, policy=policy)
        return answer

    def _stream(self, layout: PromptLayout, kwargs: dict[str, Any]) -> CompletionResponseGen:
        sampling, policy = self._sampling(kwargs)

        def gen() -> CompletionResponseGen:
            text = ""
            for piece in self._engine.stream(layout, sampling, policy=policy):
                text += piece.text
                yield self._completion(piece.generation, text, piece.text)

        return gen()

    def _astream(self, layout: PromptLayout, kwargs: dict[str, Any]) -> CompletionResponseAsyncGen:
        sampling, policy = self._sampling(kwargs)

        async def gen() -> CompletionResponseAsyncGen:
            text = ""
            async for piece in self._engine.astream(layout, sampling, policy=policy):
                text += piece.text
                yield self._completion(piece.generation, text, piece.text)

        return gen()

    def _completion(
        self, answer: Generation | None, text: str | None = None, delta: str | None = None
    ) -> CompletionResponse:
        """A response, and behind a whole answer its event."""
        if answer is None:
            return CompletionResponse(text=text or "", delta=delta)
        report = answer.report
        usage = {
            "prompt_tokens": report.prompt_tokens,
            "completion_tokens": len(answer.token_ids),
            "total_tokens": report.prompt_tokens + len(answer.token_ids),
            "prompt_tokens_details": {"cached_tokens": report.reused_tokens},
        }
        raw = {
            "model": self._engine.model_name,
            "finish_reason": answer.finish_reason,
            "ttft_s": report.ttft_s,
            "usage": usage,
            "blend_rag": report.as_dict(),
        }
        dispatcher.event(
            BlendReuseEvent(model_name=self._engine.model_name, ttft_s=report.ttft_s, report=report.as_dict())
        )
        counted = {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
        return CompletionResponse(text=answer.text, delta=delta, raw=raw, additional_kwargs=counted)


def _as_chat(response: CompletionResponse) -> ChatResponse:
    return ChatResponse(
        message=ChatMessage(role=MessageRole.ASSISTANT, content=response.text),
        delta=response.delta,
        raw=response.raw,
        additional_kwargs=response.additional_kwargs,
    )


def _text(message: ChatMessage) -> str:
    kinds = [block.block_type for block in message.blocks if block.block_type != "text"]
    if kinds:
        msg = f"this model reads text alone, a message holds {kinds[0]!r}: leave it out or describe it"
        raise PromptError(msg)
    return message.content or ""

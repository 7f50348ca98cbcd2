"""`BlendLLM`: a LangChain text model that reuses the KV of passages in its prompts."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.llms import BaseLLM
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.outputs import Generation as TextGeneration
from langchain_core.outputs import GenerationChunk, LLMResult
from langchain_core.prompt_values import PromptValue

from blend_rag import Generation, PromptLayout
from langchain_blend_rag.base import CONFIG, BlendModel, Call, metadata_of, usage_of
from langchain_blend_rag.prompts import BlendPromptValue, SegmentedText


class BlendLLM(BlendModel, BaseLLM):
    """Text model over a blend-rag engine. New applications should prefer `ChatBlend`.

    A prompt is put into the model's chat template as a user message, where it has one; `chat=False` sends it as it is.
    Passages are known in prompts of `BlendPrompt` and in text with separators.

    Raises:
        BlendRagError: the model cannot be loaded.
        PolicyError: a sampling parameter makes no sense.
    """

    model_config = CONFIG

    chat: bool | None = None
    """Use the chat template; by default if the model has one."""

    def _use_chat_template(self) -> bool | None:
        return self.chat

    @property
    def _llm_type(self) -> str:
        return "blend-llm"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**super()._identifying_params, "chat": self.chat}

    def _convert_input(self, model_input: LanguageModelInput) -> PromptValue:
        value = super()._convert_input(model_input)
        if isinstance(value, BlendPromptValue) or isinstance(model_input, str):
            return value
        return BlendPromptValue(messages=value.to_messages())

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        call = self._call(stop, kwargs)
        answers = self._run(self._rows(prompts, call), call)
        return self._result(answers, call.n)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        call = self._call(stop, kwargs)
        answers = await self._arun(self._rows(prompts, call), call)
        return self._result(answers, call.n)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        call = self._call(stop, kwargs)
        started = time.monotonic()
        for piece in self.engine.stream(self.layout(prompt), call.sampling, policy=call.policy):
            self._check_time(started)
            chunk = self._chunk(piece.text, piece.generation)
            if run_manager and chunk.text:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        call = self._call(stop, kwargs)
        started = time.monotonic()
        async for piece in self.engine.astream(self.layout(prompt), call.sampling, policy=call.policy):
            self._check_time(started)
            chunk = self._chunk(piece.text, piece.generation)
            if run_manager and chunk.text:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    def layout(self, prompt: LanguageModelInput) -> PromptLayout:
        """The prompt as the core lays it out.

        Raises:
            PromptError: it cannot be laid out.
        """
        if isinstance(prompt, str) and not isinstance(prompt, SegmentedText):
            messages: Sequence[BaseMessage] = [HumanMessage(prompt)]
        elif isinstance(prompt, SegmentedText):
            messages = prompt.messages
        else:
            messages = self._convert_input(prompt).to_messages()
        return self.runtime.layout(messages)

    def _rows(self, prompts: Sequence[str], call: Call) -> list[PromptLayout]:
        return [layout for layout in map(self.layout, prompts) for _ in range(call.n)]

    def _result(self, answers: Sequence[Generation], n: int) -> LLMResult:
        generations = [TextGeneration(text=answer.text, generation_info=self._info(answer)) for answer in answers]
        usages = [usage_of(answer) for answer in answers]
        counted = {
            "input_tokens": sum(usage["input_tokens"] for usage in usages),
            "output_tokens": sum(usage["output_tokens"] for usage in usages),
            "total_tokens": sum(usage["total_tokens"] for usage in usages),
        }
        rows = [generations[start : start + n] for start in range(0, len(generations), n)]
        return LLMResult(
            generations=cast("list[Any]", rows), llm_output={"model_name": self.model_name, "token_usage": counted}
        )

    def _chunk(self, text: str, answer: Generation | None) -> GenerationChunk:
        return GenerationChunk(text=text, generation_info=self._info(answer) if answer else None)

    def _info(self, answer: Generation) -> dict[str, Any]:
        return {**metadata_of(answer, self.model_name), "usage_metadata": dict(usage_of(answer))}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return self._tracing("llm", stop, kwargs)

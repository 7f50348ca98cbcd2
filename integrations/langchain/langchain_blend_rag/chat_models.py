"""`ChatBlend`: a LangChain chat model that reuses the KV of passages in its messages."""

from __future__ import annotations

import contextvars
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput, ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import model_validator
from typing_extensions import Self

from blend_rag import Generation, PromptLayout
from langchain_blend_rag.base import CONFIG, BlendModel, Call, metadata_of, usage_of
from langchain_blend_rag.segments import mark_of
from langchain_blend_rag.together import CURRENT, AsyncGroup, AsyncMember, Group, Member
from langchain_blend_rag.tools import parser_for

Tool = dict[str, Any] | type | Callable[..., Any] | BaseTool


class ChatBlend(BlendModel, BaseChatModel):
    """Chat model over a blend-rag engine.

    Messages made by `BlendPrompt` or `BlendMiddleware` say where their passages lie, and so does text with separators;
    KV of passages seen before is reused at any place. Other messages run as ordinary generation.

    Example:
        ```python
        from langchain_blend_rag import BlendPrompt, ChatBlend

        chat = ChatBlend()  # or ChatBlend(model="folder or hub id"), ChatBlend(engine=...)
        chain = BlendPrompt(system="Answer from the passages.", llm=chat) | chat
        answer = chain.invoke({"context": documents, "question": "Who built it?"})
        print(answer.text, answer.usage_metadata, answer.response_metadata["ttft_s"])
        ```

    Raises:
        BlendRagError: the model cannot be loaded.
        PolicyError: a sampling parameter makes no sense.
    """

    model_config = CONFIG

    streaming: bool = False
    """Stream by default, so that callbacks get every token of `invoke` too."""

    @property
    def _llm_type(self) -> str:
        return "chat-blend"

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        layout, call, tools = self._prepare(messages, stop, kwargs)
        layouts = [layout] * call.n
        member = CURRENT.get()
        answers = member.generate(layouts, call) if isinstance(member, Member) else None
        return self._result(messages, answers or self._run(layouts, call), tools)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        layout, call, tools = self._prepare(messages, stop, kwargs)
        layouts = [layout] * call.n
        member = CURRENT.get()
        answers = await member.generate(layouts, call) if isinstance(member, AsyncMember) else None
        return self._result(messages, answers or await self._arun(layouts, call), tools)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        layout, call, tools = self._prepare(messages, stop, kwargs)
        started = time.monotonic()
        for piece in self.engine.stream(layout, call.sampling, policy=call.policy):
            self._check_time(started)
            for chunk in self._chunks(messages, piece.text, piece.generation, tools):
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        layout, call, tools = self._prepare(messages, stop, kwargs)
        started = time.monotonic()
        async for piece in self.engine.astream(layout, call.sampling, policy=call.policy):
            self._check_time(started)
            for chunk in self._chunks(messages, piece.text, piece.generation, tools):
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    # Batches: LangChain's calls run side by side, the engine gets them as one

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Answer several prompts; up to `max_concurrency` of them are one batch of the engine."""
        outputs: list[Any] = []
        for some, configs in _slices(inputs, config):
            group = Group(len(some), self._run)

            def one(pair: tuple[LanguageModelInput, RunnableConfig], group: Group = group) -> Any:
                with group.member():
                    try:
                        return self.invoke(pair[0], pair[1], **kwargs)
                    except Exception as error:
                        if return_exceptions:
                            return error
                        raise

            with ThreadPoolExecutor(len(some)) as pool:
                contexts = [contextvars.copy_context() for _ in some]
                calls = [
                    pool.submit(context.run, one, pair)
                    for context, pair in zip(contexts, zip(some, configs, strict=True), strict=True)
                ]
                outputs += [call.result() for call in calls]
        return outputs

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Async twin of `batch`."""
        import asyncio

        outputs: list[Any] = []
        for some, configs in _slices(inputs, config):
            group = AsyncGroup(len(some), self._arun)

            async def one(prompt: LanguageModelInput, config: RunnableConfig, group: AsyncGroup = group) -> Any:
                with group.member():
                    return await self.ainvoke(prompt, config, **kwargs)

            calls = (one(prompt, config) for prompt, config in zip(some, configs, strict=True))
            outputs += await asyncio.gather(*calls, return_exceptions=return_exceptions)
        return outputs

    # Tools

    def bind_tools(
        self,
        tools: Sequence[Tool],
        *,
        tool_choice: str | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Let the model call tools.

        Args:
            tools: tools, functions, schemas.
            tool_choice: "auto" or "none"; the model cannot be forced to call one, so others only limit the choice.
            kwargs: further arguments of the call.

        Raises:
            NotImplementedError: the model's chat template shows no tools.
        """
        self._check_tools()
        schemas = [] if tool_choice == "none" else [convert_to_openai_tool(tool) for tool in tools]
        named = [schema for schema in schemas if schema["function"]["name"] == tool_choice]
        return self.bind(tools=named or schemas, **kwargs)

    def _check_tools(self) -> None:
        if parser_for(self.runtime.chat_template) is None:
            msg = (
                f"the chat template of {self.model_name} shows no tools: use a model that was trained with tools, or "
                "pass its template in template_kwargs={'chat_template': ...}"
            )
            raise NotImplementedError(msg)

    # What LangChain asks for

    @model_validator(mode="after")
    def _complete_profile(self) -> Self:
        if self.profile is None:  # LangChain looks before the engine is there
            self.profile = self._resolve_model_profile()
        return self

    def _resolve_model_profile(self) -> ModelProfile | None:
        tools = parser_for(self.runtime.chat_template) is not None
        return ModelProfile(
            name=self.model_name,
            max_input_tokens=self.engine.max_model_len,
            text_inputs=True,
            image_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            text_outputs=True,
            tool_calling=tools,
            structured_output=False,
        )

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return self._tracing("chat", stop, kwargs)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of the prompt that these messages become, template and all."""
        schemas = [convert_to_openai_tool(tool) for tool in tools or ()]
        return len(self.runtime.layout(messages, schemas))

    def layout(self, messages: LanguageModelInput, tools: Sequence[Any] = ()) -> PromptLayout:
        """The prompt that messages become, as the core lays it out.

        Raises:
            PromptError: the messages cannot be laid out.
        """
        schemas = [convert_to_openai_tool(tool) for tool in tools]
        return self.runtime.layout(self._convert_input(messages).to_messages(), schemas)

    def _prepare(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]
    ) -> tuple[PromptLayout, Call, bool]:
        """Layout, what the call asks for, and whether answers may hold tool calls."""
        left = {name: value for name, value in kwargs.items() if not name.startswith("ls_") and name != "stream"}
        tools = left.pop("tools", None) or []
        left.pop("tool_choice", None)
        if tools:
            self._check_tools()
        return self.runtime.layout(messages, tools), self._call(stop, left), bool(tools)

    def _result(self, messages: list[BaseMessage], answers: Sequence[Generation], tools: bool) -> ChatResult:
        generations = [
            ChatGeneration(message=self._message(messages, answer, tools), generation_info=None) for answer in answers
        ]
        return ChatResult(generations=generations, llm_output={"model_name": self.model_name})

    def _message(self, messages: list[BaseMessage], answer: Generation, tools: bool) -> AIMessage:
        text, calls, invalid = self._parse(answer.text, tools)
        return AIMessage(
            content=text,
            tool_calls=calls,
            invalid_tool_calls=invalid,
            usage_metadata=usage_of(answer),
            response_metadata=metadata_of(answer, self.model_name, **_dropped(messages)),
        )

    def _parse(self, text: str, tools: bool) -> tuple[str, list[Any], list[Any]]:
        parser = parser_for(self.runtime.chat_template) if tools else None
        return parser(text) if parser else (text, [], [])

    def _chunks(
        self, messages: list[BaseMessage], text: str, answer: Generation | None, tools: bool
    ) -> Iterator[ChatGenerationChunk]:
        """Chunks of a piece: its text; behind the last one usage and metadata. Tool calls come whole, at the end."""
        if text and not tools:
            yield ChatGenerationChunk(message=AIMessageChunk(content=text))
        if answer is None:
            return
        written, calls, invalid = self._parse(answer.text, tools)
        yield ChatGenerationChunk(
            message=AIMessageChunk(
                content=written if tools else "",
                tool_calls=calls,
                invalid_tool_calls=invalid,
                tool_call_chunks=[_tool_call_chunk(call, number) for number, call in enumerate(calls)],
                usage_metadata=usage_of(answer),
                response_metadata=metadata_of(answer, self.model_name, **_dropped(messages)),
                chunk_position="last",
            )
        )


def _tool_call_chunk(call: dict[str, Any], index: int) -> Any:
    import json

    return {
        "name": call["name"],
        "args": json.dumps(call["args"]),
        "id": call["id"],
        "index": index,
        "type": "tool_call_chunk",
    }


def _dropped(messages: list[BaseMessage]) -> dict[str, Any]:
    """What `BlendPrompt` left out of these messages for want of room."""
    dropped = [name for message in messages for name in (mark_of(message) or {}).get("dropped", ())]
    return {"dropped_documents": dropped} if dropped else {}


def _slices(
    inputs: Sequence[LanguageModelInput], config: RunnableConfig | list[RunnableConfig] | None
) -> Iterator[tuple[Sequence[LanguageModelInput], list[RunnableConfig]]]:
    if not inputs:
        return
    configs = get_config_list(config, len(inputs))
    limit = configs[0].get("max_concurrency") or len(inputs)
    for start in range(0, len(inputs), limit):
        yield inputs[start : start + limit], configs[start : start + limit]

"""`BlendPrompt`: documents and a question to messages that say where the documents lie."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage, convert_to_messages, get_buffer_string
from langchain_core.prompt_values import ChatPromptValue, PromptValue
from langchain_core.prompts import BasePromptTemplate, PromptTemplate, format_document
from langchain_core.runnables import RunnableConfig, RunnableSerializable
from pydantic import ConfigDict, Field, PrivateAttr, model_validator
from typing_extensions import Self

from blend_rag import Passage, Passages
from blend_rag.errors import PromptError
from blend_rag.layout import DEFAULT_SEPARATOR, DEFAULT_TEMPLATE
from langchain_blend_rag.segments import MARK, mark, original_documents

logger = logging.getLogger(__name__)


class SegmentedText(str):
    """A prompt as text, which still knows its messages: LangChain's text models only pass strings on."""

    __slots__ = ("messages",)
    messages: tuple[BaseMessage, ...]

    @classmethod
    def of(cls, messages: Sequence[BaseMessage]) -> SegmentedText:
        text = cls(get_buffer_string(messages))
        text.messages = tuple(messages)
        return text


class BlendPromptValue(ChatPromptValue):
    """Messages whose passages survive being turned into a string."""

    def to_string(self) -> str:
        """The messages as text; `BlendLLM` still finds the passages in it."""
        return SegmentedText.of(self.messages)


class BlendPrompt(RunnableSerializable[dict[str, Any], PromptValue]):
    """Takes the place of a prompt template: `{"context": list[Document], "question": str}` to a prompt.

    Documents keep their order and are never cut. With a model, what does not fit is left out whole, lowest rank (last
    in the list) first, and named in the answer's `response_metadata["blend_rag"]["dropped_documents"]`.

    Example:
        ```python
        prompt = BlendPrompt(system="Answer from the passages.", llm=chat)
        chain = {"context": retriever, "question": RunnablePassthrough()} | prompt | chat
        ```

    Raises:
        PromptError: the template does not hold `{context}` and `{question}` once each.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    system: str | None = None
    """System text; with the template's text before its first field, the prefix that documents are warmed behind."""
    template: str = DEFAULT_TEMPLATE
    """The human message, with `{context}` and `{question}`."""
    document_prompt: BasePromptTemplate[str] = Field(
        default_factory=lambda: PromptTemplate.from_template("{page_content}")
    )
    """What a document looks like in the prompt."""
    document_separator: str = DEFAULT_SEPARATOR
    """What stands between documents."""
    context_key: str = "context"
    question_key: str = "question"
    history_key: str = "chat_history"
    llm: Any = Field(default=None, exclude=True, repr=False)
    """A `ChatBlend` or `BlendLLM`, to count tokens with; without it nothing is left out."""
    reserve_tokens: int | None = None
    """Room kept for the answer; by default the model's `max_tokens`."""

    _parts: list[str] = PrivateAttr()

    @model_validator(mode="after")
    def _check(self) -> Self:
        fields = sorted((self.template.find("{" + name + "}"), name) for name in ("context", "question"))
        if fields[0][0] < 0 or any(self.template.count("{" + name + "}") != 1 for _, name in fields):
            msg = f"a prompt template holds {{context}} and {{question}} once each, this one is {self.template!r}"
            raise PromptError(msg)
        return self

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Prompts hold a model and are not serialised."""
        return False

    def document_text(self, document: Document) -> str:
        """Exactly the text of a document that is prompted, and has to be warmed."""
        return format_document(document, self.document_prompt)

    def passage(self, document: Document) -> Passage:
        """A document as the core takes it; its id is the document whose deletion deletes its KV."""
        source = document.metadata.get("source")
        name = document.id or (None if source is None else str(source))
        return Passage(self.document_text(document), str(source) if source is not None else document.id, name)

    def invoke(
        self,
        input: dict[str, Any],  # noqa: A002 - LangChain names it so
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> PromptValue:
        """A prompt value whose messages carry the documents' places."""
        return self._call_with_config(self._build, input, config, run_type="prompt", **kwargs)

    async def ainvoke(
        self,
        input: dict[str, Any],  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> PromptValue:
        """Async twin of `invoke`."""
        return await self._acall_with_config(self._abuild, input, config, run_type="prompt", **kwargs)

    async def _abuild(self, given: dict[str, Any]) -> PromptValue:
        return self._build(given)

    def _build(self, given: dict[str, Any]) -> PromptValue:
        missing = [key for key in (self.context_key, self.question_key) if key not in given]
        if missing:
            msg = f"the prompt needs {' and '.join(missing)}, it got {', '.join(given) or 'nothing'}"
            raise KeyError(msg)
        documents = given[self.context_key]
        if isinstance(documents, (str, Document)):
            msg = f"{self.context_key} is one {type(documents).__name__}: pass a list of documents"
            raise TypeError(msg)
        documents = original_documents(documents)
        question = str(given[self.question_key])
        history = convert_to_messages(given.get(self.history_key) or [])
        kept = documents
        messages = self._messages(kept, [], question, history)
        limit = self._limit()
        while limit is not None and kept and len(self.llm.runtime.layout(messages)) > limit:
            kept = kept[:-1]
            messages = self._messages(kept, documents[len(kept) :], question, history)
        if len(kept) < len(documents):
            logger.warning(
                "%d of %d documents did not fit and were left out", len(documents) - len(kept), len(documents)
            )
        return BlendPromptValue(messages=messages)

    def _messages(
        self, documents: Sequence[Document], dropped: Sequence[Document], question: str, history: Sequence[BaseMessage]
    ) -> list[BaseMessage]:
        first, second = sorted(("context", "question"), key=lambda name: self.template.index("{" + name + "}"))
        before, _, rest = self.template.partition("{" + first + "}")
        between, _, after = rest.partition("{" + second + "}")
        fields: dict[str, str | Passages] = {
            "context": Passages(tuple(self.passage(document) for document in documents)),
            "question": question,
        }
        parts = [_unescape(before), fields[first], _unescape(between), fields[second], _unescape(after)]
        start = sum(_length(part, self.document_separator) for part in parts[: 1 if first == "question" else 3])
        text, found = mark(
            parts,
            self.document_separator,
            template=self.template,
            separator=self.document_separator,
            question=[start, start + len(question)],
            **({"dropped": [self.passage(document).source for document in dropped]} if dropped else {}),
        )
        human = HumanMessage(text, additional_kwargs={MARK: found})
        system = [] if self.system is None else [SystemMessage(self.system)]
        return [*system, *history, human]

    def _limit(self) -> int | None:
        if self.llm is None:
            return None
        reserved = self.llm.max_tokens if self.reserve_tokens is None else self.reserve_tokens
        return int(self.llm.engine.max_model_len) - reserved


def _length(part: str | Passages, separator: str) -> int:
    if isinstance(part, str):
        return len(part)
    texts = [passage.text for passage in part.passages]
    return sum(map(len, texts)) + len(separator) * max(0, len(texts) - 1)


def _unescape(text: str) -> str:
    return text.replace("{{", "{").replace("}}", "}")

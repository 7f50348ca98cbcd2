"""Passages on LangChain messages: where in a message's text they lie, and how messages become layouts.

LangChain flattens every prompt value to messages, so segments travel on the messages themselves, in
`additional_kwargs["blend_rag"]`, as character spans of a content that stays an ordinary string. Any other model sees an
ordinary message; caches and state serialisers carry the spans along.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, SystemMessage, ToolMessage

from blend_rag import Message, Passage, Passages
from blend_rag.in_band import IN_BAND_SEPARATOR, split

logger = logging.getLogger(__name__)

MARK = "blend_rag"
"""Key in `additional_kwargs` of messages and in `metadata` of documents."""
Parts = tuple[str | Passages, ...]


def mark(parts: Sequence[str | Passages], glue: str, /, **extra: Any) -> tuple[str, dict[str, Any]]:
    """A message's text, and the mark that tells where its passages lie in it.

    Args:
        parts: text and groups of passages.
        glue: what stands between passages of a group.
        extra: further fields of the mark; plain data.
    """
    text = ""
    groups: list[list[list[Any]]] = []
    for part in parts:
        if isinstance(part, str):
            text += part
            continue
        group: list[list[Any]] = []
        for number, passage in enumerate(part.passages):
            text += glue if number else ""
            group.append([len(text), len(text) + len(passage.text), passage.source, passage.document])
            text += passage.text
        groups.append(group)
    return text, {"groups": groups, "check": _check(text), **extra}


def parts_of(message: BaseMessage, glue: str, in_band: str = IN_BAND_SEPARATOR) -> Parts:
    """Text and groups of passages of a message: by its mark, else by separators in its text.

    Args:
        message: any message.
        glue: what stands between passages of a group.
        in_band: separator that marks passages inside plain text; of an AI's own messages it does not.

    Raises:
        ValueError: the content is no text.
    """
    text = text_of(message)
    found = mark_of(message)
    if found is None:
        return (text,) if isinstance(message, AIMessage) else split(text, in_band, glue)
    parts: list[str | Passages] = []
    at = 0
    for group in found["groups"]:
        if not group:
            continue
        if group[0][0] > at:
            parts.append(text[at : group[0][0]])
        parts.append(Passages(tuple(Passage(text[start:end], source, doc) for start, end, source, doc in group)))
        at = group[-1][1]
    return (*parts, text[at:]) if text[at:] else tuple(parts)


def mark_of(message: BaseMessage) -> dict[str, Any] | None:
    """The mark of a message, if its text is still the one it was made for."""
    found = message.additional_kwargs.get(MARK)
    if not isinstance(found, dict) or "check" not in found:
        return None
    if found["check"] != _check(text_of(message)):
        logger.warning("a message's text was changed behind its passages: it is computed as ordinary text")
        return None
    return found


def text_of(message: BaseMessage) -> str:
    """A message's text.

    Raises:
        ValueError: it holds images, audio or files.
    """
    if isinstance(message.content, str):
        return message.content
    texts: list[str] = []
    for block in message.content:
        if isinstance(block, str):
            texts.append(block)
        elif block.get("type") == "text":
            texts.append(block["text"])
        elif block.get("type") not in ("reasoning", "thinking", "tool_use", "tool_call", "input_json_delta"):
            msg = f"this model reads text alone, a message holds {block.get('type')!r}: leave it out or describe it"
            raise ValueError(msg)
    return "".join(texts)


def to_core(message: BaseMessage, glue: str, in_band: str = IN_BAND_SEPARATOR) -> Message:
    """A message as the core lays it out.

    Raises:
        ValueError: the content is no text, or the message has a role that prompts do not know.
    """
    content = parts_of(message, glue, in_band)
    if isinstance(message, AIMessage):
        extra = {"tool_calls": [_tool_call(call) for call in message.tool_calls]} if message.tool_calls else {}
        return Message("assistant", content, extra)
    if isinstance(message, ToolMessage):
        named = {"name": message.name} if message.name else {}
        return Message("tool", content, {"tool_call_id": message.tool_call_id, **named})
    roles = {"human": "user", "system": "system"}
    role = roles.get(message.type) or getattr(message, "role", None)
    if role is None:
        msg = f"messages of type {message.type!r} have no place in a prompt: use system, human, AI or tool messages"
        raise ValueError(msg)
    return Message(role, content)


def leading_system(messages: Sequence[BaseMessage]) -> tuple[str | None, list[BaseMessage]]:
    """Text of a leading system message without passages, and the messages behind it."""
    if messages and isinstance(messages[0], SystemMessage):
        parts = parts_of(messages[0], "")
        if all(isinstance(part, str) for part in parts):
            return text_of(messages[0]), list(messages[1:])
    return None, list(messages)


def original_documents(documents: Iterable[Document]) -> list[Document]:
    """Documents as they were before `BlendRetriever(in_band=True)` put borders into them."""
    return [
        document.model_copy(
            update={
                "page_content": document.metadata[MARK]["text"],
                "metadata": {name: value for name, value in document.metadata.items() if name != MARK},
            }
        )
        if isinstance(document.metadata.get(MARK), dict)
        else document
        for document in documents
    ]


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "id": call["id"], "function": {"name": call["name"], "arguments": call["args"]}}


def _check(text: str) -> str:
    return hashlib.sha256(json.dumps(text).encode()).hexdigest()[:16]

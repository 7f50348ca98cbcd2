"""Tool calls in a model's own words: which form its chat template uses, and how to read calls out of an answer."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from typing import Any

from langchain_core.messages import InvalidToolCall, ToolCall

Parsed = tuple[str, list[ToolCall], list[InvalidToolCall]]


def parser_for(template: str) -> Callable[[str], Parsed] | None:
    """The parser of a chat template's tool calls, or None where it shows no tools."""
    if not re.search(r"\btools\b", template):
        return None
    if "<tool_call>" in template:
        return parse_tagged
    if "[TOOL_CALLS]" in template:
        return parse_listed
    return parse_bare


def parse_tagged(text: str) -> Parsed:
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`, as Hermes, Qwen and SmolLM write."""
    found = _Calls()
    pattern = r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)"
    for match in re.finditer(pattern, text, re.DOTALL):
        found.add(match[1])
    return found.parsed(re.sub(pattern, "", text, flags=re.DOTALL).strip() if found else text)


def parse_listed(text: str) -> Parsed:
    """`[TOOL_CALLS] [{"name": …, "arguments": …}]`, as Mistral writes."""
    before, mark, after = text.partition("[TOOL_CALLS]")
    found = _Calls()
    if mark:
        try:
            calls = json.loads(after)
        except ValueError:
            found.invalid(after)
        else:
            for call in calls if isinstance(calls, list) else [calls]:
                found.add(json.dumps(call))
    return found.parsed(before.strip() if mark else text)


def parse_bare(text: str) -> Parsed:
    """An answer that is one JSON object `{"name": …, "parameters": …}`, as Llama writes."""
    found = _Calls()
    written = text.strip().removeprefix("<|python_tag|>").strip()
    if written.startswith("{") and '"name"' in written:
        found.add(written)
    return found.parsed("" if found else text)


class _Calls:
    def __init__(self) -> None:
        self._calls: list[ToolCall] = []
        self._invalid: list[InvalidToolCall] = []

    def __bool__(self) -> bool:
        return bool(self._calls or self._invalid)

    def add(self, written: str) -> None:
        try:
            call: Any = json.loads(written)
            arguments = call.get("arguments", call.get("parameters", {}))
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            if not isinstance(call["name"], str) or not isinstance(arguments, dict):
                raise TypeError
        except (ValueError, KeyError, TypeError, AttributeError):
            self.invalid(written)
        else:
            self._calls.append(ToolCall(name=call["name"], args=arguments, id=_new_id(), type="tool_call"))

    def invalid(self, written: str) -> None:
        self._invalid.append(
            InvalidToolCall(name=None, args=written, id=_new_id(), error="no tool call", type="invalid_tool_call")
        )

    def parsed(self, text: str) -> Parsed:
        return text, self._calls, self._invalid


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"

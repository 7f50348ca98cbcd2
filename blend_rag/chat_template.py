"""Chat templates, with message content kept out of their hands.

Knows a tokenizer's chat template, never what the content is. A template is rendered around marks that stand for the
content and is cut at the marks afterwards, so nothing that a template does to strings reaches the content.
"""

from __future__ import annotations

import datetime
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from blend_rag.errors import PromptError
from blend_rag.tokenization import PromptTokenizer

Content = TypeVar("Content")
_DIRECTIVES = "aAbBcdfHIjmMpSUwWxXyYzZ"
_PADDED_DIRECTIVES = "dHIjmMSy"


@dataclass(frozen=True, slots=True)
class Turn(Generic[Content]):
    """A message on its way to the chat template; `extra` holds its further fields."""

    role: str
    content: tuple[Content, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TemplateText:
    """What the template wrote. `literal` text came from a message's further fields and must not become control tokens.

    Roles and the template's own arguments are the caller's code and count as template text.
    """

    text: str
    literal: bool = False


class ChatTemplate:
    """The chat template of a tokenizer, rendered for one fixed date.

    Args:
        tokenizer: its `source` is a transformers tokenizer with a chat template.
        date: what the template's `strftime_now` and `date_string` tell.
        arguments: further arguments of the template.
    """

    def __init__(self, tokenizer: PromptTokenizer, date: datetime.date, arguments: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._clock = _frozen_clock(date)
        self._arguments = {"date_string": date.strftime("%d %b %Y"), **arguments}

    def weave(self, turns: Sequence[Turn[Content]]) -> list[TemplateText | Content]:
        """Template text and content in the order in which the rendered prompt shows them.

        Raises:
            PromptError: the template refuses the messages, or drops or repeats content.
        """
        marks: _Marks[Content] = _Marks()
        contents = ["".join(marks.stand_for(content) for content in turn.content) for turn in turns]
        expected = list(range(len(marks.items)))
        messages = [
            {"role": turn.role, "content": content, **self._shield(turn.extra, marks)}
            for turn, content in zip(turns, contents, strict=True)
        ]
        woven, shown = marks.cut(self._render(messages))
        if sorted(number for number in shown if number < len(expected)) != expected:
            msg = "the chat template drops or repeats message content, so its prompts cannot be laid out exactly"
            raise PromptError(msg)
        return woven

    def _render(self, messages: list[dict[str, Any]]) -> str:
        source = self._tokenizer.source
        arguments = dict(self._arguments)
        try:
            template = source.get_chat_template(arguments.pop("chat_template", None), tools=arguments.get("tools"))
            return str(
                source.apply_chat_template(
                    messages,
                    chat_template=self._clock + template,
                    tokenize=False,
                    add_generation_prompt=True,
                    **arguments,
                )
            )
        except Exception as error:  # templates raise whatever their author wrote
            msg = f"the chat template refuses these messages: {error}"
            raise PromptError(msg) from error

    def _shield(self, value: Any, marks: _Marks[Content]) -> Any:
        """`value` with a mark for everything in its strings that would become a control token."""
        if isinstance(value, Mapping):
            return {self._shield(key, marks): self._shield(item, marks) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._shield(item, marks) for item in value]
        if not isinstance(value, str):
            return value
        shielded, at = "", 0
        for start, end in self._tokenizer.control_spans(value):
            shielded += value[at:start] + marks.stand_for(TemplateText(value[start:end], literal=True))
            at = end
        return shielded + value[at:]


class _Marks(Generic[Content]):
    """Strings that stand for items in rendered text; nobody can type them, because they are random."""

    def __init__(self) -> None:
        self.items: list[TemplateText | Content] = []
        self._nonce = secrets.token_hex(8)

    def stand_for(self, item: TemplateText | Content) -> str:
        self.items.append(item)
        return f"@@{self._nonce}-{len(self.items) - 1}@@"

    def cut(self, text: str) -> tuple[list[TemplateText | Content], list[int]]:
        """Template text and items in order, and the numbers of the items shown."""
        pieces = re.split(rf"@@{self._nonce}-(\d+)@@", text)  # template text and numbers in turn
        shown = [int(number) for number in pieces[1::2]]
        woven: list[TemplateText | Content] = [TemplateText(pieces[0])]
        for number, between in zip(shown, pieces[2::2], strict=True):
            woven += [self.items[number], TemplateText(between)]
        return woven, shown


def _frozen_clock(date: datetime.date) -> str:
    """Jinja text that fixes a template's `strftime_now`; newer transformers take no function as an argument."""
    values = {f"%{letter}": date.strftime(f"%{letter}") for letter in _DIRECTIVES}
    values |= {f"%-{letter}": values[f"%{letter}"].lstrip("0") or "0" for letter in _PADDED_DIRECTIVES}
    values["%%"] = "%"
    replacements = "".join(f".replace({directive!r}, {value!r})" for directive, value in values.items())
    # the empty expression keeps the engine from trimming a line break that the template may start with
    return f"{{%- macro strftime_now(format) %}}{{{{ format{replacements} }}}}{{% endmacro %}}{{{{ '' }}}}"

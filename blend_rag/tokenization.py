"""Text to token ids, so that documents stay documents.

Knows a tokenizer, never a model. Template text may produce control tokens; everything a user or a document says is
tokenised *literally*: a control token's name inside it becomes ordinary text tokens.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from tokenizers import Encoding, Tokenizer

from blend_rag.errors import PromptError


class PromptTokenizer:
    """Two views of one fast tokenizer: `markup` for template text, `literal` for everything else.

    Many SentencePiece tokenizers put a space in front of every text they are given. Text that stands alone keeps it
    (so a chunk has the ids that the tokenizer itself gives it); text that goes on from other text is asked for with
    `inside=True` and gets none.

    Attributes:
        source: the tokenizer given.
        bos_ids: ids the tokenizer puts in front of a text by itself; empty where it adds none.
        unk_id: id for text the vocabulary cannot spell; None where it can spell everything.
        adds_prefix_space: whether a text that stands alone gets a space in front.

    Args:
        tokenizer: a Hugging Face fast tokenizer (anything with `backend_tokenizer`), or a `tokenizers.Tokenizer`.

    Raises:
        PromptError: the tokenizer has no fast backend.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = tokenizer if isinstance(tokenizer, Tokenizer) else getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            msg = (
                f"{type(tokenizer).__name__} has no fast backend, which exact layouts need: "
                "load it with AutoTokenizer.from_pretrained(..., use_fast=True)"
            )
            raise PromptError(msg)
        self.source = tokenizer
        spec = json.loads(backend.to_str())
        spec["truncation"] = spec["padding"] = None
        if "dropout" in spec["model"]:
            spec["model"]["dropout"] = None  # a text must have the same ids every time
        self._control_ids = _control_tokens(spec)
        self._markup = _tokenizer(spec)
        _hide_control_tokens(spec, self._control_ids)
        self._literal = _tokenizer(spec)
        self.adds_prefix_space = _drop_prefix_space(spec)
        self._inside = _tokenizer(spec) if self.adds_prefix_space else self._literal
        self.bos_ids = self._leading_special_ids()
        self.unk_id = _unk_id(spec)

    def literal(self, text: str, *, inside: bool = False) -> tuple[int, ...]:
        """Ids of `text` with every control token in it taken as ordinary text. No BOS, no EOS.

        Raises:
            PromptError: `text` is no string of whole characters.
        """
        return tuple(_encode(self._inside if inside else self._literal, text).ids)

    def count(self, text: str) -> int:
        """Number of tokens of `text`, taken literally."""
        return len(self.literal(text))

    def literal_encoding(self, text: str) -> Encoding:
        """Like `literal`, with character offsets."""
        return _encode(self._literal, text)

    def markup(self, text: str, *, inside: bool = False) -> tuple[int, ...]:
        """Ids of trusted template text: control tokens are recognised. No BOS, no EOS beyond those written in it.

        Raises:
            PromptError: `text` is no string of whole characters.
        """
        if not (inside and self.adds_prefix_space):
            return tuple(_encode(self._markup, text).ids)
        spans = self.control_spans(text)
        head = spans[0][0] if spans else len(text)  # behind a control token the tokenizer decides by itself
        return (*self.literal(text[:head], inside=True), *_encode(self._markup, text[head:]).ids)

    def markup_encoding(self, text: str) -> Encoding:
        """Like `markup`, with character offsets."""
        return _encode(self._markup, text)

    def control_spans(self, text: str) -> list[tuple[int, int]]:
        """Characters [start, end) of `text` that `markup` would turn into control tokens, left to right."""
        controls = set(self._control_ids.values()) - {self.unk_id}
        encoding = self.markup_encoding(text)
        return [span for token_id, span in zip(encoding.ids, encoding.offsets, strict=True) if token_id in controls]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, control tokens included."""
        return str(self._markup.decode(list(token_ids), skip_special_tokens=False))

    def token_id(self, token: str) -> int | None:
        """Id of `token` if it is one reserved (control) token of the vocabulary, else None."""
        return self._control_ids.get(token)

    @property
    def chat_template(self) -> Any:
        """The tokenizer's chat template, or None."""
        return getattr(self.source, "chat_template", None)

    def _leading_special_ids(self) -> tuple[int, ...]:
        plain = self._markup.encode("a", add_special_tokens=False).ids
        full = self._markup.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return tuple(full[:start])
        return ()


def _tokenizer(spec: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(spec))


def _encode(tokenizer: Tokenizer, text: str) -> Encoding:
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except TypeError as error:  # also what half a surrogate pair raises
        msg = "text must be a str of whole characters: decode files with errors='replace'"
        raise PromptError(msg) from error


def _control_tokens(spec: dict[str, Any]) -> dict[str, int]:
    """Names and ids of added tokens that mean something beyond their text.

    These are all special tokens and all other visible added tokens (`<think>`, `<tool_call>`, `[INST]`): chat
    templates use both. Runs of white space are text, and so is a lone ASCII character of the vocabulary: some
    tokenizers pad with `!`.
    """
    vocabulary = set(_pieces(spec))
    return {
        token["content"]: token["id"]
        for token in spec["added_tokens"]
        if (token["special"] or token["content"].replace("▁", " ").strip())
        and not (_is_ascii_character(token["content"]) and token["content"] in vocabulary)
    }


def _is_ascii_character(text: str) -> bool:
    return len(text) == 1 and text.isascii()


def _pieces(spec: dict[str, Any]) -> list[str]:
    vocab = spec["model"]["vocab"]  # {piece: id}, or [[piece, score], …] in a Unigram model
    return list(vocab) if isinstance(vocab, dict) else [piece for piece, _ in vocab]


def _hide_control_tokens(spec: dict[str, Any], controls: dict[str, int]) -> None:
    """Change `spec` so that no text produces a control token, and nothing else gets other ids.

    Control tokens get names nobody can type (random per process) instead of being removed, because removal would
    renumber the others. The model's own vocabulary needs the same: Unigram, WordPiece and BPE without merges match
    whole pieces in it, and a BPE merge could build one.
    """
    salt = secrets.token_hex(16)
    hidden = {name: f"\ufdd0{salt}-{token_id}\ufdd1" for name, token_id in controls.items()}
    for token in spec["added_tokens"]:
        if token["content"] in hidden:
            token.update(content=hidden[token["content"]], lstrip=False, rstrip=False)
    model = spec["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {hidden.get(piece, piece): token_id for piece, token_id in model["vocab"].items()}
    else:
        model["vocab"] = [[hidden.get(piece, piece), score] for piece, score in model["vocab"]]
    if "unk_token" in model:
        model["unk_token"] = hidden.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _uses(merge, hidden)]


def _uses(merge: Any, names: dict[str, str]) -> bool:
    """Whether a BPE merge uses or yields one of `names`."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names


def _drop_prefix_space(spec: dict[str, Any]) -> bool:
    """Change `spec` so that it puts no space in front of a text; whether it did."""
    stages = {stage: _without_prefix_space(spec[stage]) for stage in ("normalizer", "pre_tokenizer")}
    changed = any(spec[stage] != without for stage, without in stages.items())
    spec.update(stages)
    return changed


def _without_prefix_space(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_prefix_space(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    node = {key: _without_prefix_space(value) for key, value in node.items()}
    if node.get("type") == "Metaspace":
        node["prepend_scheme"] = "never"
    if node.get("type") == "ByteLevel":
        node["add_prefix_space"] = False
    return node


def _unk_id(spec: dict[str, Any]) -> int | None:
    model = spec["model"]
    unk_id: int | None = model.get("unk_id")  # Unigram models give the id, the others the name
    return unk_id if unk_id is not None else dict(model["vocab"]).get(model.get("unk_token"))

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
        self._markup = Tokenizer.from_str(backend.to_str())
        self._markup.no_truncation()
        self._markup.no_padding()
        self._literal = _without_control_tokens(self._markup)
        self.bos_ids = self._leading_special_ids()
        """Ids the tokenizer puts in front of a text by itself; empty where it adds none."""

    def literal(self, text: str) -> tuple[int, ...]:
        """Ids of `text` with every control token in it taken as ordinary text. No BOS, no EOS."""
        return tuple(self._literal.encode(text, add_special_tokens=False).ids)

    def markup(self, text: str) -> tuple[int, ...]:
        """Ids of trusted template text: control tokens are recognised. No BOS, no EOS beyond those written in it."""
        return tuple(self._markup.encode(text, add_special_tokens=False).ids)

    def markup_encoding(self, text: str) -> Encoding:
        """Like `markup`, with character offsets."""
        return self._markup.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, control tokens included."""
        return str(self._markup.decode(list(token_ids), skip_special_tokens=False))

    def token_id(self, token: str) -> int | None:
        """Id of `token` if it is one added (reserved, control) token of the vocabulary, else None."""
        for token_id, added in self._markup.get_added_tokens_decoder().items():
            if added.content == token:
                return int(token_id)
        return None

    @property
    def chat_template(self) -> Any:
        return getattr(self.source, "chat_template", None)

    def _leading_special_ids(self) -> tuple[int, ...]:
        plain = self._markup.encode("a", add_special_tokens=False).ids
        full = self._markup.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return tuple(full[:start])
        return ()


def _without_control_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer with the same ids that cannot produce a control token from any text.

    Special tokens are given names nobody can type (random per process) instead of being removed, because removal
    would renumber the others. So are added tokens that are not special but mean something to chat templates
    (`<think>`, `<tool_call>`, `[INST]`); only added runs of whitespace stay. Unigram and WordLevel models would still
    match a control token's text through their own vocabulary, and BPE through a merge, hence the renaming there too.
    """
    spec = json.loads(tokenizer.to_str())
    spec["post_processor"] = None
    salt = secrets.token_hex(16)
    renamed: dict[str, str] = {}
    for token in spec["added_tokens"]:
        if token["special"] or token["content"].strip():
            renamed[token["content"]] = f"\ufdd0{salt}-{token['id']}\ufdd1"
            token["content"] = renamed[token["content"]]
            token["lstrip"] = token["rstrip"] = False
    model = spec["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {renamed.get(piece, piece): token_id for piece, token_id in vocab.items()}
    else:  # Unigram: [piece, score] pairs
        model["vocab"] = [[renamed.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _makes(merge, renamed)]
    return Tokenizer.from_str(json.dumps(spec))


def _makes(merge: Any, names: dict[str, str]) -> bool:
    """Whether a BPE merge uses or yields one of `names`."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names

"""Tiny real tokenizers of every family, trained on the spot, each with a chat template of its kind.

They are small, but made of the same parts as the tokenizers people use: the same normalizers, pre-tokenizers, models,
post-processors and added tokens.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from functools import cache

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "A chunk keeps its tokens alone, at ingestion and in any prompt, whatever stands before or after it.",
    "The keys and values of a passage are computed once; the question comes later and is always computed.",
    "you are here and the end is there, the answer to issue #42 needs #include <stdio.h> in 3 files.",
    "System: answer the question from the passages. User: when was it built? Assistant: in 1889, I think.",
    "Numbers 0 1 2 3 4 5 6 7 8 9 10 42 1024; words: café, naïve, 中文, and marks like # - * = ( ) [ ] { } < > / | .",
    "def split(ids):\n    return [run for run in ids if run]\n\nA new paragraph starts after a blank line.\n\n",
    *(f"{mark}{mark}{mark} a{mark}b" for mark in string.printable.strip()),
]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% if message.tool_calls %}{{ '<tool_call>' + message.tool_calls | tojson + '</tool_call>' }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# like Llama 3: writes its own BOS, prints today's date, strips content
HEADERS = (
    "{{ bos_token }}{% set date = strftime_now('%d %b %Y') %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date + '\n\n' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim }}{% set messages = messages[1:] %}"
    "{% endif %}{{ '<|eot_id|>' }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

# like Llama 2: the system text stands inside the first user turn, every user turn begins with a BOS, roles alternate
INSTRUCT = (
    "{% set system = '' %}{% if messages[0]['role'] == 'system' %}"
    "{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant/user/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + message['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)

# like Zephyr: role headers are ordinary text
PLAIN_HEADERS = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] | trim + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

BERT = (
    "{% for message in messages %}{{ message['role'] + ' : ' + message['content'] + ' [SEP] ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE that adds no BOS, as in GPT-2 and Qwen; `<think>` and a run of spaces are added, not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.train_from_iterator(CORPUS, _byte_level_trainer(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]))
    plain = ["<think>", "</think>", "<tool_call>", "</tool_call>", "        "]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in plain])
    return _wrap(tokenizer, CHATML, eos_token="<|im_end|>", pad_token="<|endoftext|>")


@cache
def byte_level_bos() -> PreTrainedTokenizerFast:
    """Byte-level BPE that adds a BOS, as in Llama 3; whole words are looked up before merges.

    `ENDOFTURN` is a control token that is one word to the pre-tokenizer.
    """
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|reserved_0|>"]
    tokenizer.train_from_iterator(CORPUS, _byte_level_trainer([*special, "ENDOFTURN"]))
    bos = (special[0], tokenizer.token_to_id(special[0]))
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos]),
        ]
    )
    return _wrap(tokenizer, HEADERS, bos_token=special[0], eos_token="<|eot_id|>")


@cache
def sentencepiece() -> PreTrainedTokenizerFast:
    """SentencePiece BPE with byte fallback and a BOS, as in Mistral: control tokens stand in the model's vocabulary."""
    tokenizer = _sentencepiece_bpe()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _wrap(tokenizer, INSTRUCT, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def sentencepiece_legacy() -> PreTrainedTokenizerFast:
    """The same as older Llama 2 files have it: a normalizer writes the spaces, also behind every control token."""
    tokenizer = _sentencepiece_bpe()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _wrap(tokenizer, INSTRUCT, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def unigram() -> PreTrainedTokenizerFast:
    """Unigram that adds only an EOS, as in T5; `</s>` is a piece of the vocabulary, line breaks are not."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    alphabet = [character for character in string.printable if not character.isspace()]
    trainer = trainers.UnigramTrainer(
        vocab_size=250,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([line.replace("\n", " ") for line in CORPUS], trainer)
    eos = ("</s>", tokenizer.token_to_id("</s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[eos])
    return _wrap(tokenizer, PLAIN_HEADERS, eos_token="</s>", unk_token="<unk>", pad_token="<pad>")


@cache
def wordpiece() -> PreTrainedTokenizerFast:
    """WordPiece as in BERT: lower case, punctuation split off, `[CLS]` in front and `[SEP]` behind."""
    return _wordpiece(pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer(lowercase=True))


@cache
def wordpiece_whitespace() -> PreTrainedTokenizerFast:
    """WordPiece that splits on white space only, so that `[SEP]` is one word."""
    return _wordpiece(pre_tokenizers.WhitespaceSplit(), normalizers.Sequence([]))


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    make.__name__: make
    for make in (
        byte_level,
        byte_level_bos,
        sentencepiece,
        sentencepiece_legacy,
        unigram,
        wordpiece,
        wordpiece_whitespace,
    )
}

WITH_BOS = {
    "byte_level_bos": "<|begin_of_text|>",
    "sentencepiece": "<s>",
    "sentencepiece_legacy": "<s>",
    "wordpiece": "[CLS]",
    "wordpiece_whitespace": "[CLS]",
}
"""Tokenizers that add a BOS, and which."""


def control_ids(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Ids that no document may produce: all visible added tokens but the one for unknown text."""
    return {
        token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.content.strip() and token.content != tokenizer.unk_token
    }


def _byte_level_trainer(special: list[str]) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=450,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )


def _sentencepiece_bpe() -> Tokenizer:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        [line.replace("\n", " ") for line in CORPUS], trainers.BpeTrainer(vocab_size=350, show_progress=False)
    )
    learned = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in learned["merges"]]
    merges += [("<", "/"), ("</", "s"), ("</s", ">")]  # so that merges alone would build a control token
    control = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = dict.fromkeys([*control, *fallback, *learned["vocab"], *(left + right for left, right in merges)])
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _wordpiece(
    pre_tokenizer: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer
) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=500,
        special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"],
        initial_alphabet=[character for character in string.printable if not character.isspace()],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return _wrap(tokenizer, BERT, cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]", pad_token="[PAD]")


def _wrap(tokenizer: Tokenizer, chat_template: str, **special: str) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    wrapped.chat_template = chat_template
    return wrapped

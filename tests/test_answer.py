"""Text is shown once it is settled; stop strings and half characters are held back."""

from __future__ import annotations

import random

import pytest
import torch

from blend_rag.blend.plan import HotKV
from blend_rag.engines.answer import Answer
from blend_rag.engines.base import SamplingParams
from blend_rag.engines.hot import HotPrefixes
from tests.tokenizers_for_tests import CORPUS, TOKENIZERS


class Bytes:
    """A tokenizer whose ids are bytes."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def run(text: str, **sampling: object) -> tuple[list[str], Answer]:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    answer = Answer(Bytes(), {0}, params, params.max_tokens)
    return [answer.add(byte) for byte in text.encode()], answer


def test_half_characters_are_held_back() -> None:
    pieces, answer = run("aé€b")
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == answer.text == "aé€b"


def test_stop_string_across_tokens_is_never_shown() -> None:
    pieces, answer = run("one STOP two", stop=("STOP",))
    assert "".join(pieces) == answer.text == "one "
    assert answer.finish_reason == "stop"


def test_a_false_start_of_a_stop_string_is_shown_later() -> None:
    pieces, answer = run("one STOB two\0", stop=("STOP",))
    assert "".join(pieces) == answer.text == "one STOB two"


def test_the_earliest_stop_string_wins() -> None:
    assert run("a,b;c", stop=(";", ","))[1].text == "a"


def test_length_and_end_of_turn_are_told_apart() -> None:
    assert run("abc\0def")[1].finish_reason == "stop"
    assert run("abc\0def", ignore_eos=True, max_tokens=7)[1].finish_reason == "length"
    assert run("abcdef", max_tokens=3)[1].text == "abc"
    assert run("ab")[1].finish_reason is None


def hot_kv(length: int) -> HotKV:
    return HotKV(length, (torch.zeros(1, length, 4),), (torch.zeros(1, length, 4),))


def test_hot_prefixes_find_the_longest_common_beginning() -> None:
    hot = HotPrefixes(max_bytes=10_000)
    hot.add((1, 2, 3), hot_kv(3))
    hot.add((1, 2, 9, 9), hot_kv(4))
    assert hot.find((1, 2, 9, 5)).length == 3  # type: ignore[union-attr]
    assert hot.find((1, 5)).length == 1  # type: ignore[union-attr]
    assert hot.find((7,)) is None
    hot.clear()
    assert hot.find((1, 2)) is None


def test_hot_prefixes_stay_within_their_bytes() -> None:
    size = 2 * 3 * 4 * 4
    hot = HotPrefixes(max_bytes=2 * size)
    for first in (1, 2, 3):
        hot.add((first, 5, 5), hot_kv(3))
    assert hot.find((1, 5, 5)) is None
    assert hot.find((3, 5, 5)).length == 3  # type: ignore[union-attr]
    assert not HotPrefixes(0).fits(1)


@pytest.mark.parametrize("family", TOKENIZERS)
def test_text_is_that_of_all_tokens_decoded_at_once(family: str) -> None:
    tokenizer = TOKENIZERS[family]()
    rng = random.Random(family)
    text = " ".join(CORPUS) + " 你好 🙂🙃 naïve — Ωmega\n\n\tx = [1,2]; " * 3
    for _ in range(20):
        words = rng.sample(text.split(" "), 60)
        ids = [token for word in words for token in tokenizer.encode(" " + word, add_special_tokens=False)]
        answer = Answer(tokenizer, (), SamplingParams(), 10_000)
        shown = "".join(answer.add(token_id) for token_id in ids) + answer.end("stop")
        assert shown == answer.text == tokenizer.decode(ids, skip_special_tokens=True)

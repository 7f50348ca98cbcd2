"""Policies that make no sense are refused with what to choose instead."""

from __future__ import annotations

import pytest

from blend_rag import RecomputePolicy, SamplingParams
from blend_rag.blend.selectors import SELECTORS, make_selector
from blend_rag.errors import PolicyError


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ratio": 1.5}, "choose 0"),
        ({"ratio": -0.1}, "choose 0"),
        ({"check_layer": 0}, "K/V of layer 0 depend on the token alone"),
        ({"schedule": ((0, 0.5),), "check_layer": 2}, "choose 1 or more"),
        ({"schedule": ((2, 0.5), (1, 0.3)), "check_layer": 3}, "rising layers"),
        ({"schedule": ((1, 0.1),), "check_layer": 2}, "falling ratios"),
        ({"context": "history"}, "'prefix' or 'alone'"),
    ],
)
def test_policy_refuses(settings: dict, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        RecomputePolicy(**settings)


def test_unknown_selector_lists_those_there_are() -> None:
    with pytest.raises(PolicyError, match="k-deviation, v-deviation, first-k, query-guided, random, oracle"):
        make_selector(RecomputePolicy(selector="magic"))
    assert set(SELECTORS) == {"k-deviation", "v-deviation", "first-k", "query-guided", "random", "oracle"}


@pytest.mark.parametrize(
    "settings",
    [{"max_tokens": 0}, {"temperature": -1}, {"top_p": 0}, {"top_p": 2}, {"top_k": -1}, {"stop": "x"}, {"stop": ("",)}],
)
def test_sampling_refuses(settings: dict) -> None:
    with pytest.raises(PolicyError):
        SamplingParams(**settings)

"""Rules that choose which reused tokens to compute again, one small file each."""

from __future__ import annotations

from collections.abc import Callable

from blend_rag.blend.policy import RecomputePolicy
from blend_rag.blend.selectors.base import Selector
from blend_rag.blend.selectors.deviation import KeyDeviation, ValueDeviation
from blend_rag.blend.selectors.first_k import FirstK
from blend_rag.blend.selectors.oracle import Oracle
from blend_rag.blend.selectors.query_guided import QueryGuided
from blend_rag.blend.selectors.random import Random
from blend_rag.errors import PolicyError

SELECTORS: dict[str, Callable[[RecomputePolicy], Selector]] = {
    "k-deviation": lambda policy: KeyDeviation(policy.check_layer, policy.schedule),
    "v-deviation": lambda policy: ValueDeviation(policy.check_layer, policy.schedule),
    "first-k": lambda policy: FirstK(),
    "query-guided": lambda policy: QueryGuided(),
    "random": lambda policy: Random(policy.seed),
    "oracle": lambda policy: Oracle(),
}
"""Every rule by the name a policy gives it."""

__all__ = [
    "SELECTORS",
    "FirstK",
    "KeyDeviation",
    "Oracle",
    "QueryGuided",
    "Random",
    "Selector",
    "ValueDeviation",
    "make_selector",
]


def make_selector(policy: RecomputePolicy) -> Selector:
    """The rule a policy names.

    Raises:
        PolicyError: there is no such rule.
    """
    if policy.selector not in SELECTORS:
        msg = f"selector {policy.selector!r} is unknown: choose one of {', '.join(SELECTORS)}"
        raise PolicyError(msg)
    return SELECTORS[policy.selector](policy)

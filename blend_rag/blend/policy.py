"""What a request asks of the blend, as data, so that a run over many policies is a loop over values."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from blend_rag.errors import PolicyError


@dataclass(frozen=True, slots=True)
class RecomputePolicy:
    """Which reused chunk tokens are computed again.

    Attributes:
        ratio: share r of the reused chunk tokens, 0 to 1. Question, history, glue and new chunks are always computed
            and do not count.
        selector: name of the rule that picks them, see `blend_rag.blend.selectors`.
        check_layer: layer whose K/V a deviation rule compares, counted from 0. Must be at least 1, because K/V of
            layer 0 depend on the token embedding alone and so never deviate.
        schedule: candidates narrowed before the final choice, as (check layer, ratio) with rising layers and falling
            ratios, for deviation rules: the paper's gradual filtering.
        context: what chunk KV was computed behind: "prefix" (falls back to "alone" where only that is stored) or
            "alone".
        reuse: False ignores all stored and hot KV: full prefill through the same code.
        correct_positions: False leaves K at the positions it had when its chunk was computed: a baseline that shows
            what position correction is worth, never useful otherwise.
        seed: of the random rule.

    Raises:
        PolicyError: a value makes no sense.
    """

    ratio: float = 0.15
    selector: str = "query-guided"
    check_layer: int = 1
    schedule: tuple[tuple[int, float], ...] = ()
    context: str = "prefix"
    reuse: bool = True
    correct_positions: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.ratio <= 1.0:
            msg = f"ratio={self.ratio} is not a share: choose 0 (reuse everything) to 1 (recompute everything)"
            raise PolicyError(msg)
        for layer in (self.check_layer, *(layer for layer, _ in self.schedule)):
            if layer < 1:
                msg = (
                    f"check layer {layer} shows nothing: K/V of layer 0 depend on the token alone and never deviate; "
                    "choose 1 or more"
                )
                raise PolicyError(msg)
        if self.context not in ("prefix", "alone"):
            msg = f"context={self.context!r} is unknown: choose 'prefix' or 'alone'"
            raise PolicyError(msg)
        steps = [*self.schedule, (self.check_layer, self.ratio)] if self.schedule else []
        for (layer, ratio), (next_layer, next_ratio) in pairwise(steps):
            if next_layer <= layer or next_ratio > ratio or ratio > 1.0:
                msg = "a schedule needs rising layers and falling ratios, ending at check_layer and ratio"
                raise PolicyError(msg)


FULL_PREFILL = RecomputePolicy(ratio=1.0, selector="first-k", reuse=False)
"""Compute every token; nothing is read from a store."""

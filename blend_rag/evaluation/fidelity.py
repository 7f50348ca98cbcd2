"""How close blended answers are to full prefill of the same prompt.

The measure: full prefill answers greedily; that answer is then forced on every policy, and next-token distributions are
compared token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from blend_rag.blend.passes import blend, continue_from
from blend_rag.blend.plan import BlendPlan
from blend_rag.blend.policy import FULL_PREFILL, RecomputePolicy
from blend_rag.engines.transformers import TransformersEngine
from blend_rag.errors import PromptTooLongError
from blend_rag.layout import PromptLayout


@dataclass(frozen=True, slots=True)
class FidelityResult:
    """One policy on one prompt: mean KL(full‖policy) in nats and share of tokens with the same most likely token."""

    policy: RecomputePolicy
    kl: float
    top1: float


@torch.no_grad()
def kl_to_full(
    engine: TransformersEngine, layout: PromptLayout, policies: Sequence[RecomputePolicy], tokens: int = 32
) -> list[FidelityResult]:
    """Compare policies with full prefill over `tokens` forced tokens of full prefill's greedy answer.

    Stored KV is used as it lies in the engine's store, hot KV is not, so that no policy profits from another. The
    answer goes on past the end of its turn, so that every prompt counts the same number of tokens.

    Raises:
        PromptTooLongError: prompt and answer do not fit into the model's context.
    """
    if len(layout) + tokens > engine.max_model_len:
        msg = f"{len(layout)} prompt tokens and {tokens} forced ones exceed the model's {engine.max_model_len}"
        raise PromptTooLongError(msg)
    answer = engine.generate(layout, max_tokens=tokens, policy=FULL_PREFILL, ignore_eos=True).token_ids
    full = _log_probabilities(engine, layout, FULL_PREFILL, answer)
    results = []
    for policy in policies:
        other = _log_probabilities(engine, layout, policy, answer)
        kl = (full.exp() * (full - other)).sum(-1).mean().item()
        top1 = (full.argmax(-1) == other.argmax(-1)).float().mean().item()
        results.append(FidelityResult(policy, kl, top1))
    return results


def _log_probabilities(
    engine: TransformersEngine, layout: PromptLayout, policy: RecomputePolicy, answer: Sequence[int]
) -> torch.Tensor:
    """Log-probabilities of every forced token's distribution, [tokens, vocabulary], float32."""
    plan = BlendPlan.of(layout, engine.find_kv(layout, policy).hits, policy)
    result = blend(engine.decoder, [plan])[0]
    hidden = [result.last_hidden[None]]
    if len(answer) > 1:
        hidden.append(continue_from(engine.decoder, result.kv, answer[:-1]))
    return engine.decoder.logits(torch.cat(hidden)).log_softmax(-1)

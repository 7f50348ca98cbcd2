"""How close blended answers are to full prefill of the same prompt.

The measure: full prefill answers greedily; that answer is then forced on every policy, and next-token distributions are
compared token by token. Where a right answer is known, it is forced too.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from blend_rag.blend.passes import BlendResult, blend, continue_from
from blend_rag.blend.plan import BlendPlan
from blend_rag.blend.policy import FULL_PREFILL, RecomputePolicy
from blend_rag.engines.transformers import TransformersEngine
from blend_rag.errors import PromptTooLongError
from blend_rag.layout import PromptLayout

FORCED_TOKENS = 32


@dataclass(frozen=True, slots=True)
class FidelityResult:
    """One policy on one prompt.

    Attributes:
        policy: what was recomputed.
        kl: mean KL(full‖policy) over the forced tokens of full prefill's answer, nats.
        top1: share of them with the same most likely token.
        kl_answer: mean KL(full‖policy) over the tokens of the right answer; None where there is none.
        nll_answer: mean negative log-likelihood of the right answer's tokens, nats; None where there is none.
    """

    policy: RecomputePolicy
    kl: float
    top1: float
    kl_answer: float | None = None
    nll_answer: float | None = None


@dataclass(frozen=True, slots=True)
class Reference:
    """Full prefill of one prompt, against which policies are measured.

    Attributes:
        layout: the prompt.
        forced: full prefill's greedy answer, past the end of its turn, so that every prompt counts alike.
        full: its log-probabilities over `forced`, [tokens, vocabulary], float32.
        gold: token ids of the right answer; may be empty.
        full_gold: log-probabilities over `gold`, [tokens, vocabulary], float32.
    """

    layout: PromptLayout
    forced: tuple[int, ...]
    full: torch.Tensor = field(repr=False)
    gold: tuple[int, ...] = ()
    full_gold: torch.Tensor = field(default_factory=lambda: torch.empty(0), repr=False)

    @classmethod
    @torch.no_grad()
    def of(
        cls, engine: TransformersEngine, layout: PromptLayout, gold: Sequence[int] = (), tokens: int = FORCED_TOKENS
    ) -> Reference:
        """Answer a prompt by full prefill.

        Raises:
            PromptTooLongError: prompt and answer do not fit into the model's context.
        """
        longest = max(tokens, len(gold))
        if len(layout) + longest > engine.max_model_len:
            msg = f"{len(layout)} prompt tokens and {longest} forced ones exceed the model's {engine.max_model_len}"
            raise PromptTooLongError(msg)
        forced = engine.generate(layout, max_tokens=tokens, policy=FULL_PREFILL, ignore_eos=True).token_ids
        result = _blended(engine, layout, FULL_PREFILL)
        return cls(layout, forced, _forced(engine, result, forced), tuple(gold), _forced(engine, result, gold))

    @torch.no_grad()
    def measure(self, engine: TransformersEngine, policy: RecomputePolicy) -> FidelityResult:
        """Compare a policy with full prefill.

        Stored KV is used as it lies in the engine's store, hot KV is not, so that no policy profits from another.
        """
        result = _blended(engine, self.layout, policy)
        found = _forced(engine, result, self.forced)
        top1 = (self.full.argmax(-1) == found.argmax(-1)).float().mean().item()
        if not self.gold:
            return FidelityResult(policy, _kl(self.full, found), top1)
        gold = _forced(engine, result, self.gold)
        nll = -gold.gather(-1, torch.tensor(self.gold, device=gold.device)[:, None]).mean().item()
        return FidelityResult(policy, _kl(self.full, found), top1, _kl(self.full_gold, gold), nll)


def kl_to_full(
    engine: TransformersEngine, layout: PromptLayout, policies: Sequence[RecomputePolicy], tokens: int = FORCED_TOKENS
) -> list[FidelityResult]:
    """Compare policies with full prefill over `tokens` forced tokens of full prefill's greedy answer.

    Raises:
        PromptTooLongError: prompt and answer do not fit into the model's context.
    """
    reference = Reference.of(engine, layout, tokens=tokens)
    return [reference.measure(engine, policy) for policy in policies]


def _blended(engine: TransformersEngine, layout: PromptLayout, policy: RecomputePolicy) -> BlendResult:
    plan = BlendPlan.of(layout, engine.find_kv(layout, policy).hits, policy)
    return blend(engine.decoder, [plan])[0]


def _forced(engine: TransformersEngine, result: BlendResult, answer: Sequence[int]) -> torch.Tensor:
    """Log-probabilities of every forced token's distribution, [tokens, vocabulary], float32."""
    if not answer:
        return torch.empty(0)
    hidden = [result.last_hidden[None]]
    if len(answer) > 1:
        hidden.append(continue_from(engine.decoder, result.kv, answer[:-1]))
    return engine.decoder.logits(torch.cat(hidden)).log_softmax(-1)


def _kl(full: torch.Tensor, other: torch.Tensor) -> float:
    return (full.exp() * (full - other)).sum(-1).mean().item()


# Scores of answers


def exact_match(answer: str, right: Sequence[str]) -> float:
    """1 where the answer is one of the right ones but for case, articles and punctuation (SQuAD, arXiv 1606.05250)."""
    return float(any(_words(answer) == _words(text) for text in right))


def f1(answer: str, right: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of words, against the best of the right answers (SQuAD)."""
    return max((_f1(_words(answer), _words(text)) for text in right), default=0.0)


def _f1(found: list[str], wanted: list[str]) -> float:
    if not found or not wanted:
        return float(found == wanted)
    common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted))


def _words(text: str) -> list[str]:
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()

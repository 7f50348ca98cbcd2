"""What a selector may ask of the model: early deviation, the question's attention, or (research) the whole truth.

Each question is one score pass: the model's own forward over the tokens needed, stopped after the layer needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from blend_rag.blend.attention import CausalRows, MassMeter, attention_mass, position_attention
from blend_rag.blend.decoder import Attend, Decoder, LayerInputs
from blend_rag.blend.plan import BlendPlan
from blend_rag.blend.prompt_kv import PromptKV
from blend_rag.errors import PolicyError


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far fresh K and V of tokens are from their stored ones: L2 norms over heads, float32, [tokens]."""

    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class Probe:
    """Score passes over one prompt. Positions in and out are those of the prompt.

    `max_rows` bounds the tokens that go through the model at once; None does not.
    """

    decoder: Decoder
    plan: BlendPlan
    kv: PromptKV
    max_rows: int | None = None

    def deviation(self, layer: int, candidates: torch.Tensor) -> Deviation:
        """Deviation of `candidates` at `layer`, after computing them (and all computed tokens) up to it.

        Fresh K/V of the layers passed stay in the prompt's KV: they are better than the stored ones.

        Raises:
            PolicyError: the model has no such layer.
        """
        if layer >= self.decoder.shape.layers:
            msg = f"check layer {layer} does not exist: choose 1 to {self.decoder.shape.layers - 1} for this model"
            raise PolicyError(msg)
        rows = torch.cat([self.plan.computed, candidates]).sort().values
        found: list[Deviation] = []

        for tile in torch.split(rows, self.max_rows or max(1, len(rows))):
            asked = torch.isin(tile, candidates)
            who = CausalRows.of(tile, torch.arange(len(self.plan)), self.decoder.device)
            self.decoder.forward(
                self.plan.token_ids[tile],
                tile,
                self._deviating(layer, who, tile, asked, found),
                stop_after=layer,
                unrotated=True,
            )
        return Deviation(torch.cat([part.key for part in found]), torch.cat([part.value for part in found]))

    def _deviating(
        self, layer: int, who: CausalRows, rows: torch.Tensor, asked: torch.Tensor, found: list[Deviation]
    ) -> Attend:
        def attend(inputs: LayerInputs) -> torch.Tensor:
            if inputs.layer < layer:
                return self.kv.attend(inputs.layer, who, inputs.query, (inputs.key, inputs.value))
            found.append(self._deviation(inputs, asked.nonzero()[:, 0], rows[asked]))
            self.kv.write(layer, who.positions, inputs.key, inputs.value)
            return inputs.query  # the pass stops here

        return attend

    def guidance(self, first_layer: int = 0, last_layer: int | None = None) -> torch.Tensor:
        """Attention mass the question's tokens give to each candidate, summed over layers, heads and tokens.

        The question runs at r = 0 over stored KV; new chunks are not seen, for their KV is not known yet. Where the
        question stands before a candidate, its ids are put behind the prompt once more for this pass only.
        Source: query-guided selection (ProphetKV, FusionRAG). Returns float32 [candidates].
        """
        plan, device = self.plan, self.decoder.device
        last = self.decoder.shape.layers - 1 if last_layer is None else min(last_layer, self.decoder.shape.layers - 1)
        real, seen, asked = plan.computed, torch.arange(len(plan)), plan.candidates
        if len(plan.unseen):
            real = real[~torch.isin(real, plan.unseen)]
            known = torch.ones(len(plan), dtype=torch.bool)
            known[plan.unseen] = False
            seen = known.nonzero()[:, 0]
            asked = torch.searchsorted(seen, asked)
        echo = plan.guidance[:0] if plan.question_is_last else plan.guidance
        rows = torch.cat([real, len(plan) + torch.arange(len(echo))])
        token_ids = torch.cat([plan.token_ids[real], plan.token_ids[echo]])
        asking = torch.arange(len(real), len(rows)) if len(echo) else torch.searchsorted(real, plan.guidance)
        key_positions = torch.cat([seen, rows[len(real) :]])
        meter = MassMeter(rows, key_positions, asking, self.decoder.shape.scale, device)
        fresh = real.to(device)

        def attend(inputs: LayerInputs) -> torch.Tensor:
            self.kv.write(inputs.layer, fresh, inputs.key[: len(real)], inputs.value[: len(real)])
            keys, values = self._with_echo(inputs, seen, len(real))
            return meter.attend(inputs.query, keys, values, count=inputs.layer >= first_layer)

        self.decoder.forward(token_ids, rows, attend, stop_after=last)
        return self.decoder.sum_over_ranks(meter.mass()[asked.to(device)]).cpu()

    def truth(self, score: Callable[[Deviation, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Sum over layers of `score(deviation, question's attention mass)` under full prefill, [candidates].

        Costs a full prefill: for research only. Leaves the prompt's KV alone.
        """
        plan = self.plan
        rows = torch.arange(len(plan))
        who = CausalRows.of(rows, rows, self.decoder.device)
        askers, keys_at = plan.guidance.to(self.decoder.device), rows.to(self.decoder.device)
        total = torch.zeros(len(plan.candidates))

        def attend(inputs: LayerInputs) -> torch.Tensor:
            keys, values = inputs.key.transpose(0, 1), inputs.value.transpose(0, 1)
            seen = attention_mass(inputs.query[plan.guidance], keys, askers, keys_at, self.decoder.shape.scale)
            mass = self.decoder.sum_over_ranks(seen).cpu()
            deviation = self._deviation(inputs, plan.candidates, plan.candidates)
            total.add_(score(deviation, mass[plan.candidates]))
            return position_attention(inputs.query, keys, values, who, self.decoder.shape.scale)

        self.decoder.forward(plan.token_ids, rows, attend, stop_after=self.decoder.shape.layers - 1, unrotated=True)
        return total

    def _with_echo(self, inputs: LayerInputs, seen: torch.Tensor, real: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the tokens whose KV is known, and of the echoed question behind them."""
        keys, values = self.kv.layer(inputs.layer)
        if len(seen) < len(self.plan):
            keys, values = keys[:, seen.to(keys.device)], values[:, seen.to(keys.device)]
        if real < len(inputs.key):
            keys = torch.cat([keys, inputs.key[real:].transpose(0, 1)], dim=1)
            values = torch.cat([values, inputs.value[real:].transpose(0, 1)], dim=1)
        return keys, values

    def _deviation(self, inputs: LayerInputs, rows: torch.Tensor, positions: torch.Tensor) -> Deviation:
        """Compare un-rotated K and V of `rows` of a pass with what is stored for `positions`."""
        rows = rows.to(inputs.value.device)
        fresh = torch.stack([inputs.unrotated()[rows], inputs.value[rows]]).float()
        squares = (fresh - self._stored(inputs.layer, positions)).square().flatten(2).sum(-1)  # [2, positions]
        distance = self.decoder.sum_over_ranks(squares).sqrt().cpu()
        return Deviation(distance[0], distance[1])

    def _stored(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """Stored un-rotated K and V at `positions`, [2, positions, kv_heads, head_dim], float32."""
        shape, device = self.decoder.shape, self.decoder.device
        found = torch.zeros(2, len(self.plan), shape.kv_heads, shape.head_dim, device=device)
        for span in self.plan.spans:
            found[:, span.start : span.end] = span.kv.data[layer, :, span.skip :].to(device, non_blocking=True)
        return found[:, positions.to(device)]

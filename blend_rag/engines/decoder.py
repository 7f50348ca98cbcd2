"""A transformers model as a `Decoder`: its own forward with attention swapped for the length of one call.

The only place that knows a transformers model's modules. The swap is local to the calling context, so blended and plain
calls may run side by side in threads and tasks.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from blend_rag.blend.decoder import Attend, AttentionShape, LayerInputs, unrotate
from blend_rag.errors import UnsupportedModelError

_NAME = "blend_rag"
_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class _StoppedError(Exception):
    """Ends a forward after the layer asked for; never leaves this module."""


@dataclass(slots=True)
class _Call:
    """A forward whose attention is swapped."""

    decoder: TransformersDecoder
    positions: torch.Tensor
    attend: Attend
    stop_after: int | None
    key_unrotated: torch.Tensor | None = None

    def take_key(self, key: torch.Tensor) -> torch.Tensor:
        """K before RoPE, [rows, kv_heads, head_dim]: what the hook saw, or rotated `key` turned back without one."""
        seen, self.key_unrotated = self.key_unrotated, None
        if seen is not None:
            return seen.view(key.shape)
        cos, sin = self.decoder.rotary(self.positions)
        return unrotate(key.transpose(0, 1), cos, sin).transpose(0, 1).to(key.dtype)


_current: ContextVar[_Call | None] = ContextVar("blend_rag_call", default=None)


def _attention(module: torch.nn.Module, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    """Stock attention, or the caller's within a blended call. query, key, value: [1, heads, rows, head_dim]."""
    call = _current.get()
    if call is None:
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [rows, heads, head_dim]
    inputs = LayerInputs(layer, query, key, value, call.take_key(key))
    out = call.attend(inputs)
    if layer == call.stop_after:
        raise _StoppedError
    return out[None], None


def _mask(*args: Any, **kwargs: Any) -> Any:
    """Stock mask, or none within a blended call, whose attention masks by position itself."""
    return sdpa_mask(*args, **kwargs) if _current.get() is None else None


def _keep_key(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
    """Forward hook on what yields K before RoPE."""
    if (call := _current.get()) is not None:
        call.key_unrotated = output


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, _mask)


class TransformersDecoder:
    """Runs a causal language model of transformers for the blend.

    Args:
        model: a loaded Llama, Mistral, Qwen2 or Qwen3; its attention implementation is set to a switch that is stock
            SDPA outside blended calls.

    Raises:
        UnsupportedModelError: its attention is not plain RoPE with full attention.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        check_supported(model.config)
        self.model: Any = model
        self._body: Any = self.model.get_decoder()  # type: ignore[no-untyped-call]
        attention = self._body.layers[0].self_attn
        config = model.config
        self.shape = AttentionShape(
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            scale=attention.scaling,
        )
        self.device = model.device
        self.dtype = model.dtype
        model.set_attn_implementation(_NAME)
        for layer in self._body.layers:
            source = getattr(layer.self_attn, "k_norm", None) or getattr(layer.self_attn, "k_proj", None)
            if source is not None:  # fused projections have no place to look; K is turned back then
                source.register_forward_hook(_keep_key)

    @torch.no_grad()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        stop_after: int | None = None,
        unrotated: bool = False,
    ) -> torch.Tensor | None:
        """See `Decoder.forward`."""
        token = _current.set(_Call(self, positions, attend, stop_after))
        try:
            outputs = self._body(
                input_ids=token_ids.to(self.device)[None],
                position_ids=positions.to(self.device)[None],
                use_cache=False,
            )
        except _StoppedError:
            return None
        finally:
            _current.reset(token)
        hidden: torch.Tensor = outputs.last_hidden_state[0]
        return hidden

    @torch.no_grad()
    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Decoder.rotary`."""
        like = torch.empty(0, dtype=torch.float32, device=self.device)  # the module answers in this dtype
        cos, sin = self._body.rotary_emb(like, position_ids=positions.to(self.device)[None])
        return cos[0], sin[0]

    def sum_over_ranks(self, scores: torch.Tensor) -> torch.Tensor:
        """See `Decoder.sum_over_ranks`; one device holds all heads here."""
        return scores

    def from_first_rank(self, positions: torch.Tensor) -> torch.Tensor:
        """See `Decoder.from_first_rank`."""
        return positions

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits [rows, vocabulary] of last hidden states [rows, hidden], float32."""
        logits: torch.Tensor = self.model.get_output_embeddings()(hidden.to(self.dtype))
        return logits.float()


def check_supported(config: Any) -> None:
    """Refuse, in words, what blending would get wrong.

    Raises:
        UnsupportedModelError: with the setting that is in the way.
    """
    kind = config.model_type
    if kind not in _MODEL_TYPES:
        msg = f"architecture {kind!r} is not supported: use a model of {', '.join(_MODEL_TYPES)}"
        raise UnsupportedModelError(msg)
    rope = getattr(config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type not in _ROPE_TYPES:
        msg = (
            f"RoPE of type {rope_type!r} depends on the prompt's length, so cached keys cannot be moved: "
            f"use a model with one of {', '.join(_ROPE_TYPES)}"
        )
        raise UnsupportedModelError(msg)
    layer_types = set(getattr(config, "layer_types", None) or ())
    sliding = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    obstacles = {
        f"attention of kind {', '.join(sorted(layer_types - {'full_attention'}))}": bool(
            layer_types - {"full_attention"}
        ),
        f"a sliding window of {sliding} tokens": bool(sliding) and not layer_types,
        "RoPE on a part of each head": rope.get("partial_rotary_factor", 1.0) != 1.0,
        "attention logit soft-capping": bool(getattr(config, "attn_logit_softcapping", None)),
        "multi-axis RoPE": bool(rope.get("mrope_section")),
    }
    for obstacle, present in obstacles.items():
        if present:
            msg = f"this {kind} model has {obstacle}; blending needs plain RoPE with full attention: use another model"
            raise UnsupportedModelError(msg)

"""vLLM's loaded model as a `Decoder`: its own forward with attention swapped for the length of one call.

Attention layers are looked up by name in vLLM's forward context, so a context of our own with other layers under those
names is all it takes. Norms, MLPs, quantised weights and tensor-parallel reductions stay the model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.forward_context import create_forward_context, override_forward_context
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index

from blend_rag.blend.decoder import Attend, AttentionShape, LayerInputs
from blend_rag.errors import ConnectorError
from blend_rag.vllm.graphs import PassGraphs

logger = init_logger(f"vllm.{__name__}")  # below vLLM's own, so that it is shown


class _StoppedError(Exception):
    """Ends a forward after the layer asked for; never leaves this module."""


class _SwappedImpl:
    """Stands in for a layer's attention: gets q, k, v after RoPE and gives the caller's output."""

    def __init__(self, decoder: VLLMDecoder, layer: int) -> None:
        self._decoder = decoder
        self._layer = layer

    def do_kv_cache_update(self, *args: Any, **kwargs: Any) -> None:
        """Pages are not written while blending."""

    def forward(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        output: Any,
        **kwargs: Any,
    ) -> Any:
        found = self._decoder.attend(self._layer, query, key, value)
        rows = len(found)
        output[:rows].copy_(found.reshape(output[:rows].shape))
        if rows < len(output):
            output[rows:].zero_()  # padding: nothing that quantising a whole tensor could stumble over
        return output


class _SwappedLayer:
    """A layer as the forward context names it, with another `impl`."""

    def __init__(self, real: Any, impl: _SwappedImpl) -> None:
        self._real = real
        self.impl = impl

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class VLLMDecoder:
    """Runs vLLM's model for the blend.

    Args:
        vllm_config: the worker's configuration.
        model: the loaded model.

    Raises:
        ConnectorError: its attention is not plain RoPE with full attention.
    """

    def __init__(self, vllm_config: Any, model: torch.nn.Module) -> None:
        self._config = vllm_config
        self._model = model
        self.layers = _attention_layers(vllm_config)
        first = self.layers[0][1]
        self.shape = AttentionShape(
            layers=len(self.layers),
            heads=first.num_heads,
            kv_heads=first.num_kv_heads,
            head_dim=first.head_size,
            scale=first.impl.scale,
        )
        self._ropes: list[Any] = [module for module in model.modules() if hasattr(module, "cos_sin_cache")]
        _check_attention([layer for _, layer in self.layers], self._ropes)
        parameter = next(model.parameters())
        self.device = parameter.device
        self.dtype: torch.dtype = vllm_config.model_config.dtype
        self._swapped = {
            name: _SwappedLayer(layer, _SwappedImpl(self, i)) for i, (name, layer) in enumerate(self.layers)
        }
        self._ranks = get_tp_group()
        self._attend: Attend | None = None
        self._stop_after: int | None = None
        self._key_unrotated: torch.Tensor | None = None
        self._rows = 0  # of the pass under way, without padding
        self.graphs: PassGraphs | None = None

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        stop_after: int | None = None,
        unrotated: bool = False,
    ) -> torch.Tensor | None:
        """See `Decoder.forward`. Compiled code is used where vLLM has compiled the model, unless K is asked for."""
        size = self.graphs.size(len(token_ids)) if self.graphs and not unrotated else None
        if size is not None:
            try:
                return self._forward(token_ids, positions, attend, stop_after, unrotated, size)
            except RuntimeError as error:
                if "captur" not in str(error):
                    raise
                logger.warning("CUDA graphs of the blend are gone; it goes on without (%s)", error)
                self.graphs = None
        return self._forward(token_ids, positions, attend, stop_after, unrotated, None)

    def _forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        stop_after: int | None,
        unrotated: bool,
        size: int | None,
    ) -> torch.Tensor | None:
        """A pass, in the graphs of so many rows or in none."""
        rows = len(token_ids)
        modes: dict[str, Any] = {}
        if size is not None:
            assert self.graphs
            token_ids, positions = self.graphs.fill(token_ids, positions, size)
            modes = self.graphs.context(size)
        # compiled code checks no dtypes: these are those that vLLM compiled it for
        token_ids = token_ids.to(self.device, torch.int32, non_blocking=True)
        positions = positions.to(self.device, torch.int64, non_blocking=True)
        with self._swap(attend, stop_after, unrotated, rows, modes):
            try:
                hidden: torch.Tensor = self._model(
                    input_ids=token_ids, positions=positions, intermediate_tensors=None, inputs_embeds=None
                )
            except _StoppedError:
                return None
        return hidden if size is None else hidden[:rows].clone()  # the next replay overwrites it

    def capture_graphs(self) -> None:
        """Capture graphs for small passes, where vLLM captures any. Call it once, before the first pass."""
        if not PassGraphs.fit(self._config, self.device, self.ranks):
            return
        graphs = self.graphs = PassGraphs(self.device, int(self._config.scheduler_config.max_num_batched_tokens))

        def run(rows: int, with_graphs: bool) -> None:
            ids = torch.zeros(rows, dtype=torch.int64)
            size = rows if with_graphs else None
            self._forward(ids, torch.arange(rows), lambda inputs: inputs.query, None, False, size)

        try:
            graphs.capture(run)
        except Exception as error:
            logger.warning("no CUDA graphs for the blend (%s: %s): it is slower", type(error).__name__, error)
            self.graphs = None

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention of one layer of a swapped forward, without its padding: [rows, heads, head_dim]."""
        assert self._attend is not None
        shape, rows = self.shape, self._rows
        query, key, value = query[:rows], key[:rows], value[:rows]
        kept, self._key_unrotated = self._key_unrotated, None
        inputs = LayerInputs(
            layer,
            query.view(rows, shape.heads, shape.head_dim),
            key.view(rows, shape.kv_heads, shape.head_dim),
            value.view(rows, shape.kv_heads, shape.head_dim),
            None if kept is None else kept.view(rows, shape.kv_heads, shape.head_dim),
        )
        out = self._attend(inputs)
        if layer == self._stop_after:
            raise _StoppedError
        return out

    @contextmanager
    def _swap(
        self, attend: Attend, stop_after: int | None, unrotated: bool, rows: int, modes: dict[str, Any]
    ) -> Iterator[None]:
        context = create_forward_context(None, self._config, slot_mapping={}, skip_compiled=unrotated, **modes)
        context.no_compile_layers = {**context.no_compile_layers, **self._swapped}
        ropes = self._ropes if unrotated else []
        hooks = [rope.register_forward_pre_hook(self._keep_key, with_kwargs=True) for rope in ropes]
        self._attend, self._stop_after, self._rows = attend, stop_after, rows
        try:
            with torch.inference_mode(), override_forward_context(context):
                yield
        finally:
            self._attend = self._stop_after = self._key_unrotated = None
            for hook in hooks:
                hook.remove()

    def _keep_key(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Copy K before RoPE, which works in place."""
        key = kwargs["key"] if "key" in kwargs else args[2]
        self._key_unrotated = key.clone()

    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Decoder.rotary`. The table is the one the model itself reads, so moved K is what it would compute."""
        table: torch.Tensor = self._ropes[0].cos_sin_cache
        cos, sin = table[positions.to(table.device, non_blocking=True)].to(self.device, torch.float32).chunk(2, dim=-1)
        return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)

    @property
    def rank(self) -> int:
        """Of this worker among those that share the model's heads."""
        return int(self._ranks.rank_in_group)

    @property
    def ranks(self) -> int:
        return int(self._ranks.world_size)

    def sum_over_ranks(self, scores: torch.Tensor) -> torch.Tensor:
        """See `Decoder.sum_over_ranks`."""
        if self.ranks == 1:
            return scores
        total: torch.Tensor = self._ranks.all_reduce(scores.contiguous())
        return total

    def from_first_rank(self, positions: torch.Tensor) -> torch.Tensor:
        """See `Decoder.from_first_rank`."""
        if self.ranks > 1 and len(positions):
            positions = positions.contiguous()
            torch.distributed.broadcast(positions, self._ranks.ranks[0], group=self._ranks.cpu_group)
        return positions

    def all_agree(self, flags: list[bool]) -> list[bool]:
        """Which flags every rank has set. All ranks call this with as many flags."""
        if self.ranks == 1 or not flags:
            return flags
        votes = torch.tensor(flags, dtype=torch.int32)
        torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, group=self._ranks.cpu_group)
        return [bool(vote) for vote in votes.tolist()]

    def from_all_ranks(self, data: bytes) -> list[bytes]:
        """What every rank gave, in their order; all of the same length."""
        if self.ranks == 1:
            return [data]
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.empty_like(own) for _ in range(self.ranks)]
        torch.distributed.all_gather(parts, own, group=self._ranks.cpu_group)
        return [part.numpy().tobytes() for part in parts]

    def all_heads(self, data: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """Chunk KV of all `kv_heads` heads from the ranks' parts [layers, 2, tokens, heads of a rank, head_dim]."""
        if self.ranks == 1:
            return data
        whole: torch.Tensor = self._ranks.all_gather(data.contiguous(), dim=3)
        copies = whole.shape[3] // kv_heads  # ranks beyond the number of heads hold copies
        return whole[:, :, :, ::copies].contiguous() if copies > 1 else whole

    def own_heads(self, data: torch.Tensor) -> torch.Tensor:
        """This rank's part of chunk KV of all heads."""
        if self.ranks == 1:
            return data
        start = self.rank * data.shape[3] // self.ranks
        return data[:, :, :, start : start + self.shape.kv_heads]


def _attention_layers(vllm_config: Any) -> list[tuple[str, Any]]:
    context = vllm_config.compilation_config.static_forward_context
    found = [(name, layer) for name, layer in context.items() if hasattr(layer, "impl") and hasattr(layer, "kv_cache")]
    if not found:
        raise ConnectorError("this model has no attention layers with a KV cache: serve it without BlendConnector")
    return sorted(found, key=lambda item: extract_layer_index(item[0]))


def _check_attention(layers: list[Any], ropes: list[Any]) -> None:
    """Refuse, in words, what blending would get wrong.

    Raises:
        ConnectorError: with what is in the way.
    """
    impls = [layer.impl for layer in layers]
    obstacles = {
        "no RoPE": not ropes,
        "several kinds of RoPE": len({rope.cos_sin_cache.data_ptr() for rope in ropes}) > 1,
        "RoPE on a part of each head": any(rope.rotary_dim != rope.head_size for rope in ropes),
        "interleaved RoPE": any(not rope.is_neox_style for rope in ropes),
        "multi-axis RoPE": any(getattr(rope, "mrope_section", None) for rope in ropes),
        "layers of different shapes": len({(x.num_heads, x.num_kv_heads, x.head_size) for x in layers}) > 1,
        "values of another size than keys": any(
            getattr(layer, "head_size_v", layer.head_size) != layer.head_size for layer in layers
        ),
        "a sliding window": any(getattr(impl, "sliding_window", None) not in (None, -1, (-1, -1)) for impl in impls),
        "attention logit soft-capping": any(getattr(impl, "logits_soft_cap", None) for impl in impls),
        "attention sinks": any(getattr(impl, "sinks", None) is not None for impl in impls),
        "ALiBi": any(getattr(impl, "alibi_slopes", None) is not None for impl in impls),
        "layers that share their KV": any(getattr(layer, "kv_sharing_target_layer_name", None) for layer in layers),
        "attention without separate KV pages": any(not hasattr(impl, "do_kv_cache_update") for impl in impls),
        "quantised KV (kv_cache_dtype)": any(
            layer.kv_cache_dtype not in ("auto", "bfloat16", "float16", "float32", "half") for layer in layers
        ),
    }
    for obstacle, present in obstacles.items():
        if present:
            raise ConnectorError(
                f"this model has {obstacle}; blending needs plain RoPE with full attention: "
                "serve it without BlendConnector, or use another model"
            )

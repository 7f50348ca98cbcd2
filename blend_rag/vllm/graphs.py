"""vLLM's piecewise CUDA graphs for passes of few tokens: what lies between two attentions is one launch, not ten.

vLLM captures a piece for a batch descriptor and a set of buffers when it first sees them. Descriptors that vLLM itself
never makes, and buffers of our own, give a pass graphs that nothing else replays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.compilation import monitor
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import graph_capture
from vllm.forward_context import BatchDescriptor

SIZES = (16, 32, 64, 128, 256, 512)
"""Rows of a pass that graphs are captured for, as far as vLLM compiles for so many; passes in between are padded."""

_NOBODY = 2**31 - 1  # requests of a batch: no batch of vLLM's has so many


class PassGraphs:
    """Buffers and descriptors of the passes that graphs are captured for.

    Args:
        device: where the model runs.
        max_rows: what vLLM has compiled the model for.
    """

    def __init__(self, device: torch.device, max_rows: int) -> None:
        self._device = device
        self._sizes = tuple(size for size in SIZES if size <= max_rows)
        largest = max(self._sizes, default=0)
        self._token_ids = torch.zeros(largest, dtype=torch.int32, device=device)
        self._positions = torch.zeros(largest, dtype=torch.int64, device=device)

    @staticmethod
    def fit(vllm_config: Any, device: torch.device, ranks: int) -> bool:
        """Whether vLLM has pieces to capture. Graphs of several ranks would hold their reductions; they do without."""
        mode = vllm_config.compilation_config.cudagraph_mode
        return device.type == "cuda" and ranks == 1 and mode is not None and bool(mode.has_piecewise_cudagraphs())

    def size(self, rows: int) -> int | None:
        """Rows of the smallest graph that holds a pass."""
        return next((size for size in self._sizes if rows <= size), None)

    def fill(self, token_ids: torch.Tensor, positions: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Put a pass into the buffers, with zeros behind it."""
        behind = (0, size - len(token_ids))
        self._token_ids[:size].copy_(torch.nn.functional.pad(token_ids, behind), non_blocking=True)
        self._positions[:size].copy_(torch.nn.functional.pad(positions, behind), non_blocking=True)
        return self._token_ids[:size], self._positions[:size]

    def context(self, size: int) -> dict[str, Any]:
        """What a forward context needs so that the graphs of this size are used."""
        return {
            "cudagraph_runtime_mode": CUDAGraphMode.PIECEWISE,
            "batch_descriptor": BatchDescriptor(num_tokens=size, num_reqs=_NOBODY),
        }

    def capture(self, run: Callable[[int, bool], object]) -> None:
        """Capture all sizes; `run(rows, graphs)` makes a pass of so many rows, with graphs or without."""
        for size in reversed(self._sizes):  # the largest first: the others fit into its memory
            run(size, False)  # compiles what is compiled on first use, which a capture must not see
            with _capturing(), graph_capture(self._device):
                run(size, True)
        torch.cuda.synchronize(self._device)


@contextmanager
def _capturing() -> Iterator[None]:
    before = monitor.cudagraph_capturing_enabled
    monitor.set_cudagraph_capturing_enabled(True)
    try:
        yield
    finally:
        monitor.set_cudagraph_capturing_enabled(before)

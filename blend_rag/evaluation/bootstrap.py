"""Intervals by resampling documents: how sure a mean over few prompts is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
Interval = tuple[float, float]
Means = NDArray[np.float64]


def interval(
    columns: Sequence[Sequence[float]], statistic: Callable[..., Means], seed: int = 0, share: float = 0.95
) -> Interval:
    """Percentile bootstrap interval of a statistic of means over documents.

    Columns belong together row by row, so every resample takes the same documents of each: differences and quotients
    of columns are paired. Source: Efron, Bootstrap Methods (1979).

    Args:
        columns: one or more series with a value for each document.
        statistic: of the columns' means, each [resamples]; for one column the identity.
        seed: of the resamples.
        share: of resamples inside the interval.
    """
    values = np.asarray(columns, dtype=np.float64)  # [columns, documents]
    documents = values.shape[1]
    picks = np.random.default_rng(seed).integers(0, documents, size=(RESAMPLES, documents))
    means = values[:, picks].mean(axis=-1)  # [columns, resamples]
    with np.errstate(divide="ignore", invalid="ignore"):
        found = statistic(*means)
    low, high = np.nanquantile(found, [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)


def mean(values: Means) -> Means:
    """The statistic of one column."""
    return values


def gap_closed(policy: Means, reuse: Means) -> Means:
    """1 - mean KL of a policy / mean KL of reuse alone."""
    return 1 - policy / reuse


def difference(left: Means, right: Means) -> Means:
    """Paired difference of two means."""
    return left - right

"""From a quality somebody wants to a policy: what `blend-rag fidelity` measured, looked up.

Knows policies and a report's fields; knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blend_rag.blend.policy import RecomputePolicy
from blend_rag.blend.selectors import SELECTORS
from blend_rag.errors import PolicyError

_RESEARCH = ("oracle", "random")


@dataclass(frozen=True, slots=True)
class MeasuredPolicy:
    """A policy, the share of the gap to full prefill that it closes, and its TTFT speed-up (None: not timed)."""

    policy: RecomputePolicy
    gap_closed: float
    ttft_speedup: float | None


@dataclass(frozen=True, slots=True)
class Calibration:
    """Policies measured on one model and one kind of documents.

    Attributes:
        source: where it was read from.
        model: name of the model.
        policies: what was measured, without research baselines.
    """

    source: str
    model: str
    policies: tuple[MeasuredPolicy, ...]

    @classmethod
    def read(cls, path: str | Path) -> Calibration:
        """Read what `blend-rag fidelity --json` wrote.

        Raises:
            PolicyError: it is no such file.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            msg = f"{path} cannot be read ({error}): pass what `blend-rag fidelity --json` wrote"
            raise PolicyError(msg) from error
        return cls.of(data, str(path))

    @classmethod
    def of(cls, report: Mapping[str, Any], source: str = "the report") -> Calibration:
        """The same from a report at hand.

        Raises:
            PolicyError: it is no report of a fidelity run.
        """
        try:
            arms = [arm for arm in report["arms"] if arm["selector"] in SELECTORS and arm["selector"] not in _RESEARCH]
            return cls(source, str(report["model"]), tuple(_measured(arm) for arm in arms))
        except (TypeError, KeyError, ValueError) as error:
            msg = f"{source} is no report of a fidelity run: pass what `blend-rag fidelity --json` wrote"
            raise PolicyError(msg) from error

    def policy(self, gap_closed: float, model: str | None = None) -> RecomputePolicy:
        """The fastest measured policy that closes at least this share of the gap to full prefill.

        Where none was timed, the one that recomputes least. Nothing is interpolated: what is returned was measured.

        Args:
            gap_closed: wanted share, up to 1; 1 recomputes everything.
            model: the model it is for; None does not compare, for example where a server has another name for it.

        Raises:
            PolicyError: no measured policy reaches it, or another model was measured.
        """
        if not 0 <= gap_closed <= 1:
            msg = f"target {gap_closed} is not a share: choose 0 (reuse as it is) to 1 (as full prefill)"
            raise PolicyError(msg)
        if model is not None:
            self.check_model(model)
        if gap_closed == 1:
            return RecomputePolicy(ratio=1.0)
        fitting = [found for found in self.policies if found.gap_closed >= gap_closed]
        if not fitting:
            best = max((found.gap_closed for found in self.policies), default=0.0)
            msg = (
                f"no policy in {self.source} closes {gap_closed:g} of the gap, the best closes {best:.2f}: "
                "measure higher ratios, for example `blend-rag fidelity --ratios 0.5,0.7`"
            )
            raise PolicyError(msg)
        return max(fitting, key=_preference).policy

    def check_model(self, model: str) -> None:
        """Refuse another model than the measured one; folders and hub ids are compared by their last part.

        Raises:
            PolicyError: it is another one.
        """
        if Path(model).name.lower() != Path(self.model).name.lower():
            msg = f"{self.source} was measured on {self.model}, not {model}: run `blend-rag fidelity` on your model"
            raise PolicyError(msg)


def chosen_policy(
    base: RecomputePolicy,
    *,
    ratio: float | None = None,
    target: float | None = None,
    calibration: Calibration | str | Path | None = None,
    model: str | None = None,
) -> RecomputePolicy:
    """A policy for one request: by a ratio, or by a target looked up in a calibration.

    Args:
        base: what holds where nothing is said.
        ratio: share to recompute by the base's rule.
        target: share of the gap to full prefill to close.
        calibration: what a fidelity run wrote; needed with a target.
        model: name of the model in use.

    Raises:
        PolicyError: both are given, a target has no calibration, or it cannot be reached.
    """
    if ratio is not None and target is not None:
        msg = "ratio and target both say how much to recompute: pass one of them"
        raise PolicyError(msg)
    if ratio is not None:
        return replace(base, ratio=ratio, schedule=())
    if target is None:
        return base
    if calibration is None:
        msg = "a target needs a calibration: pass the JSON file that `blend-rag fidelity --json` wrote"
        raise PolicyError(msg)
    measured = calibration if isinstance(calibration, Calibration) else Calibration.read(calibration)
    return measured.policy(target, model)


def _measured(arm: Mapping[str, Any]) -> MeasuredPolicy:
    policy = RecomputePolicy(
        ratio=float(arm["ratio"]),
        selector=str(arm["selector"]),
        context=str(arm["context"]),
        check_layer=int(arm.get("check_layer", 1)),
        schedule=tuple((int(layer), float(ratio)) for layer, ratio in arm.get("schedule", ())),
    )
    speedup = arm.get("ttft_speedup")
    return MeasuredPolicy(policy, float(arm["gap_closed"]), None if speedup is None else float(speedup))


def _preference(found: MeasuredPolicy) -> tuple[float, float, float]:
    """Fastest first, then the smallest ratio, then the closest."""
    return (found.ttft_speedup or 0.0, -found.policy.ratio, found.gap_closed)

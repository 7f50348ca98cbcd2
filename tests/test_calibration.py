"""From a wanted quality to a policy that was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from blend_rag import RecomputePolicy
from blend_rag.errors import PolicyError
from blend_rag.evaluation.calibration import Calibration, chosen_policy


def arm(selector: str, ratio: float, gap: float, speedup: float | None, **more: Any) -> dict[str, Any]:
    return {
        "selector": selector,
        "ratio": ratio,
        "context": "prefix",
        "gap_closed": gap,
        "ttft_speedup": speedup,
        **more,
    }


REPORT = {
    "model": "tiny",
    "arms": [
        arm("full", 1.0, 1.0, 1.0),
        arm("reuse", 0.0, 0.25, 12.0),
        arm("oracle", 0.15, 0.99, 0.9),
        arm("random", 0.15, 0.9, 9.0),
        arm("first-k", 0.15, 0.55, 4.5),
        arm("query-guided", 0.15, 0.66, 4.0),
        arm("k-deviation", 0.15, 0.5, 3.0, check_layer=3, schedule=[[1, 0.3]]),
        arm("first-k", 0.3, 0.7, 2.9),
        arm("query-guided", 0.3, 0.78, 2.4, context="alone"),
    ],
}


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (0.5, RecomputePolicy(selector="first-k", ratio=0.15)),
        (0.6, RecomputePolicy(selector="query-guided", ratio=0.15)),
        (0.68, RecomputePolicy(selector="first-k", ratio=0.3)),
        (0.75, RecomputePolicy(selector="query-guided", ratio=0.3, context="alone")),
        (1.0, RecomputePolicy(ratio=1.0)),
    ],
)
def test_the_fastest_measured_policy_that_reaches_it(target: float, expected: RecomputePolicy) -> None:
    assert Calibration.of(REPORT).policy(target) == expected


def test_without_times_the_smallest_ratio() -> None:
    untimed = {**REPORT, "arms": [{**row, "ttft_speedup": None} for row in REPORT["arms"]]}  # type: ignore[attr-defined]
    assert Calibration.of(untimed).policy(0.6) == RecomputePolicy(selector="query-guided", ratio=0.15)


def test_schedules_come_back() -> None:
    policies = [found.policy for found in Calibration.of(REPORT).policies]
    assert RecomputePolicy(selector="k-deviation", check_layer=3, schedule=((1, 0.3),)) in policies
    assert len(policies) == 5


def test_what_cannot_be_had_is_said(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(REPORT))
    calibration = Calibration.read(path)
    with pytest.raises(PolicyError, match=r"closes 0\.95 of the gap, the best closes 0\.78: measure higher ratios"):
        calibration.policy(0.95)
    with pytest.raises(PolicyError, match="measured on tiny, not large"):
        calibration.policy(0.6, "large")
    with pytest.raises(PolicyError, match="not a share"):
        calibration.policy(1.2)
    with pytest.raises(PolicyError, match="cannot be read"):
        Calibration.read(tmp_path / "none.json")
    path.write_text('{"rows": []}')
    with pytest.raises(PolicyError, match="no report of a fidelity run"):
        Calibration.read(path)


def test_a_request_says_ratio_or_target(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(REPORT))
    base = RecomputePolicy(selector="first-k", context="alone")
    assert chosen_policy(base) is base
    assert chosen_policy(base, ratio=0.4) == RecomputePolicy(selector="first-k", context="alone", ratio=0.4)
    assert chosen_policy(base, target=0.6, calibration=path, model="tiny") == RecomputePolicy()
    with pytest.raises(PolicyError, match="pass one of them"):
        chosen_policy(base, ratio=0.1, target=0.5)
    with pytest.raises(PolicyError, match="a target needs a calibration"):
        chosen_policy(base, target=0.5)
    with pytest.raises(PolicyError, match="choose 0"):
        chosen_policy(base, ratio=1.5)

"""What `verify` says of two trajectories, without ranks."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from samecurve.experiments.layout_runner import Trajectory
from samecurve.experiments.verify.verdicts import judge
from samecurve.experiments.verify.verify_report import conclusion

if TYPE_CHECKING:
    from samecurve.core.protocols import StoredArrays


def trajectory(
    second: float, norm: float = 1.0, gradient: Mapping[str, np.ndarray] | None = None
) -> Trajectory:
    arrays = {"model/first": np.ones(2), "model/second": np.array([1.0, second])}
    return Trajectory(
        losses=[2.0, 1.0],
        norms=[1.0, norm],
        arrays=cast("StoredArrays", arrays),
        gradient=gradient or {},
    )


@pytest.mark.parametrize("other", [trajectory(np.nan), trajectory(1.0, norm=np.nan)])
def test_a_nan_never_passes(other: Trajectory) -> None:
    """It is unequal to everything, and max() passes over one that does not come first."""
    expected = trajectory(1.0)
    equal = judge("ddp:2", trajectory(1.0), expected, tolerance=1e-10, seconds=0.0)
    verdict = judge("ddp:2", other, expected, tolerance=1e-10, seconds=0.0)
    assert (equal.verdict, verdict.verdict, verdict.worst) == ("PASS", "FAIL", np.inf)


@pytest.mark.parametrize(("size", "says_so"), [(1e-17, True), (1e-3, False), (0.0, False)])
def test_a_parameter_that_only_rounding_moves_is_told(size: float, *, says_so: bool) -> None:
    gradient = {"first": np.ones(2), "second": np.full(2, size)}
    other, expected = trajectory(1.001, gradient=gradient), trajectory(1.0, gradient=gradient)
    verdict = judge("ddp:2", other, expected, tolerance=1e-10, seconds=0.0)
    assert verdict.verdict == "FAIL"
    assert "second (by" in verdict.culprit
    assert ("bias=False" in verdict.culprit) is says_so


def test_a_running_mean_behind_such_a_parameter_is_told() -> None:
    gradient = {"first": np.ones(2), "second": np.full(2, 1e-17)}
    sides = []
    for second in (1.001, 1.0):
        side = trajectory(second, gradient=gradient)
        arrays = {name: side.arrays[name] for name in side.arrays}
        arrays["model/norm.running_mean"] = np.full(2, second)
        sides.append(replace(side, arrays=cast("StoredArrays", arrays)))
    culprit = judge("ddp:2", *sides, tolerance=1e-10, seconds=0.0).culprit
    assert "norm.running_mean (by" in culprit
    assert culprit.endswith("bias=False), and running means and averages follow them")


@pytest.mark.parametrize(("off", "says_so"), [(1e-7, True), (1e-3, False)])
def test_rounding_of_float32_in_an_f64_run_is_told(off: float, *, says_so: bool) -> None:
    expected = trajectory(1.0)
    line = "task.py:7: F.linear computes in float32 in an f64 run"
    other = replace(expected, losses=[2.0 + off, 1.0], in_float32=line)
    verdict = judge("ddp:2", other, expected, tolerance=1e-10, seconds=0.0)
    assert verdict.verdict == ("PASS" if says_so else "FAIL")
    assert (line in verdict.culprit) is says_so
    assert (", as float32 rounds" in conclusion([verdict], bits=False)) is says_so
    assert ("before any update" in verdict.culprit) is not says_so

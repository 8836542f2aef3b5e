"""What `verify` says of two trajectories, without ranks."""

from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from samecurve.experiments.layout_runner import Trajectory
from samecurve.experiments.verdicts import judge

if TYPE_CHECKING:
    from samecurve.core.protocols import StoredArrays


def trajectory(second: float, norm: float = 1.0) -> Trajectory:
    arrays = {"model/first": np.ones(2), "model/second": np.array([1.0, second])}
    return Trajectory(
        losses=[2.0, 1.0],
        norms=[1.0, norm],
        arrays=cast("StoredArrays", arrays),
        gradient={},
    )


@pytest.mark.parametrize("other", [trajectory(np.nan), trajectory(1.0, norm=np.nan)])
def test_a_nan_never_passes(other: Trajectory) -> None:
    """It is unequal to everything, and max() passes over one that does not come first."""
    expected = trajectory(1.0)
    equal = judge("ddp:2", trajectory(1.0), expected, tolerance=1e-10, seconds=0.0)
    verdict = judge("ddp:2", other, expected, tolerance=1e-10, seconds=0.0)
    assert (equal.verdict, verdict.verdict, verdict.worst) == ("PASS", "FAIL", np.inf)

"""A weight below 0 would turn the update round: refused where it is added, masked on devices."""

import pytest
import torch

from samecurve.core.determinism import Mean
from samecurve.core.determinism.step_arithmetic import Clip
from samecurve.errors import UserError
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.step.step_metrics import DeviceTotals, HostTotals

ONE, CPU = torch.ones(()), torch.device("cpu")


def test_a_microbatchs_weight_is_refused_on_the_host() -> None:
    totals = HostTotals(1, [CPU])
    totals.add(0, 0, [Mean(ONE, 2.0), Mean(1.0, 0.0)])
    with pytest.raises(UserError, match="the weight -3"):
        totals.add(0, 0, [Mean(ONE, -ONE * 3)])
    with pytest.raises(UserError, match="the weight -1"):
        totals.add(0, 0, [Mean(ONE, 1.0), Mean(1.0, -1.0)])


@pytest.mark.parametrize(("weight", "makes_update"), [(2.0, True), (0.0, False), (-2.0, False)])
def test_a_steps_weight_masks_the_update(weight: float, *, makes_update: bool) -> None:
    """Both kinds of totals; what a device adds up is looked at there, without waiting for it."""
    host = HostTotals(1, [CPU])
    host.all_reduce(Comm(), [], 1)
    device = DeviceTotals(1, [CPU])
    for totals in (host, device):
        sums = torch.tensor([1.0, weight], dtype=torch.float64)
        totals._sums = sums.tolist() if isinstance(totals, HostTotals) else sums
        scaling = totals.gradient_scaling(ONE, ONE, nominal_weight=8.0, clip=Clip(0.0, 0.0))
        assert bool(scaling.finite) is makes_update

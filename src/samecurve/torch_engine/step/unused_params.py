"""Parameters that a loss never uses: found in the first steps and named, since weight decay alone
would move them.

A parameter that the loss of one step does not use has a zero gradient in that step, under every
strategy, as in a loop that zeroes gradients and does not drop them. Momentum and weight decay go on
moving it.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import torch

from samecurve.core.planning.plan import Plan
from samecurve.errors import UserError
from samecurve.torch_engine.process_group import Comm
from samecurve.units import counted

_MOST_STEPS = 100  # in which every parameter is to be used once


class UsageCheck:
    """Watches a run's first epoch, or 100 steps, or all there are, until some rank has used every
    parameter.

    names: of the parameters that are trained.
    """

    def __init__(self, plan: Plan, comm: Comm, device: torch.device, names: Sequence[str]) -> None:
        self._last_step = min(plan.order.steps_per_epoch, _MOST_STEPS, plan.steps)
        self._comm, self._device = comm, device
        self._names, self._used = names, set[str]()
        self._step = 0

    def add(self, with_grad: AbstractSet[str]) -> bool:
        """Note what a step used. Returns whether nothing is left to watch. All ranks call it.

        with_grad: parameters to which this rank's loss gave a gradient.

        UserError, on every rank: the last step that is watched, and some were never used.
        """
        self._used |= with_grad
        self._step += 1
        is_last = self._step >= self._last_step
        is_power_of_two = not self._step & (self._step - 1)
        if not is_last and not is_power_of_two:
            return False
        flags = [float(name in self._used) for name in self._names]
        used_by = torch.tensor(flags, dtype=torch.float64, device=self._device)
        counts: list[float] = self._comm.all_reduce(used_by)().tolist()
        unused = [name for name, count in zip(self._names, counts, strict=True) if not count]
        if is_last and unused:
            raise _never_used(unused, self._step)
        return is_last or not unused


def _never_used(names: Sequence[str], steps: int) -> UserError:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return UserError(
        f"the loss does not use {', '.join(names[:4])}{more}: no gradient came in"
        f" {counted(steps, 'step')}",
        "take them out of the model, or freeze them: parameter.requires_grad_(False) there, or"
        " optimizer.groups in the config",
        "model",
    )

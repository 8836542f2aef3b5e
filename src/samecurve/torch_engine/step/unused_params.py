"""Parameters that a loss never uses: found in the first steps and named, since weight decay alone
would move them.

One that a step's loss does not use has a zero gradient in that step, under every strategy: as in a
loop that zeroes gradients and does not drop them. Momentum and weight decay go on moving it.
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
    """Watches a run's first epoch, or 100 steps, or all there are, until every parameter was used
    by some rank.
    """

    def __init__(self, plan: Plan, comm: Comm, device: torch.device) -> None:
        self._last_step = min(plan.order.steps_per_epoch, _MOST_STEPS, plan.steps)
        self._comm, self._device = comm, device
        self._used: set[str] = set()
        self._step = 0
        self.done = False

    @property
    def is_first_step(self) -> bool:
        return self._step == 0

    def add(self, names: Sequence[str], with_grad: AbstractSet[str]) -> None:
        """After a step that all ranks make.

        names: of what is trained
        with_grad: those that this rank's loss gave a gradient

        UserError, on every rank: the last step that is watched, and some were never used.
        """
        self._used |= with_grad
        self._step += 1
        is_last = self._step >= self._last_step
        is_power_of_two = not self._step & (self._step - 1)
        if not is_last and not is_power_of_two:
            return
        flags = [float(name in self._used) for name in names]
        used_by = torch.tensor(flags, dtype=torch.float64, device=self._device)
        counts: list[float] = self._comm.all_reduce(used_by)().tolist()
        unused = [name for name, count in zip(names, counts, strict=True) if not count]
        self.done = is_last or not unused
        if is_last and unused:
            raise _never_used(unused, self._step)


def _never_used(names: Sequence[str], steps: int) -> UserError:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return UserError(
        f"the loss does not use {', '.join(names[:4])}{more}: no gradient came in"
        f" {counted(steps, 'step')}",
        "take them out of the model, or freeze them: parameter.requires_grad_(False) there, or"
        " optimizer.groups in the config",
        "model",
    )

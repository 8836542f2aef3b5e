"""Watches the first steps of a run for parameters that the loss does not use yet.

A parameter that the loss has not used yet stays as it is. Once the loss has used a parameter, a
step that does not use it gives it a zero gradient, under every strategy, as in a loop that zeroes
gradients and does not drop them: momentum and weight decay go on moving it.
"""

import torch

from samecurve.torch_engine.step.setup import EngineSetup, State, Update

_MOST_STEPS = 100  # after which the parameters are named that the loss has not used


class UsageWatch:
    """Watches which parameters of an update the loss has used, until it has used all of them.

    A parameter is trained from the first step in which any sample of the global batch gives it a
    gradient, as in a plain loop on one device. Until then it stays as it is. From then on a step
    that does not use the parameter gives it a zero gradient.

    All ranks must know of the first use before the update, so each watched step ends with one small
    all-reduce, for which the host waits. It names only the parameters that are still unused.
    """

    def __init__(self, setup: EngineSetup, state: State, update: Update) -> None:
        self._setup, self._state, self._update = setup, state, update
        plan = setup.plan
        self._last_step = min(plan.order.steps_per_epoch, _MOST_STEPS, plan.steps)
        self._step = state.step
        self._unused = [
            param for param in update.trained if not self._step or state.late.get(param.name) == 0
        ]

    def end_step(self) -> bool:
        """Note what a step used. Returns whether something is left to watch. All ranks call it,
        between the reduction and the update.
        """
        is_first = not self._step
        self._step += 1
        used = self._used()
        unused = [param for param in self._unused if param.name not in used]
        if unused if is_first else used:
            from samecurve.torch_engine.optimizers.late_params import note_first_use

            names = [param.name for param in unused]
            note_first_use(self._state, self._update, used, names, is_first_step=is_first)
        self._unused = unused
        if unused and self._step == self._last_step:
            from samecurve.core.unused_params import unused_line

            self._setup.notes.append(unused_line([param.name for param in unused]))
        return bool(unused)

    def _used(self) -> set[str]:
        """The watched parameters that this step's loss used, on any rank."""
        has_gradient = self._setup.strategy.has_gradient
        counts = [float(has_gradient(param.parameter)) for param in self._unused]
        if self._setup.comm.group is not None and counts:
            sent = torch.tensor(counts, dtype=torch.float64, device=self._setup.device)
            counts = self._setup.comm.all_reduce(sent)().tolist()
        return {param.name for param, count in zip(self._unused, counts, strict=True) if count}

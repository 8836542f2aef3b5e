"""The gradient of one microbatch, computed by every device before the step that computes it, too:
all hashes must be equal. Probes do so where a plan gives the same bits; train.sentinel asks for
more of it, to find devices that compute wrong.

Gradients are hashed as backward gives them, before anything is added up. So the gradient that is
trained with is checked, too, and devices that compute side by side take no longer than one.
Buffers, attributes and random generators are put back: a step is the same to the bit, checked or
not.
"""

import socket
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from samecurve.errors import UserError
from samecurve.features.guard import Chosen, SentinelRule
from samecurve.features.guard.shared_microbatch import copy_of
from samecurve.features.guard.trial_passes import dense_and_real, graph_nodes
from samecurve.features.guard.verdict import (
    CheckedGradient,
    Finding,
    Row,
    alike,
    hosts_of_devices,
    judge,
)
from samecurve.features.guard.weights import BitSums
from samecurve.torch_engine.precision import in_precision, on_device
from samecurve.torch_engine.process_group import texts_of_all
from samecurve.torch_engine.step.training_step import TrainingStep
from samecurve.torch_engine.users_code import has_users_code
from samecurve.torch_engine.users_code.side_effects import Buffers, undone

Hashes = dict[str, torch.Tensor]  # of a gradient's arrays, by name


class Recomputation:
    """One microbatch of the step in work, computed again. It is made where what forward passes
    change is undone.

    rule: of train.sentinel, which says what a difference does; None: it ends the run
    is_due: whether the rule asks for it, and not a probe of the run itself

    UserError: the model recomputes blocks in a way that gives gradients in a step only; a probe
        leaves it at that.
    """

    def __init__(
        self,
        step: TrainingStep,
        chosen: Chosen,
        rule: SentinelRule | None,
        *,
        is_due: bool,
    ) -> None:
        self._step, self._chosen, self._rule, self._is_due = step, chosen, rule, is_due
        self._setup, self._plan, self._strategy = step.setup, step.plan, step.strategy
        self._names = [param.name for param in step.state.trained]
        run = self._strategy.train if self._strategy.gathers_weights else self._strategy.call
        self._run = in_precision(run, step.plan, step.setup.device)
        self._bit_sums = [BitSums() for _ in step.devices]
        self._buffers = [Buffers(model) for model in self._strategy.models]  # as the step began
        # by device of the plan, the hashes of each time that it computed
        self._times: list[list[Row]] = [[] for _ in self._plan.layout.devices]
        self._in_step: Hashes = {}  # of the step's own gradient
        self._num_seen = 0  # microbatches that the step has computed on the chosen one's device
        self._hooks: Sequence[RemovableHandle] = ()
        try:
            self._compute_everywhere()
            if self._finding():
                self._compute_everywhere()
        except _ReentrantError:
            if is_due:
                raise
            return
        step.after_forward.append(self.after_forward)
        step.after_backward.append(self.after_backward)
        step.after_reduction.append(self.after_reduction)

    # --- the hooks of this step

    def after_forward(self, device_index: int, is_first: bool, /) -> None:  # noqa: FBT001 - hook
        """Have the gradients hashed, if this is the microbatch that was chosen."""
        if self._chosen.thread != device_index:
            return
        self._num_seen = 1 if is_first else self._num_seen + 1
        if self._num_seen - 1 == self._chosen.place:
            self._hooks = self._hash_gradients(device_index, self._in_step)

    def after_backward(self, device_index: int, _is_first: bool, /) -> None:  # noqa: FBT001 - hook
        if self._chosen.thread == device_index:
            for hook in self._hooks:
                hook.remove()
            self._hooks = ()

    def after_reduction(self) -> None:
        """Judge all hashes, the step's own included. The hook does not come again.

        UserError: they differ for what the loss reads. RunError: they differ, and
        train.on_sentinel is stop.
        """
        self._step.after_forward.remove(self.after_forward)
        self._step.after_backward.remove(self.after_backward)
        in_step = self._setup.comm.all_reduce(self._row(self._in_step))().cpu().numpy()
        self._times[self._chosen.choice.device].insert(0, in_step)
        finding = self._finding()
        is_first = min(map(len, self._times)) < 2 or self._plan.layout.num_devices == 1
        if finding and is_first and not self._strategy.gathers_weights:
            with undone(self._setup):
                for buffers in self._buffers:
                    buffers.put_back()
                self._compute_everywhere()
            finding = self._finding()
        if not finding and not self._is_due:
            return
        gradient = self._described(hosts=self._hosts() if finding else ())
        times = [len(of_device) for of_device in self._times]
        if not finding:
            self._setup.notes.append(gradient.passed(sum(times)))
            return
        if self._rule is None and has_users_code(self._setup.task, self._strategy.models[0]):
            from samecurve.features.guard.diagnosis import unlike_error

            raise unlike_error(self._setup, gradient.cause(finding, times))
        self._setup.notes.append(gradient.report(finding, times))

    def _finding(self) -> Finding | None:
        return judge(self._times, alike(self._plan))

    # --- its gradient

    def _compute_everywhere(self) -> None:
        """Compute the gradient on all devices of all ranks, and note the hashes."""
        jobs: list[Callable[[], torch.Tensor]] = [
            on_device(partial(self._computed, index), device)
            for index, device in enumerate(self._setup.devices)
        ]
        rows = self._strategy.run_jobs(jobs)
        comm, device = self._setup.comm, self._setup.device
        table = torch.zeros(
            (comm.world_size, len(rows), len(self._names)), dtype=torch.int64, device=device
        )
        table[comm.rank] = torch.stack([row.to(device) for row in rows])
        by_device = comm.all_reduce(table)().flatten(0, 1).cpu().numpy()
        for times, row in zip(self._times, by_device, strict=True):
            times.append(row)

    def _computed(self, device_index: int) -> torch.Tensor:
        """The hashes of the gradient that one device computes."""
        microbatch = self._chosen.microbatch
        context, keys = self._setup.contexts[device_index], self._step.keys_of(microbatch)
        hashes: Hashes = {}
        with context.within(keys, number=microbatch.number):
            if self._strategy.gathers_weights:
                self._backward_together(hashes)
            else:
                total = self._loss_sum(device_index)
                leaves = self._strategy.leaves(device_index)
                if device_index == 0:
                    _refuse_reentrant(total)
                gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
                for name, gradient in zip(leaves, gradients, strict=True):
                    if gradient is not None:
                        hashes[name] = self._hash(device_index, gradient)
        return self._row(hashes, device_index)

    def _backward_together(self, hashes: Hashes) -> None:
        """Forward and backward as in a step, whose weights all ranks gather together. What is
        summed of it is dropped.
        """
        strategy, parameters = self._strategy, self._step.state.parameters
        microbatch = self._chosen.microbatch
        strategy.begin_step(parameters, self._setup.comm.world_size)  # a microbatch for each rank
        strategy.begin_microbatch(0, microbatch, is_last=True)
        total = self._loss_sum(0)
        hooks = self._hash_gradients(0, hashes)
        torch.autograd.backward(total)
        for hook in hooks:
            hook.remove()
        strategy.end_microbatch(0, microbatch)
        for parameter in parameters:
            parameter.grad = None

    def _loss_sum(self, device_index: int) -> torch.Tensor:
        """The loss's sum, with the factor that it has in the step.

        Models may write to their inputs, so each computation has rows of its own.
        """
        step, batch = self._step, self._chosen.batch
        arrays = step.arrays_on(device_index, self._chosen.microbatch)
        if self._setup.devices[device_index].type == "cpu":
            arrays = {name: copy_of(tensor) for name, tensor in arrays.items()}
        phase = step.update.phase
        losses = self._run(device_index, step.task.losses, arrays, batch.progress, phase)
        total: torch.Tensor = losses["loss"].sum
        scaled: torch.Tensor = total * step.loss_factors[device_index].to(total.dtype)
        return scaled

    def _hash_gradients(self, device_index: int, hashes: Hashes) -> list[RemovableHandle]:
        """Have the next backward pass on a device hash each gradient, before it is added up."""

        def hash_one(name: str, gradient: torch.Tensor) -> None:
            hashes[name] = self._hash(device_index, gradient)

        return [
            leaf.register_hook(partial(hash_one, name))  # type: ignore[no-untyped-call]
            for name, leaf in self._strategy.leaves(device_index).items()
        ]

    def _hash(self, device_index: int, gradient: torch.Tensor) -> torch.Tensor:
        return self._bit_sums[device_index].of(dense_and_real(gradient))

    def _row(self, hashes: Hashes, device_index: int = 0) -> torch.Tensor:
        """The hashes in the order of the model; 0: the loss does not use the array."""
        device = self._setup.devices[device_index]
        zero = torch.zeros((), dtype=torch.int64, device=device)
        return torch.stack([hashes.get(name, zero).to(device) for name in self._names])

    def _described(self, hosts: Sequence[str]) -> CheckedGradient:
        batch, choice, microbatch, *_ = self._chosen
        return CheckedGradient(
            plan=self._plan,
            rule=self._rule or SentinelRule(0, "stop"),
            step=batch.step,
            choice=choice,
            count=batch.num_microbatches,
            ids=microbatch.keys.rows.ids.tolist(),
            names=self._names,
            hosts=hosts,
        )

    def _hosts(self) -> list[str]:
        host = socket.gethostname().encode()
        texts = texts_of_all(self._setup.comm, host, self._setup.device)
        return hosts_of_devices(self._plan, [text.decode() for text in texts])


class _ReentrantError(UserError):
    """Gradients can be had in a step only."""


def _refuse_reentrant(total: torch.Tensor) -> None:
    """_ReentrantError: a block is recomputed by a backward pass of its own, which adds to the
    step's gradients, and which torch.autograd.grad() leaves out.
    """
    if any(node.name() == "CheckpointFunctionBackward" for node in graph_nodes(total)):
        raise _ReentrantError(
            "train.sentinel: torch.utils.checkpoint with use_reentrant=True gives gradients in a"
            " step only",
            "use_reentrant=False, or train.recompute, or leave train.sentinel out",
            "model",
        )

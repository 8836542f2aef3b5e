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
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from samecurve.core.protocols import Batch, MicroBatch, Progress, Round
from samecurve.errors import UserError
from samecurve.features.guard import Choice, SentinelRule
from samecurve.features.guard.shared_microbatch import copy_of, find
from samecurve.features.guard.unlike_ranks import unlike_error
from samecurve.features.guard.verdict import CheckedGradient, Row, alike, judge
from samecurve.torch_engine.bit_sums import BitSums
from samecurve.torch_engine.precision import in_precision, on_device
from samecurve.torch_engine.process_group import texts_of_all
from samecurve.torch_engine.step.training_step import TrainingStep
from samecurve.torch_engine.users_code import has_users_code
from samecurve.torch_engine.users_code.side_effects import Buffers, undone

Hashes = dict[str, torch.Tensor]  # of a gradient's arrays, by name


@dataclass(kw_only=True)
class _Check:
    """The check of the step in work.

    count: microbatches of the step
    thread: which of this process's devices has it in the step; None:
        another process has it
    place: which of the thread's microbatches in this step it is
    buffers: of each device's model, as the step began
    """

    choice: Choice
    count: int
    progress: Progress
    microbatch: MicroBatch
    thread: int | None
    place: int
    buffers: Sequence[Buffers]
    times: list[list[Row]]  # by device of the plan, the hashes of each time that it computed
    in_step: Hashes = field(default_factory=dict)  # of the step's own gradient
    num_seen: int = 0  # microbatches that the step has computed on that device
    hooks: Sequence[RemovableHandle] = ()


class Chosen(NamedTuple):
    """The microbatch of a step that is computed again."""

    batch: Batch[list[Round]]
    choice: Choice
    microbatch: MicroBatch


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
        self._step, self._rule, self._is_due = step, rule, is_due
        batch, choice, microbatch = chosen
        self._setup, self._plan, self._strategy = step.setup, step.plan, step.strategy
        self._names = [param.name for param in step.state.trained]
        run = self._strategy.train if self._strategy.gathers_weights else self._strategy.call
        self._run = in_precision(run, step.plan, step.setup.device)
        self._bit_sums = [BitSums() for _ in step.devices]
        _, thread, place = find(step, batch, choice)
        check = self._check = _Check(
            choice=choice,
            count=batch.num_microbatches,
            progress=batch.progress,
            microbatch=microbatch,
            thread=thread,
            place=place,
            buffers=[Buffers(model) for model in self._strategy.models],
            times=[[] for _ in self._plan.layout.devices],
        )
        try:
            self._compute_everywhere(check)
            if judge(check.times, alike(self._plan)):
                self._compute_everywhere(check)
        except _ReentrantError:
            if is_due:
                raise
            return
        step.after_forward.append(self.after_forward)
        step.after_backward.append(self.after_backward)
        step.after_reduction.append(self.after_reduction)

    # The hooks of this step:

    def after_forward(self, device_index: int, is_first: bool, /) -> None:  # noqa: FBT001 - hook
        """Have the gradients hashed, if this is the microbatch that was chosen."""
        check = self._check
        if check.thread != device_index:
            return
        check.num_seen = 1 if is_first else check.num_seen + 1
        if check.num_seen - 1 == check.place:
            check.hooks = self._hash_gradients(device_index, check.in_step)

    def after_backward(self, device_index: int, _is_first: bool, /) -> None:  # noqa: FBT001 - hook
        check = self._check
        if check.thread == device_index:
            for hook in check.hooks:
                hook.remove()
            check.hooks = ()

    def after_reduction(self) -> None:
        """Judge all hashes, the step's own included. The hook does not come again.

        UserError: they differ for what the loss reads. RunError: they differ, and
        train.on_sentinel is stop.
        """
        step, check = self._step, self._check
        step.after_forward.remove(self.after_forward)
        step.after_backward.remove(self.after_backward)
        row = self._row(check.in_step)
        in_step = self._setup.comm.all_reduce(row)().cpu().numpy()
        check.times[check.choice.device].insert(0, in_step)
        finding = judge(check.times, alike(self._plan))
        is_first = min(map(len, check.times)) < 2 or self._plan.layout.num_devices == 1
        if finding and is_first and not self._strategy.gathers_weights:
            with undone(self._setup):
                for buffers in check.buffers:
                    buffers.put_back()
                self._compute_everywhere(check)
            finding = judge(check.times, alike(self._plan))
        if not finding and not self._is_due:
            return
        gradient = self._described(check, hosts=self._hosts() if finding else ())
        times = [len(each) for each in check.times]
        if not finding:
            self._setup.notes.append(gradient.passed(sum(times)))
            return
        if self._rule is None and has_users_code(self._setup.task, self._strategy.models[0]):
            raise unlike_error(self._setup, gradient.cause(finding, times))
        self._setup.notes.append(gradient.report(finding, times))

    # Its gradient:

    def _compute_everywhere(self, check: _Check) -> None:
        """Compute the gradient on all devices of all ranks, and note the hashes."""
        jobs: list[Callable[[], torch.Tensor]] = [
            on_device(partial(self._computed, index, check), self._setup.devices[index])
            for index in range(len(self._setup.devices))
        ]
        rows = self._strategy.run_jobs(jobs)
        comm, device = self._setup.comm, self._setup.device
        table = torch.zeros(
            (comm.world_size, len(rows), len(self._names)), dtype=torch.int64, device=device
        )
        table[comm.rank] = torch.stack([row.to(device) for row in rows])
        by_device = comm.all_reduce(table)().flatten(0, 1).cpu().numpy()
        for times, row in zip(check.times, by_device, strict=True):
            times.append(row)

    def _computed(self, device_index: int, check: _Check) -> torch.Tensor:
        """The hashes of the gradient that one device computes."""
        step, microbatch = self._step, check.microbatch
        context, keys = self._setup.contexts[device_index], step.keys_of(microbatch)
        hashes: Hashes = {}
        with context.within(keys, number=microbatch.number):
            if self._strategy.gathers_weights:
                self._backward_together(microbatch, check.progress, hashes)
            else:
                total = self._loss_sum(device_index, microbatch, check.progress)
                leaves = self._strategy.leaves(device_index)
                if device_index == 0:
                    _refuse_reentrant(total)
                gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
                for name, gradient in zip(leaves, gradients, strict=True):
                    if gradient is not None:
                        hashes[name] = self._hash(device_index, gradient)
        return self._row(hashes, device_index)

    def _backward_together(
        self, microbatch: MicroBatch, progress: Progress, hashes: Hashes
    ) -> None:
        """Forward and backward as in a step, whose weights all ranks gather together. What is
        summed of it is dropped.
        """
        strategy, parameters = self._strategy, self._step.state.parameters
        strategy.begin_step(parameters, self._setup.comm.world_size)  # a microbatch for each rank
        strategy.begin_microbatch(0, microbatch, is_last=True)
        total = self._loss_sum(0, microbatch, progress)
        hooks = self._hash_gradients(0, hashes)
        torch.autograd.backward(total)
        for hook in hooks:
            hook.remove()
        strategy.end_microbatch(0, microbatch)
        for parameter in parameters:
            parameter.grad = None

    def _loss_sum(
        self, device_index: int, microbatch: MicroBatch, progress: Progress
    ) -> torch.Tensor:
        """The loss's sum, with the factor that it has in the step.

        Models may write to their inputs, so each computation has rows of its own.
        """
        step = self._step
        arrays = step.arrays_on(device_index, microbatch)
        if self._setup.devices[device_index].type == "cpu":
            arrays = {name: copy_of(tensor) for name, tensor in arrays.items()}
        phase = step.update.phase
        losses = self._run(device_index, step.task.losses, arrays, progress, phase)
        total: torch.Tensor = losses["loss"].sum
        scaled: torch.Tensor = total * step.loss_factors[device_index].to(total.dtype)
        return scaled

    def _hash_gradients(self, device_index: int, hashes: Hashes) -> list[RemovableHandle]:
        """Have the next backward pass on a device hash each gradient, before it is added up."""

        def hash_one(name: str, gradient: torch.Tensor) -> None:
            hashes[name] = self._hash(device_index, gradient)

        leaves = self._strategy.leaves(device_index)
        hooks = []
        for name, leaf in leaves.items():
            hook = partial(hash_one, name)
            hooks.append(leaf.register_hook(hook))  # type: ignore[no-untyped-call]
        return hooks

    def _hash(self, device_index: int, gradient: torch.Tensor) -> torch.Tensor:
        dense = gradient.detach()
        if dense.is_sparse:
            dense = dense.to_dense()
        if dense.is_complex():
            dense = torch.view_as_real(dense.resolve_conj())
        return self._bit_sums[device_index].of(dense)

    def _row(self, hashes: Hashes, device_index: int = 0) -> torch.Tensor:
        """The hashes in the order of the model; 0: the loss does not use the array."""
        device = self._setup.devices[device_index]
        zero = torch.zeros((), dtype=torch.int64, device=device)
        return torch.stack([hashes.get(name, zero).to(device) for name in self._names])

    def _described(self, check: _Check, hosts: Sequence[str]) -> CheckedGradient:
        return CheckedGradient(
            plan=self._plan,
            rule=self._rule or SentinelRule(0, "stop"),
            step=check.progress.step,
            choice=check.choice,
            count=check.count,
            ids=check.microbatch.keys.rows.ids.tolist(),
            names=self._names,
            hosts=hosts,
        )

    def _hosts(self) -> list[str]:
        """The host of each device; empty: there is one host."""
        comm = self._setup.comm
        if comm.group is None:
            return []
        texts = texts_of_all(comm, socket.gethostname().encode(), self._setup.device)
        hosts = [text.decode() for text in texts for _ in self._plan.layout.devices_of(comm.rank)]
        return hosts if len(set(hosts)) > 1 else []


class _ReentrantError(UserError):
    """Gradients can be had in a step only."""


def _refuse_reentrant(total: torch.Tensor) -> None:
    """_ReentrantError: a block is recomputed by a backward pass of its own, which adds to the
    step's gradients, and which torch.autograd.grad() leaves out.
    """
    seen, left = set(), [total.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise _ReentrantError(
                "train.sentinel: torch.utils.checkpoint with use_reentrant=True gives gradients in"
                " a step only",
                "use_reentrant=False, or train.recompute, or leave train.sentinel out",
                "model",
            )
        left += [following for following, _ in node.next_functions]

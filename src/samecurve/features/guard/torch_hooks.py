"""The guard in engine torch: what it tries before the first step, and what it sees in each step.

A loss may read weights. In each step they have the same versions after the last backward pass as
before the first forward pass; in a probed step, the same bits, too, and so has what the optimizer
keeps. Buffers that the first step does not write into are not written into later.

A probe takes one microbatch of the step, chosen by the seed. All ranks compute some of its samples
at once and in two parts: loss, gradient and the means beside the loss must add up, and be the same
on all ranks. Where a plan gives the same bits, all devices compute the whole microbatch once more
(recomputation.py). So what depends on the rank, the split, the epoch or the clock is found when it
first matters, on the state that the run really has.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from samecurve.core.protocols import Batch, MicroBatch, Round, TrialRows
from samecurve.errors import UserError
from samecurve.features.guard import (
    Choice,
    Chosen,
    SentinelRule,
    choose,
    is_due,
    is_probed,
    next_probe,
)
from samecurve.features.guard.additivity import lines_or_refuse
from samecurve.features.guard.split_check import SplitCheck
from samecurve.features.guard.trials import is_on_any_rank
from samecurve.features.guard.weights import (
    VERSION,
    Bits,
    FrozenWeights,
    Versions,
    buffers_of_no_norm,
    moments,
    read_weights,
    refuse_stale_views,
    weights_of,
)
from samecurve.torch_engine.randomness import StagedKeys
from samecurve.torch_engine.step.feature_hooks import Start, TorchHooks
from samecurve.torch_engine.step.training_step import TrainingStep
from samecurve.torch_engine.users_code import loss_place
from samecurve.torch_engine.users_code.holders import HeldByTask
from samecurve.torch_engine.users_code.side_effects import Noted, undone

if TYPE_CHECKING:
    from samecurve.core.determinism.sample_keys import RowKeys


class Hooks(TorchHooks):
    """Watches the training of one process."""

    value: SentinelRule | None
    _start: Start | None = None  # None: nothing is trained

    def begin_training(self, start: Start) -> Mapping[str, Any]:
        """UserError: the loss does not add up, does not repeat, or writes where it must not."""
        setup, self._start = self.setup, start
        kept = Bits(chain.from_iterable(map(moments, start.state.updates)))
        verdict = SplitCheck(setup, start.rows, start.stage, is_split=start.is_split).run()
        if changed := kept.written():
            from samecurve.features.guard.diagnosis import write_error

            raise write_error(setup, changed[0], lambda: None)
        lines = lines_or_refuse(
            verdict.error,
            repeats=verdict.repeats,
            is_split=start.is_split,
            allowed=setup.plan.compute.allow_coupled,
        )
        setup.notes.extend([*lines, *verdict.notes])
        return verdict.brings

    def add_to(self, steps: Sequence[TrainingStep]) -> None:
        if self._start is None:
            return
        if self.setup.task.optimizer and self.setup.plan.layout.shards > 1:
            from samecurve.features.guard.one_device import refuse_joint_updates

            refuse_joint_updates(self.setup, self._start.state.updates)
        for step in steps:
            StepGuard(step, self.value, phases=len(steps), is_split=self._start.is_split)
        steps[-1].after_reduction += [self._refuse_learned, self._refuse_stale_views]

    def _refuse_learned(self) -> None:
        """Once, after a backward pass. UserError: the loss trains a tensor outside of the model."""
        HeldByTask(self.setup.task, self.setup.strategy.models[0]).refuse_learned()

    def _refuse_stale_views(self) -> None:
        """Once, after forward passes. UserError: a view of a weight doesn't follow the weight."""
        assert self._start is not None
        refuse_stale_views(self._start.first_memory, self.setup)


class StepGuard:
    """The hooks of a training step.

    rule: of train.sentinel, which asks for more probes
    phases: how many updates a step of the run has
    is_split: whether the loss must add up over samples
    """

    def __init__(
        self, step: TrainingStep, rule: SentinelRule | None, *, phases: int, is_split: bool
    ) -> None:
        self._step, self._rule, self._phases, self._is_split = step, rule, phases, is_split
        self._setup, self._plan = step.setup, step.plan
        self._first = self._next = step.state.step  # the first step, and the next that is probed
        self._frozen = FrozenWeights(step.strategy)
        self._versions: Versions | None = None
        self._bits: Bits | None = None  # as a probed step began
        # names of buffers that no step writes into; None: before this process's first microbatch
        self._still: Collection[str] | None = None if is_split else ()
        if self._plan.compute.allow_coupled:
            self._still = ()
        self._batch: Batch[list[Round]] | None = None  # of the step in work
        step.before_step.append(self.before_step)
        step.after_reduction.append(self.after_reduction)

    def before_step(self, batch: Batch[list[Round]]) -> None:
        """UserError: a probe fails. RunError: a device computes wrong."""
        self._batch = batch
        if self._versions is None or batch.step >= self._next:
            self._versions, self._bits = Versions(self._watched()), None
            if batch.step >= self._next:
                weights = weights_of(self._step.strategy)
                self._bits = Bits(chain(weights, moments(self._step.update)))
                self._probe(batch)
                self._next = next_probe(self._plan, self._rule, batch.step)
        versions = self._versions  # what follows is versions.note(): each step comes here
        versions.before = list(map(VERSION, versions.tensors))

    def _watched(self) -> list[tuple[str, torch.Tensor]]:
        """The weights and the buffers that no step writes into; before that is known, all."""
        moved, named = self._setup.moved_buffers, buffers_of_no_norm(self._step.strategy)
        buffers = [pair for pair in named if pair[0] not in moved]
        if self._still is not None:
            buffers = [pair for pair in buffers if pair[0] in self._still]
        return [*read_weights(self._step.strategy), *buffers]

    def after_reduction(self) -> bool:
        """Returns True: the hook comes again.

        UserError: the loss of this step has written into a weight, or has thawed one.
        """
        versions = self._versions
        assert versions is not None
        is_still = self._still is not None and versions.before == list(
            map(VERSION, versions.tensors)
        )
        if is_still and self._bits is None:
            return True
        written = versions.written() + (self._bits.written() if self._bits else [])
        if self._still is None:
            written = self._settle_still(written)
        if written:
            raise self._write_error(written[0])
        if thawed := self._frozen.thawed():
            from samecurve.features.guard.split_errors import explain_deed

            raise explain_deed("thawed", loss_place(self._setup), name=thawed)
        self._batch = self._bits = None
        return True

    def _settle_still(self, written: Sequence[str]) -> list[str]:
        """Note the buffers that a step does not write into. Returns the weights among `written`."""
        assert self._batch is not None
        buffers = {name for name, _ in buffers_of_no_norm(self._step.strategy)}
        if any(microbatch for of_round in self._batch.rounds for microbatch in of_round):
            self._still, self._versions = buffers.difference(written), None
        return [name for name in written if name not in buffers]

    def _write_error(self, name: str) -> UserError:
        """The error of a weight that the loss of this process's first microbatch writes into."""
        from samecurve.features.guard.diagnosis import write_error

        step, batch = self._step, self._batch
        assert batch is not None
        microbatch = next(filter(None, (of_round[0] for of_round in batch.rounds)))

        def again() -> None:
            with step.setup.contexts[0].within(step.keys_of(microbatch), number=microbatch.number):
                step.forward(0, microbatch, batch.progress)

        return write_error(step.setup, name, again)

    # --- probes

    def _probe(self, batch: Batch[list[Round]]) -> None:
        choice = choose(self._plan, batch.step, batch.num_microbatches, phases=self._phases)
        if choice.phase != self._step.update.number or self._step.comm.timeline is not None:
            return  # a profile is one of plain steps
        is_due_by_rule = is_due(self._rule, batch.step, self._first)
        may_probe = not self._plan.compute.allow_coupled and self._has_room()
        recomputes = is_due_by_rule or (may_probe and self._plan.same_bits and self._computes_alone)
        # before the first step of a start the split check has tried more
        in_parts = may_probe and self._is_split and batch.step != self._first
        in_parts = in_parts and is_probed(self._plan, batch.step, self._first)
        if not (recomputes or in_parts):
            return
        chosen = _chosen(self._step, batch, choice)
        with undone(self._setup) as noted:
            if in_parts:
                self._try_parts(chosen, noted)
            if recomputes:
                from samecurve.features.guard.recomputation import Recomputation

                Recomputation(self._step, chosen, self._rule, is_due=is_due_by_rule)

    @property
    def _computes_alone(self) -> bool:
        """Whether a microbatch's loss can be computed without the others."""
        return not (self._plan.sees_whole_batch or self._plan.syncs_norms)

    def _has_room(self) -> bool:
        """Whether one more gradient has room beside all that lasts; of GPUs, on all ranks."""
        setup, device = self._setup, self._setup.device
        if device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        gradient = sum(p.numel() * p.itemsize for p in self._step.state.parameters)
        return not is_on_any_rank(setup, 2 * gradient > free)

    def _try_parts(self, chosen: Chosen, noted: Noted) -> None:
        """UserError: what some of its samples give does not add up, or differs between ranks."""
        rows = _rows_of(chosen)
        # the rows of a step have been staged
        check = SplitCheck(self._setup, rows, lambda staged: staged, is_split=True)
        error = check.error_in_step(self._step.update.number, noted)
        if error and self._bits and (written := self._bits.written()):
            error = self._write_error(written[0])
        if error:
            raise error


def _chosen(step: TrainingStep, batch: Batch[list[Round]], choice: Choice) -> Chosen:
    """The microbatch of a choice; all ranks call it together."""
    devices = step.plan.layout.devices_of(step.comm.rank)
    own: MicroBatch | None = None
    thread, place = None, 0
    if choice.device in devices:
        thread = choice.device - devices.start
        in_turn = list(filter(None, (of_round[thread] for of_round in batch.rounds)))
        numbers = [microbatch.number if microbatch.real else None for microbatch in in_turn]
        place = numbers.index(choice.number)
        own = in_turn[place]
    if step.comm.group is not None:
        from samecurve.features.guard.shared_microbatch import shared

        own = shared(step, batch, choice, own)
    assert own is not None
    return Chosen(batch, choice, own, thread, place)


def _rows_of(chosen: Chosen) -> TrialRows:
    """The rows of a microbatch."""
    keys: RowKeys = chosen.microbatch.keys.rows

    def pick(numbers: Sequence[int]) -> MicroBatch:
        rows = list(numbers)
        arrays = {name: tensor[rows] for name, tensor in chosen.microbatch.arrays.items()}
        return MicroBatch(arrays, keys=StagedKeys(replace(keys, ids=keys.ids[rows])))

    return TrialRows(keys.ids, chosen.batch.step, pick)

"""The guard of a training step: it sees that the loss writes into no weight, and probes some steps.

A loss may read weights. In each step they have the same versions after the last backward pass as
before the first forward pass; in a probed step, the same bits, too.

A probe takes one microbatch of the step, chosen by the seed. All ranks compute some of its samples
at once and in two parts: loss, gradient and the means beside the loss must add up, and be the same
on all ranks. Where a plan gives the same bits, all devices compute the whole microbatch once more
(recomputation.py). So what depends on the rank, the split, the epoch or the clock is found when it
first matters, on the state that the run really has.
"""

import torch

from samecurve.core.protocols import Batch, MicroBatch, Round
from samecurve.features.guard import SentinelRule, choose, is_due, is_probed, next_probe
from samecurve.features.guard.shared_microbatch import rows_of, shared
from samecurve.features.guard.split_check import SplitCheck
from samecurve.features.guard.written_weights import (
    VERSION,
    FrozenWeights,
    WeightBits,
    WeightVersions,
    thaw_error,
    write_error,
)
from samecurve.torch_engine.step.training_step import TrainingStep
from samecurve.torch_engine.users_code.side_effects import Noted, undone


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
        self._versions: WeightVersions | None = None
        self._bits: WeightBits | None = None  # as a probed step began
        self._batch: Batch[list[Round]] | None = None  # of the step in work
        step.before_step.append(self.before_step)
        step.after_reduction.append(self.after_reduction)

    def before_step(self, batch: Batch[list[Round]]) -> None:
        """UserError: a probe fails. RunError: a device computes wrong."""
        self._batch = batch
        if self._versions is None or batch.step >= self._next:
            self._versions, self._bits = WeightVersions(self._step.strategy), None
            if batch.step >= self._next:
                self._bits = WeightBits(self._step.strategy)
                self._probe(batch)
                self._next = next_probe(self._plan, self._rule, batch.step)
        versions = self._versions  # what follows is versions.note(): each step comes here
        versions.before = list(map(VERSION, versions.tensors))

    def after_reduction(self) -> bool:
        """Returns True: the hook comes again.

        UserError: the loss of this step has written into a weight, or has thawed one.
        """
        versions = self._versions
        assert versions is not None
        if self._bits is None and versions.before == list(map(VERSION, versions.tensors)):
            return True
        written = versions.written() or (self._bits and self._bits.written())
        if written:
            raise write_error(self._setup, written, self._again)
        if thawed := self._frozen.thawed():
            raise thaw_error(self._setup, thawed)
        self._batch = self._bits = None
        return True

    def _again(self) -> None:
        """Compute the loss of this process's first microbatch once more."""
        step, batch = self._step, self._batch
        assert batch is not None
        microbatch = next(filter(None, (of_round[0] for of_round in batch.rounds)))
        with step.setup.contexts[0].within(step.keys_of(microbatch), number=microbatch.number):
            step.forward(0, microbatch, batch.progress)

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
        microbatch = shared(self._step, batch, choice)
        with undone(self._setup) as noted:
            if in_parts:
                self._try_parts(microbatch, batch, noted)
            if recomputes:
                from samecurve.features.guard.recomputation import Chosen, Recomputation

                chosen = Chosen(batch, choice, microbatch)
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
        lacks = torch.tensor(float(2 * gradient > free), dtype=torch.float64, device=device)
        return not float(setup.comm.all_reduce(lacks)())

    def _try_parts(self, microbatch: MicroBatch, batch: Batch[list[Round]], noted: Noted) -> None:
        """UserError: what some of its samples give does not add up, or differs between ranks."""
        rows = rows_of(microbatch, batch.progress)
        check = SplitCheck(self._setup, rows, _staged, is_split=True)
        error = check.error_in_step(self._step.update.number, noted)
        if error and self._bits and (written := self._bits.written()):
            error = write_error(self._setup, written, self._again)
        if error:
            raise error


def _staged(microbatch: MicroBatch) -> MicroBatch:
    """The rows of a step have been staged."""
    return microbatch

"""The split check: tries before a run's first step whether the loss is the same however a batch is
divided over devices and microbatches.

For each update phase of a step it tries, in this order, until something is wrong:

1. whole: the loss of up to 16 samples at once, on the run's own devices. Where the loss draws
   random numbers, two sizes of a microbatch teach first which draws follow the samples, and parts
   which rows of a draw are a sample's.
2. again: the same samples once more. Another loss does not repeat.
3. in parts: the same samples in two parts. Sums and weights must add up, buffers must move alike.
4. far: the same samples as after many more microbatches, where an attribute counts.
5. alone: each sample by itself, where weights differ. A sample with nothing to count has weight 0.
6. kept: attributes of the last microbatch that a later phase, or a call after an update, reads.
7. hooks: of the user's on accumulated gradients.
8. gradient: a few samples in three parts: the loss, its gradient, and the means that are logged
   beside it.
9. one device: a few samples under a sharded strategy, and with whole weights.
10. later: a few samples in parts at later steps, where the loss depends on the step; the first
   four trials, too, where it changes other buffers there; then "gradient" at the last of these.
11. what features check: batch_loss(), which every device computes by itself.

No trial may write into a weight. What shows only once weights have moved, behind a gate that begins
at 0, is found by the first probe (torch_hooks.py).

first_look.py makes the first four trials, trials.py computes the losses, judge.py compares them and
shares the error between ranks, and diagnosis.py, imported only where something is wrong, finds the
line of the user's code. Every rank tries the same samples and makes the same calls, whatever it
finds. Afterwards the model, the task's attributes and the random generators are as before.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from samecurve.core.feature_list import brought_by
from samecurve.core.protocols import TrialRows
from samecurve.errors import UserError
from samecurve.features.guard.additivity import (
    TOLERANCE,
    compare_repeats,
    has_even_weights,
    rows_of_odd_weight,
    steps_tried,
    three_parts,
    two_parts,
)
from samecurve.features.guard.first_look import FirstLook
from samecurve.features.guard.judge import Judge
from samecurve.features.guard.trials import (
    RAISED,
    Drawn,
    Observed,
    Rows,
    Stage,
    Trials,
)
from samecurve.features.guard.weights import Bits, FrozenWeights, weights_of
from samecurve.torch_engine.step import EngineSetup
from samecurve.torch_engine.strategies import GatherOrderError
from samecurve.torch_engine.users_code import (
    loss_place,
    names_read,
    place_of,
    place_of_method,
    users_code,
)
from samecurve.torch_engine.users_code.holders import described
from samecurve.torch_engine.users_code.side_effects import Noted, Position

if TYPE_CHECKING:
    from samecurve.features.guard.split_errors import Deed

_FEW = 6  # samples of which gradients are tried, and losses at later steps
_FEW_IN_STEP = 3  # in a probed step, which waits for them: the fewest with unequal parts


@dataclass(frozen=True)
class SplitVerdict:
    """The result of the split check.

    error: what does not add up; None: everything does
    repeats: whether the same samples give the same loss twice
    steady: buffers that each forward pass changes in the same way, whatever the samples
    notes: lines for the user about what is not wrong and good to know
    """

    error: UserError | None
    repeats: bool
    steady: AbstractSet[str]
    notes: Sequence[str] = ()

    @property
    def brings(self) -> dict[str, AbstractSet[str]]:
        """The features that the run needs for what was found, with what their hooks take."""
        return dict.fromkeys(brought_by("steady buffers"), self.steady) if self.steady else {}


class SplitCheck:
    """A check on this process's first device; all ranks call it together.

    stage: host rows -> tensors, as for a step
    is_split: whether a step has several microbatches. A step of one is looked at for what it keeps
        and draws; a start on more devices tries the rest.
    """

    def __init__(
        self, setup: EngineSetup, rows: TrialRows, stage: Stage, *, is_split: bool
    ) -> None:
        self._is_split = is_split
        self._setup, self._plan = setup, setup.plan
        self._first_step = rows.step
        self._trials = Trials(setup, rows, stage)
        self._judge = Judge(setup, self._trials)
        self._look = FirstLook(setup, self._trials, self._judge)
        self._frozen = FrozenWeights(setup.strategy)  # by the loss of the first step, once tried
        self._kept: list[str] = []  # attributes that earlier phases keep of a microbatch
        # buffers that some pass has changed, and those that each pass changes in the same way
        self._moving: set[str] = set()
        self._steady: set[str] = set()

    def run(self) -> SplitVerdict:
        """Try each phase of a step, until a phase has an error.

        UserError: the loss writes into a weight, or thaws one: no way to train it would be right.
        """
        for number in range(len(self._trials.phases)):
            self._trials.phase_number = number
            with self._trials.prepared():
                strategy = self._setup.strategy
                bits, frozen = Bits(weights_of(strategy)), FrozenWeights(strategy)
                verdict = self._verdict_of_phase()
                self._refuse_writes(bits, frozen)
            if verdict.error:
                break
        notes = () if verdict.error else list(dict.fromkeys(self._judge.notes))
        return replace(verdict, notes=notes)

    def error_in_step(self, phase_number: int, noted: Noted) -> UserError | None:
        """The error of a few samples in parts, in a step that has begun: of the loss, of the means
        beside it, of the gradient.

        noted: what the step's forward passes may change, as it is
        """
        trials = self._trials
        trials.phase_number = phase_number
        few = trials.samples[:_FEW_IN_STEP]
        with trials.prepared(noted), trials.trying(trials.step, few, two_parts(few)):
            with_gradient = trials.is_small()
            return self._error_of_parts(Drawn(), with_gradient=with_gradient, between_ranks=True)

    def _verdict_of_phase(self) -> SplitVerdict:
        """The list above, step by step."""
        seen = self._look.observed()
        self._frozen = FrozenWeights(self._setup.strategy)
        self._moving |= seen.steady
        self._steady |= seen.steady
        error, repeats = self._judge.error_of(seen)
        if self._is_split:
            error = error or self._error_of_samples_alone(seen)
        error = error or self._error_of_kept(seen.kept)
        error = error or self._judge.shared(self._error_of_hooks())
        if self._is_split:
            error = error or self._error_of_gradients_at(self._first_step)
        if not error and self._plan.layout.shards > 1:
            error = self._error_beside_one_device()
        plan = self._plan
        steps: list[int] = []
        if self._setup.task.follows_progress:  # the loss may depend on the step
            steps = steps_tried(self._first_step, plan.steps, plan.order.steps_per_epoch)
        for step in steps:
            error = error or self._error_at(step, two_parts, with_gradient=False)
        if steps and self._is_split:  # where the warm-up of a penalty is over
            error = error or self._error_of_gradients_at(steps[-1])
        if plan.sees_whole_batch and not error:
            from samecurve.features.guard.batch_loss_check import batch_loss_error

            of_batch = batch_loss_error(self._setup, self._trials, [self._first_step, *steps])
            error = self._judge.shared(of_batch)
            repeats = error is None  # devices would differ, however the batch is divided
        if self._is_split and not error:
            self._judge.note_rounding(self._trials.samples[:_FEW])
        return SplitVerdict(error, repeats, self._steady)

    # --- alone

    def _error_of_samples_alone(self, seen: Observed) -> UserError | None:
        """The error of a sample whose weight is another one alone than beside others: a weight that
        is 1 at least, where a sample has nothing to count.
        """
        trials, judge = self._trials, self._judge
        whole, parts = seen.trials_of("loss")
        if not judge.agree(not has_even_weights([whole, *parts])):
            return None
        alone = []
        for row in trials.samples:
            alone.append(trials.tried_part([row])[0])
            trials.put_back()
        weights = [of_row.losses["loss"] for of_row in alone]
        for at in rows_of_odd_weight(whole, weights, TOLERANCE[trials.format]):
            others = [row for number, row in enumerate(trials.samples) if number != at]
            with trials.trying(trials.step, trials.samples, [[trials.samples[at]], others]):
                rest, _ = trials.tried_part(others)
                trials.put_back()
                error, _ = judge.error_of(Observed(whole=seen.whole, parts=[alone[at], rest]))
            if error:
                return error
        return None

    # --- written

    def _refuse_writes(self, bits: Bits, frozen: FrozenWeights) -> None:
        """bits, frozen: weights as they were before the trials.

        UserError: any of the trials has written into a weight, has thawed or made one, or has moved
        an iterator.
        """
        trials, error = self._trials, self._error_of_first_pass(frozen)
        names = bits.written()
        written = trials.written or (names and (names[0], trials.step))
        if thawed := frozen.thawed():
            error = _explained("thawed", loss_place(self._setup), name=thawed)
        if written:
            from samecurve.features.guard.diagnosis import write_error

            name, step = written
            with trials.trying(step, trials.samples, trials.parts):
                error = write_error(self._setup, name, lambda: trials.loss_if_any(trials.samples))
        error = self._judge.shared(error)
        if error:
            raise error

    def _error_of_first_pass(self, frozen: FrozenWeights) -> UserError | None:
        """The error of what no trial can put back: a weight that it makes, an iterator's place."""
        made, trials = frozen.made(), self._trials
        changed = trials.attributes.changed()
        moved = sorted(name for name, value in changed.items() if isinstance(value, Position))
        if not self._judge.agree(bool(made or moved)):
            return None
        from samecurve.features.guard.watched_lines import watch

        reads = {name: partial(trials.attributes.read, name) for name in moved}
        lines = watch(lambda: trials.loss_if_any(trials.samples), trials.generators, reads).changes
        trials.put_back()
        if made:
            return _explained("made", loss_place(self._setup), name=made)
        for name, where in lines.items():  # others are moved by what reads the data
            return _explained("moved", where, name=described(name))
        return None

    # --- kept

    def _error_of_kept(self, names: Sequence[str]) -> UserError | None:
        """The error of attributes that hold something of the last microbatch and are read later."""
        error = self._error_of_calls(names)
        if self._judge.agree(bool(self._trials.phase_number and self._kept)):
            error = error or self._error_of_earlier_phases()
        self._kept += names
        return self._judge.shared(error)

    def _error_of_calls(self, names: Sequence[str]) -> UserError | None:
        """Whether a method that a feature calls after an update reads one of these attributes."""
        methods = [hooks.calls for hooks in self._setup.features.values() if hooks.calls]
        for method in (*methods, "schedule"):
            read = names_read(self._setup.task, method)
            for name in names:
                if name.rpartition(".")[2] in read:
                    return self._error_of_reader(name, f"{method}()", method)
        return None

    def _error_of_earlier_phases(self) -> UserError | None:
        """Whether the loss of this phase depends on what earlier phases keep of a microbatch."""
        trials, number = self._trials, self._trials.phase_number
        losses = []
        for rows in (trials.samples, trials.parts[0]):
            for trials.phase_number in range(number):
                trials.loss_if_any(rows)
            trials.phase_number = number
            losses.append(trials.loss_if_any(trials.samples))
            trials.put_back()
        one, other = losses
        if one and other and compare_repeats(one, other, TOLERANCE[trials.format]):
            reader = f"the loss of phase {trials.phases[number]}"
            return self._error_of_reader(self._kept[0], reader, "loss")
        return None

    def _error_of_reader(self, name: str, reader: str, method: str) -> UserError:
        """The error of an attribute. method: of the task, which reads it."""
        where = place_of_method(self._setup.task, method)
        return _explained("kept", where, name=described(name), reader=reader)

    # --- hooks, gradient, later

    def _error_of_hooks(self) -> UserError | None:
        """The error of a hook of the user's that is given what a device has summed so far."""
        for name, parameter in self._setup.strategy.models[0].named_parameters():
            hooks = parameter._post_accumulate_grad_hooks or {}  # noqa: SLF001 - no public name
            for code in filter(None, map(users_code, hooks.values())):
                return _explained("hook", place_of(code), name=f"a hook of {name}")
        return None

    def _error_of_gradients_at(self, step: int) -> UserError | None:
        return self._error_at(step, three_parts, with_gradient=self._trials.is_small())

    def _error_at(
        self, step: int, divide: Callable[[Rows], list[Rows]], *, with_gradient: bool
    ) -> UserError | None:
        """The first error of a few samples at a step: of the loss, of the means that are logged
        beside it, of the gradient. None too where the loss can't be computed there.
        """
        trials = self._trials
        few = trials.samples[:_FEW]
        with trials.trying(step, few, divide(few)):
            try:
                _, drawn = self._look.whole()
                if error := self._error_of_thawed() or self._error_of_late_buffers():
                    return error
            except GatherOrderError as error:  # a pass of that step would end the run
                return self._judge.shared(error)
            except RAISED:
                return None
            finally:
                trials.put_back()
            return self._error_of_parts(drawn, with_gradient=with_gradient)

    def _error_of_late_buffers(self) -> UserError | None:
        """The error of buffers that the loss of this step changes, and that of earlier ones did
        not. Those that each pass changes in the same way will move once a step.
        """
        trials = self._trials
        moved = trials.buffers.changed().keys() - self._moving
        if not self._judge.agree(bool(moved)):
            return None
        self._moving |= moved
        trials.put_back()
        seen = self._look.observed()
        self._steady |= seen.steady
        return self._judge.error_of(seen)[0]

    def _error_of_thawed(self) -> UserError | None:
        """The error of a weight that the loss of the first step freezes, and that of this step does
        not, where all ranks gather weights in one order.
        """
        thawed = self._frozen.thawed()
        if not self._judge.agree(bool(thawed and self._setup.strategy.gathers_weights)):
            return None
        from samecurve.torch_engine.strategies.sharded.gathers import another_frozen

        error = another_frozen(thawed, is_frozen=False) if thawed else None
        return self._judge.shared(error)

    def _error_of_parts(
        self, drawn: Drawn, *, with_gradient: bool, between_ranks: bool = False
    ) -> UserError | None:
        """None too where the loss can't be computed for these samples, on any rank."""
        trials, tried = self._trials, None
        try:
            tried = trials.tried_in_parts(with_gradient=with_gradient)
        except RAISED:
            pass
        finally:
            trials.put_back()
        if self._judge.agree(tried is None):
            return None
        assert tried is not None
        error = self._judge.error_of_means(replace(tried, drawn=drawn))
        if not error and between_ranks:
            ids = [int(trials.rows.ids[row]) for row in trials.samples]
            error = self._judge.error_between_ranks(tried.whole, ids)
        if error or self._judge.agree(not tried.have_gradients):
            return error
        return self._judge.error_of_gradients(tried)

    def _error_beside_one_device(self) -> UserError | None:
        from samecurve.features.guard.one_device import compare_with_one_device

        few = self._trials.samples[:_FEW]
        compared = compare_with_one_device(self._setup, self._trials, few)
        if compared.left_out:
            strategy = self._plan.layout.strategy
            note = f"{strategy} was not compared with one device: {compared.left_out}"
            self._judge.notes.append(f"{note}; samecurve verify compares whole steps")
        return self._judge.shared(compared.error)


def _explained(deed: "Deed", where: str, **names: str) -> UserError:
    """The error in words, which are imported only now."""
    from samecurve.features.guard.split_errors import explain_deed

    return explain_deed(deed, where, **names)

"""Judges the losses that the split check has tried, and gives every rank the same error.

A small difference may be rounding, so float64 gives a second opinion where it can be computed.
Where something is wrong, diagnosis.py, imported only then, finds the line of the user's code.
"""

import json
import math
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace

import torch

from samecurve.errors import UserError
from samecurve.features.guard.additivity import (
    DOUBTFUL,
    GRADIENT,
    GRADIENTS,
    SURE,
    SURE_GRADIENTS,
    TOLERANCE,
    Finding,
    Trial,
    compare_gradients,
    compare_parts,
    compare_repeats,
    relative_difference,
    rounding_line,
)
from samecurve.features.guard.trial_passes import NarrowestFormat, norms_of
from samecurve.features.guard.trials import (
    RAISED,
    Drawn,
    Observed,
    Rows,
    Trials,
    Tried,
    is_on_any_rank,
)
from samecurve.torch_engine.process_group import texts_of_all
from samecurve.torch_engine.step import EngineSetup
from samecurve.torch_engine.users_code.holders import HeldByTask
from samecurve.units import first_and_count

_LAST_DIGITS = 1e-12  # what float64 rounds, relative


class Judge:
    """Finds what is wrong with the losses that were tried; all ranks call it together.

    notes: lines for the user about what is not wrong and good to know
    """

    def __init__(self, setup: EngineSetup, trials: Trials) -> None:
        self._setup, self._trials = setup, trials
        self.notes: list[str] = []

    def error_of(self, seen: Observed) -> tuple[UserError | None, bool]:
        """The error, the same on every rank; and whether the loss repeats."""
        finding = self._finding(seen, self._trials.name)
        if not self.agree(self._is_suspect(seen, finding)):
            return None, True
        own = [name for name in seen.drawn.moved if not name.startswith("torch")]
        repeats = not (own or (finding and finding.kind == "repeat"))
        error: UserError | None = None
        with ExitStack() as stack:
            if self.agree(finding is not None and finding.difference < DOUBTFUL):
                finding = self._second_opinion(finding, stack)
            if self.agree(self._is_suspect(seen, finding)):
                error = self._diagnosed(seen, finding)
        return self.shared(error), not self.agree(not repeats)

    def error_of_means(self, seen: Observed) -> UserError | None:
        """The error of the loss, else of a mean that is logged beside it."""
        trials = self._trials
        names = ["loss", *sorted(seen.whole.losses.keys() - {"loss"})]
        findings = [self._finding(seen, name) for name in names]
        if not self.agree(any(self._is_suspect(seen, finding) for finding in findings)):
            return None
        try:
            for name in names:
                trials.name = name
                error, _ = self.error_of(seen)
                if error:
                    return error
                seen = replace(seen, drawn=Drawn(seeded=seen.drawn.seeded))  # told of the loss
        finally:
            trials.name = "loss"
        return None

    def error_of_gradients(self, seen: Observed) -> UserError | None:
        trials = self._trials
        finding = self._finding_of_gradients(seen, GRADIENTS[trials.format])
        if not self.agree(finding is not None):
            return None
        error: UserError | None = None
        with ExitStack() as stack:
            if self.agree(self._rounds_inside()):
                stack.enter_context(trials.in_float64_inside())
                finding = self._tried_again(GRADIENTS["f64"])
            elif trials.format != "f64":
                finding = first = self._finding_of_gradients(seen, SURE_GRADIENTS[trials.format])
                if trials.can_widen() and trials.format == "f32":
                    stack.enter_context(trials.in_float64())
                    finding = self._tried_again(SURE_GRADIENTS["f64"], first)
            if self.agree(finding is not None):
                error = self._diagnosed(seen, finding)
        return self.shared(error)

    def _tried_again(self, limit: float, otherwise: Finding | None = None) -> Finding | None:
        """The finding of the gradients in a wider format.

        otherwise: the finding where they can't be computed
        """
        try:
            again = self._trials.tried_in_parts(with_gradient=True)
        except RAISED:  # a model that takes no float64
            return otherwise
        finally:
            self._trials.put_back()
        return self._finding_of_gradients(again, limit) if again.have_gradients else otherwise

    def _finding(self, seen: Observed, name: str) -> Finding | None:
        """What the losses show, before any of them is computed in a wider format."""
        tolerance = TOLERANCE[self._trials.format]
        whole, parts = seen.trials_of(name)
        repeat = seen.again and compare_repeats(whole, seen.again, tolerance)
        return repeat or compare_parts(whole, parts, tolerance)

    def _is_suspect(self, seen: Observed, finding: Finding | None) -> bool:
        is_drawn = seen.drawn.moved or seen.drawn.is_shared(self._setup)
        is_counting = seen.is_counting(TOLERANCE[self._trials.format])
        return bool(finding or is_drawn or seen.unlike or is_counting)

    def agree(self, here: bool) -> bool:  # noqa: FBT001 - one word says it
        """Whether it is true on any rank."""
        return is_on_any_rank(self._setup, here)

    def largest(self, number: float) -> float:
        """The largest of all ranks' numbers."""
        numbers = torch.zeros(self._setup.comm.world_size, dtype=torch.float64)
        numbers[self._setup.comm.rank] = number
        return float(self._setup.comm.all_reduce(numbers.to(self._setup.device))().max())

    def shared(self, error: UserError | None) -> UserError | None:
        """The error of the first rank that has one, on every rank."""
        text = json.dumps([error.cause, error.remedy, error.where]).encode() if error else b""
        texts = texts_of_all(self._setup.comm, text, self._setup.device)
        first = next(filter(None, texts), None)
        return UserError(*json.loads(first)) if first else None

    def _finding_of_gradients(self, seen: Observed, tolerance: float) -> Finding | None:
        whole, *parts = (each.gradients or {} for each in (seen.whole, *seen.parts))
        norms = norms_of(self._setup, whole, parts)
        return compare_gradients(*seen.trials_of("loss"), norms, tolerance)

    def _second_opinion(self, finding: Finding | None, stack: ExitStack) -> Finding | None:
        """The finding in float64, which is in use until the stack closes; where float64 can't be
        computed, the finding if it is larger than rounding can explain.
        """
        trials = self._trials
        _, computed = self._losses(trials.samples)
        is_narrow = trials.format == "narrow" or computed.bytes < 4
        if trials.format == "f64" and computed.bytes == 4:
            return self._without_rounding(finding, computed)
        if not is_narrow and trials.format == "f32" and trials.can_widen():
            stack.enter_context(trials.in_float64())
            wide, computed = self._losses(trials.samples, *trials.parts)
            if all(wide):
                trials.format = "f64" if computed.bytes == 8 else "f32"
                tolerance = TOLERANCE["f64"] if trials.format == "f64" else SURE["f32"]
                return _in_wide_format(finding, wide, tolerance)
            stack.close()
        limit = SURE["narrow" if is_narrow else trials.format]
        return finding if finding and finding.difference > limit else None

    def _without_rounding(
        self, finding: Finding | None, computed: NarrowestFormat
    ) -> Finding | None:
        """The finding of an f64 run that computes something in float32, once that is computed in
        float64; where it can't be, the finding if it is larger than rounding can explain.
        """
        trials = self._trials
        with trials.in_float64_inside():
            wide, remaining = self._losses(trials.samples, *trials.parts)
        remains = finding if finding and finding.difference > SURE["f32"] else None
        if all(wide) and remaining.bytes == 8:
            remains = _in_wide_format(finding, wide, TOLERANCE["f64"])
        if finding and not remains:
            self._note_rounding(computed)
        return remains

    def note_rounding(self, few: Rows) -> None:
        """Say what an f64 run computes in float32, where its loss or its gradient follows that: a
        sum over few samples need not show it, and `samecurve verify` asks.
        """
        trials = self._trials
        if trials.format != "f64":
            return
        _, computed = self._losses(few)
        if not self.agree(computed.bytes == 4):
            return
        tried = []
        for format_inside in (nullcontext, trials.in_float64_inside):
            with format_inside(), suppress(*RAISED):
                tried.append(trials.tried(few, with_gradient=True))
            trials.put_back()
        lacks = [one for one in tried if one.gradients is None]
        if self.agree(bool(lacks) or len(tried) < 2):
            return
        as_it_is, wide = (one.losses["loss"] for one in tried)
        norms = norms_of(self._setup, tried[0].gradients or {}, [tried[1].gradients or {}])
        is_other = compare_repeats(as_it_is, wide, _LAST_DIGITS)
        if is_other or compare_gradients(as_it_is, [wide], norms, _LAST_DIGITS):
            self._note_rounding(computed)

    def _rounds_inside(self) -> bool:
        """Whether an f64 run computes something in float32."""
        trials = self._trials
        return trials.format == "f64" and self._losses(trials.samples)[1].bytes == 4

    def _losses(self, *each: Rows) -> tuple[list[Trial | None], NarrowestFormat]:
        """The losses of several rows, and the narrowest format that torch computed in."""
        computed = NarrowestFormat()
        with computed:
            losses = [self._trials.loss_if_any(rows) for rows in each]
        self._trials.put_back()
        return losses, computed

    def _note_rounding(self, computed: NarrowestFormat) -> None:
        from samecurve.features.guard.blamed_calls import function_name

        place = f"{computed.where}: " if computed.where else ""
        line = rounding_line(f"{place}{function_name(computed.function)}")
        kept = HeldByTask(self._setup.task, self._setup.strategy.models[0]).paths_of(torch.float32)
        if kept:
            line += (
                f". The task keeps {first_and_count([f'self.{path}' for path in kept])} in float32:"
                " what model() returns takes the run's format (nn.ModuleDict holds several models)"
            )
        self.notes.append(line)

    def _diagnosed(self, seen: Observed, finding: Finding | None) -> UserError | None:
        from samecurve.features.guard.diagnosis import Diagnosis

        return Diagnosis(self._setup, self._trials).error_of(
            seen,
            finding,
            of_gradient=self.agree(finding is not None and finding.kind == "gradient"),
        )

    def error_between_ranks(self, tried: Tried, samples: Sequence[int]) -> UserError | None:
        """The error of a loss, of a mean beside it or of a gradient: all ranks have computed it of
        the same samples, and one has got another.
        """
        setup = self._setup
        if setup.comm.world_size == 1:
            return None
        numbers = {name: [trial.sum, trial.weight] for name, trial in tried.losses.items()}
        if tried.gradients and setup.plan.layout.shards == 1:
            total = torch.stack([one.cpu() for one in tried.gradients.values()]).sum(0)
            numbers[GRADIENT] = total.tolist()
        texts = texts_of_all(setup.comm, json.dumps(numbers).encode(), setup.device)
        first, *others = (json.loads(text) for text in texts)
        for rank, other in enumerate(others, 1):
            for name in sorted(first.keys() | other.keys(), key=_in_order):
                one, two = first.get(name), other.get(name)
                if one and two and self._are_alike(name, one, two):
                    continue
                from samecurve.features.guard.diagnosis import rank_text, unlike_error

                return unlike_error(setup, rank_text(name, samples, rank, one, two))
        return None

    def _are_alike(self, name: str, one: Sequence[float], two: Sequence[float]) -> bool:
        """Whether two ranks' numbers agree: sum and weight of a mean, or a gradient's digest."""
        number_format = self._trials.format
        if name != GRADIENT:
            pairs = zip(one, two, strict=True)
            return all(relative_difference([a], [b]) <= TOLERANCE[number_format] for a, b in pairs)
        largest = math.sqrt(max(one[0], two[0]))
        off = math.dist(one[1:], two[1:]) / math.sqrt(len(one) - 1)
        return not math.isfinite(largest) or off <= GRADIENTS[number_format] * largest


def _in_wide_format(
    finding: Finding | None, losses: Sequence[Trial | None], tolerance: float
) -> Finding | None:
    """The finding of losses of all samples and of parts, computed again in a wider format."""
    if finding and finding.kind == "repeat":
        return finding
    whole, *parts = (trial for trial in losses if trial)
    return compare_parts(whole, parts, tolerance)


def _in_order(name: str) -> tuple[bool, bool, str]:
    """The loss is told first, its gradient last."""
    return name == GRADIENT, name != "loss", name

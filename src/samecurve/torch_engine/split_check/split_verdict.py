"""What the split check makes of the losses that it has tried: an error in the user's words, the
same on every rank.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import torch
from torch import nn

from samecurve.core.protocols import TrialRows
from samecurve.core.split_check.split_errors import (
    Evidence,
    explain,
    explain_buffer,
    explain_draws,
    explain_failure,
    explain_state,
)
from samecurve.core.split_check.split_verdicts import (
    DOUBTFUL,
    GRADIENTS,
    SURE,
    SURE_GRADIENTS,
    TOLERANCE,
    Finding,
    Format,
    Trial,
    compare_gradients,
    compare_parts,
    compare_repeats,
)
from samecurve.errors import UserError
from samecurve.torch_engine.split_check.split_diagnosis import (
    find_place,
    first_difference,
    first_mixing,
    watch,
)
from samecurve.torch_engine.split_check.split_formats import NarrowestFormat
from samecurve.torch_engine.split_check.split_gradients import Gradients, gradient_norms
from samecurve.torch_engine.split_check.split_state import version
from samecurve.torch_engine.split_check.split_trials import RAISED, Trials
from samecurve.torch_engine.split_check.user_code import place_of_method
from samecurve.torch_engine.step.setup import EngineSetup

_ALONE = 4  # of them, tried one by one and in pairs once something is wrong
_LABELS: dict[Format, float] = {"f64": 1e-9, "f32": 1e-4, "narrow": 3e-2}  # of single numbers


# The losses of some samples, by name, and the gradient of the loss where it can be had.
Tried = tuple[dict[str, Trial], Gradients | None]


@dataclass(frozen=True, kw_only=True)
class Look:
    """What was seen.

    far: after many microbatches, as counters tell it
    failed: why the loss could not be taken of a part
    moved: generators
    changed: attributes, and counters among them
    steady, unlike: buffers that move alike, or not, whatever the rows
    kept: attributes that are others after other rows, or once more
    """

    whole: Trial
    again: Trial
    far: Trial | None
    parts: Sequence[Trial]
    failed: UserError | None
    moved: Sequence[str]
    changed: Sequence[str]
    counters: Sequence[str]
    steady: frozenset[str]
    unlike: Sequence[str]
    kept: Sequence[str] = ()


def plain_look(
    whole: Trial, parts: Sequence[Trial], moved: Sequence[str], failed: UserError | None
) -> Look:
    """Where nothing is tried again."""
    return Look(
        whole=whole,
        again=whole,
        far=None,
        parts=parts,
        failed=failed,
        moved=moved,
        changed=(),
        counters=(),
        steady=frozenset(),
        unlike=(),
    )


class Findings:
    """What is wrong with the losses of `samples`, whole and in `parts`; all ranks call it together.

    seeded: generators of numpy and Python that begin anew in each microbatch
    """

    def __init__(self, setup: EngineSetup, rows: TrialRows, trials: Trials) -> None:
        self._setup, self._rows, self._trials = setup, rows, trials
        self._plan, self._model = setup.plan, setup.strategy.models[0]
        self.samples: Sequence[int] = trials.samples
        self.parts: Sequence[Sequence[int]] = ()
        self.seeded: list[str] = []

    def tried(self, rows: Sequence[int], *, with_gradient: bool) -> Tried:
        """With gradients where they can be had."""
        trials = self._trials
        if with_gradient:
            try:
                return trials.gradients_of(rows)
            except RuntimeError:
                trials.put_back()
        return trials.losses_of(rows), None

    def error_of_means(
        self,
        whole: Tried,
        parts: Sequence[Tried],
        moved: Sequence[str],
        failed: UserError | None,
    ) -> UserError | None:
        """The loss first, then what is logged beside it."""
        try:
            for name in ["loss", *sorted(whole[0].keys() - {"loss"})]:
                self._trials.name = name
                present = [part[0].get(name, part[0]["loss"]) for part in parts]
                of_loss = moved if name == "loss" else ()
                error, _ = self.error_of(plain_look(whole[0][name], present, of_loss, failed))
                if error:
                    return error
        finally:
            self._trials.name = "loss"
        return None

    def error_of_gradient(self, whole: Tried, parts: Sequence[Tried]) -> UserError | None:
        trials = self._trials
        finding = self._finding_of_gradient(whole, parts, GRADIENTS[trials.format])
        with ExitStack() as stack:
            if self.agree(finding is not None and trials.format != "f64"):
                limit = SURE_GRADIENTS[trials.format]
                if trials.can_widen() and trials.format == "f32":
                    stack.enter_context(trials.in_float64())
                    limit = SURE_GRADIENTS["f64"]
                try:
                    wide = [
                        self.tried(rows, with_gradient=True) for rows in (self.samples, *self.parts)
                    ]
                    whole, *parts = wide
                except RAISED:  # a model that takes no float64
                    stack.close()
                    limit = SURE_GRADIENTS[trials.format]
                trials.put_back()
                finding = self._finding_of_gradient(whole, parts, limit)
            error: UserError | None = None
            if self.agree(finding is not None):
                look = plain_look(whole[0]["loss"], [part[0]["loss"] for part in parts], (), None)
                evidence = self._evidence(look, finding)
                if finding:
                    error = explain(finding, evidence, rounded=0.0)
        return self.shared(error)

    def _finding_of_gradient(
        self, whole: Tried, parts: Sequence[Tried], tolerance: float
    ) -> Finding | None:
        norms = gradient_norms(self._setup, whole[1] or {}, [part[1] or {} for part in parts])
        trials = [part[0]["loss"] for part in parts]
        return compare_gradients(whole[0]["loss"], trials, norms, tolerance)

    def error_of(self, look: Look) -> tuple[UserError | None, bool]:
        """(what is wrong, on every rank alike; whether the loss repeats)."""
        finding = self._finding(look)
        doubtful = finding is not None and finding.difference < DOUBTFUL
        error: UserError | None = None
        own = [name for name in look.moved if not name.startswith("torch")]  # not begun anew
        repeats = not (own or (finding and finding.kind == "repeat"))
        with ExitStack() as stack:
            if self.agree(doubtful):
                finding = self._second_opinion(finding, stack)
            seen = finding or look.moved or look.unlike or self._counts(look)
            if self.agree(bool(seen or self._is_shared_by_threads())):
                evidence = self._evidence(look, finding)
                error = self._explained(look, finding, evidence)
        return self.shared(error), not self.agree(not repeats)

    def _is_shared_by_threads(self) -> bool:
        """Whether the loss draws from generators that other devices of this process draw from."""
        return bool(self.seeded) and len(self._setup.devices) > 1

    def _finding(self, look: Look) -> Finding | None:
        tolerance = TOLERANCE[self._trials.format]
        return compare_repeats(look.whole, look.again, tolerance) or compare_parts(
            look.whole, look.parts, tolerance
        )

    def _counts(self, look: Look) -> bool:
        """Whether the loss depends on how many microbatches came before."""
        return look.far is not None and bool(
            compare_repeats(look.whole, look.far, TOLERANCE[self._trials.format])
        )

    def _second_opinion(self, finding: Finding | None, stack: ExitStack) -> Finding | None:
        """A small difference may be rounding: the same in float64, where it can be had."""
        trials = self._trials
        seen = NarrowestFormat()
        with seen:
            trials.loss_if_any(self.samples)
        trials.put_back()
        narrow = trials.format == "narrow" or seen.bytes < 4
        if not narrow and trials.format == "f32" and trials.can_widen():
            stack.enter_context(trials.in_float64())
            seen = NarrowestFormat()
            with seen:
                wide = [trials.loss_if_any(rows) for rows in (self.samples, *self.parts)]
            trials.put_back()
            if all(wide):
                whole, *parts = (trial for trial in wide if trial)
                trials.format = "f64" if seen.bytes == 8 else "f32"
                tolerance = TOLERANCE["f64"] if trials.format == "f64" else SURE["f32"]
                again = None if finding is None or finding.kind != "repeat" else finding
                return again or compare_parts(whole, parts, tolerance)
            stack.close()
        if finding is None:
            return None
        limit = SURE["narrow" if narrow else trials.format]
        return finding if finding.difference > limit else None

    def _evidence(self, look: Look, finding: Finding | None) -> Evidence:
        """All ranks make the same calls here, whatever each has found."""
        trials = self._trials
        alone = self.samples[:_ALONE]
        reads = self._reads(look)
        watched = watch(lambda: trials.loss_if_any(self.samples), trials.generators, reads)
        trials.put_back()
        singles = [trials.loss_if_any([row]) for row in alone]
        pairs = {pair: trials.loss_if_any(pair) for pair in combinations(alone, 2)}
        trials.put_back()
        third = trials.loss_if_any(self.samples)
        trials.put_back()
        recorded = [trials.record(rows) for rows in (self.samples, self.samples, *self.parts)]
        name = ""
        if look.changed and third and not compare_repeats(look.whole, third, 1e-6):
            name = (look.counters or look.changed)[0]
        elif self._counts(look):
            name = look.counters[0]
        if look.unlike:
            name = look.unlike[0]
        place = None
        whole, again, *parts = recorded
        if whole and again and finding and finding.kind == "repeat":
            place = first_difference(whole, again)
        elif whole and all(parts) and finding and finding.kind == "gradient":
            present = [part for part in parts if part]
            place = first_mixing(whole, present, _LABELS[trials.format])
        elif whole and all(parts):
            present = [part for part in parts if part]
            is_weight = finding is not None and finding.kind in {"weight", "unweighted"}
            place = find_place(whole, present, _LABELS[trials.format], of_weight=is_weight)
        all_there = all(singles) and all(pairs.values())
        return Evidence(
            ids=[int(i) for i in self._rows.ids],
            singles=[trial for trial in singles if trial] if all_there else (),
            pairs={pair: trial for pair, trial in pairs.items() if trial} if all_there else {},
            place=place,
            draws=watched.draws,
            backward=trials.own_backward(self.samples) if self._is_of_gradient(finding) else None,
            state=f"attribute {name}" if name else "",
            state_at=watched.changes.get(name, ""),
            loss_at=place_of_method(
                self._setup.task, "features" if self._plan.whole_batch else "loss"
            ),
            what=self._what(),
        )

    def _is_of_gradient(self, finding: Finding | None) -> bool:
        return self.agree(finding is not None and finding.kind == "gradient")

    def _what(self) -> str:
        trials = self._trials
        what = "the loss" if trials.name == "loss" else f'"{trials.name}", logged beside the loss,'
        if self._plan.whole_batch:
            what = "features(), added up,"
        return what if trials.step == self._rows.step else f"{what} at step {trials.step}"

    def _explained(
        self, look: Look, finding: Finding | None, evidence: Evidence
    ) -> UserError | None:
        """What is most likely the cause comes first."""
        if (look.moved or (self.seeded and finding)) and evidence.draws:
            cause = f"{evidence.what} {finding.text}" if finding else ""
            return explain_draws(evidence.draws, cause)
        if self._is_shared_by_threads() and evidence.draws:
            return explain_draws(evidence.draws, "the devices of one process share a generator")
        if look.unlike:
            return explain_buffer(look.unlike[0], evidence.state_at or evidence.loss_at)
        if self._counts(look) and finding is None:
            return explain_state(evidence, f"{evidence.what} changes from microbatch to microbatch")
        if look.failed and finding and finding.kind == "finite":
            return explain_failure(look.whole, look.failed)
        if finding:
            return explain(finding, evidence, rounded=TOLERANCE[self._trials.format])
        return None

    def _reads(self, look: Look) -> dict[str, Callable[[], object]]:
        """How attributes and buffers that change are watched."""
        reads: dict[str, Callable[[], object]] = {
            name: partial(self._trials.attributes.read, name) for name in look.changed
        }
        return reads | {name: partial(_read_buffer, self._model, name) for name in look.unlike}

    def agree(self, here: bool) -> bool:  # noqa: FBT001 - one word says it
        """Whether any rank says so."""
        flag = torch.tensor(float(here), dtype=torch.float64, device=self._setup.device)
        return bool(self._setup.comm.all_reduce(flag)() > 0)

    def shared(self, error: UserError | None) -> UserError | None:
        """The error of the first rank that has one, on every rank."""
        comm, device = self._setup.comm, self._setup.device
        texts = [error.cause, error.remedy, error.where] if error else []
        message = json.dumps(texts).encode() if error else b""
        sizes = torch.zeros(comm.world_size, dtype=torch.int64, device=device)
        sizes[comm.rank] = len(message)
        lengths = comm.all_reduce(sizes)().tolist()
        teller = next((rank for rank, length in enumerate(lengths) if length), None)
        if teller is None:
            return None
        letters = torch.zeros(lengths[teller], dtype=torch.int64, device=device)
        if comm.rank == teller:
            letters.copy_(torch.tensor(list(message), dtype=torch.int64))
        return UserError(*json.loads(bytes(comm.all_reduce(letters)().tolist())))


def _read_buffer(model: nn.Module, name: str) -> object:
    buffer = model.get_buffer(name)
    return id(buffer), version(buffer)

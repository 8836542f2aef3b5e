"""The split check: before a run's first step the loss of some samples is taken whole, again, and in
parts, on the run's own devices. What does not add up, does not repeat or leaves something behind
would give another curve on other devices (core/split_check.py has the verdicts, split_trials.py
takes the losses).

Every rank takes the same samples and makes the same calls, whatever it finds; what is found by any
is told by all alike. Afterwards model, task and generators are as before.
"""

import json
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import torch
from torch import nn

from samecurve.core.protocols import TrialRows
from samecurve.core.split_check import (
    DOUBTFUL,
    SURE,
    TOLERANCE,
    Finding,
    Format,
    Trial,
    compare_parts,
    compare_repeats,
)
from samecurve.core.split_errors import (
    Evidence,
    explain,
    explain_buffer,
    explain_draws,
    explain_failure,
    explain_state,
)
from samecurve.errors import UserError
from samecurve.torch_engine.setup import EngineSetup
from samecurve.torch_engine.split_diagnosis import (
    find_place,
    first_difference,
    loss_place,
    watch,
)
from samecurve.torch_engine.split_formats import (
    NarrowestFormat,
)
from samecurve.torch_engine.split_state import version
from samecurve.torch_engine.split_trials import Stage, Trials

_ALONE = 4  # of them, tried one by one and in pairs once something is wrong
_MANY = 1000  # microbatches, after which a counter is tried
_LABELS: dict[Format, float] = {"f64": 1e-9, "f32": 1e-4, "narrow": 3e-2}  # of single numbers


@dataclass(frozen=True)
class SplitVerdict:
    """What the split check has found.

    error: what does not add up; None: all does
    repeats: whether the same samples give the same loss twice
    steady: buffers that a forward pass changes, the same way whatever its rows
    """

    error: UserError | None
    repeats: bool
    steady: frozenset[str]


class SplitCheck:
    """One check on this process's first device; all ranks call it together.

    stage: host rows -> tensors, as for a step
    """

    def __init__(self, setup: EngineSetup, rows: TrialRows, stage: Stage) -> None:
        self._setup, self._rows = setup, rows
        self._plan, self._model = setup.plan, setup.strategy.models[0]
        self._trials = Trials(setup, rows, stage)
        self._all = self._trials.samples
        self._seeded: list[str] = []  # of numpy and Python: begun anew in each microbatch

    def run(self) -> SplitVerdict:
        """The first of the step's phases that has an error tells it."""
        steady: frozenset[str] = frozenset()
        for number in range(len(self._trials.phases)):
            self._trials.phase_number = number
            with self._trials.prepared():
                look = self._look()
                error, repeats = self._error_of(look)
            steady |= look.steady
            if error:
                return SplitVerdict(error, repeats, steady)
        return SplitVerdict(None, repeats=True, steady=steady)

    # --- what is tried

    def _look(self) -> "_Look":
        trials = self._trials
        whole, moved = self._first_trials()
        after_whole = trials.buffers.moved()
        numbers = trials.attributes.numbers()
        trials.generators.put_back()
        again = trials.loss_of(self._all)
        after_again = trials.buffers.moved()
        moving = [
            name
            for name, value in after_whole.items()
            if name in after_again and not torch.equal(value, after_again[name])
        ]
        changed = trials.attributes.changed()
        counters = {
            name: (value, _MANY * (value - numbers[name]))
            for name, value in trials.attributes.numbers().items()
            if value != numbers.get(name, value)
        }
        if self._agree(bool(moving)):  # once a step, where they move alike: StepBuffers
            trials.buffers.put_back(moving)
            trials.generators.put_back()
            again = trials.loss_of(self._all)
        trials.put_back()
        parts, after_parts, failed = [], [], None
        for rows in _parts(self._all):
            part, error = trials.loss_of_part(rows)
            parts.append(part)
            failed = failed or error
            after_parts.append(trials.buffers.moved())
            trials.put_back()
        far = self._far_trial(counters)
        steady = frozenset(
            name for name in moving if _all_like(after_whole[name], name, after_parts)
        )
        unlike = [name for name, value in after_whole.items() if _differs(value, name, after_parts)]
        return _Look(
            whole=whole,
            again=again,
            far=far,
            parts=parts,
            failed=failed,
            moved=moved,
            changed=changed,
            counters=sorted(counters),
            steady=steady,
            unlike=unlike,
        )

    def _first_trials(self) -> tuple[Trial, list[str]]:
        """The loss of all samples, and generators that no key serves. Where numbers are drawn it is
        learnt first, from samples of two sizes, what they follow at each place.
        """
        trials = self._trials
        sites = self._setup.draw_sites
        with sites.recording() as draws:
            whole = trials.loss_of_all()
        moved = trials.generators.moved()
        if not self._agree(bool(draws or moved)):
            return whole, []
        trials.put_back()
        with sites.recording() as draws_of_part:
            trials.loss_if_any(_parts(self._all)[0])
        trials.put_back()
        sites.learn(draws, draws_of_part)
        self._seeded = [name for name in moved if name in {"numpy", "Python"}]
        sites.reseeds_host = self._agree(bool(self._seeded))
        whole = trials.loss_of(self._all)
        moved = [name for name in trials.generators.moved() if name not in {"numpy", "Python"}]
        if self._agree(any(name.startswith("torch") for name in moved)):
            sites.reseeds_torch = True
            trials.put_back()
            whole = trials.loss_of(self._all)
        return whole, moved

    def _far_trial(self, counters: dict[str, tuple[float, float]]) -> Trial | None:
        """The loss after many microbatches, as far as counters tell it; None: nothing counts."""
        if not self._agree(bool(counters)):
            return None
        self._trials.attributes.advance(counters)
        trial = self._trials.loss_if_any(self._all)
        self._trials.put_back()
        return trial or Trial(len(self._all), math.nan, math.nan)

    # --- what is found

    def _error_of(self, look: "_Look") -> tuple[UserError | None, bool]:
        """(what is wrong, on every rank alike; whether the loss repeats)."""
        finding = self._finding(look)
        doubtful = finding is not None and finding.difference < DOUBTFUL
        error: UserError | None = None
        own = [name for name in look.moved if not name.startswith("torch")]  # not begun anew
        repeats = not (own or (finding and finding.kind == "repeat"))
        with ExitStack() as stack:
            if self._agree(doubtful):
                finding = self._second_opinion(finding, stack)
            if self._agree(bool(finding or look.moved or look.unlike or self._counts(look))):
                evidence = self._evidence(look, finding)
                error = self._explained(look, finding, evidence)
        return self._shared(error), not self._agree(not repeats)

    def _finding(self, look: "_Look") -> Finding | None:
        tolerance = TOLERANCE[self._trials.format]
        return compare_repeats(look.whole, look.again, tolerance) or compare_parts(
            look.whole, look.parts, tolerance
        )

    def _counts(self, look: "_Look") -> bool:
        """Whether the loss depends on how many microbatches came before."""
        return look.far is not None and bool(
            compare_repeats(look.whole, look.far, TOLERANCE[self._trials.format])
        )

    def _second_opinion(self, finding: Finding | None, stack: ExitStack) -> Finding | None:
        """A small difference may be rounding: the same in float64, where it can be had."""
        trials = self._trials
        seen = NarrowestFormat()
        with seen:
            trials.loss_if_any(self._all)
        trials.put_back()
        narrow = trials.format == "narrow" or seen.bytes < 4
        if not narrow and trials.format == "f32" and trials.can_widen():
            stack.enter_context(trials.in_float64())
            seen = NarrowestFormat()
            with seen:
                wide = [trials.loss_if_any(rows) for rows in (self._all, *_parts(self._all))]
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

    def _evidence(self, look: "_Look", finding: Finding | None) -> Evidence:
        """All ranks make the same calls here, whatever each has found."""
        trials = self._trials
        alone = self._all[:_ALONE]
        reads = self._reads(look)
        watched = watch(lambda: trials.loss_if_any(self._all), trials.generators, reads)
        trials.put_back()
        singles = [trials.loss_if_any([row]) for row in alone]
        pairs = {pair: trials.loss_if_any(pair) for pair in combinations(alone, 2)}
        trials.put_back()
        third = trials.loss_if_any(self._all)
        trials.put_back()
        recorded = [trials.record(rows) for rows in (self._all, self._all, *_parts(self._all))]
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
            state=f"attribute {name}" if name else "",
            state_at=watched.changes.get(name, ""),
            loss_at=loss_place(self._setup.task, whole_batch=self._plan.whole_batch),
            what="features(), added up," if self._plan.whole_batch else "the loss",
        )

    def _explained(
        self, look: "_Look", finding: Finding | None, evidence: Evidence
    ) -> UserError | None:
        """What is most likely the cause comes first."""
        if (look.moved or (self._seeded and finding)) and evidence.draws:
            cause = f"{evidence.what} {finding.text}" if finding else ""
            return explain_draws(evidence.draws, cause)
        if look.unlike:
            return explain_buffer(look.unlike[0], evidence.state_at or evidence.loss_at)
        if self._counts(look) and finding is None:
            return explain_state(evidence, f"{evidence.what} changes from microbatch to microbatch")
        if look.failed and finding and finding.kind == "finite":
            return explain_failure(look.whole, look.failed)
        if finding:
            return explain(finding, evidence, rounded=TOLERANCE[self._trials.format])
        return None

    def _reads(self, look: "_Look") -> dict[str, Callable[[], object]]:
        """How attributes and buffers that change are watched."""
        reads: dict[str, Callable[[], object]] = {
            name: partial(self._trials.attributes.read, name) for name in look.changed
        }
        return reads | {name: partial(_read_buffer, self._model, name) for name in look.unlike}

    # --- what all ranks know

    def _agree(self, here: bool) -> bool:  # noqa: FBT001 - one word says it
        """Whether any rank says so."""
        flag = torch.tensor(float(here), dtype=torch.float64, device=self._setup.device)
        return bool(self._setup.comm.all_reduce(flag)() > 0)

    def _shared(self, error: UserError | None) -> UserError | None:
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

    # --- as it was


@dataclass(frozen=True, kw_only=True)
class _Look:
    """What was seen.

    far: after many microbatches, as counters tell it
    failed: why the loss could not be taken of a part
    moved: generators
    changed: attributes, and counters among them
    steady, unlike: buffers that move alike, or not, whatever the rows
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


def _parts(rows: Sequence[int]) -> list[list[int]]:
    """Two unequal ones, their order turned; one row can't be split."""
    turned = list(reversed(rows))
    if len(turned) < 2:
        return [turned]
    cut = max(1, 3 * len(turned) // 8)
    return [turned[:cut], turned[cut:]]


def _all_like(value: torch.Tensor, name: str, others: Sequence[dict[str, torch.Tensor]]) -> bool:
    return all(name in other and _close(value, other[name]) for other in others)


def _differs(value: torch.Tensor, name: str, others: Sequence[dict[str, torch.Tensor]]) -> bool:
    """Not where its size follows the rows: a cache."""
    return not _all_like(value, name, others) and all(
        name not in other or other[name].shape == value.shape for other in others
    )


def _read_buffer(model: nn.Module, name: str) -> object:
    buffer = model.get_buffer(name)
    return id(buffer), version(buffer)


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    difference = (one.double() - other.double()).abs().nan_to_num()
    largest = torch.maximum(one.double().abs().max(), other.double().abs().max())
    return bool(difference.max() <= 1e-5 * largest) if one.numel() else True

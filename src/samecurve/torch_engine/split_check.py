"""The split check: before a run's first step the loss of some samples is taken whole, again, and in
parts, on the run's own devices. What does not add up, does not repeat or leaves something behind
would give another curve on other devices (core/split_check.py has the verdicts).

Every rank takes the same samples and makes the same calls, whatever it finds; what is found by any
is told by all alike. Afterwards model, task and generators are as before.
"""

import json
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import torch
from torch import nn

from samecurve.core.determinism.mean import Mean
from samecurve.core.protocols import MicroBatch, TrialRows
from samecurve.core.split_check import (
    DOUBTFUL,
    SURE,
    TOLERANCE,
    Evidence,
    Finding,
    Format,
    Trial,
    compare_parts,
    compare_repeats,
    explain,
    explain_buffer,
    explain_draws,
    explain_failure,
    explain_state,
)
from samecurve.errors import UserError
from samecurve.torch_engine.layers.context import StagedKeys
from samecurve.torch_engine.model import run_uncompiled
from samecurve.torch_engine.precision import autocast_for, current_device
from samecurve.torch_engine.setup import EngineSetup
from samecurve.torch_engine.split_diagnosis import (
    Recorded,
    Recording,
    find_place,
    first_difference,
    loss_place,
    watch,
)
from samecurve.torch_engine.split_formats import (
    NarrowestFormat,
    added_up,
    full_float32,
    norms_frozen,
    widened,
    widened_buffers,
)
from samecurve.torch_engine.split_state import Attributes, Buffers, GeneratorStates, version

_ALONE = 4  # of them, tried one by one and in pairs once something is wrong
_MANY = 1000  # microbatches, after which a counter is tried
_WIDENED = 500_000_000  # parameters at most of a model that is tried in float64
_LABELS: dict[Format, float] = {"f64": 1e-9, "f32": 1e-4, "narrow": 3e-2}  # of single numbers
_RAISED = (
    UserError,
    ArithmeticError,
    AssertionError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)  # what a loss says to samples that it does not expect
Stage = Callable[[MicroBatch], MicroBatch]


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
        self._setup, self._rows, self._stage = setup, rows, stage
        self._plan, self._model = setup.plan, setup.strategy.models[0]
        self._all = list(range(len(rows.ids)))
        self._with_grad = False
        self._format: Format = _format_of(setup)
        self._casts_rows = False
        self._phases = list(getattr(setup.task, "phases", {})) or [""]
        self._phase = 0
        self._seeded: list[str] = []  # of numpy and Python: begun anew in each microbatch

    def run(self) -> SplitVerdict:
        """The first of the step's phases that has an error tells it."""
        steady: frozenset[str] = frozenset()
        for number in range(len(self._phases)):
            self._phase = number
            with self._prepared():
                look = self._look()
                error, repeats = self._error_of(look)
            steady |= look.steady
            if error:
                return SplitVerdict(error, repeats, steady)
        return SplitVerdict(None, repeats=True, steady=steady)

    # --- what is tried

    def _look(self) -> "_Look":
        whole, moved = self._first_trials()
        after_whole = self._buffers.moved()
        numbers = self._attributes.numbers()
        self._generators.put_back()
        again = self._trial(self._all)
        after_again = self._buffers.moved()
        moving = [
            name
            for name, value in after_whole.items()
            if name in after_again and not torch.equal(value, after_again[name])
        ]
        changed = self._attributes.changed()
        counters = {
            name: (value, _MANY * (value - numbers[name]))
            for name, value in self._attributes.numbers().items()
            if value != numbers.get(name, value)
        }
        if self._agree(bool(moving)):  # once a step, where they move alike: StepBuffers
            self._buffers.put_back(moving)
            self._generators.put_back()
            again = self._trial(self._all)
        self._put_back()
        parts, after_parts, failed = [], [], None
        for rows in _parts(self._all):
            part, error = self._part(rows)
            parts.append(part)
            failed = failed or error
            after_parts.append(self._buffers.moved())
            self._put_back()
        far = self._far_trial(counters)
        steady = frozenset(
            name for name in moving if _all_like(after_whole[name], name, after_parts)
        )
        unlike = [name for name, value in after_whole.items() if _differs(value, name, after_parts)]
        return _Look(
            whole, again, far, parts, failed, moved, changed, sorted(counters), steady, unlike
        )

    def _first_trials(self) -> tuple[Trial, list[str]]:
        """The loss of all samples, and generators that no key serves. Where numbers are drawn it is
        learnt first, from samples of two sizes, what they follow at each place.
        """
        sites = self._setup.draw_sites
        with sites.recording() as draws:
            whole = self._first_trial()
        moved = self._generators.moved()
        if not self._agree(bool(draws or moved)):
            return whole, []
        self._put_back()
        with sites.recording() as draws_of_part:
            self._try(_parts(self._all)[0])
        self._put_back()
        sites.learn(draws, draws_of_part)
        self._seeded = [name for name in moved if name in {"numpy", "Python"}]
        sites.reseeds_host = self._agree(bool(self._seeded))
        whole = self._trial(self._all)
        moved = [name for name in self._generators.moved() if name not in {"numpy", "Python"}]
        if self._agree(any(name.startswith("torch") for name in moved)):
            sites.reseeds_torch = True
            self._put_back()
            whole = self._trial(self._all)
        return whole, moved

    def _first_trial(self) -> Trial:
        """Settles how losses are computed: wide where that can be, without gradient where that can
        be.
        """
        while True:
            try:
                return self._trial(self._all)
            except Exception as error:
                if not self._with_grad and _wants_gradient(error):
                    self._with_grad = True
                elif self._format == "f32" and self._plan.precision in {"bf16", "f16"}:
                    self._format = "narrow"  # a kernel that knows two bytes only, say
                else:
                    raise
                self._put_back()

    def _far_trial(self, counters: dict[str, tuple[float, float]]) -> Trial | None:
        """The loss after many microbatches, as far as counters tell it; None: nothing counts."""
        if not self._agree(bool(counters)):
            return None
        self._attributes.advance(counters)
        trial = self._try(self._all)
        self._put_back()
        return trial or Trial(len(self._all), math.nan, math.nan)

    def _trial(self, rows: Sequence[int]) -> Trial:
        loss = self._loss(rows)
        return Trial(len(rows), float(loss.sum), float(loss.weight))

    def _part(self, rows: Sequence[int]) -> tuple[Trial, UserError | None]:
        """And why the loss can't be taken of these samples, though of all of them it can."""
        try:
            return self._trial(rows), None
        except _RAISED as error:
            where = error.where if isinstance(error, UserError) else ""
            cause = error.cause if isinstance(error, UserError) else f"{error}"
            nothing = Trial(len(rows), math.nan, math.nan)
            return nothing, UserError(cause, where=where)

    def _try(self, rows: Sequence[int]) -> Trial | None:
        """None: the loss can't be taken of these."""
        trial, error = self._part(rows)
        return None if error else trial

    def _loss(self, rows: Sequence[int]) -> Mean:
        setup, device = self._setup, self._setup.device
        microbatch = self._stage(self._rows.pick(rows))
        keys = microbatch.keys
        if keys is not None and self._phase:  # each phase draws numbers of its own
            keys = StagedKeys(keys.rows.of_phase(self._phase))
        arrays = {name: tensor.to(device) for name, tensor in microbatch.arrays.items()}
        if self._casts_rows:
            arrays = {name: widened(tensor) for name, tensor in arrays.items()}
        precision = self._plan.precision if self._format == "narrow" else "f32"
        progress = self._plan.progress_at(self._rows.step)
        with (
            torch.set_grad_enabled(self._with_grad),
            current_device(device),
            setup.contexts[0].within(keys),
            autocast_for(precision, device),
        ):
            phase = self._phases[self._phase]
            if self._plan.whole_batch:
                features = setup.strategy.call(0, setup.task.features, arrays, progress, phase)
                return Mean(added_up(features), len(rows))
            losses = setup.strategy.call(0, setup.task.losses, arrays, progress, phase)
        return losses["loss"]

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
        tolerance = TOLERANCE[self._format]
        return compare_repeats(look.whole, look.again, tolerance) or compare_parts(
            look.whole, look.parts, tolerance
        )

    def _counts(self, look: "_Look") -> bool:
        """Whether the loss depends on how many microbatches came before."""
        return look.far is not None and bool(
            compare_repeats(look.whole, look.far, TOLERANCE[self._format])
        )

    def _second_opinion(self, finding: Finding | None, stack: ExitStack) -> Finding | None:
        """A small difference may be rounding: the same in float64, where it can be had."""
        seen = NarrowestFormat()
        with seen:
            self._try(self._all)
        self._put_back()
        narrow = self._format == "narrow" or seen.bytes < 4
        if not narrow and self._format == "f32" and self._can_widen():
            stack.enter_context(self._in_float64())
            seen = NarrowestFormat()
            with seen:
                trials = [self._try(rows) for rows in (self._all, *_parts(self._all))]
            self._put_back()
            if all(trials):
                whole, *parts = (trial for trial in trials if trial)
                self._format = "f64" if seen.bytes == 8 else "f32"
                tolerance = TOLERANCE["f64"] if self._format == "f64" else SURE["f32"]
                again = None if finding is None or finding.kind != "repeat" else finding
                return again or compare_parts(whole, parts, tolerance)
            stack.close()
        if finding is None:
            return None
        limit = SURE["narrow" if narrow else self._format]
        return finding if finding.difference > limit else None

    def _can_widen(self) -> bool:
        sharded = self._plan.shards > 1
        size = sum(parameter.numel() for parameter in self._model.parameters())
        return not sharded and not self._plan.float8 and size <= _WIDENED

    def _evidence(self, look: "_Look", finding: Finding | None) -> Evidence:
        """All ranks make the same calls here, whatever each has found."""
        alone = self._all[:_ALONE]
        reads = self._reads(look)
        watched = watch(lambda: self._try(self._all), self._generators, reads)
        self._put_back()
        singles = [self._try([row]) for row in alone]
        pairs = {pair: self._try(pair) for pair in combinations(alone, 2)}
        self._put_back()
        third = self._try(self._all)
        self._put_back()
        recorded = [self._record(rows) for rows in (self._all, self._all, *_parts(self._all))]
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
            place = find_place(whole, present, _LABELS[self._format], of_weight=is_weight)
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

    def _record(self, rows: Sequence[int]) -> Recorded | None:
        recording = Recording()
        try:
            with recording:
                loss = self._loss(rows)
        except _RAISED:
            return None
        finally:
            self._put_back()
        return Recorded(recording, rows, tuple(loss))

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
            return explain(finding, evidence, rounded=TOLERANCE[self._format])
        return None

    def _reads(self, look: "_Look") -> dict[str, Callable[[], object]]:
        """How attributes and buffers that change are watched."""
        reads: dict[str, Callable[[], object]] = {
            name: partial(self._attributes.read, name) for name in look.changed
        }
        return reads | {name: partial(_read_buffer, self._model, name) for name in look.unlike}

    # --- what all ranks know

    def _agree(self, mine: bool) -> bool:  # noqa: FBT001 - one word says it
        """Whether any rank says so."""
        flag = torch.tensor(float(mine), dtype=torch.float64, device=self._setup.device)
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

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        """What may stay of the check is noted before; norms over the batch, which the plan knows
        of, use what they have learnt.
        """
        task = getattr(self._setup.task, "task", self._setup.task)
        with ExitStack() as stack:
            stack.enter_context(norms_frozen(self._model))
            stack.enter_context(run_uncompiled(self._plan))
            stack.enter_context(full_float32())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # of fewer samples than a step has
            self._buffers = Buffers(self._model)
            self._attributes = Attributes(self._model, task)
            self._generators = GeneratorStates(self._attributes, [self._setup.device])
            stack.callback(self._put_back)
            yield

    def _put_back(self) -> None:
        self._attributes.put_back()
        self._buffers.put_back()
        self._generators.put_back()

    @contextmanager
    def _in_float64(self) -> Iterator[None]:
        """Weights, buffers and rows widened for a while."""
        saved = [(parameter, parameter.data) for parameter in self._model.parameters()]
        buffers = self._buffers
        with widened_buffers(self._model):
            for parameter, data in saved:
                parameter.data = widened(data)
            self._casts_rows, self._buffers = True, Buffers(self._model)
            try:
                yield
            finally:
                self._casts_rows, self._buffers = False, buffers
                for parameter, data in saved:
                    parameter.data = data


@dataclass(frozen=True)
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


def _format_of(setup: EngineSetup) -> Format:
    """What losses are computed in: wider than a step where the weights are there in it."""
    plan = setup.plan
    if plan.precision == "f64":
        return "f64"
    is_narrow = plan.precision in {"bf16", "f16"}
    return "narrow" if plan.float8 or (is_narrow and plan.shards > 1) else "f32"


def _parts(rows: Sequence[int]) -> list[list[int]]:
    """Two unequal ones, their order turned; one row can't be split."""
    turned = list(reversed(rows))
    if len(turned) < 2:
        return [turned]
    cut = max(1, 3 * len(turned) // 8)
    return [turned[:cut], turned[cut:]]


def _wants_gradient(error: BaseException) -> bool:
    """Raised because a loss takes gradients itself."""
    causes = [error, error.__cause__, error.__context__]
    return any(
        isinstance(cause, RuntimeError) and "does not require grad" in str(cause)
        for cause in causes
    )


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

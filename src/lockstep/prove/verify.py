"""Does the number of devices change the result? The same few steps in each layout, against one device, on the user's own model and data.

The reference is one device, unbroken. Every other layout trains one step, saves, and goes on from what it saved, so that its
restart is proved too; and what one layout saved is resumed by another. Dropout is off and the global batch the config's own.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from lockstep.checkpoint.format import load, name_of
from lockstep.core.config import Batch, Config, StrategyName
from lockstep.core.facts import Facts
from lockstep.core.machine import Machine
from lockstep.core.plan import Plan, plan
from lockstep.core.protocols import Stored
from lockstep.errors import LockstepError, UserError
from lockstep.launch.files import Attempt, Run
from lockstep.launch.pool import JobFailed, Pool, pool
from lockstep.launch.rehearsal import rehearse
from lockstep.observe.journal import read

TOLERANCE = {"f64": 1e-10, "f32": 1e-5}  # relative
STEPS = 6
_JAX = {"jax": "dp", "jax-fsdp": "fsdp"}  # what layouts of engine jax are called -> its strategies
_PART = rf"(?P<strategy>{'|'.join([*get_args(StrategyName), *reversed(_JAX)])})(?::(?P<world>\d+))?(?:/(?P<rounds>\d+))?"


@dataclass(frozen=True)
class Layout:
    """strategy:world, /rounds of accumulation; then: another one that goes on from what this one saved half way."""

    strategy: str
    world: int
    rounds: int | None = None
    then: "Layout | None" = None

    def __str__(self) -> str:
        own = self.strategy if self.strategy == "single" else f"{self.strategy}:{self.world}"
        return own + (f"/{self.rounds}" if self.rounds else "") + (f"..{self.then}" if self.then else "")

    @property
    def engine(self) -> str:
        return "jax" if self.strategy in _JAX else "torch"

    @property
    def legs(self) -> "list[Layout]":
        return [self, *(self.then.legs if self.then else [])]

    @property
    def most(self) -> int:
        """Processes at once: jax's devices are all in one."""
        return max(1 if self.engine == "jax" else self.world, self.then.most if self.then else 1)


def parse_layout(text: str) -> Layout:
    """'ddp:2', 'fsdp:3/4', 'ddp:2..fsdp:3'. UserError: none of these."""
    made: Layout | None = None
    for part in reversed(text.strip().split("..")):
        found = re.fullmatch(_PART, part)
        world = int(found["world"] or 1) if found else 0
        if not found or not 1 <= world <= 64 or (found["strategy"] == "single" and world != 1) or found["rounds"] == "0":
            raise UserError(f"--layouts: {text!r} is no layout", "for example single, ddp:2, jax:4, jax-fsdp:2, ddp:2/4 (4 rounds of accumulation), ddp:2..fsdp:3 (saved by the one, resumed by the other)", "--layouts")
        made = Layout(found["strategy"], world, int(found["rounds"]) if found["rounds"] else None, made)
    assert made is not None
    return made


def default_layouts(devices: int, accumulates: bool, engines: Sequence[str]) -> list[Layout]:
    """devices: how many there are to try. accumulates: whether the model may be split into rounds. engines: which can train it, the config's own first."""
    worlds = [2, 3] if devices >= 3 else [2]
    alone, other = [_torch_layouts(worlds, accumulates), _jax_layouts(worlds, accumulates)][:: 1 if engines[0] == "torch" else -1]
    if len(engines) == 1:
        return alone
    return [*alone, *other, Layout("ddp", 2, None, Layout("jax", worlds[-1], None, Layout("fsdp", 2)))]


def _jax_layouts(worlds: Sequence[int], accumulates: bool) -> list[Layout]:
    found = [Layout("jax", 1), *(Layout(strategy, world) for strategy in _JAX for world in worlds)]
    return [*found, *([Layout("jax", 2, 4)] if accumulates else []), Layout("jax", 2, None, Layout("jax-fsdp", worlds[-1]))]


def _torch_layouts(worlds: Sequence[int], accumulates: bool) -> list[Layout]:
    found = [Layout("single", 1), *(Layout(strategy, world) for strategy in ("dp", "ddp", "fsdp") for world in worlds)]
    if accumulates:
        found += [Layout("single", 1, 4), Layout("ddp", 2, 4), Layout("fsdp", worlds[-1], 4)]
    return [*found, Layout("ddp", 2, None, Layout("fsdp", worlds[-1]))]


@dataclass(frozen=True)
class Verdict:
    """Largest relative differences to the reference. first_step: where loss or norm first exceeds the tolerance. culprit: what is wrong, and where."""

    layout: str
    loss: float
    grad_norm: float
    parameters: float
    worst: float
    first_step: int | None
    verdict: str
    culprit: str
    seconds: float


@dataclass(frozen=True)
class Course:
    """What a layout did. gradient: of the first step by parameter, before clipping; empty where it was not saved."""

    losses: list[float]
    norms: list[float]
    arrays: Stored
    gradient: Mapping[str, Any]


class Trials:
    """Runs layouts of one config on warm ranks. rehearsal: what a rank does, replaced only to plant faults."""

    def __init__(self, config: Config, machine: Machine, facts: Facts, steps: int | None, on: str, pool: Pool, home: Path, rehearsal: Callable[..., Any] = rehearse) -> None:
        own = plan(_alone(config, on), machine, facts) if config.batch.samples else plan(config, machine, facts)
        self.batch, self.steps = own.batch, steps or min(STEPS, own.steps)
        if self.steps > own.steps:
            raise UserError(f"--steps {steps}: the config trains {own.steps}", f"--steps {own.steps}, or a longer run", "--steps")
        self._config, self._machine, self._facts, self._on, self._pool, self._home, self._rehearsal = config, machine, facts, on, pool, home, rehearsal

    def plan(self, layout: Layout) -> Plan:
        """UserError: this model can't be laid out so on this machine."""
        return plan(self._laid_out(layout), self._machine, self._facts)

    def _laid_out(self, layout: Layout) -> Config:
        use = f"cpu:{layout.world}" if self._on == "cpu" else ",".join(str(gpu.index) for gpu in self._machine.devices[: layout.world])
        devices = self._config.devices.model_copy(update={"use": use, "strategy": _JAX.get(layout.strategy, layout.strategy), "shards": None, "compress": "none"})
        return self._config.model_copy(update={"engine": layout.engine, "devices": devices, "batch": Batch(samples=self.batch, accumulate=layout.rounds)})

    def reference(self) -> Course:
        """One device, unbroken; its first step once more, to be saved by itself."""
        single = Layout("jax" if self._config.engine == "jax" else "single", 1)
        first = self._run("reference-first", [(single, 1)])
        return self._course(self._run("reference", [(single, self.steps)]), first)

    def course(self, layout: Layout) -> Course:
        if layout.then:
            legs = layout.legs
            return self._course(self._run(str(layout), [(leg, self.steps * (number + 1) // len(legs)) for number, leg in enumerate(legs)]), None)
        run = self._run(str(layout), [(layout, 1), (layout, self.steps)] if self.steps > 1 else [(layout, 1)])
        return self._course(run, run)

    def _run(self, name: str, legs: Sequence[tuple[Layout, int]]) -> Run:
        name = re.sub(r"[^A-Za-z0-9-]+", "-", name)
        run = Run(self._home / name)
        for directory in (run.home, run.checkpoints, run.logs):
            directory.mkdir(exist_ok=True)
        last: Path | None = None
        for layout, until in legs:
            made = self.plan(layout)
            run.write(self._laid_out(layout), made, {}, {})
            attempt = Attempt(name, str(run.home), str(last) if last else None, until)
            self._train(made, attempt)
            last = run.checkpoints / name_of(until)
        return run

    def _train(self, made: Plan, attempt: Attempt) -> None:
        how: dict[str, Any] = {"backend": made.backend if made.backend in {"gloo", "nccl"} else "gloo"}
        if 1 < made.shards < made.world and made.world < self._pool.size:  # its groups are made by all processes that there are
            with pool(made.world) as own:
                own.run(made.processes, self._rehearsal, attempt.to_json(), **how)
        else:
            self._pool.run(made.processes, self._rehearsal, attempt.to_json(), **how)

    def _course(self, run: Run, first: Run | None) -> Course:
        steps = [event.values for event in read(run.journal) if event.kind == "step"]
        course = Course([s["loss"] for s in steps], [s["grad_norm"] for s in steps], load(run.checkpoints / name_of(self.steps)).arrays, {})
        return Course(course.losses, course.norms, course.arrays, self._gradient(first, course.norms[0])) if first else course

    def _gradient(self, run: Run, norm: float) -> dict[str, Any]:
        """Of the first step, from the optimizer's first moment after it: (1 - beta) x gradient (adamw), or the gradient itself, after clipping."""
        arrays, fields = load(run.checkpoints / name_of(1)).arrays, self._config.optimizer
        slot, share = ("exp_avg", 1 - fields.betas[0]) if fields.name == "adamw" else ("momentum_buffer", 1.0)
        share *= min(1.0, fields.clip / norm) if fields.clip and norm else 1.0
        prefix = f"optimizer/{slot}/"
        return {name.removeprefix(prefix): arrays[name] / share for name in arrays if name.startswith(prefix)} if share else {}


def _alone(config: Config, on: str) -> Config:
    """The config on one device, where its batch does not depend on how many there are."""
    return config.model_copy(update={"devices": config.devices.model_copy(update={"use": "cpu" if on == "cpu" else config.devices.use, "strategy": "auto", "shards": None, "compress": "none"})})


def verify(trials: Trials, layouts: Sequence[Layout], tolerance: float) -> Iterator[Verdict]:
    """One verdict after the other. UserError, before any of them: a layout that can't be."""
    layouts = list(dict.fromkeys(layouts))
    for layout in layouts:
        for leg in layout.legs:
            _plannable(trials, layout, leg)
        if len(layout.legs) > trials.steps:
            raise UserError(f"layout {layout} changes {len(layout.legs) - 1} times in {trials.steps} steps", f"--steps {len(layout.legs)} or more", "--steps")
    reference = trials.reference()
    for layout in layouts:
        began = time.perf_counter()
        try:
            course = trials.course(layout)
        except JobFailed as error:
            yield Verdict(str(layout), np.inf, np.inf, np.inf, np.inf, None, "FAILED", error.cause, time.perf_counter() - began)
            continue
        yield judge(str(layout), course, reference, tolerance, time.perf_counter() - began)


def _plannable(trials: Trials, layout: Layout, part: Layout) -> None:
    try:
        trials.plan(part)
    except UserError as error:
        raise UserError(f"layout {layout}: {error.cause}", error.remedy, error.where) from None


def judge(name: str, course: Course, reference: Course, tolerance: float, seconds: float) -> Verdict:
    losses, norms = _apart(course.losses, reference.losses), _apart(course.norms, reference.norms)
    names = [key for key in reference.arrays if key.startswith("model/")]
    parameters = _distances({key.removeprefix("model/"): (course.arrays[key], reference.arrays[key]) for key in names})
    gradient = _distances({key: (course.gradient[key], reference.gradient[key]) for key in course.gradient})
    late = [step + 1 for step in range(len(losses)) if max(losses[step], norms[step]) > tolerance]
    figures = max(losses), max(norms), max(parameters.values())
    worst = max(figures)
    passed = worst <= tolerance
    first = late[0] if late else None
    return Verdict(name, *figures, worst, first, "PASS" if passed else "FAIL", "" if passed else _culprit(first, losses, gradient, parameters, tolerance), seconds)


def _culprit(first: int | None, losses: Sequence[float], gradient: Mapping[str, float], parameters: Mapping[str, float], tolerance: float) -> str:
    """At which stage the layouts part, and in which parameters most."""
    if losses[0] > tolerance:
        return "step 1: the loss differs before any update: other samples, other weights of them, or another start"
    if any(apart > tolerance for apart in gradient.values()):
        return f"step 1: the loss is equal, the gradient is not: {_largest(gradient, tolerance)}"
    where = f"step {first}" if first else "the last step"
    return f"{where}: the first loss and gradient are equal; what came after is not: {_largest(parameters, tolerance)}"


def _largest(apart: Mapping[str, float], tolerance: float) -> str:
    """The parameters furthest off, and how many are."""
    off = sorted((name for name, distance in apart.items() if not distance <= tolerance), key=lambda name: -np.nan_to_num(apart[name], nan=np.inf))
    shown = ", ".join(f"{name} (by {apart[name]:.1e})" for name in off[:3])
    return f"{shown}{f' and {len(off) - 3} more' if len(off) > 3 else ''}, of {len(apart)} parameters"


def _apart(found: Sequence[float | None], expected: Sequence[float | None]) -> list[float]:
    """Relative differences, step by step; a step that one of them could not take (null) is infinitely far."""
    pairs = zip(found, expected, strict=True)
    return [0.0 if a == b else np.inf if a is None or b is None else abs(a - b) / max(abs(b), 1e-300) for a, b in pairs]


def _distances(pairs: Mapping[str, tuple[Any, Any]]) -> dict[str, float]:
    """For each array the norm of the difference, relative to the norm of all that was expected.

    Not relative to itself: a bias before a BatchNorm has no gradient but rounding, which AdamW still turns into steps.
    """
    with np.errstate(invalid="ignore"):  # a mask's infinities, equal on both sides
        apart = {name: float(np.linalg.norm(np.where(found == expected, 0.0, found - expected).ravel())) for name, (found, expected) in pairs.items()}
    scale = float(np.sqrt(sum(float(np.sum(np.square(expected[np.isfinite(expected)], dtype=np.float64))) for _, expected in pairs.values())))
    return {name: distance / (scale or 1.0) for name, distance in apart.items()}


def as_json(trials: Trials, config: Config, tolerance: float, verdicts: Sequence[Verdict], left_out: Sequence[str]) -> str:
    layouts = [{key: value if not isinstance(value, float) or np.isfinite(value) else None for key, value in asdict(verdict).items()} for verdict in verdicts]
    head = {"reference": "single", "steps": trials.steps, "batch": trials.batch, "dtype": config.train.precision, "tolerance": tolerance}
    return json.dumps({**head, "layouts": layouts, "left_out": list(left_out), "passed": all(verdict.verdict == "PASS" for verdict in verdicts)}, indent=1)


__all__ = ["TOLERANCE", "Layout", "LockstepError", "Trials", "Verdict", "as_json", "default_layouts", "judge", "parse_layout", "verify"]

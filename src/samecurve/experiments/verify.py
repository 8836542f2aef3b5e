"""Does the number of devices change the result?

The same few steps in each layout, against one device, on the user's own model and data.

The reference is one device, unbroken. Every other layout trains one step, saves, and goes on from
what it saved, so that its restart is proved too; and what one layout saved is resumed by another.
Dropout is off and the global batch the config's own.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from samecurve.checkpoint.format import load, name_of
from samecurve.core.config.sections import Batch, Config
from samecurve.core.determinism.digest import combined, digest
from samecurve.core.planning.balance import with_even_balance
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.plan import Plan, plan
from samecurve.core.protocols import StoredArrays
from samecurve.errors import UserError
from samecurve.experiments.layouts import JAX, Layout
from samecurve.launch.pool import JobFailed, Pool, pool
from samecurve.observe.journal import read_events
from samecurve.run.attempt import Attempt
from samecurve.run.directory import Run
from samecurve.units import first_and_count
from samecurve.worker.jobs.train import rehearse

TOLERANCE = {"f64": 1e-10, "f32": 1e-5}  # relative
STEPS = 6


@dataclass(frozen=True)
class Verdict:
    """Largest relative differences to the reference.

    first_step: where loss or norm first exceeds the tolerance. culprit: what is wrong, and where.
    hash: of the last state.
    """

    layout: str
    loss: float
    grad_norm: float
    parameters: float
    worst: float
    first_step: int | None
    verdict: str
    culprit: str
    seconds: float
    hash: str = ""


@dataclass(frozen=True)
class Trajectory:
    """What a layout did.

    gradient: of the first step by parameter, before clipping; empty where it was not saved.
    """

    losses: list[float]
    norms: list[float]
    arrays: StoredArrays
    gradient: Mapping[str, Any]


class Trials:
    """Runs layouts of one config on warm ranks.

    rehearsal: what a rank does, replaced only to plant faults.
    """

    def __init__(
        self,
        config: Config,
        machine: Machine,
        facts: Facts,
        steps: int | None,
        on: str,
        pool: Pool,
        home: Path,
        rehearsal: Callable[..., Any] = rehearse,
    ) -> None:
        own = plan(
            _alone(config, on) if config.batch.samples else with_even_balance(config),
            machine,
            facts,
        )
        self.batch, self.steps = own.global_batch_size, steps or min(STEPS, own.steps)
        self._slot = own.micro_batch_size
        if self.steps > own.steps:
            raise UserError(
                f"--steps {steps}: the config trains {own.steps}",
                f"--steps {own.steps}, or a longer run",
                "--steps",
            )
        (
            self._config,
            self._machine,
            self._facts,
            self._on,
            self._pool,
            self._home,
            self._rehearsal,
        ) = (
            config,
            machine,
            facts,
            on,
            pool,
            home,
            rehearsal,
        )
        self._references: dict[str, Trajectory] = {}

    @property
    def exact(self) -> bool:
        return self._config.train.exact

    def plan(self, layout: Layout) -> Plan:
        """UserError: this model can't be laid out so on this machine."""
        return plan(self._laid_out(layout), self._machine, self._facts)

    def _laid_out(self, layout: Layout) -> Config:
        use = (
            f"cpu:{layout.world}"
            if self._on == "cpu"
            else ",".join(str(gpu.index) for gpu in self._machine.devices[: layout.world])
        )
        devices = self._config.devices.model_copy(
            update={
                "use": use,
                "strategy": JAX.get(layout.strategy, layout.strategy),
                "shards": None,
                "compress": "none",
                "balance": self._balance(layout),
            }
        )
        train = self._config.train.model_copy(
            update={"compile": self._config.train.compile and layout.engine == "torch"}
        )  # jax compiles anyway
        return self._config.model_copy(
            update={
                "engine": layout.engine,
                "devices": devices,
                "batch": self._batch(layout),
                "train": train,
            }
        )

    def _balance(self, layout: Layout) -> str | tuple[float, ...]:
        """The speeds that the config gives, where there are as many devices to deal by them."""
        given = self._config.devices.balance
        return (
            given
            if not isinstance(given, str) and len(given) == layout.world and layout.deals
            else "even"
        )

    def _batch(self, layout: Layout) -> Batch:
        if not self._config.train.exact:
            return Batch(samples=self.batch, accumulate=layout.rounds)
        if layout.rounds:
            raise UserError(
                "train.exact: rounds follow from the slots, whose size is the same on any devices",
                "--set batch.per_device=N for slots of N samples",
                "--layouts",
            )
        return Batch(samples=self.batch, per_device=self._slot)

    def reference(self, engine: str) -> Trajectory:
        """One device, unbroken; its first step once more, to be saved by itself.

        Where every bit counts, of this engine; else of the config's.
        """
        if not self._config.train.exact:
            engine = self._config.engine
        if engine not in self._references:
            single = Layout("jax" if engine == "jax" else "single", 1)
            first = self._run(f"reference-{engine}-first", [(single, 1)])
            self._references[engine] = self._course(
                self._run(f"reference-{engine}", [(single, self.steps)]), first
            )
        return self._references[engine]

    def course(self, layout: Layout) -> Trajectory:
        if layout.then:
            legs = layout.legs
            return self._course(
                self._run(
                    str(layout),
                    [
                        (leg, self.steps * (number + 1) // len(legs))
                        for number, leg in enumerate(legs)
                    ],
                ),
                None,
            )
        run = self._run(
            str(layout), [(layout, 1), (layout, self.steps)] if self.steps > 1 else [(layout, 1)]
        )
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
        how: dict[str, Any] = {
            "backend": made.backend if made.backend in {"gloo", "nccl"} else "gloo"
        }
        if (
            1 < made.shards < made.num_devices and made.num_devices < self._pool.size
        ):  # its groups are made by all processes that there are
            with pool(made.num_devices) as own:
                own.run(made.world_size, self._rehearsal, attempt.to_json(), **how)
        else:
            self._pool.run(made.world_size, self._rehearsal, attempt.to_json(), **how)

    def _course(self, run: Run, first: Run | None) -> Trajectory:
        steps = [event.values for event in read_events(run.journal) if event.kind == "step"]
        course = Trajectory(
            [s["loss"] for s in steps],
            [s["grad_norm"] for s in steps],
            load(run.checkpoints / name_of(self.steps)).arrays,
            {},
        )
        return (
            Trajectory(
                course.losses, course.norms, course.arrays, self._gradient(first, course.norms[0])
            )
            if first
            else course
        )

    def _gradient(self, run: Run, norm: float) -> dict[str, Any]:
        """Of the first step, from the optimizer's first moment after it: (1 - beta) x gradient
        (adamw), or the gradient itself, after clipping.
        """
        arrays, fields = load(run.checkpoints / name_of(1)).arrays, self._config.optimizer
        slot, share = (
            ("exp_avg", 1 - fields.betas[0]) if fields.name == "adamw" else ("momentum_buffer", 1.0)
        )
        share *= min(1.0, fields.clip / norm) if fields.clip and norm else 1.0
        prefix = f"optimizer/{slot}/"
        return (
            {
                name.removeprefix(prefix): arrays[name] / share
                for name in arrays
                if name.startswith(prefix)
            }
            if share
            else {}
        )


def _alone(config: Config, on: str) -> Config:
    """The config on one device, where its batch does not depend on how many there are."""
    return config.model_copy(
        update={
            "devices": config.devices.model_copy(
                update={
                    "use": "cpu" if on == "cpu" else config.devices.use,
                    "strategy": "auto",
                    "shards": None,
                    "compress": "none",
                    "balance": "even",
                }
            )
        }
    )


def verify(trials: Trials, layouts: Sequence[Layout], tolerance: float) -> Iterator[Verdict]:
    """One verdict after the other.

    tolerance 0: every bit counts. UserError, before any of them: a layout that can't be.
    """
    layouts = list(dict.fromkeys(layouts))
    for layout in layouts:
        for leg in layout.legs:
            _plannable(trials, layout, leg)
        if len(layout.legs) > trials.steps:
            raise UserError(
                f"layout {layout} changes {len(layout.legs) - 1} times in {trials.steps} steps",
                f"--steps {len(layout.legs)} or more",
                "--steps",
            )
    for layout in layouts:
        reference = trials.reference(layout.engine)
        began = time.perf_counter()
        try:
            course = trials.course(layout)
        except JobFailed as error:
            yield Verdict(
                str(layout),
                np.inf,
                np.inf,
                np.inf,
                np.inf,
                None,
                "FAILED",
                error.cause,
                time.perf_counter() - began,
            )
            continue
        yield judge(str(layout), course, reference, tolerance, time.perf_counter() - began)


def _plannable(trials: Trials, layout: Layout, part: Layout) -> None:
    if trials.exact and part.engine != layout.engine:
        raise UserError(
            f"layout {layout}: the two engines compute with different kernels, so their bits"
            " differ",
            "layouts of one engine with --bits, or leave --bits out",
            "--layouts",
        )
    try:
        trials.plan(part)
    except UserError as error:
        raise UserError(f"layout {layout}: {error.cause}", error.remedy, error.where) from None


def judge(
    name: str, course: Trajectory, reference: Trajectory, tolerance: float, seconds: float
) -> Verdict:
    losses, norms = _apart(course.losses, reference.losses), _apart(course.norms, reference.norms)
    names = [key for key in reference.arrays if key.startswith("model/")]
    parameters = _distances(
        {key.removeprefix("model/"): (course.arrays[key], reference.arrays[key]) for key in names}
    )
    gradient = _distances(
        {key: (course.gradient[key], reference.gradient[key]) for key in course.gradient}
    )
    late = [step + 1 for step in range(len(losses)) if max(losses[step], norms[step]) > tolerance]
    figures = max(losses), max(norms), max(parameters.values())
    worst = max(figures)
    first = late[0] if late else None
    odd = [] if tolerance else _odd(course.arrays, reference.arrays)
    passed = worst <= tolerance and not odd
    culprit = (
        ""
        if passed
        else (
            f"the last state alone differs: {first_and_count(odd)}"
            if worst <= tolerance
            else _culprit(first, losses, gradient, parameters, tolerance)
        )
    )
    return Verdict(
        name,
        *figures,
        worst,
        first,
        "PASS" if passed else "FAIL",
        culprit,
        seconds,
        _hash(course.arrays),
    )


def _digests(arrays: StoredArrays) -> dict[str, str]:
    return {name: digest(array).hex() for name, array in arrays.items()}


def _hash(arrays: StoredArrays) -> str:
    return combined(_digests(arrays))


def _odd(found: StoredArrays, expected: StoredArrays) -> list[str]:
    """Arrays of a state, the optimizer's too, that are not equal to the last bit."""
    ours, theirs = _digests(found), _digests(expected)
    return sorted(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))


def _culprit(
    first: int | None,
    losses: Sequence[float],
    gradient: Mapping[str, float],
    parameters: Mapping[str, float],
    tolerance: float,
) -> str:
    """At which stage the layouts part, and in which parameters most."""
    if losses[0] > tolerance:
        return (
            "step 1: the loss differs before any update: other samples, other weights of them, or"
            " another start"
        )
    if any(apart > tolerance for apart in gradient.values()):
        return f"step 1: the loss is equal, the gradient is not: {_largest(gradient, tolerance)}"
    where = f"step {first}" if first else "the last step"
    return (
        f"{where}: the first loss and gradient are equal; what came after is not:"
        f" {_largest(parameters, tolerance)}"
    )


def _largest(apart: Mapping[str, float], tolerance: float) -> str:
    """The parameters furthest off, and how many are."""
    off = sorted(
        (name for name, distance in apart.items() if not distance <= tolerance),
        key=lambda name: -np.nan_to_num(apart[name], nan=np.inf),
    )
    shown = ", ".join(f"{name} (by {apart[name]:.1e})" for name in off[:3])
    return (
        f"{shown}{f' and {len(off) - 3} more' if len(off) > 3 else ''}, of {len(apart)} parameters"
    )


def _apart(found: Sequence[float | None], expected: Sequence[float | None]) -> list[float]:
    """Relative differences, step by step; a step that one of them could not take (null) is
    infinitely far.
    """
    pairs = zip(found, expected, strict=True)
    return [
        0.0 if a == b else np.inf if a is None or b is None else abs(a - b) / max(abs(b), 1e-300)
        for a, b in pairs
    ]


def _distances(pairs: Mapping[str, tuple[Any, Any]]) -> dict[str, float]:
    """For each array the norm of the difference, relative to the norm of all that was expected.

    Not relative to itself: a bias before a BatchNorm has no gradient but rounding, which AdamW
    still turns into steps.
    """
    with np.errstate(invalid="ignore"):  # a mask's infinities, equal on both sides
        apart = {
            name: float(np.linalg.norm(np.where(found == expected, 0.0, found - expected).ravel()))
            for name, (found, expected) in pairs.items()
        }
    scale = float(
        np.sqrt(
            sum(
                float(np.sum(np.square(expected[np.isfinite(expected)], dtype=np.float64)))
                for _, expected in pairs.values()
            )
        )
    )
    return {name: distance / (scale or 1.0) for name, distance in apart.items()}


def as_json(
    trials: Trials,
    config: Config,
    tolerance: float,
    verdicts: Sequence[Verdict],
    left_out: Sequence[str],
) -> str:
    layouts = [
        {
            key: value if not isinstance(value, float) or np.isfinite(value) else None
            for key, value in asdict(verdict).items()
        }
        for verdict in verdicts
    ]
    head = {
        "reference": "single",
        "steps": trials.steps,
        "batch": trials.batch,
        "dtype": config.train.precision,
        "bits": trials.exact,
        "tolerance": tolerance,
    }
    return json.dumps(
        {
            **head,
            "layouts": layouts,
            "left_out": list(left_out),
            "passed": all(verdict.verdict == "PASS" for verdict in verdicts),
        },
        indent=1,
    )

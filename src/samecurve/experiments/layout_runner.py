"""Train the same few steps of one config in one layout after another, for `samecurve verify`.

The reference trains on one device without interruption. Every other layout trains one step, saves,
and resumes from its checkpoint, so the restart is tested too. Some layouts resume another layout's
checkpoint. The global batch is the config's own.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from samecurve.checkpoint import name_of
from samecurve.checkpoint.format import load
from samecurve.core.config.sections import Batch, Config
from samecurve.core.feature_list import spec_of
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.fixed import CLIP_EPSILON
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan
from samecurve.core.protocols import StoredArrays
from samecurve.errors import NotSameBitsError, UserError
from samecurve.experiments.layouts import JAX, Layout
from samecurve.experiments.scratch import for_steps_alone, make_run, run_on_ranks
from samecurve.features.balance import balance_of, with_even_balance
from samecurve.features.guard.additivity import IN_FLOAT32
from samecurve.launch.pool import Pool, pool
from samecurve.observe import read_events
from samecurve.run.directory import Run
from samecurve.run.directory.attempt import Attempt
from samecurve.worker.jobs.train_job import rehearse

STEPS = 6  # steps of each layout without --steps
# values of `devices` without groups and uneven shares
_UNSPLIT = {"shards": None, "balance": "even"}


def with_bits_settled(config: Config, machine: Machine, facts: Facts) -> Config:
    """The config with what its plan chooses, where the config leaves the bits to the plan."""
    if not config.train.plan_chooses_bits:
        return config
    made = plan(config, machine, facts)
    if made.same_bits:
        config = config.with_values(batch={"per_device": made.batch.micro_batch_size})
    return config.with_bits(same=made.same_bits)


def on_one_device(config: Config, kind: str) -> Config:
    """The config for one device of this kind; where its batch follows the devices, for its own."""
    if not config.batch.samples:
        return with_even_balance(config)
    use = "cpu" if kind == "cpu" else config.devices.use
    return config.with_values(devices={**_UNSPLIT, "use": use, "strategy": "auto"})


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """The losses, norms and arrays of a layout's steps."""

    losses: list[float | None]  # of each step; None: not finite
    norms: list[float | None]  # norm of each step's gradient
    arrays: StoredArrays  # arrays of the last state
    gradient: Mapping[str, np.ndarray]  # the first step's gradients by parameter; empty: not saved
    in_float32: str = ""  # the split check's line about float32 in an f64 run; '': there is none


class LayoutRunner:
    """Runner of layouts of one config on warm ranks."""

    def __init__(
        self,
        config: Config,
        machine: Machine,
        facts: Facts,
        *,
        steps: int | None,
        kind: str,
        pool: Pool,
        home: Path,
        job: Callable[..., Any] = rehearse,
    ) -> None:
        """Prepare a runner. UserError: the config trains fewer steps.

        facts: facts of the config's task
        steps: optimizer steps of each layout; None: 6, or all steps of a shorter run
        kind: kind of device: cpu or cuda
        home: directory of the runs
        job: the work of a rank; tests replace it to simulate faults
        """
        config_plan = plan(on_one_device(config, kind), machine, facts)
        if steps is not None and steps > config_plan.steps:
            raise UserError(
                f"--steps {steps}: the config trains {config_plan.steps}",
                f"--steps {config_plan.steps}, or a longer run",
                "--steps",
            )
        self.config, self.kind, self.most_steps = config, kind, config_plan.steps
        self.steps = steps or min(STEPS, config_plan.steps)
        self.global_batch_size = config_plan.batch.global_batch_size
        self._micro_batch_size = config_plan.batch.micro_batch_size
        self._machine, self._facts = machine, facts
        self._pool, self._home, self._job = pool, home, job
        self._references: dict[str, Trajectory] = {}

    @property
    def same_bits(self) -> bool:
        return self.config.train.asks_same_bits

    def plan(self, layout: Layout) -> Plan:
        """Plan a layout. UserError: this layout is not possible for this model and machine."""
        return for_steps_alone(plan(self._config_of(layout), self._machine, self._facts))

    def _config_of(self, layout: Layout) -> Config:
        if self.kind == "cpu":
            use = f"cpu:{layout.num_devices}"
        else:
            gpus = self._machine.devices[: layout.num_devices]
            use = ",".join(str(gpu.index) for gpu in gpus)
        strategy = JAX.get(layout.strategy, layout.strategy)
        balance = self._balance(layout)
        in_jax = layout.engine == "jax"  # which always compiles
        config = self.config.without_features(
            lambda feature: feature.follows_devices or (in_jax and feature.compiles_blocks)
        )
        return config.with_values(
            engine=layout.engine,
            devices={**_UNSPLIT, "use": use, "strategy": strategy, "balance": balance},
            batch=self._batch(layout),
        )

    def _balance(self, layout: Layout) -> str | tuple[float, ...]:
        """The config's speeds, if the layout has as many devices; else an even assignment."""
        speeds = balance_of(self.config)
        if isinstance(speeds, str) or len(speeds) != layout.num_devices:
            return "even"
        return speeds if layout.can_be_uneven else "even"

    def _batch(self, layout: Layout) -> Batch:
        if not self.same_bits:
            return Batch(samples=self.global_batch_size, accumulate=layout.accumulation_steps)
        if layout.accumulation_steps:
            raise NotSameBitsError(
                "accumulation steps follow from the microbatches, whose size is the"
                " same on any devices",
                "--set batch.per_device=N for microbatches of N samples",
                "--layouts",
            )
        return Batch(samples=self.global_batch_size, per_device=self._micro_batch_size)

    def reference(self, engine: str) -> Trajectory:
        """Train the reference on one device, unbroken. Its first step runs again, to be saved.

        The engine is the given one if every bit counts, else the config's.
        """
        if not self.same_bits:
            engine = self.config.engine
        if engine not in self._references:
            single = Layout("jax" if engine == "jax" else "single", 1)
            first_step = self._run(f"reference-{engine}-first", [(single, 1)])
            run = self._run(f"reference-{engine}", [(single, self.steps)])
            self._references[engine] = self._trajectory(run, first_step)
        return self._references[engine]

    def trajectory(self, layout: Layout) -> Trajectory:
        """Train a layout. JobFailedError: a rank failed."""
        if layout.resumed_by:
            count = len(layout.legs)
            legs = [
                (leg, self.steps * number // count)
                for number, leg in enumerate(layout.legs, start=1)
            ]
            return self._trajectory(self._run(str(layout), legs), None)
        legs = [(layout, 1)]
        if self.steps > 1:
            legs.append((layout, self.steps))
        run = self._run(str(layout), legs)
        return self._trajectory(run, run)

    def run_unbroken(self, name: str, until: int, checkpoint: Path | None = None) -> Run:
        """Train on one device. checkpoint: to go on from; None: from the start, and the first step
        is saved.
        """
        single = Layout("jax" if self.config.engine == "jax" else "single", 1)
        legs = [(single, until)] if checkpoint else [(single, 1), (single, until)]
        return self._run(name, legs, checkpoint)

    def _run(
        self, name: str, legs: Sequence[tuple[Layout, int]], checkpoint: Path | None = None
    ) -> Run:
        """Run layouts in turn. legs: each layout with the step at which the next one takes over."""
        name = re.sub(r"[^A-Za-z0-9-]+", "-", name)
        for layout, until in legs:
            leg_plan = self.plan(layout)
            run = make_run(self._home / name, self._config_of(layout), leg_plan)
            resume = str(checkpoint) if checkpoint else None
            self._train(leg_plan, Attempt(name, str(run.home), resume, until))
            checkpoint = run.checkpoints / name_of(until)
        return run

    def _train(self, plan: Plan, attempt: Attempt) -> None:
        grouped = 1 < plan.layout.shards < plan.layout.num_devices
        if grouped and plan.layout.num_devices < self._pool.size:
            # all processes take part in making its groups
            with pool(plan.layout.num_devices) as ranks:
                run_on_ranks(ranks, plan, self._job, attempt.to_json())
        else:
            run_on_ranks(self._pool, plan, self._job, attempt.to_json())

    def _trajectory(self, run: Run, first_step: Run | None) -> Trajectory:
        """Read a trajectory. first_step: the run that saved the first step; None: none did."""
        events = list(read_events(run.journal))
        steps = [event.values for event in events if event.kind == "step"]
        warned = (event.values["text"] for event in events if event.kind == "warned")
        norms = [values["grad_norm"] for values in steps]
        arrays = load(run.checkpoints / name_of(self.steps)).arrays
        return Trajectory(
            losses=[values["loss"] for values in steps],
            norms=norms,
            arrays=arrays,
            gradient=self.first_gradient(first_step, norms[0]) if first_step else {},
            in_float32=next((text for text in warned if IN_FLOAT32 in text), ""),
        )

    def first_gradient(self, run: Run, norm: float | None) -> dict[str, np.ndarray]:
        """The first step's gradient before clipping, from the optimizer's first moment.

        The first moment is (1 - beta) x clipped gradient (adamw), or the clipped gradient itself
        (sgd).
        """
        arrays, optimizer = load(run.checkpoints / name_of(1)).arrays, self.config.optimizer
        shares = {"exp_avg": 1 - optimizer.betas[0], "momentum_buffer": 1.0}
        spec = spec_of(optimizer.name)
        if spec and spec.newest_share_is_rest:
            shares["momentum_buffer"] -= optimizer.momentum
        clipping = 1.0
        if optimizer.clip and norm:
            clipping = min(1.0, optimizer.clip / (norm + CLIP_EPSILON))
        gradient = {}
        for name, array in arrays.items():
            _, _, rest = name.partition("optimizer/")
            state, _, parameter = rest.partition("/")
            if shares.get(state):
                gradient[parameter] = array / (shares[state] * clipping)
        return gradient

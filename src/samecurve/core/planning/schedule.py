"""The length of a run, its learning rate at each step, and the intervals of its actions."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from samecurve.core.config import (
    Decay,
    ScheduleForm,
    epochs_of,
    seconds_of,
)
from samecurve.core.config.sections import Batch, ScheduleFields
from samecurve.core.config.train_section import Train
from samecurve.core.determinism.data_order import Order
from samecurve.core.planning import Decision
from samecurve.errors import UserError

_TOGETHER = 256  # steps whose rates are computed together


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate as a pure function of the step: a checkpoint needs no state of it."""

    peak: float  # learning rate after warm-up
    steps: int
    warmup: int = 0  # steps
    decay: Decay | Literal["task"] = "cosine"  # task: the task's own schedule decides
    final: float = 0.1  # share of the peak left at the end
    cooldown: float = 0.2  # share of the steps after warm-up in which wsd decays
    form: ScheduleForm = "samecurve"

    def at(self, step: int, task_factor: Callable[[int], float] | None = None) -> float:
        """The rate of a step, counted from 0.

        The first step of a warm-up of n takes peak/n, the n-th the peak; the run's last step takes
        the final rate. In the form of transformers each is one step later: the first step takes 0.

        task_factor: gives the factor of a step, by the task's own schedule
        """
        if self.decay == "task":
            assert task_factor, "the task has a schedule"
            # an experiment may take more steps than the run has, for which the task has no factor
            return self.peak * task_factor(min(step, self.steps - 1))
        first = 0 if self.form == "transformers" else 1  # what the run's first step counts as
        if step < self.warmup:
            return self.peak * (step + first) / self.warmup
        span = max(1, self.steps - first - self.warmup)
        done = min(1.0, (step - self.warmup) / span)
        share = 1.0  # constant, or wsd without decay: warm-up, then stable
        if self.decay == "linear":
            share = 1.0 + (self.final - 1.0) * done
        elif self.decay == "cosine":
            share = self.final + (1.0 - self.final) * 0.5 * (1.0 + math.cos(math.pi * done))
        elif self.decay == "wsd" and self.cooldown:
            into = max(0.0, done - (1.0 - self.cooldown)) / self.cooldown
            share = 1.0 + (self.final - 1.0) * into
        return self.peak * share


class Rates(dict[int, float]):
    """By step, the rates of a run: those of many steps are computed together.

    Where the task has its own schedule, each is computed when it is asked for: the schedule may
    refuse a step that is far ahead.
    """

    def __init__(self, schedule: Schedule, task_factor: Callable[[int], float] | None) -> None:
        super().__init__()
        self._schedule, self._task_factor = schedule, task_factor
        self._together = 1 if schedule.decay == "task" else _TOGETHER

    def __missing__(self, step: int) -> float:
        self.clear()
        for number in range(step, step + self._together):
            self[number] = self._schedule.at(number, self._task_factor)
        return self[step]


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """Steps between actions; 0: never (the last step does each action that is due at the end)."""

    log: int
    evaluate: int
    save: int
    sample: int
    hash: int = 0
    save_seconds: float = 0.0  # between saves that go by time; 0: none do


def choose_intervals(train: Train, order: Order, *, hashes: bool) -> Decision[Intervals]:
    """The intervals of the config, in steps; saves may go by time.

    hashes: whether the state is hashed
    """
    save_seconds = seconds_of(train.save_every) or 0.0
    intervals = Intervals(
        log=train.log_every,
        evaluate=_interval(train.eval_every, order),
        save=0 if save_seconds else _interval(train.save_every, order),
        sample=_interval(train.sample_every, order),
        hash=train.hash_every if hashes else 0,
        save_seconds=save_seconds,
    )
    reasons = {}
    if save_seconds:
        reasons["save"] = (
            "and at the end; more rarely where saves would take more than 1 % of the time. Curves"
            " don't depend on it"
        )
    return Decision(intervals, reasons)


def check_steps(train_steps: int | str, steps: int | None = None) -> None:
    """UserError: the run would take no step.

    train_steps: of the config
    steps: their number; None: not known yet, where train.steps is in epochs
    """
    if 0 in {train_steps, epochs_of(train_steps), steps}:
        raise UserError(
            f"train.steps {train_steps} trains nothing",
            "--max-steps N or --epochs N",
            "train.steps",
        )


def choose_peak(
    section: ScheduleFields, lr: float, batch: Batch, global_batch_size: int
) -> Decision[float]:
    """The learning rate after warm-up: optimizer.lr, scaled by schedule.scale_lr.

    UserError: the batch that lr was found for is not known.
    """
    rule, base = section.scale_lr, section.base_batch
    if rule == "none":
        return Decision(lr, {"lr": "as configured; not scaled"})
    if base is None and batch.samples is None:
        base = (batch.per_device or 0) * (batch.accumulate or 1)
    if not base:
        raise UserError(
            f"schedule.scale_lr {rule} needs the batch that lr {lr:g} was found for",
            "--set schedule.base_batch=N",
            "schedule.scale_lr",
        )
    factor = global_batch_size / base
    if rule == "sqrt":
        factor **= 0.5
    reason = f"{lr:g} x {factor:g} ({rule}: batch {global_batch_size} against {base})"
    return Decision(lr * factor, {"lr": reason})


def choose_schedule(
    section: ScheduleFields,
    train_steps: int | str,
    batch: Batch,
    order: Order,
    *,
    lr: float,
    by_task: str = "",
) -> Decision[Schedule]:
    """The number of steps, and the learning rate of each.

    lr: optimizer.lr
    by_task: the task's own schedule, in words; '': the config's schedule holds

    UserError: nothing would be trained, or the config sets what the task's schedule does not read.
    """
    peak = choose_peak(section, lr, batch, order.global_batch_size)
    steps, warmup = _steps(train_steps, order), _warmup(section, order)
    check_steps(train_steps, steps)
    why_steps = f"train.steps {train_steps}; {order.steps_per_epoch} steps an epoch"
    reasons = {"steps": why_steps, **peak.reasons}
    if by_task:
        _check_not_set(section)
        reasons["lr"] += f"; times {by_task}"
        return Decision(Schedule(peak=peak.value, steps=steps, decay="task"), reasons)
    warnings = []
    if peak.value > lr and not warmup:
        warnings.append(
            f"the learning rate is scaled up {peak.value / lr:g} times without warm-up:"
            f" --warmup {max(1, steps // 20)} is safer"
        )
    if warmup >= steps:
        warnings.append(f"warm-up takes {warmup} of {steps} steps: the learning rate never decays")
    schedule = Schedule(
        peak=peak.value,
        steps=steps,
        warmup=warmup,
        decay=section.decay,
        final=section.final,
        cooldown=section.cooldown,
        form=section.form,
    )
    if section.form == "transformers":
        first, last = schedule.at(0), schedule.at(steps - 1)
        reasons["lr"] += (
            f"; schedule.form transformers: {first:.3g} in the first step, {last:.3g} in the last"
        )
    return Decision(schedule, reasons, tuple(warnings))


def _warmup(section: ScheduleFields, order: Order) -> int:
    """Steps of warm-up. transformers rounds a part of the run up to whole steps."""
    epochs = epochs_of(section.warmup)
    if epochs is None or section.form != "transformers":
        return _steps(section.warmup, order)
    return math.ceil(epochs * order.steps_per_epoch - 1e-9)


def _check_not_set(section: ScheduleFields) -> None:
    """UserError: the config sets fields that the task's own schedule does not read."""
    unheard = section.changed("warmup", "decay", "final", "cooldown", "form")
    if unheard:
        keys = " and ".join(f"schedule.{name}" for name in unheard)
        verb = "does" if len(unheard) == 1 else "do"
        raise UserError(
            f"the task brings its own schedule of the learning rate, which {keys} {verb} not reach",
            "leave it out of the config, or schedule() out of the class",
            f"schedule.{unheard[0]}",
        )


def _steps(duration: int | str, order: Order) -> int:
    epochs = epochs_of(duration)
    return int(duration) if epochs is None else order.steps_to(epochs)


def _interval(duration: int | str, order: Order) -> int:
    epochs = epochs_of(duration)
    return int(duration) if epochs is None else max(1, round(epochs * order.steps_per_epoch))

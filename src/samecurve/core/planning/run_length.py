"""How long a run is: its steps, its learning rate over them, and when things are due."""

from dataclasses import dataclass

from samecurve.core.config.sections import Config, epochs_of
from samecurve.core.config.train_section import Train
from samecurve.core.determinism.data_order import Order
from samecurve.core.evaluation.metric_goal import EarlyStopRule
from samecurve.core.planning.decision import Decision
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.schedule import Schedule
from samecurve.errors import UserError
from samecurve.units import counted


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """Steps between things; 0: never (what is due at the end is due all the same)."""

    log: int
    evaluate: int
    save: int
    sample: int
    hash: int = 0


def choose_intervals(train: Train, order: Order) -> Intervals:
    """train: the config's section"""
    return Intervals(
        log=train.log_every,
        evaluate=_interval(train.eval_every, order),
        save=_interval(train.save_every, order),
        sample=_interval(train.sample_every, order),
        hash=train.hash_every if train.exact else 0,
    )


def choose_early_stop(train: Train, facts: Facts) -> Decision[EarlyStopRule | None]:
    """UserError: nothing would be evaluated before the end."""
    fields = train.early_stop
    if fields is None:
        return Decision(None)
    if not facts.eval_samples:
        raise UserError(
            "train.early_stop looks at evaluations, and the task has no held-out data",
            "a share of the data for validation, or leave it out",
            "train.early_stop",
        )
    if not train.eval_every:
        raise UserError(
            "train.early_stop looks at evaluations, and there is one at the end only",
            "--eval-every 1ep, or a number of steps",
            "train.early_stop",
        )
    goal = fields.goal
    reason = (
        f"after {counted(fields.patience, 'evaluation')} in a row without a better {goal.metric}"
        f" ({goal.mode}"
    )
    reason += f", by more than {fields.min_delta:g})" if fields.min_delta else ")"
    rule = EarlyStopRule(goal, fields.patience, fields.min_delta)
    return Decision(rule, {"early stop": reason})


def choose_schedule(config: Config, order: Order, by_task: str = "") -> Decision[Schedule]:
    """by_task: its own schedule, in words; '': the config's holds

    UserError: nothing would be trained, or the rate can't be scaled.
    """
    fields, train_steps = config.schedule, config.train.steps
    steps, warmup = _steps(train_steps, order), _steps(fields.warmup, order)
    if steps < 1:
        raise UserError(
            f"train.steps {train_steps} trains nothing",
            "--max-steps N or --epochs N",
            "train.steps",
        )
    peak, why_lr = _scale_lr(config, order.global_batch_size)
    why_steps = f"train.steps {train_steps}; {order.steps_per_epoch} steps an epoch"
    if by_task:
        _check_says_nothing(config)
        schedule = Schedule(peak=peak, steps=steps, decay="task")
        return Decision(schedule, {"steps": why_steps, "lr": f"{why_lr}; times {by_task}"})
    warnings = []
    if peak > config.optimizer.lr and not warmup:
        warnings.append(
            f"the learning rate is scaled up {peak / config.optimizer.lr:g} times without warm-up:"
            f" --warmup {max(1, steps // 20)} is safer"
        )
    if warmup >= steps:
        warnings.append(f"warm-up takes {warmup} of {steps} steps: the learning rate never decays")
    schedule = Schedule(
        peak=peak,
        steps=steps,
        warmup=warmup,
        decay=fields.decay,
        final=fields.final,
        cooldown=fields.cooldown,
    )
    return Decision(schedule, {"steps": why_steps, "lr": why_lr}, tuple(warnings))


def _check_says_nothing(config: Config) -> None:
    """UserError: the config's schedule says something to one that the task brings itself."""
    fields, defaults = config.schedule, type(config.schedule)()
    names = ["warmup", "decay", "final", "cooldown"]
    unheard = [name for name in names if getattr(fields, name) != getattr(defaults, name)]
    if unheard:
        keys = " and ".join(f"schedule.{name}" for name in unheard)
        verb = "does" if len(unheard) == 1 else "do"
        raise UserError(
            f"the task brings its own schedule of the learning rate, which {keys} {verb} not reach",
            "leave it out of the config, or schedule() out of the class",
            f"schedule.{unheard[0]}",
        )


def _scale_lr(config: Config, batch: int) -> tuple[float, str]:
    """(the learning rate after warm-up, why)."""
    rule, lr = config.schedule.scale_lr, config.optimizer.lr
    if rule == "none":
        return lr, "as configured; not scaled"
    base = config.schedule.base_batch
    if base is None and config.batch.samples is None:
        base = (config.batch.per_device or 0) * (config.batch.accumulate or 1)
    if not base:
        raise UserError(
            f"schedule.scale_lr {rule} needs the batch that lr {lr:g} was found for",
            "--set schedule.base_batch=N",
            "schedule.scale_lr",
        )
    factor = batch / base
    if rule == "sqrt":
        factor **= 0.5
    return lr * factor, f"{lr:g} x {factor:g} ({rule}: batch {batch} against {base})"


def _steps(duration: int | str, order: Order) -> int:
    epochs = epochs_of(duration)
    if epochs is None:
        return int(duration)
    return order.steps_to(epochs)


def _interval(duration: int | str, order: Order) -> int:
    epochs = epochs_of(duration)
    if epochs is None:
        return int(duration)
    return max(1, round(epochs * order.steps_per_epoch))

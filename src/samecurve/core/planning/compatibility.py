"""What makes a result depend on its layout after all, and what a strategy's user should know:
refused, or said, by plan().
"""

from collections.abc import Sequence

from samecurve.core.config.sections import Config
from samecurve.core.config.train_section import Train
from samecurve.core.planning.batch import BatchSplit
from samecurve.core.planning.built_in_optimizers import say_built_in
from samecurve.core.planning.decision import Decision
from samecurve.core.planning.facts import Facts, UserOptimizerFacts
from samecurve.core.planning.layout import Layout
from samecurve.core.planning.memory import MemoryTerm
from samecurve.core.planning.optimizer_state import itemsize
from samecurve.errors import UserError
from samecurve.units import counted, first_and_count, show_bytes

_ALLOWED = (
    "train.allow_coupled: a loss that does not add up over samples, or draws numbers that follow no"
    " sample, is trained all the same; results may then depend on the devices"
)


def check_coupled(
    config: Config, facts: Facts, layout: Layout, split: BatchSplit
) -> Decision[None]:
    """A model that mixes samples gives the same result only if all that it mixes is computed
    together.

    UserError: it would not be, and the config does not allow it.
    """
    train, coupled = config.train, facts.coupled
    if not coupled:
        if train.allow_coupled:
            return Decision(None, warnings=(_ALLOWED,))
        if not train.norm_sync:
            return Decision(None)
        warning = "train.norm_sync: the model has no BatchNorm, so there is nothing to synchronise"
        return Decision(None, warnings=(warning,))
    if train.recompute != "none":
        raise UserError(
            f"{first_and_count(coupled)} would count its statistics twice where blocks are"
            " computed again",
            "leave train.recompute out",
            "train.recompute",
        )
    others = [name for name in coupled if not name.startswith("BatchNorm")]
    rounds = split.accumulation_steps
    if not others and train.norm_sync and (split.num_microbatches == 1 or rounds == 1):
        reason = f"{first_and_count(coupled)}: statistics over the whole step, synchronised"
        return Decision(None, {"coupled": reason})
    if not others and split.num_microbatches == 1:
        reason = f"{first_and_count(coupled)}: one microbatch a step, so nothing is split"
        return Decision(None, {"coupled": reason})
    if train.allow_coupled and train.exact:
        reason = (
            f"{first_and_count(coupled)} mixes the samples of a microbatch, which are the same on"
            " any devices (train.exact)"
        )
        return Decision(None, {"coupled": reason})
    if train.allow_coupled:
        warning = (
            f"{first_and_count(coupled)} mixes the samples of a microbatch: results depend on the"
            f" {layout.num_devices} devices and {rounds} rounds (train.allow_coupled)"
        )
        return Decision(None, warnings=(warning,))
    raise _coupled_split(others or coupled, layout, rounds, norms_only=not others)


def _coupled_split(
    coupled: Sequence[str], layout: Layout, rounds: int, *, norms_only: bool
) -> UserError:
    devices = counted(layout.num_devices, "device")
    remedy = (
        "a norm that treats each sample by itself (GroupNorm, LayerNorm); --set"
        " train.allow_coupled=true trains it all the same"
    )
    if not norms_only:
        remedy = (
            "features() and batch_loss() in place of loss(): the loss then sees the whole batch,"
            " however it is split; --set train.allow_coupled=true trains it all the same"
        )
    elif rounds == 1:
        remedy = f"--set train.norm_sync=true takes its statistics over all devices; or {remedy}"
    else:
        remedy = f"a batch that fits in one round, with --set train.norm_sync=true; or {remedy}"
    return UserError(
        f"{first_and_count(coupled)} mixes the samples of a batch, so the result would depend on"
        f" how it is split: here over {devices} in {counted(rounds, 'round')}",
        remedy,
        "model",
    )


def say_average(train: Train) -> Decision[None]:
    """Of the weights."""
    if not train.ema:
        return Decision(None)
    reason = (
        f"after each step {train.ema:g} x the average + {1 - train.ema:g} x the weights, from the"
        " first weights on: it is evaluated, sampled and exported"
    )
    return Decision(None, {"ema": reason})


def say_modes(facts: Facts) -> Decision[None]:
    """Which modules are in training, where that is not plain."""
    parts = []
    if facts.kept_in_eval:
        parts.append(f"{first_and_count(facts.kept_in_eval)} stays in eval mode, as model() has it")
    if facts.from_pretrained:
        came = first_and_count(facts.from_pretrained)
        parts.append(f"{came} goes into training: from_pretrained() gives it in eval mode")
    return Decision(None, {"modes": "; ".join(parts)} if parts else {})


def say_notes(facts: Facts) -> Decision[None]:
    """What the task says of itself."""
    return Decision(None, {"task": "\n".join(facts.notes)} if facts.notes else {})


def say_batch_loss(facts: Facts, split: BatchSplit) -> Decision[None]:
    """What a loss over the whole batch costs."""
    if not facts.whole_batch:
        return Decision(None)
    batch = counted(split.global_batch_size, "sample")
    reason = f"batch_loss(), over the features of all {batch} on every device"
    if split.accumulation_steps == 1:
        return Decision(None, {"loss": f"{reason}; one round, so each sample is computed once"})
    reason += (
        f"; {split.accumulation_steps} rounds: each sample goes forward twice, once for its"
        " features and once for its gradient, about a third more time"
    )
    return Decision(None, {"loss": reason})


def check_optimizer(config: Config, facts: Facts, layout: Layout) -> Decision[None]:
    """What is trained otherwise, and by whose optimizer.

    UserError: the config's section says what a task's own optimizer does not hear.
    """
    reasons = {}
    if facts.groups:
        reasons["groups"] = "\n".join(facts.groups)
    optimizer = facts.user_optimizer
    if optimizer is None:
        return say_built_in(config, facts, reasons)
    _check_section_reaches(config, optimizer)
    _check_elementwise(config, layout, optimizer)
    scales = " and ".join(f"{scale:.6g}" for scale in optimizer.scales)
    if optimizer.takes_lr:
        rates, hold = f"learning rate x {scales}", "lr, clip and what groups freeze"
    else:
        rates = f"learning rate its own, {scales} times what is shown as lr"
        hold = "clip and what groups freeze"
    reasons["optimizer"] = (
        f"{optimizer.name} of {optimizer.by}: {rates}; of the config's section {hold} hold;"
        " the host waits for each step, to leave out what is not finite"
    )
    if defaults := _defaults_beside(config, facts):
        reasons["defaults"] = defaults
    return Decision(None, reasons)


def _defaults_beside(config: Config, facts: Facts) -> str:
    """What this program does beside a task's own optimizer though nobody asked for it."""
    optimizer, schedule = config.optimizer, config.schedule
    defaults, without = [], []
    if optimizer.clip and "clip" not in optimizer.model_fields_set:
        defaults.append(f"clip {optimizer.clip:.6g}")
        without.append("optimizer.clip=0")
    is_chosen = not schedule.model_fields_set.isdisjoint({"decay", "final"})
    if not facts.schedule and schedule.decay != "constant" and not is_chosen:
        defaults.append(f"a {schedule.decay} to {schedule.final:.0%} of the rate")
        without.append("schedule.decay=constant")
    if not defaults:
        return ""
    verb = "is a default" if len(defaults) == 1 else "are defaults"
    options = " ".join(f"--set {assignment}" for assignment in without)
    return f"{' and '.join(defaults)} {verb} here: {options} for a loop without"


def _check_section_reaches(config: Config, optimizer: UserOptimizerFacts) -> None:
    """UserError: the config says something to an optimizer that the task brings."""
    fields = config.optimizer
    defaults = type(fields)()
    names = ["name", "weight_decay", "betas", "eps", "momentum"]
    if not optimizer.takes_lr:
        names.append("lr")
    unheard = [name for name in names if getattr(fields, name) != getattr(defaults, name)]
    if unheard:
        remedy = "leave it out of the config"
        if unheard == ["lr"]:
            remedy += f"; def optimizer(self, params, lr) takes it: {optimizer.name}(params, lr=lr)"
        keys = " and ".join(f"optimizer.{name}" for name in unheard)
        verb = "does" if len(unheard) == 1 else "do"
        raise UserError(
            f"the task brings its own optimizer, {optimizer.by}, which {keys} {verb} not reach",
            remedy,
            f"optimizer.{unheard[0]}",
        )
    for number, group in enumerate(fields.groups):
        if not group.freeze:
            raise UserError(
                f"the task brings its own optimizer, {optimizer.by}, whose parameter groups are its"
                " own",
                f"groups of {optimizer.name} there; freeze: true holds here too",
                f"optimizer.groups.{number}",
            )


def _check_elementwise(config: Config, layout: Layout, optimizer: UserOptimizerFacts) -> None:
    """UserError: it may look at a parameter as a whole, and would see a part."""
    if optimizer.elementwise:
        return
    if layout.shards > 1:
        why = f"strategy {layout.strategy} gives it only a part of each parameter"
        otherwise = "--strategy ddp"
    elif config.train.exact:
        why = "train.exact asks for arithmetic that is the same number by number"
        otherwise = "leave --exact out"
    else:
        return
    raise UserError(
        f"{optimizer.by}: {why}, and the task does not say that {optimizer.name} updates each"
        " number by itself",
        "elementwise = True in the task's class, if it does (Adam and its kin do; Muon, Adafactor,"
        f" LAMB don't); or {otherwise}",
        "task",
    )


def say_task_steps(facts: Facts, layout: Layout) -> Decision[None]:
    """What a task does in a step beside the one forward and backward pass, and the one update."""
    reasons = {}
    if facts.phases:
        reasons["phases"] = (
            f"{', then '.join(facts.phases)}: each with its own forward and backward passes,"
            " reduction and update"
        )
    if not facts.after_step:
        return Decision(None, reasons)
    reason = f"{facts.after_step} is called after each update, for which the host waits"
    if layout.shards > 1:
        reason += f"; {layout.strategy} gathers all weights for it, and shares them out again"
    return Decision(None, {**reasons, "after_step": reason})


def after_step_term(config: Config, facts: Facts, layout: Layout) -> MemoryTerm | None:
    """What a shard needs for it beside its own; None: nothing."""
    if not facts.after_step or layout.shards == 1:
        return None
    width = itemsize(config.train.precision)
    formula = f"{facts.params} x {width} B, whole for {facts.after_step}"
    return MemoryTerm(name="after step", bytes=facts.params * width, formula=formula)


def check_narrow(config: Config, facts: Facts) -> None:
    """UserError: a part of the model has no kernels for this precision."""
    precision = config.train.precision
    if facts.narrow_only and precision not in {"bf16", "f16"}:
        raise UserError(
            f"{facts.narrow_only} computes in bf16 and f16 only; train.precision is {precision}",
            "--dtype bf16, or leave it out",
            "train.precision",
        )


def check_recompute(config: Config, facts: Facts) -> None:
    """UserError: there is nothing that could be run again."""
    if config.train.recompute != "none" and facts.blocks < 2:
        raise UserError(
            f"train.recompute {config.train.recompute}: the model has no repeated blocks that could"
            " be run again",
            "its layers in a ModuleList or Sequential, or leave it out",
            "train.recompute",
        )


def layout_warnings(config: Config, layout: Layout, memory: Sequence[MemoryTerm]) -> list[str]:
    """What a user of this strategy should know."""
    warnings = []
    devices, spec = layout.devices, layout.spec
    if config.devices.balance == "even" and any(d.name != devices[0].name for d in devices):
        warning = "the devices differ: each step waits for the slowest"
        if spec.can_be_uneven:
            warning += "; --balance measured assigns them microbatches by their speed"
        warnings.append(warning)
    if spec.runs_threads and layout.num_devices > 1:
        more = sum(term.bytes for term in memory if term.name == "optimizer")
        warnings.append(
            f"{spec.name}: the first device holds {show_bytes(more)} more than the others (the"
            " optimizer's state), and adds up all gradients; --strategy ddp is even, and faster"
        )
    if config.devices.compress != "none":
        warnings.append(
            f"gradients are reduced as {config.devices.compress}: results change with it and with"
            " the number of devices"
        )
    if not config.devices.reshard and layout.shards == 1:
        warnings.append(
            f"devices.reshard has no effect under {layout.strategy}, which gathers no weights"
        )
    return warnings

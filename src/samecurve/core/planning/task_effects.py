"""Effects of a task's model, loss and steps on the plan.

An effect that would make the result depend on the devices is refused; the others are shown.
"""

from collections.abc import Sequence

from samecurve.core.config.train_section import Train
from samecurve.core.planning.batch import BatchSplit
from samecurve.core.planning.decision import Decision
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.layout import Layout
from samecurve.errors import UserError
from samecurve.units import counted, first_and_count

_ALLOWED = (
    "train.allow_coupled: a loss that does not add up over samples, or draws numbers that follow no"
    " sample, is trained all the same; results may then depend on the devices"
)


def check_coupled(train: Train, coupled: Sequence[str], split: BatchSplit) -> Decision[None]:
    """The reason shown for a model that mixes samples.

    Its result depends on how a step is split, unless all samples that it mixes are computed
    together.

    coupled: layers that mix samples. UserError: they would be split, and the config forbids that.
    """
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
            f" {split.num_devices} devices and {rounds} rounds (train.allow_coupled)"
        )
        return Decision(None, warnings=(warning,))
    raise _coupled_split(others or coupled, split, norms_only=not others)


def _coupled_split(coupled: Sequence[str], split: BatchSplit, *, norms_only: bool) -> UserError:
    devices, rounds = counted(split.num_devices, "device"), split.accumulation_steps
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


def say_modes(facts: Facts) -> Decision[None]:
    """Modules that stay in eval mode, or that go from eval mode into training."""
    parts = []
    if facts.kept_in_eval:
        parts.append(f"{first_and_count(facts.kept_in_eval)} stays in eval mode, as model() has it")
    if facts.from_pretrained:
        came = first_and_count(facts.from_pretrained)
        parts.append(f"{came} goes into training: from_pretrained() gives it in eval mode")
    return Decision(None, {"modes": "; ".join(parts)} if parts else {})


def say_notes(facts: Facts) -> Decision[None]:
    """The lines that the task has for its users."""
    return Decision(None, {"task": "\n".join(facts.notes)} if facts.notes else {})


def say_batch_loss(facts: Facts, split: BatchSplit) -> Decision[None]:
    """The cost of a loss over the whole batch."""
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


def say_task_steps(facts: Facts, layout: Layout) -> Decision[None]:
    """Reasons for a task's own updates in turn, and for its after_step()."""
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

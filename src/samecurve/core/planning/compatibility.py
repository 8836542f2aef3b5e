"""What makes a result depend on its layout after all, and what a strategy's user should know:
refused, or said, by plan().
"""

from samecurve.core.config.sections import Config
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.memory import MemoryTerm
from samecurve.core.planning.strategies import Layout
from samecurve.errors import UserError
from samecurve.units import first_and_count, show_bytes


def check_coupled(
    config: Config,
    facts: Facts,
    layout: Layout,
    rounds: int,
    count: int,
    because: dict[str, str],
    warnings: list[str],
) -> None:
    """A model that mixes samples gives the same result only if all that it mixes is computed
    together.
    """
    others = [name for name in facts.coupled if not name.startswith("BatchNorm")]
    synchronised = config.train.norm_sync and facts.coupled
    if config.train.norm_sync and not facts.coupled:
        warnings.append(
            "train.norm_sync: the model has no BatchNorm, so there is nothing to synchronise"
        )
    if facts.coupled and config.train.recompute != "none":
        raise UserError(
            f"{first_and_count(facts.coupled)} would count its statistics twice where blocks are computed"
            " again",
            "leave train.recompute out",
            "train.recompute",
        )
    if (
        not facts.coupled
        or (count == 1 and not others)
        or (synchronised and rounds == 1 and not others)
    ):
        if facts.coupled:
            because["coupled"] = f"{first_and_count(facts.coupled)}: " + (
                "statistics over the whole step, synchronised"
                if synchronised
                else "one slot a step, so nothing is split"
            )
        return
    if config.train.allow_coupled and config.train.exact:
        because["coupled"] = (
            f"{first_and_count(facts.coupled)} mixes the samples of a slot, which are the same on any devices"
            " (train.exact)"
        )
        return
    if config.train.allow_coupled:
        warnings.append(
            f"{first_and_count(facts.coupled)} mixes the samples of a slot: results depend on the"
            f" {len(layout.devices)} devices and {rounds} rounds (train.allow_coupled)"
        )
        return
    split = (
        f"{len(layout.devices)} device{'s' if len(layout.devices) > 1 else ''} in {rounds}"
        f" round{'s' if rounds > 1 else ''}"
    )
    remedy = (
        "a norm that treats each sample by itself (GroupNorm, LayerNorm); --set"
        " train.allow_coupled=true trains it all the same"
    )
    if not others:
        remedy = (
            "--set train.norm_sync=true takes its statistics over all devices; or "
            if rounds == 1
            else "a batch that fits in one round, with --set train.norm_sync=true; or "
        ) + remedy
    raise UserError(
        f"{first_and_count(others or facts.coupled)} mixes the samples of a batch, so the result would depend"
        f" on how it is split: here over {split}",
        remedy,
        "model",
    )


def check_optimizer(config: Config, facts: Facts, layout: Layout, because: dict[str, str]) -> None:
    """What is trained otherwise, and by whose optimizer.

    UserError: the config's section says what a task's own optimizer does not hear.
    """
    if facts.groups:
        because["groups"] = "\n".join(facts.groups)
    own, fields = facts.user_optimizer, config.optimizer
    if own is None:
        return
    defaults = type(fields)()
    deaf = [
        name
        for name in (
            "name",
            "weight_decay",
            "betas",
            "eps",
            "momentum",
            *(() if own.takes_lr else ("lr",)),
        )
        if getattr(fields, name) != getattr(defaults, name)
    ]
    if deaf:
        takes = (
            f"; def optimizer(self, params, lr) takes it: {own.name}(params, lr=lr)"
            if deaf == ["lr"]
            else ""
        )
        keys = " and ".join(f"optimizer.{name}" for name in deaf)
        raise UserError(
            f"the task brings its own optimizer, {own.by}, which {keys}"
            f" do{'es' if len(deaf) == 1 else ''} not reach",
            f"leave it out of the config{takes}",
            f"optimizer.{deaf[0]}",
        )
    for number, group in enumerate(fields.groups):
        if not group.freeze:
            raise UserError(
                f"the task brings its own optimizer, {own.by}, whose parameter groups are its own",
                f"groups of {own.name} there; freeze: true holds here too",
                f"optimizer.groups.{number}",
            )
    cut = (
        f"strategy {layout.strategy} gives it only a part of each parameter"
        if layout.shards > 1
        else (
            "train.exact asks for arithmetic that is the same number by number"
            if config.train.exact
            else ""
        )
    )
    if cut and not own.elementwise:
        raise UserError(
            f"{own.by}: {cut}, and the task does not say that {own.name} updates each number by"
            " itself",
            "elementwise = True in the task's class, if it does (Adam and its kin do; Muon,"
            " Adafactor, LAMB don't); or "
            + ("--strategy ddp" if layout.shards > 1 else "leave --exact out"),
            "task",
        )
    scales = " and ".join(f"{scale:.6g}" for scale in own.scales)
    rates = (
        f"learning rate x {scales}"
        if own.takes_lr
        else f"learning rate its own, {scales} times what is shown as lr"
    )
    hold = ("lr, " if own.takes_lr else "") + "clip and what groups freeze"
    because["optimizer"] = (
        f"{own.name} of {own.by}: {rates}; of the config's section {hold} hold; the host waits for"
        " each step, to leave out what is not finite"
    )


def warn_of_layout(
    config: Config, facts: Facts, layout: Layout, memory: list[MemoryTerm], warnings: list[str]
) -> None:
    """What a user of this strategy should know."""
    if (
        any(device.name != layout.devices[0].name for device in layout.devices)
        and config.devices.balance == "even"
    ):
        warnings.append(
            "the devices differ: each step waits for the slowest"
            + (
                "; --balance measured deals them slots by their speed"
                if config.engine == "torch" and layout.shards == 1
                else ""
            )
        )
    if layout.strategy == "dp" and config.engine == "torch" and len(layout.devices) > 1:
        more = sum(term.bytes for term in memory if term.name == "optimizer")
        warnings.append(
            f"dp: the first device holds {show_bytes(more)} more than the others (the optimizer's"
            " state), and adds up all gradients; --strategy ddp is even, and faster"
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
    if config.train.recompute != "none" and facts.blocks < 2:
        raise UserError(
            f"train.recompute {config.train.recompute}: the model has no repeated blocks that could"
            " be run again",
            "its layers in a ModuleList or Sequential, or leave it out",
            "train.recompute",
        )
    if facts.unkeyed_dropout:
        warnings.append(
            f"{first_and_count(facts.unkeyed_dropout)} draws its dropout by device: results depend on the devices"
            " (seeded anew each step from seed, step and rank)"
            + (
                "; under dp even two runs on these devices differ"
                if layout.strategy == "dp"
                and layout.devices[0].kind == "cpu"
                and len(layout.devices) > 1
                else ""
            )
        )

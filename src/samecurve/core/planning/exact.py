"""What train.exact takes: slots of one size whatever the devices, and nothing whose bits depend on
these; the rest is refused by name.
"""

from collections.abc import Sequence

from samecurve.core.config.sections import Config
from samecurve.core.determinism.microbatches import TreeSum, microbatches_of, split_batch, subtrees
from samecurve.core.planning.facts import Facts, Fixed
from samecurve.core.planning.memory import MemoryTerm, itemsize, sample_bytes
from samecurve.core.planning.strategies import Layout
from samecurve.errors import UserError
from samecurve.units import first_and_count

_SLOTS = 8  # of a step, where nothing else is asked for: work for 1, 2, 4 and 8 devices


def check_exact(config: Config, facts: Facts, layout: Layout) -> None:
    """UserError: something that gives other bits on other devices."""
    if layout.shards > 1:
        how = f"strategy {layout.strategy}" + (
            ", taken because the model does not fit on one device,"
            if config.devices.strategy == "auto"
            else ""
        )
        raise UserError(
            f"train.exact: {how} cuts weights by the number of devices, and with them the vectors"
            " that the optimizer and the norm work on, whose ends are computed otherwise",
            "--strategy ddp (dp with engine jax), or leave --exact out",
            "devices.strategy",
        )
    if config.devices.compress != "none":
        raise UserError(
            f"train.exact: compress {config.devices.compress} rounds what each device sends",
            "leave --compress out",
            "devices.compress",
        )
    names = {device.name for device in layout.devices}
    if len(names) > 1:
        raise UserError(
            f"train.exact: {' and '.join(sorted(names))} compute with different kernels",
            "--gpus with devices of one kind",
            "devices.use",
        )
    if facts.unkeyed_dropout:
        raise UserError(
            f"train.exact: {first_and_count(facts.unkeyed_dropout)} draws its dropout by device",
            "nn.Dropout, whose masks follow the sample, or p = 0",
            "model",
        )
    norms = [name for name in facts.coupled if name.startswith("BatchNorm")]
    if norms:
        raise UserError(
            f"train.exact: the running statistics of {first_and_count(norms)} follow the device",
            "a norm that treats each sample by itself (GroupNorm, LayerNorm), or leave --exact out",
            "model",
        )


def exact_batch(
    config: Config, layout: Layout, fixed: Fixed | None, because: dict[str, str]
) -> tuple[int, int]:
    """(samples of a step, samples of a slot). The slot's size never follows from the devices."""
    given, world = config.batch, len(layout.devices)
    if given.samples and given.accumulate:
        raise UserError(
            "train.exact: batch.accumulate cuts a step by the number of devices",
            "batch.per_device: the samples of a slot, on any devices",
            "batch.accumulate",
        )
    batch = (
        (fixed.global_batch_size if fixed else None)
        or given.samples
        or (given.per_device or 0) * (given.accumulate or 1) * world
    )
    because["batch"] = (
        "as this run began"
        if fixed and fixed.global_batch_size
        else (
            "batch.samples, whatever the devices"
            if given.samples
            else "as given per device: it grows with the devices"
        )
    )
    if fixed:
        micro, because["micro"] = fixed.micro_batch_size, "as this run began (train.exact)"
    elif given.per_device:
        micro, because["micro"] = min(given.per_device, batch), "batch.per_device"
    else:
        micro, because["micro"] = (
            -(-batch // _SLOTS),
            (
                f"a {_SLOTS}th of the batch, whatever the devices (train.exact); batch.per_device"
                " gives another slot"
            ),
        )
    because["exact"] = (
        f"{len(split_batch(batch, micro))} slots of {micro} a step, computed one by one and added along"
        " one tree; the order of devices changes no bit"
    )
    return batch, micro


def exact_memory(
    config: Config,
    facts: Facts,
    layout: Layout,
    count: int,
    micro: int,
    times: Sequence[float],
    cap: int | None,
    fixed: Fixed | None,
) -> MemoryTerm:
    """What sums of `count` slots take.

    UserError: beside them no slot fits. cap: samples that fit in flight without them.
    """
    term = _exact_term(config, facts, count, layout, times)
    each = sample_bytes(config, facts)
    if cap is not None and each:
        cap -= -(-term.bytes // each)
    if cap is not None and cap < 1:
        raise UserError(
            "the sums that train.exact holds beside the gradients leave no room for a sample",
            "a smaller model, or leave --exact out",
            "train.exact",
        )
    if cap is not None and micro > cap:
        remedy = (
            "fewer ranks on this machine, or a device with more memory: this run's slots are of"
            f" {micro}"
            if fixed
            else (
                f"--set batch.per_device={cap}: slots of that size wherever this is to give the"
                " same bits"
            )
        )
        raise UserError(
            f"a slot of {micro} samples does not fit: {cap} do", remedy, "batch.per_device"
        )
    return term


def _exact_term(
    config: Config, facts: Facts, count: int, layout: Layout, times: Sequence[float]
) -> MemoryTerm:
    """What is held beside one gradient: sums of parts of the step that wait for their siblings, and
    what devices exchange.
    """
    world = len(layout.devices)
    shares = [microbatches_of(count, place, world, times) for place in range(world)]
    waiting = max(_most_waiting(count, mine) for mine in shares)
    sent = max(len(subtrees(mine, count)) for mine in shares)
    moved = (
        3 if config.engine == "jax" else 2 if layout.world_size > 1 else 0
    )  # torch's dp adds up in place
    copies = waiting + moved * sent
    each = facts.trainable * itemsize(config.train.precision)
    return MemoryTerm(
        name="exact",
        bytes=copies * each,
        formula=f"{copies} x {facts.trainable} x {itemsize(config.train.precision)} B: {waiting} sums that"
        " wait, the rest on its way between devices",
    )


def _most_waiting(count: int, mine: range) -> int:
    """Sums held while the next slot's gradient comes to be.

    A right sibling is added in place to the left one.
    """
    sums: TreeSum[None] = TreeSum(count, lambda left, right: None)
    most = 0
    for number in mine:
        paired = number % 2 == 1 and bool(sums.held) and sums.held[-1][0] == (0, number - 1)
        most = max(most, len(sums.held) - paired)
        sums.give((0, number), None)
    return most

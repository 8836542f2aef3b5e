"""What train.exact takes: microbatches of one size whatever the devices, and nothing whose bits
depend on these; the rest is refused by name.
"""

from samecurve.core.config.sections import Config
from samecurve.core.determinism.microbatches import TreeSum, microbatches_of, subtrees
from samecurve.core.planning.batch import BatchSplit
from samecurve.core.planning.decision import Decision
from samecurve.core.planning.facts import Facts, Fixed
from samecurve.core.planning.layout import Layout
from samecurve.core.planning.memory import MemoryTerm, sample_bytes
from samecurve.core.planning.optimizer_state import itemsize
from samecurve.errors import UserError
from samecurve.units import first_and_count

# of a step, where nothing else is asked for: work for 1, 2, 4 and 8 devices
_MICROBATCHES = 8


def check_exact(config: Config, facts: Facts, layout: Layout) -> None:
    """UserError: something that gives other bits on other devices."""
    refusal = layout.spec.refuses.get("train.exact")
    if refusal and layout.num_devices > 1:
        how = f"strategy {layout.strategy}"
        if config.devices.strategy == "auto":
            how += ", taken because the model does not fit on one device,"
        raise UserError(f"train.exact: {how} {refusal.why}", refusal.remedy, "devices.strategy")
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
    norms = [name for name in facts.coupled if name.startswith("BatchNorm")]
    if norms:
        raise UserError(
            f"train.exact: the running statistics of {first_and_count(norms)} follow the device",
            "a norm that treats each sample by itself (GroupNorm, LayerNorm), or leave --exact out",
            "model",
        )


def choose_exact_batch(
    config: Config, fixed: Fixed | None, num_devices: int
) -> Decision[BatchSplit]:
    """The size of a microbatch never follows from the devices."""
    section = config.batch
    if section.samples and section.accumulate:
        raise UserError(
            "train.exact: batch.accumulate cuts a step by the number of devices",
            "batch.per_device: the samples of a microbatch, on any devices",
            "batch.accumulate",
        )
    if fixed and fixed.global_batch_size:
        batch, why_batch = fixed.global_batch_size, "as this run began"
    elif section.samples:
        batch, why_batch = section.samples, "batch.samples, whatever the devices"
    else:
        batch = (section.per_device or 0) * (section.accumulate or 1) * num_devices
        why_batch = "as given per device: it grows with the devices"
    if fixed:
        micro, why_micro = fixed.micro_batch_size, "as this run began (train.exact)"
    elif section.per_device:
        micro, why_micro = min(section.per_device, batch), "batch.per_device"
    else:
        micro = -(-batch // _MICROBATCHES)
        why_micro = (
            f"a {_MICROBATCHES}th of the batch, whatever the devices (train.exact);"
            " batch.per_device gives another size"
        )
    split = BatchSplit(global_batch_size=batch, micro_batch_size=micro, num_devices=num_devices)
    why_exact = (
        f"{split.num_microbatches} microbatches of {micro} a step, computed one by one and added"
        " along one tree; the order of devices changes no bit"
    )
    return Decision(split, {"batch": why_batch, "micro": why_micro, "exact": why_exact})


def exact_memory(
    config: Config,
    facts: Facts,
    layout: Layout,
    split: BatchSplit,
    *,
    capacity: int | None,
    is_resumed: bool,
) -> MemoryTerm:
    """What the sums of a step's microbatches take.

    capacity: samples that fit in flight without them; None: not known

    UserError: beside them no microbatch fits.
    """
    term = _exact_term(config, facts, layout, split)
    each = sample_bytes(config, facts)
    if capacity is None:
        return term
    if each:
        capacity -= -(-term.bytes // each)
    if capacity < 1:
        raise UserError(
            "the sums that train.exact holds beside the gradients leave no room for a sample",
            "a smaller model, or leave --exact out",
            "train.exact",
        )
    micro = split.micro_batch_size
    if micro > capacity:
        remedy = (
            f"--set batch.per_device={capacity}: microbatches of that size wherever this is to give"
            " the same bits"
        )
        if is_resumed:
            remedy = (
                "fewer ranks on this machine, or a device with more memory: this run's microbatches"
                f" are of {micro}"
            )
        raise UserError(
            f"a microbatch of {micro} samples does not fit: {capacity} do",
            remedy,
            "batch.per_device",
        )
    return term


def _exact_term(config: Config, facts: Facts, layout: Layout, split: BatchSplit) -> MemoryTerm:
    """What is held beside one gradient: sums of parts of the step that wait for their siblings, and
    what devices exchange.
    """
    count = split.num_microbatches
    of_device = [
        microbatches_of(count, device, split.num_devices, split.microbatch_seconds)
        for device in range(split.num_devices)
    ]
    waiting = max(_most_waiting(count, numbers) for numbers in of_device)
    sent = max(len(subtrees(numbers, count)) for numbers in of_device)
    if config.engine == "jax":
        moved = 3
    elif layout.world_size > 1:
        moved = 2
    else:
        moved = 0  # added in place: by one device, or by the first one's thread
    copies = waiting + moved * sent
    width = itemsize(config.train.precision)
    return MemoryTerm(
        name="exact",
        bytes=copies * facts.trainable * width,
        formula=(
            f"{copies} x {facts.trainable} x {width} B: {waiting} sums that wait, the rest on its"
            " way between devices"
        ),
    )


def _most_waiting(count: int, numbers: range) -> int:
    """Sums held while the next microbatch's gradient comes to be.

    A right sibling is added in place to the left one.
    """
    sums: TreeSum[None] = TreeSum(count, lambda _left, _right: None)
    most = 0
    for number in numbers:
        left_sibling = (0, number - 1)
        in_place = number % 2 == 1 and bool(sums.held) and sums.held[-1][0] == left_sibling
        most = max(most, len(sums.held) - in_place)
        sums.give((0, number), None)
    return most

"""The decisions of train.exact: its refusals, where bits would follow the devices, the microbatches
of one size on any devices, and the memory of their sums.
"""

from math import prod

from samecurve.core.config.sections import Batch, Optimizer
from samecurve.core.determinism.microbatches import TreeSum, microbatches_of, subtrees
from samecurve.core.planning import Decision
from samecurve.core.planning.batch import BatchSplit, check_count
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.fixed import Fixed
from samecurve.core.planning.layout import Layout
from samecurve.core.planning.memory import (
    MemoryOptions,
    MemoryTerm,
    autocast_itemsize,
    sample_bytes,
)
from samecurve.errors import NotExactError
from samecurve.units import counted, first_and_count


def check_exact_layout(layout: Layout, *, is_auto: bool) -> None:
    """NotExactError: on these devices the bits would be others than on one device.

    is_auto: the plan chose the strategy
    """
    refusal = layout.spec.exact_refusal
    if refusal and layout.num_devices > 1:
        how = f"strategy {layout.strategy}"
        if is_auto:
            how += ", taken because the model does not fit on one device,"
        raise NotExactError(f"train.exact: {how} {refusal.why}", refusal.remedy, "devices.strategy")
    if layout.compress != "none":
        raise NotExactError(
            f"train.exact: compress {layout.compress} rounds what each device sends",
            "leave --compress out",
            "devices.compress",
        )
    if layout.offload:
        raise NotExactError(
            "train.exact: with devices.offload the host's CPU makes the updates, and it rounds in"
            " another way than the devices",
            "--no-exact, or leave devices.offload out",
            "devices.offload",
        )
    names = {device.name for device in layout.devices}
    if len(names) > 1:
        raise NotExactError(
            f"train.exact: {' and '.join(sorted(names))} compute with different kernels",
            "--gpus with devices of one kind",
            "devices.use",
        )


def check_exact_model(facts: Facts) -> None:
    """NotExactError: the model keeps statistics that follow the device."""
    norms = [name for name in facts.coupled if name.startswith("BatchNorm")]
    if norms:
        raise NotExactError(
            f"train.exact: the running statistics of {first_and_count(norms)} follow the device",
            "a norm that treats each sample by itself (GroupNorm, LayerNorm), or --no-exact",
            "model",
        )


def check_exact_kernels(facts: Facts, layout: Layout) -> None:
    """NotExactError: the loss calls operations that these devices can't repeat bit by bit."""
    if facts.repeats.nondeterministic and layout.devices[0].kind == "cuda":
        from samecurve.core.nondeterministic import refusal

        raise NotExactError(*refusal(facts.repeats.nondeterministic), "train.exact")


def check_exact_optimizer(section: Optimizer, facts: Facts, layout: Layout) -> None:
    """NotExactError: this optimizer's arithmetic follows the shards of a parameter."""
    cause = why_not_sharded(section, facts) if layout.shards > 1 else ""
    if cause:
        raise NotExactError(
            f"train.exact under {layout.strategy}: {cause}",
            "optimizer.name adamw, sgd, muon or adamw8bit; or --strategy ddp",
            "task" if facts.updates.user_optimizer else "optimizer.name",
        )


def why_not_sharded(section: Optimizer, facts: Facts) -> str:
    """Why train.exact can't update shards with this optimizer; empty: it can."""
    own = facts.updates.user_optimizer
    if own is not None:
        return (
            f"{own.name} of {own.by} would update parts of arrays, and torch's kernels may round"
            " the ends of a part in another way than the same numbers of a whole array"
        )
    if section.name == "adafactor":
        return "adafactor adds up the squares of a column shard by shard"
    return ""


def choose_exact_batch(
    section: Batch,
    fixed: Fixed | None,
    num_devices: int,
    interleaved: int = 1,
    *,
    most_devices: int,
    is_auto: bool,
) -> Decision[BatchSplit]:
    """The batch of train.exact, whose microbatches have one size on any devices.

    interleaved: devices that share a copy of the model
    most_devices: train.exact_devices
    is_auto: the plan chose train.exact, and batch.per_device was not meant as its microbatch

    NotExactError: the config cuts a step by the number of devices, or into too many parts.
    """
    if section.samples and section.accumulate:
        raise NotExactError(
            "train.exact: batch.accumulate cuts a step by the number of devices",
            "batch.per_device: the samples of a microbatch, on any devices",
            "batch.accumulate",
        )
    if fixed and fixed.global_batch_size:
        global_batch_size, why_batch = fixed.global_batch_size, "as this run began"
    elif section.samples:
        global_batch_size, why_batch = section.samples, "batch.samples, whatever the devices"
    else:
        global_batch_size = (section.per_device or 0) * (section.accumulate or 1) * num_devices
        why_batch = "as given per device: it grows with the devices"
    if fixed:
        micro, why_micro = fixed.micro_batch_size, "as this run began (train.exact)"
    else:
        micro, why_micro = _exact_microbatch(
            section, global_batch_size, most_devices=most_devices, is_auto=is_auto
        )
    split = BatchSplit(
        global_batch_size=global_batch_size,
        micro_batch_size=micro,
        num_devices=num_devices,
        interleaved=interleaved,
    )
    if is_auto and fixed is None and num_devices > split.num_microbatches:
        raise NotExactError(
            f"{num_devices} devices share a step of"
            f" {counted(split.num_microbatches, 'microbatch')}",
            f"train.exact_devices={num_devices}",
            "train.exact_devices",
        )
    check_count(split, NotExactError)
    return Decision(split, {"batch": why_batch, "micro": why_micro, "exact": say_exact(split)})


def say_exact(split: BatchSplit) -> str:
    """How an exact step is computed, for the plan."""
    how = (
        f"{counted(split.num_microbatches, 'microbatch')} of {split.micro_batch_size} a step, each"
        " computed by itself and added along one tree; the order of devices changes no bit"
    )
    if split.interleaved > 1:
        how += f"; in each round {split.interleaved} devices take neighbouring ones"
    return how


def _exact_microbatch(
    section: Batch, global_batch_size: int, *, most_devices: int, is_auto: bool
) -> tuple[int, str]:
    """The samples of a microbatch, and why as many."""
    share = -(-global_batch_size // most_devices)
    why = (
        f"the batch over {most_devices} devices, whatever their number (train.exact_devices);"
        " batch.per_device gives another size"
    )
    if section.per_device and is_auto:
        return min(section.per_device, share), f"{why} at most"
    if section.per_device:
        return min(section.per_device, global_batch_size), "batch.per_device"
    return share, why


def exact_memory(
    options: MemoryOptions,
    facts: Facts,
    layout: Layout,
    split: BatchSplit,
    *,
    capacity: int | None,
    is_resumed: bool,
) -> list[MemoryTerm]:
    """The memory of the sums of a step's microbatches, and of weights that are gathered wide.

    capacity: samples that fit without them; None: not known

    NotExactError: no microbatch fits beside them.
    """
    terms = [_exact_term(options, facts, layout, split)]
    if copies := _copies(options, facts, layout):
        terms.append(copies)
    each = sample_bytes(options, facts)
    if capacity is None:
        return terms
    if each:
        capacity -= -(-sum(term.bytes for term in terms) // each)
    if capacity < 1:
        raise NotExactError(
            "the sums that train.exact holds beside the gradients leave no room for a sample",
            "a smaller model, or --no-exact",
            "train.exact",
        )
    micro = split.micro_batch_size
    if micro > capacity:
        fitting = micro
        while fitting > capacity:  # halved, so that the devices share them out as before
            fitting = -(-fitting // 2)
        smaller = f"batch.per_device={fitting}"
        remedy = (
            f"--set {smaller}: microbatches of that size wherever this is to give the same bits"
        )
        if is_resumed:
            remedy = (
                "fewer ranks on this machine, or a device with more memory: this run's microbatches"
                f" are of {micro}"
            )
        raise NotExactError(
            f"a microbatch of {micro} samples does not fit: {capacity} do",
            remedy,
            "batch.per_device",
            instead=f"{smaller} makes it fit",
        )
    return terms


def _exact_term(
    options: MemoryOptions, facts: Facts, layout: Layout, split: BatchSplit
) -> MemoryTerm:
    """The memory beside one gradient: sums that wait for their siblings, and sums on their way
    between devices.
    """
    if layout.is_sharded_by_block:
        kind = _once_term if layout.gathers_once else _sharded_term
        return kind(options, facts, layout, split)
    count = split.num_microbatches
    of_device = [split.microbatches_of(count, device) for device in range(split.num_devices)]
    waiting = max(_most_waiting(count, numbers) for numbers in of_device)
    sent = max(len(subtrees(numbers, count)) for numbers in of_device)
    if layout.engine == "jax":
        moved = 3
    elif layout.world_size > 1:
        moved = 2
    else:
        moved = 0  # added in place: by one device, or by the first one's thread
    copies = waiting + moved * sent
    width = options.itemsize
    formula = (
        f"{copies} x {facts.trainable} x {width} B: {waiting} sums that wait, the rest on its way"
        " between devices"
    )
    return MemoryTerm("exact", copies * facts.trainable * width, formula)


def _sharded_term(
    options: MemoryOptions, facts: Facts, layout: Layout, split: BatchSplit
) -> MemoryTerm:
    """The memory beside one shard of the gradient: shards of sums that wait, those that copies of
    the model exchange, and a group's gradients of all ranks as they arrive.
    """
    count, width = split.num_microbatches, options.itemsize
    num_copies = split.num_devices // split.interleaved
    waiting = sent = 0
    for copy in range(num_copies):
        numbers = split.microbatches_of_group(count, copy)
        held = _held_after(count, numbers)[:: -split.interleaved]  # at the ends of the rounds
        waiting, sent = max([waiting, *held]), max([sent, *held[:1]])
    copies = waiting - 1 + (2 * sent if num_copies > 1 else 0)
    shard = -(-facts.trainable // layout.shards)
    largest = _largest_group(facts)
    formula = (
        f"({copies} x {shard} + {largest}) x {width} B: {waiting} shards of sums that wait, one of"
        " which becomes the gradient; the largest group's gradients of all ranks"
    )
    return MemoryTerm("exact", (copies * shard + largest) * width, formula)


def _once_term(
    options: MemoryOptions, facts: Facts, layout: Layout, split: BatchSplit
) -> MemoryTerm:
    """The memory beside one whole gradient and its shard, where gradients are exchanged once a
    step: whole sums that wait, and those of the largest group on their way. Under hsdp, if it is
    more: the shards that copies of the model exchange, for which whole gradients are let go of.
    """
    count, width = split.num_microbatches, options.itemsize
    of_device = [split.microbatches_of(count, device) for device in range(split.num_devices)]
    waiting = max(_most_waiting(count, numbers) for numbers in of_device)
    sent = max(len(subtrees(numbers, count)) for numbers in of_device)
    largest = _largest_group(facts)
    numbers = waiting * facts.trainable + 2 * sent * largest
    formula = (
        f"({waiting} x {facts.trainable} + {2 * sent} x {largest}) x {width} B: {waiting} sums that"
        " wait; the largest group's gradients as they are exchanged"
    )
    num_copies = split.num_devices // layout.shards
    if num_copies > 1:
        of_copies = [microbatches_of(count, copy, num_copies) for copy in range(num_copies)]
        moved = 3 * max(len(subtrees(of_copy, count)) for of_copy in of_copies)
        shard = -(-facts.trainable // layout.shards)
        if moved * shard - facts.trainable > numbers:
            numbers = moved * shard - facts.trainable
            formula = (
                f"({moved} x {shard} - {facts.trainable}) x {width} B: shards that copies exchange,"
                " more than whole gradients, which are let go of by then"
            )
    return MemoryTerm("exact", numbers * width, formula)


def _largest_group(facts: Facts) -> int:
    """The numbers of the largest group of weights that is gathered at once."""
    return max(facts.block_params, facts.params - facts.blocks * facts.block_params)


def _copies(options: MemoryOptions, facts: Facts, layout: Layout) -> MemoryTerm | None:
    """What sharded weights take more in f32 than in two bytes, where train.exact gathers them as
    they are and autocast rounds them; None: they are no wider.
    """
    width, narrow = options.itemsize, autocast_itemsize(options.precision)
    if not layout.is_sharded_by_block or narrow == width:
        return None
    blocks = facts.blocks
    if layout.reshards_by_block:
        blocks = min(2, blocks)
    wider, kept = blocks * facts.block_params, "kept for backward"
    rounded = sum(prod(facts.model.arrays.get(name, ())) for name in facts.model.rounded)
    if options.recompute != "none":
        rounded, kept = 2 * facts.block_params, "of the largest block, with their gradient"
    formula = (
        f"{wider} gathered weights x {width - narrow} B more; {rounded} x {narrow} B: weights as"
        f" products take them, {kept}"
    )
    return MemoryTerm("copies", wider * (width - narrow) + rounded * narrow, formula)


def _held_after(count: int, numbers: range) -> list[int]:
    """How many sums are held after each microbatch."""
    sums: TreeSum[None] = TreeSum(count, lambda _left, _right: None)
    held = []
    for number in numbers:
        sums.give((0, number), None)
        held.append(len(sums.held))
    return held


def _most_waiting(count: int, numbers: range) -> int:
    """The most sums that are held while the next microbatch's gradient is computed.

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

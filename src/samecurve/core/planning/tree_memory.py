"""The memory that the step's tree takes beside the gradient: sums of microbatches that wait for
their siblings, and sums on their way between devices.
"""

from math import prod

from samecurve.core.determinism.microbatches import TreeSum, microbatches_of, subtrees
from samecurve.core.planning.batch import BatchSplit
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.layout import Layout
from samecurve.core.planning.memory import (
    MemoryOptions,
    MemoryTerm,
    autocast_itemsize,
)


def tree_sums(
    options: MemoryOptions, facts: Facts, layout: Layout, split: BatchSplit
) -> tuple[int, str]:
    """The bytes beside one gradient, and their formula: sums that wait for their siblings, and sums
    on their way between devices.
    """
    if layout.is_sharded_by_block:
        kind = _sums_once if layout.gathers_once else _sharded_sums
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
    return copies * facts.trainable * width, formula


def _sharded_sums(
    options: MemoryOptions, facts: Facts, layout: Layout, split: BatchSplit
) -> tuple[int, str]:
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
    return (copies * shard + largest) * width, formula


def _sums_once(
    options: MemoryOptions, facts: Facts, layout: Layout, split: BatchSplit
) -> tuple[int, str]:
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
    return numbers * width, formula


def _largest_group(facts: Facts) -> int:
    """The numbers of the largest group of weights that is gathered at once."""
    return max(facts.block_params, facts.params - facts.blocks * facts.block_params)


def gathered_wide(options: MemoryOptions, facts: Facts, layout: Layout) -> MemoryTerm | None:
    """Extra bytes of gathered weights in f32 beside two bytes a weight. None where there are none.

    The tree's gradients need weights that are gathered as they are; autocast then rounds them.
    """
    width, narrow = options.itemsize, autocast_itemsize(options.precision)
    if not layout.is_sharded_by_block or narrow == width:
        return None
    blocks = facts.blocks
    if layout.reshards_by_block:
        blocks = min(2, blocks)
    wider, kept = blocks * facts.block_params, "kept for backward"
    rounded = sum(prod(facts.model.arrays.get(name, ())) for name in facts.model.rounded)
    if options.rerun != "none":
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

"""How gradients are added up over microbatches and ranks, where no tree says in which order."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from one_curve import check_one_curve
from samecurve.errors import UserError
from samecurve.torch_engine.randomness import graph_task
from samecurve.torch_engine.strategies.reducers.buckets import (
    Bucket,
    GradientQueue,
    cut_into_buckets,
)
from tiny import config_of
from worlds import Pool

IN_PARTS = f"{Path(__file__).parent}/in_parts.py:InParts"


def test_a_gradient_that_comes_in_parts_is_summed_whole(pool: Pool, tmp_path: Path) -> None:
    """A bucket that is sent while a pass still runs would miss the second part."""
    config = config_of(
        {
            "task": IN_PARTS,
            "batch": {"samples": 12},
            "train": {"exact": False, "precision": "f64"},
        }
    )
    check_one_curve(config, ["ddp:2", "ddp:3/2"], pool, tmp_path, steps=4, near=1e-12)


def test_a_bucket_has_one_number_format() -> None:
    kinds = [torch.float32, torch.float32, torch.float64, torch.complex64, torch.float32]
    weights = [nn.Parameter(torch.zeros(3, dtype=kind)) for kind in kinds]
    cuts = cut_into_buckets(weights)
    assert cuts == [slice(3, 5), slice(2, 3), slice(0, 2)]  # complex64 are pairs of float32
    bucket = Bucket(weights[cuts[0]], num_shards=4)
    flat = bucket.filled([torch.ones(3, dtype=torch.complex64), None])
    assert (flat.dtype, bucket.size % 4, flat.sum().item()) == (torch.float32, 0, 3)


class Steps:
    """Passes over three layers, each of them a bucket, and what is sent: (bucket, in backward)."""

    def __init__(self, *, in_tree: bool = True) -> None:
        self.layers = [nn.Linear(2, 2, bias=False) for _ in range(3)]
        self.weights: list[Any] = [layer.weight for layer in reversed(self.layers)]
        self.sent: list[tuple[int, bool]] = []
        self.queue = GradientQueue([[w] for w in self.weights], self.send, in_tree=in_tree)

    def send(self, number: int) -> None:
        self.sent.append((number, graph_task() != -1))
        self.weights[number].grad = None

    def run(self, *orders: Sequence[int]) -> list[tuple[int, bool]]:
        """A step with one pass for each order in which the layers are called."""
        self.sent.clear()
        for weight in self.weights:
            weight.grad = None
        self.queue.begin_step()
        for number, order in enumerate(orders):
            self.queue.begin_pass(is_last=number == len(orders) - 1)
            x = torch.ones(1, 2)
            for layer in order:
                x = self.layers[layer](x)
            x.sum().backward()  # type: ignore[no-untyped-call]
            self.queue.end_pass()
        return list(self.sent)

    def hooks(self) -> list[int]:
        """How many hooks each weight has."""
        return [len(weight._post_accumulate_grad_hooks or ()) for weight in self.weights]


AT_THE_END = [(0, False), (1, False), (2, False)]
EARLY = [(0, True), (1, True), (2, False)]


def test_buckets_are_sent_as_soon_as_they_are_whole() -> None:
    """The first step notes the order; then one hook a bucket is enough, for pairs of passes too."""
    steps = Steps()
    assert steps.hooks() == [1, 1, 1]
    assert steps.run([0, 1, 2]) == AT_THE_END
    assert steps.hooks() == [1, 1, 0]
    assert steps.run([0, 1, 2]) == EARLY
    assert steps.run([0, 1, 2], [0, 1, 2]) == EARLY
    assert steps.run([0, 1]) == AT_THE_END  # the first bucket has no gradient: nobody may pass it
    assert steps.run([0, 1, 2]) == EARLY
    steps.queue.close()
    assert steps.hooks() == [0, 0, 0]


def test_buckets_that_come_in_another_order_wait_for_each_other() -> None:
    steps = Steps()
    steps.run([0, 1, 2])
    assert steps.run([2, 1, 0]) == EARLY
    assert steps.run([1, 0]) == AT_THE_END


def test_a_bucket_of_several_weights_is_whole_with_its_last_gradient() -> None:
    """The order is noted anew where another gradient was the last one."""
    first, second, third = (nn.Parameter(torch.ones(2)) for _ in range(3))
    sent: list[tuple[int, bool]] = []
    queue = GradientQueue(
        [[first, second], [third]],
        lambda number: sent.append((number, graph_task() != -1)),
        in_tree=True,
    )

    def step(x: torch.Tensor, *order: nn.Parameter) -> list[tuple[int, bool]]:
        sent.clear()
        for weight in (first, second, third):
            weight.grad = None
        queue.begin_step()
        queue.begin_pass(is_last=True)
        for weight in order:
            x = x * weight
        x.sum().backward()  # type: ignore[no-untyped-call]
        queue.end_pass()
        return list(sent)

    x = torch.ones(2)
    step(x, third, first, second)
    assert step(x, third, first, second) == [(0, True), (1, False)]
    assert step(x, third, second, first) == [(0, False), (1, False)]  # `first` comes too early
    step(x, third, second, first)
    assert step(x, third, second, first) == [(0, True), (1, False)]


@pytest.mark.parametrize("in_tree", [True, False])
def test_a_gradient_that_comes_again_is_refused(*, in_tree: bool) -> None:
    """Along a tree in the first step already; else once its bucket is on its way."""
    steps = Steps(in_tree=in_tree)

    @torch.enable_grad()
    def again(_: torch.Tensor) -> None:
        steps.layers[2](torch.ones(1, 2)).sum().backward()

    def twice() -> None:
        steps.queue.begin_step()
        steps.queue.begin_pass(is_last=True)
        x = torch.ones(1, 2)
        for number, layer in enumerate(steps.layers):
            x = layer(x)
            if number == 0:  # when the others have had their gradients
                x.register_hook(again)
        x.sum().backward()  # type: ignore[no-untyped-call]
        steps.queue.end_pass()

    if in_tree:
        with pytest.raises(UserError, match="adds to the same gradient several times"):
            twice()
        return
    steps.run([0, 1, 2])
    with pytest.raises(UserError, match="adds to the same gradient several times"):
        twice()


def test_a_gradient_that_comes_again_in_a_later_step_is_refused_along_a_tree() -> None:
    """Without a hook of its own: its version tells, where another pass has given it a gradient."""
    weight = nn.Parameter(torch.ones(2))
    queue = GradientQueue([[weight]], in_tree=True)

    def one_pass(times: int, *, is_last: bool) -> None:
        queue.begin_pass(is_last=is_last)
        for _ in range(times):
            weight.sum().backward()  # type: ignore[no-untyped-call]
        queue.end_pass()

    one_pass(1, is_last=True)
    one_pass(1, is_last=False)
    with pytest.raises(UserError, match="adds to the same gradient several times"):
        one_pass(2, is_last=True)

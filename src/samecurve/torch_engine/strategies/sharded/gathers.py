"""What gathers and sums the groups of a model, as blocks, autograd and the strategy call it."""

from collections.abc import Hashable, Sequence
from typing import Protocol

from samecurve.errors import UserError
from samecurve.torch_engine.strategies import GatherOrderError
from samecurve.torch_engine.strategies.sharded.group import WeightGroup

Key = tuple[Hashable, ...]  # what a pass calls, and how


class Sums(Protocol):
    """What an order calls when a group's gradients are to be summed."""

    def send(self, group: WeightGroup) -> None: ...


class Gathers(Protocol):
    """What gathers the groups of a model, in one order on all ranks.

    is_at_work: whether a pass has begun, and not ended
    is_backward: whether its forward pass is over
    trains: whether it has a backward pass
    """

    @property
    def is_at_work(self) -> bool: ...
    @property
    def is_backward(self) -> bool: ...
    @property
    def trains(self) -> bool: ...

    def begin(self, key: Key, *, trains: bool) -> None:
        """Begin a pass. key: what is called, and how"""

    def need(self, group: WeightGroup) -> None:
        """Gather a group that is not whole, and take part in what comes before it."""

    def need_in_backward(self, group: WeightGroup) -> None:
        """Backward has come to a group."""

    def stays_after_call(self, group: WeightGroup) -> bool:
        """Whether a group stays whole after a call of its block in the forward pass."""

    def gradient_came(self, group: WeightGroup) -> None:
        """A gradient of a group is there."""

    def begin_step(self) -> None: ...

    def end_forward(self) -> None:
        """After a training pass's forward pass, on all ranks."""

    def end(self, *, is_last: bool = True) -> None:
        """After a pass. is_last: of a step"""

    def reset(self) -> None:
        """Go back to before the first pass."""


def another_order(titles: Sequence[str]) -> UserError:
    """The error of blocks that are called in another order."""
    return GatherOrderError(
        f"fsdp: {' or '.join(titles)} is called in another order by some ranks than by others,"
        " or than in the first step, and its weights are gathered by all ranks together",
        "call the blocks in one order in every forward pass; put them in a block that is always"
        " called; or --strategy ddp",
        "model",
    )


def another_read(name: str) -> UserError:
    """The error of a weight that code outside of its block reads in some steps only."""
    return GatherOrderError(
        f"fsdp: the loss reads {name} outside of its block's forward() (copy.deepcopy of a model"
        " does), and has not done so in the first step: all ranks gather weights in the order that"
        " the first step has found",
        "read it in every step; a copy of the model, as a teacher: make it in model(), and give it"
        " the weights in after_step(self, model, step); or --strategy ddp",
        "model",
    )


def another_frozen(name: str, *, is_frozen: bool) -> UserError:
    """The error of a weight that the loss freezes or thaws. is_frozen: what it is now"""
    what = "freezes" if is_frozen else "thaws"
    return GatherOrderError(
        f"fsdp: the loss {what} the weight {name} (requires_grad_), and the order in which all"
        " ranks gather and sum weights is that of the steps before",
        "--strategy ddp, where a loss may freeze weights until some step; or two runs, the second"
        " with --init-from, each with what it freezes in model()",
        "model",
    )


def replaced(name: str) -> UserError:
    """The error of a weight in whose place the block would be called with another tensor."""
    return UserError(
        f"fsdp: another tensor stands in the place of {name} as its block is called"
        " (torch.func.functional_call puts it there), and the block would compute with its own"
        " weight",
        "--strategy ddp, which computes with the other tensor; or functions of torch in place of"
        " the block's call: F.linear(x, weight, bias)",
        "model",
    )


def late_gradient(group: WeightGroup) -> UserError:
    """The error of a gradient that comes when the ranks have summed its group."""
    return UserError(
        f"fsdp: a gradient of {group.title} comes later in this backward pass than in the passes"
        " before, and the ranks have summed that block already",
        "use the weights of a block in its own forward() only; or --strategy ddp",
        "model",
    )

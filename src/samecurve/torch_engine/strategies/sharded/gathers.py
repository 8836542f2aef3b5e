"""What gathers and sums the groups of a model, as blocks, autograd and the strategy call it."""

from collections.abc import Hashable
from typing import Protocol

from samecurve.errors import UserError
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


def late_gradient(group: WeightGroup) -> UserError:
    """The error of a gradient that comes when the ranks have summed its group."""
    return UserError(
        f"fsdp: a gradient of {group.title} comes later in this backward pass than in the passes"
        " before, and the ranks have summed that block already",
        "use the weights of a block in its own forward() only; or --strategy ddp",
        "model",
    )

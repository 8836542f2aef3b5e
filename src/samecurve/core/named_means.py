"""The means that a task's loss gives beside it: the same names each time, since what every device
counted is added up by name.
"""

from collections.abc import Collection

from samecurve.errors import UserError


def check_names(with_loss: Collection[str], names: Collection[str]) -> None:
    """UserError: a microbatch gives other means than the one before.

    with_loss: of this microbatch, the loss among them
    names: of the one before, without the loss
    """
    if set(with_loss) != {"loss", *names}:
        raise other_names(with_loss, ["loss", *names])


def other_names(one: Collection[str], other: Collection[str]) -> UserError:
    return UserError(
        f"the loss gives {', '.join(sorted(one))} for one microbatch and"
        f" {', '.join(sorted(other))} for another",
        "the same names each time; a weight may be 0 where there is nothing to count",
        "task",
    )

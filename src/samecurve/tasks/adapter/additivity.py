"""Whether a loss adds up.

Two samples at once must give the sums and weights that each gives alone, added. A mean in place of
a sum doesn't.
"""

import math
from collections.abc import Sequence

from samecurve.core.determinism.mean import Mean
from samecurve.errors import UserError
from samecurve.tasks.adapter.base import MEAN

_CLOSE = 1e-3  # of what f32 and another order of adding change, with much to spare


def check_adds(losses: Sequence[Mean], what: str) -> None:
    """Whether the loss of two samples is what each gives alone, added.

    losses: of both samples, of the first, and of the second, as numbers
    what: the method, for errors

    UserError: it is a mean, or its weight doesn't count. Whatever else doesn't add up (a
    contrastive loss) is not found here.
    """
    both, first, second = losses
    if not all(math.isfinite(number) for mean in losses for number in mean):
        return
    if (
        not _near(both.weight, first.weight + second.weight)
        and _near(both.weight, first.weight)
        and _near(both.weight, second.weight)
    ):
        raise UserError(
            f"{what} gives weight {both.weight:g} for two samples as for each of them alone:"
            " weights don't add up",
            MEAN,
            "task",
        )
    total = first.weight + second.weight
    plain_mean = (first.sum + second.sum) / 2
    weighted_mean = math.nan
    if total:
        weighted_mean = (first.sum * first.weight + second.sum * second.weight) / total
    is_mean = _near(both.sum, plain_mean) or _near(both.sum, weighted_mean)
    if is_mean and not _near(both.sum, first.sum + second.sum):
        raise UserError(
            f"{what} gives the sum {both.sum:.6g} for two samples, which alone give {first.sum:.6g}"
            f" and {second.sum:.6g}: that is their mean",
            MEAN,
            "task",
        )


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_CLOSE, abs_tol=1e-12)

"""Whether a loss adds up: two samples at once must give the sums and weights that each gives alone,
added. A mean in place of a sum doesn't.
"""

import math
from collections.abc import Sequence

from samecurve.core.determinism.mean import Mean
from samecurve.errors import UserError
from samecurve.tasks.adapter.base import MEAN

_CLOSE = 1e-3  # of what f32 and another order of adding change, with much to spare


def check_adds(found: Sequence[Mean], what: str) -> None:
    """found: the loss of two samples, of the first and of the second, as numbers.

    UserError: it is a mean, or its weight doesn't count. Whatever else doesn't add up (a
    contrastive loss) is not told from here.
    """
    both, first, second = found
    if not all(math.isfinite(number) for mean in found for number in mean):
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
    plain, weighted = (
        (first.sum + second.sum) / 2,
        (first.sum * first.weight + second.sum * second.weight) / total if total else math.nan,
    )
    if not _near(both.sum, first.sum + second.sum) and (
        _near(both.sum, plain) or _near(both.sum, weighted)
    ):
        raise UserError(
            f"{what} gives the sum {both.sum:.6g} for two samples, which alone give {first.sum:.6g}"
            f" and {second.sum:.6g}: that is their mean",
            MEAN,
            "task",
        )


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_CLOSE, abs_tol=1e-12)

"""Whether a loss adds up, as far as two samples tell before anything runs: a mean in place of a
sum, or a weight that doesn't count, is wrong on any devices. The rest is the split check's.
"""

from collections.abc import Sequence

from samecurve.core.determinism.mean import Mean
from samecurve.core.split_check.split_errors import MEAN
from samecurve.core.split_check.split_verdicts import Trial, compare_parts
from samecurve.errors import UserError

_CLOSE = 1e-3  # of what f32 and another order of adding change, with much to spare


def check_adds(losses: Sequence[Mean], what: str) -> None:
    """losses: of two samples at once, of the first, and of the second, as numbers.

    what: the method, for errors

    UserError: it is a mean, or its weight doesn't count.
    """
    whole, *parts = (
        Trial(samples, loss.sum, loss.weight)
        for samples, loss in zip((2, 1, 1), losses, strict=True)
    )
    finding = compare_parts(whole, parts, _CLOSE)
    if finding and finding.kind in {"mean", "unweighted"}:
        raise UserError(f"{what} {finding.text}", MEAN, "task")

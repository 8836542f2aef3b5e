"""The split check of jax tasks that compute a microbatch as a whole (leave_out).

Rows of such a microbatch can influence each other; rows that are mapped one by one can't.
"""

import math
from collections.abc import Callable, Sequence

from samecurve.core.evaluation import EvalSums
from samecurve.core.planning.plan import Plan
from samecurve.errors import UserError
from samecurve.features.guard.additivity import SURE, Format, Trial, compare_parts
from samecurve.features.guard.split_errors import Evidence, explain
from samecurve.jax_engine.evaluation import RealAndIdle

_FORMATS: dict[str, Format] = {"f64": "f64", "f32": "f32"}  # by precision; all others: narrow


def whole_rows_error(
    sums_of: Callable[[Sequence[int]], RealAndIdle], count: int, plan: Plan
) -> UserError | None:
    """The error of a loss or a metric that does not add up over rows; None: all add up.

    sums_of: numbers of rows -> the task's sums
    count: the number of rows
    """
    rows = range(count)
    cut = max(1, 3 * count // 8)
    parts = [rows[:cut], rows[cut:]]
    (whole, idle), *of_parts = map(sums_of, (rows, *parts))
    tolerance = SURE[_FORMATS.get(plan.compute.precision, "narrow")]
    names = [name.removesuffix(".sum") for name in whole if name.endswith(".sum")]
    for name in names:
        trials = [
            _trial(sums, name, len(numbers))
            for sums, numbers in zip(
                (whole, *(real for real, _ in of_parts)), (rows, *parts), strict=True
            )
        ]
        present = [trial for trial in trials if trial]
        finding = compare_parts(present[0], present[1:], tolerance) if all(trials) else None
        if finding:
            what = "the loss" if name == "loss" else f'the metric "{name}"'
            return explain(finding, Evidence(what=what, loss_at="task"), rounded=tolerance)
    for name, total in idle.items():
        if isinstance(total, float) and not math.isfinite(total) and math.isfinite(whole[name]):
            return UserError(
                f"{name} is {total} where a device has no row that counts",
                "return 0 there, as sum and as weight: if leave_out(rows, real) leaves no row, a"
                " division by the number of rows is 0/0 (jnp.maximum(count, 1))",
                "task",
            )
    return None


def _trial(sums: EvalSums, name: str, samples: int) -> Trial | None:
    """The sum and weight of a metric; None for a table of counts."""
    total, weight = sums[f"{name}.sum"], sums[f"{name}.weight"]
    if not isinstance(total, int | float) or not isinstance(weight, int | float):
        return None
    return Trial(samples, total, weight)

"""Explain an operation without a deterministic kernel that only a step shows."""

from samecurve.core.nondeterministic import operation_in, refusal
from samecurve.core.planning.plan import Plan
from samecurve.errors import SamecurveError, UserError, message_of


def explain_nondeterministic(error: BaseException, plan: Plan) -> UserError | None:
    """The refusal that the plan would have given; None: the error is another one.

    error: torch's own, or one that names the user's line
    """
    text, where = message_of(error), ""
    if isinstance(error, SamecurveError):
        text, where = error.cause, error.where
    operation = operation_in(text)
    if not operation or not plan.compute.deterministic:
        return None
    place = "GPUs" if plan.layout.devices[0].kind == "cuda" else "CPUs"
    return refusal([operation], place, where)

"""The parameters that each phase of a task updates, where a step has several updates in turn."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from samecurve.errors import UserError
from samecurve.units import first_and_count

Patterns = Mapping[str, Sequence[str]]  # patterns of parameter names, by phase


def names_by_phase(names: Sequence[str], patterns: Patterns) -> dict[str, set[str]]:
    """The trained parameters of each phase.

    names: of all parameters that are trained

    UserError: one belongs to no phase, or to two, or a phase has none.
    """
    by_phase: dict[str, set[str]] = {phase: set() for phase in patterns}
    for name in names:
        matching = [
            phase
            for phase, of_phase in patterns.items()
            if any(fnmatchcase(name, pattern) for pattern in of_phase)
        ]
        if len(matching) != 1:
            belongs = f"belongs to {' and '.join(matching)}" if matching else "belongs to no phase"
            raise UserError(
                f"phases of the task: {name} {belongs}",
                "patterns that match each trained parameter once; what no phase moves is frozen by"
                " requires_grad_(False)",
                "task",
            )
        by_phase[matching[0]].add(name)
    empty = [phase for phase, of_phase in by_phase.items() if not of_phase]
    if empty:
        raise UserError(
            f"phases of the task: {empty[0]} ({', '.join(patterns[empty[0]])}) has no parameter"
            " that is trained",
            f"a pattern of their names, which are {first_and_count(list(names))}",
            "task",
        )
    return by_phase

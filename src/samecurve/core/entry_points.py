"""What installed packages bring by entry points, our products as others. None replaces ours."""

from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from samecurve.errors import UserError

_OURS = "samecurve"  # the distribution


@cache
def installed(kind: str) -> Mapping[str, EntryPoint]:
    """The entry points of the group `samecurve.KIND` by name.

    kind: tasks, features, verbs, trackers, importers or predictors. A search takes milliseconds

    UserError: our own tasks are not among them: the code here is newer than what is installed.
    """
    points = sorted(entry_points(group=f"samecurve.{kind}"), key=is_ours)
    if kind in {"tasks", "verbs"} and not any(map(is_ours, entry_points(group="samecurve.tasks"))):
        raise _not_installed()
    return {point.name: point for point in points}


def _not_installed() -> UserError:
    from samecurve.core.system.installation import checkout, pip_command

    source = checkout()
    again = pip_command("install", "-e", str(source)) if source else "install samecurve again"
    return UserError(
        "this copy of Samecurve is newer than its installation: no task is found", again
    )


def is_ours(point: EntryPoint) -> bool:
    """Whether the thing comes with this program."""
    return point.dist is not None and point.dist.name == _OURS


def load(point: EntryPoint, what: str, by: Callable[[EntryPoint], Any] = EntryPoint.load) -> Any:
    """Load what an entry point names.

    what: the kind of thing, for the error, such as `task`
    by: how the thing is loaded

    UserError: the package raises an exception, or lacks the name.
    """
    try:
        return by(point)
    except Exception as error:  # whatever that package's code raises
        package = point.dist.name if point.dist else point.value
        raise UserError(
            f"{what} {point.name} of the installed package {package} can't be loaded:"
            f" {type(error).__name__}: {error}",
            f"install {package} again, correct {point.value}, or uninstall the package",
        ) from error

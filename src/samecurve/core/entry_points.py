"""What installed packages bring by entry points, our products as others. None replaces ours."""

from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from typing import Any

from samecurve.errors import UserError


@cache
def ours(kind: str) -> Mapping[str, EntryPoint]:
    """The entry points of the group `samecurve.KIND` that come with this program, by name.

    UserError: there is no task among them: the code here is newer than what is installed.
    """
    try:
        points = distribution("samecurve").entry_points
    except PackageNotFoundError:
        raise _not_installed() from None
    if not points.select(group="samecurve.tasks"):
        raise _not_installed()
    return {point.name: point for point in points.select(group=f"samecurve.{kind}")}


@cache
def installed(kind: str) -> Mapping[str, EntryPoint]:
    """All entry points of the group `samecurve.KIND` by name. A search takes milliseconds.

    kind: tasks, features, verbs, trackers, importers or predictors
    """
    others = {point.name: point for point in entry_points(group=f"samecurve.{kind}")}
    return {**others, **ours(kind)}


def find(kind: str, name: str) -> EntryPoint | None:
    """One entry point. What other packages bring is looked for where the name is none of ours."""
    return ours(kind).get(name) or installed(kind).get(name)


def _not_installed() -> UserError:
    from samecurve.core.system.installation import checkout, pip_command

    source = checkout()
    return UserError(
        "this copy of Samecurve is newer than its installation: no task is found",
        pip_command("install", "-e", str(source)) if source else "install samecurve again",
    )


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

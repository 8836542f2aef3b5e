"""Trust in the code that a run's config names.

The config names the class of the model, and importing the class runs its file. A run may come from
anywhere, so code that came with the run, or lies outside of the project, needs the user's consent.
"""

import sys
import sysconfig
from pathlib import Path

from samecurve.errors import UserError
from samecurve.run.directory import Run
from samecurve.tasks.user_class import Place, is_pickled, place_of
from samecurve.tasks.user_class.kept_source import read_kept_source
from samecurve.tasks.user_class.pickled_class import is_remembered


def check_trusted(run: Run, *, trust: bool, where: str) -> None:
    """Refuse code that is not this project's. To be called before the run's task is imported.

    trust: the user allows to run the code
    where: the argument that named the run

    UserError: the code is not this project's, and the user has not allowed it.
    """
    place = place_of(run.document_for_use().value.get("task"))
    if trust or place is None or not place.path.exists():
        return
    kept = read_kept_source(run.home)
    if kept and kept.task == run.read_document().value.get("task") and kept.is_own():
        return  # the code that is used says what a session of this user has kept
    reason = _reason(place, run)
    if reason is not None:
        raise UserError(
            f"the config of {run.home} would import {place.path.resolve()}, and so run it:"
            f" {reason}",
            "--trust, once you have read that file and know whom it is from (from Python:"
            " trust=True)",
            where,
        )


def _reason(place: Place, run: Run) -> str | None:
    """The reason why the code is not the user's own; None: it is the user's own."""
    path, project = place.path.resolve(), Path.cwd().resolve()
    loaded = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    if str(path) in loaded:
        return None
    if is_pickled(place.path):
        return None if is_remembered(path) else "no session of yours has kept that class here"
    if path.is_relative_to(run.home.resolve()):
        return "it came with the run"
    installed = [Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")]
    if place.module and any(path.is_relative_to(home.resolve()) for home in installed):
        return None
    if path.is_relative_to(project):
        return None
    return f"it does not lie in this project, {project}"

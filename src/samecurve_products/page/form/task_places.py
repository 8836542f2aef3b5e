"""Whether a config's task may be run from the page: a class in a file is the user's own code."""

from pathlib import Path

from samecurve.seam import UserError
from samecurve.tasks import installed
from samecurve.tasks.user_class import is_pickled, place_of
from samecurve.tasks.user_class.local_imports import local_files
from samecurve_products.page.form.places import Roots
from samecurve_products.page.own_code import is_own_code

Stamps = tuple[tuple[str, int], ...]  # files, each with the time of its last change


def check_task(task: object, roots: Roots, home: Path) -> None:
    """UserError: the task is a class in a file below no root, or one that came with a run.

    To be called before the task is looked at: that may run the file.

    home: the folder that relative paths begin from, which is the working directory
    """
    if not isinstance(task, str) or task in installed():
        return
    place = place_of(task, home)
    if place is None:
        return
    if roots.root_of(home / place.path) is None:
        raise UserError(
            f"task: the file of {task} lies outside of the page's folders, and using it would run"
            " its code",
            "move it below one of these folders, start the page with `samecurve ui . FOLDER`,"
            " or train on the command line",
            "task",
        )
    if not is_pickled(place.path):
        if not is_own_code(home / place.path, roots.paths):
            raise UserError(
                f"task: the file of {task} came with a run, and using it would run its code",
                "read it; if you trust it, copy it out of the run's directory, and name the copy",
                "task",
            )
    else:
        from samecurve.tasks.user_class.pickled_class import is_remembered

        if not is_remembered((home / place.path).resolve()):
            raise UserError(
                f"task: no session of yours has kept the class {task}, and using it would run its"
                " code",
                "train on the command line, if you know whom it is from",
                "task",
            )


def stamps_of(task: object) -> Stamps:
    """The files of a task's class, with their times; empty for a task that is no user's file."""
    place = place_of(task)
    if place is None:
        return ()
    try:
        local = local_files(place)
        files = [local.root / name for name in sorted(local.sources)]
        return tuple((str(file), file.stat().st_mtime_ns) for file in files)
    except OSError:
        return ()


def have_changed(stamps: Stamps) -> bool:
    """Whether a file is another one than when it was stamped."""
    for file, time in stamps:
        try:
            if Path(file).stat().st_mtime_ns != time:
                return True
        except OSError:
            return True
    return False

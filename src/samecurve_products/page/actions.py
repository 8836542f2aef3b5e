"""The actions of the page's buttons on a run.

A live run is asked through its control file, and all its ranks agree on a step. A run that is not
live is resumed, evaluated and sampled by the command line, as a job of its own.
"""

import fcntl
import os
import re
import shutil
import socket
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, get_args

from samecurve.core.events import Request
from samecurve.core.strategies import STRATEGY_NAMES
from samecurve.run.directory.attempt import ask
from samecurve.seam import Run, checkpoints, event_of, is_live, regular_only
from samecurve.tasks.user_class import Place, is_pickled, place_of
from samecurve.tasks.user_class.kept_source import read_kept_source
from samecurve.tasks.user_class.pickled_class import is_remembered
from samecurve_products.page.errors import RefusedError
from samecurve_products.page.jobs.desk import JobCommand
from samecurve_products.page.journal_tail import live_attempt, read_tail
from samecurve_products.page.lock_file import read_holder
from samecurve_products.page.own_code import is_own_code
from samecurve_products.page.roots import ListedRun, is_plain_directory
from samecurve_products.page.run_list import State

Action = Literal["stop", "kill", "save", "evaluate", "sample", "resume"]
ACTIONS: tuple[Action, ...] = get_args(Action)
_DEVICES = re.compile(r"auto|all|cpu|cpu:[1-9]\d{0,3}|\d{1,3}(,\d{1,3}){0,63}", re.ASCII)
_ASKED = {
    "stop": "asked to stop: it saves at the end of the step, and leaves",
    "save": "asked to save at the end of the step",
    "evaluate": "asked to evaluate at the end of the step",
    "sample": "asked for samples at the end of the step",
}
_SOON = "try again in a few seconds"
_GONE = "reload the page: it shows what the run does now"


def possible(listed: ListedRun, state: State, *, live: bool) -> list[Action]:
    """The actions that the page offers for a run."""
    if live:
        if state == "starting":
            return ["stop", "kill"]
        if state != "running":  # its last line is written, and it ends
            return ["kill"]
        return ["stop", "kill", "save", "evaluate", "sample"]
    has_saved = bool(checkpoints(listed.run.checkpoints))
    actions: list[Action] = ["evaluate", "sample"] if has_saved else []
    return actions if state == "finished" else ["resume", *actions]


def request(listed: ListedRun, what: Request) -> str:
    """Ask a live run for something. Returns what it will do, as a sentence.

    RefusedError: the run is not live, or can't be asked.
    """
    run = listed.run
    if not is_live(run):
        raise RefusedError(409, f"this run is not live, so it can't {what}", _GONE)
    run.check("RUN")
    try:
        attempt = live_attempt(run.journal)
        if attempt is None:
            raise RefusedError(409, "this run starts just now", _SOON)
        if read_tail(run.journal).end:
            raise RefusedError(409, "this run is just ending", _SOON)
        ask(run, attempt, what)
    except OSError as error:
        raise RefusedError(
            409, f"{run.control.name} can't be written: {error.strerror}", "free some space on disk"
        ) from None
    return _ASKED[what]


def resume_command(listed: ListedRun, devices: str | None, strategy: str | None) -> JobCommand:
    """The command that goes on with a run. RefusedError: it is live, or there is no such value.

    devices, strategy: None: as the run's config says
    """
    flags = []
    if devices:
        if not _DEVICES.fullmatch(devices):
            cause = f"devices {devices[:60]!r} name none"
            remedy = "auto, all, cpu, cpu:4, or the numbers of GPUs such as 0,1"
            raise RefusedError(400, cause, remedy, "devices")
        flags += ["--devices", devices]
    if strategy:
        names = ["auto", *STRATEGY_NAMES]
        if strategy not in names:
            cause = f"there is no strategy {strategy[:60]!r}"
            raise RefusedError(400, cause, ", ".join(names), "strategy")
        flags += ["--strategy", strategy]
    _check_idle(listed, "resumed", uses_kept=False)
    run, home = listed.run, str(listed.home)
    arguments = ["train", "-f", str(run.config), "--save-dir", home, *flags]
    return _command(listed, arguments, "resume", devices or "")._replace(run=listed.home)


def checkpoint_command(listed: ListedRun, verb: Literal["eval", "sample"]) -> JobCommand:
    """The command that evaluates a run's last checkpoint, or samples from it."""
    word = "evaluated" if verb == "eval" else "sampled from"
    _check_idle(listed, word, uses_kept=True)
    return _command(listed, [verb, str(listed.home)], "evaluate" if verb == "eval" else verb, "")


def _command(listed: ListedRun, arguments: Sequence[str], what: str, devices: str) -> JobCommand:
    return JobCommand(arguments, f"{what} {listed.name}", start_folder(listed), devices)


def _check_idle(listed: ListedRun, word: str, *, uses_kept: bool) -> None:
    """Refuse a live run, and one that names code which is not the user's own.

    uses_kept: the command uses the run's own copy of the code, where its files have changed
    """
    run = listed.run
    run.check("RUN")
    if is_live(run):
        raise RefusedError(409, f"this run is live, so it can't be {word}", _GONE)
    for file in _files_of_task(listed, uses_kept=uses_kept):
        if not is_own_code(file, [listed.root.path]):
            raise RefusedError(
                403,
                f"the config of this run would import {file}, and so run it: it came with a run,"
                " or lies outside of the page's folders",
                "read that file; then start the command in a terminal, where --trust allows it",
                "RUN",
            )


def _files_of_task(listed: ListedRun, *, uses_kept: bool) -> list[Path]:
    """The files of code that the run's command may import and that no session of the user has kept.

    Relative paths and modules are looked for where the command is started.
    """
    folder, run = start_folder(listed), listed.run
    task = run.read_document().value.get("task")
    place, kept = place_of(task, folder), read_kept_source(run.home)
    if place is None:
        return []
    place = place._replace(path=(folder / place.path).resolve())
    if is_pickled(place.path):
        return [] if is_remembered(place.path) else [place.path]
    files = [] if _is_installed(place) else [place.path]
    if kept is None or kept.task != task:
        return files
    if kept.is_own():
        return [] if uses_kept or not kept.changes(place) else files
    original = kept.original()  # used in place of the copy, where both are the same
    return [*files, (folder / original.path).resolve()] if original else files


def _is_installed(place: Place) -> bool:
    """Whether a module is one of an installed package."""
    homes = [Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")]
    return place.module is not None and any(map(place.path.resolve().is_relative_to, homes))


def start_folder(listed: ListedRun) -> Path:
    """The folder in which a run's command is started: relative paths of its config begin there.

    The journal has the run's directory as the command line named it; where the directory ends with
    that path, the folder is what stands before it. It never lies outside of the run's root.
    """
    named = _named_directory(listed.run)
    parts, home = Path(named).parts if named else (), listed.home
    if parts and not os.path.isabs(named) and home.parts[-len(parts) :] == parts:
        folder = Path(*home.parts[: -len(parts)])
        if folder.is_relative_to(listed.root.path):
            return folder
    return listed.root.path


def _named_directory(run: Run) -> str:
    """The run's directory, as the command that began the run named it; '' where nothing says so."""
    try:
        with open(run.journal, "rb", opener=regular_only) as file:
            first = event_of(file.readline(1 << 22))
    except OSError:
        return ""
    named = first.values.get("run") if first and first.kind == "planned" else None
    return named if isinstance(named, str) and ".." not in Path(named).parts else ""


def delete(listed: ListedRun) -> str:
    """Remove a run's directory. RefusedError: it is live, or no directory of its own."""
    if not is_plain_directory(listed.home) or not listed.run.plan.is_file():
        raise RefusedError(404, "this run is gone", _GONE)
    if listed.home == listed.root.path:
        raise RefusedError(
            409,
            "this run is the folder itself that the page was started with",
            "remove it in a terminal",
        )
    with _locked(listed.run):
        try:
            shutil.rmtree(listed.home)  # no link is followed
        except OSError as error:
            cause = f"{error.filename or listed.home}: {error.strerror}"
            raise RefusedError(409, cause, "remove it in a terminal") from None
    return f"removed {listed.name}"


@contextmanager
def _locked(run: Run) -> Iterator[None]:
    """Keep others from starting the run in the block. RefusedError: a process holds its lock.

    Nothing else of the run is looked at: one with damaged files, or with links in it, may go too.
    """
    live = RefusedError(409, "a live process holds the lock of this run", "stop it first")
    holder = read_holder(run)
    if holder and holder.host != socket.gethostname():
        raise live
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open(run.home / "lock", "ab", opener=regular_only))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise live from None
        except OSError:  # the lock is a link, which no run of ours holds, or can't be written
            if is_live(run):
                raise live from None
        yield

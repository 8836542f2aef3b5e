"""A run in a store, for verbs that read a run directory: a copy of what they need, in the cache.

The copy is compared with the store each time. It holds one checkpoint at most.
"""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

from samecurve.checkpoint.store import checkpoints
from samecurve.core.system import one_at_a_time
from samecurve.core.system.cache import cache_home
from samecurve.errors import UserError
from samecurve.run.directory import Run
from samecurve.run.remote.fetch import best_name, fetch_checkpoint, fetch_files
from samecurve.run.remote.stored_run import CHECKPOINTS, StoredRun
from samecurve.storage.place import open_place
from samecurve.storage.url import ObjectUrl
from samecurve.terminal import echo

Want = Literal["files", "newest", "best"]
_CHECKPOINT = re.compile(rf"(.*?)/?{CHECKPOINTS}/(step-\d+)")
_UNREAD = ("logs/", "initial/")


def local_copy(url: ObjectUrl, want: Want, where: str) -> Path:
    """The path of a copy of a run, or of the checkpoint that the URL names.

    want: which checkpoint is brought; files: none. where: the argument that has the URL

    UserError: there is no run, or it has no whole checkpoint.
    """
    named = _CHECKPOINT.fullmatch(url.prefix)
    if named:
        url = replace(url, prefix=named[1])
    home = cache_home() / "stored-runs" / url.short_name
    with one_at_a_time(home.with_suffix(".lock")):
        stored = StoredRun(open_place(url, where))
        if not stored.exists():
            raise UserError(
                f"there is no run at {url}",
                "the address that --save-dir had; `aws s3 ls` shows what a bucket has",
                where,
            )
        home.mkdir(parents=True, exist_ok=True)
        fetch_files(stored, home, leave_out=_UNREAD)
        if want == "files" and not named:
            return home
        names = [named[2]] if named else _wanted(stored, home, want, where)
        name = _bring(stored, home, names, where)
        return home / CHECKPOINTS / name if named else home


def local_weights(url: ObjectUrl, where: str) -> Path:
    """The path of a copy of weights: of a run, a checkpoint, or other programs' files."""
    place = open_place(url, where)
    stored = StoredRun(place)
    if stored.exists() or _CHECKPOINT.fullmatch(url.prefix):
        return local_copy(url, "newest", where)
    home = cache_home() / "stored-weights" / url.short_name
    with one_at_a_time(home.with_suffix(".lock")):
        if "" in stored.objects:  # a file, which the URL names whole
            target = home / url.prefix.rpartition("/")[2]
            home.mkdir(parents=True, exist_ok=True)
            place.download("", stored.objects[""].size, target)
            return target
        if not stored.objects:
            raise UserError(f"there is nothing at {url}", "a run, a checkpoint, or files", where)
        home.mkdir(parents=True, exist_ok=True)
        fetch_files(stored, home)
    return home


def _wanted(stored: StoredRun, home: Path, want: Want, where: str) -> list[str]:
    """The names of the checkpoints to look at."""
    if want == "newest":
        return stored.checkpoint_names()
    best = best_name(stored, Run(home).read_plan(), home / ".manifests")
    if best is None:
        raise UserError(
            f"none of the checkpoints of {stored.url} was evaluated at its own step",
            "leave --best out: the newest is taken",
            where,
        )
    return [best]


def _bring(stored: StoredRun, home: Path, names: list[str], where: str) -> str:
    """Bring the first of these checkpoints that is whole, and remove the others: its name."""
    into = home / CHECKPOINTS
    into.mkdir(exist_ok=True)
    for path in checkpoints(into):
        if path.name not in names:
            shutil.rmtree(path, ignore_errors=True)
    fetched = fetch_checkpoint(stored, into, names)
    for note in fetched.notes:
        echo(f"warn   {note}", err=True)
    if fetched.checkpoint is None:
        raise UserError(
            f"{stored.url} has no whole checkpoint" + (f" {names[0]}" if len(names) == 1 else ""),
            "a run that has saved; `aws s3 ls` shows which checkpoints are there",
            where,
        )
    for path in checkpoints(into):
        if path.name != fetched.checkpoint:
            shutil.rmtree(path, ignore_errors=True)
    return fetched.checkpoint

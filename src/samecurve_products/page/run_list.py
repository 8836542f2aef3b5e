"""The list of runs: a row for each, with its state, from files and from the lock of a live process.

What a file says is kept until its size or time changes, so that a list in which nothing happens
costs a few system calls a run.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from samecurve.seam import printable, read_file_bytes
from samecurve_products.page.journal_tail import Tail, read_tail
from samecurve_products.page.lock_file import holds_lock, read_holder
from samecurve_products.page.plan_file import PlanFile, read_plan_file
from samecurve_products.page.roots import ListedRun
from samecurve_products.report.redact import redact

State = Literal[
    "running", "starting", "finished", "failed", "stopped", "interrupted", "not started"
]
_MOST_CONFIG = 1 << 20  # bytes that are searched for the task
_TASK = re.compile(rb"^task:[^\n]*", re.MULTILINE)
T = TypeVar("T")
Row = dict[str, Any]  # a run in the list


class RunList:
    """Makes the rows, and keeps what was read for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[Path, tuple[tuple[int, int, int], Any]] = {}  # stamp and content

    def rows(self, runs: Mapping[str, ListedRun]) -> list[Row]:
        """The rows, the last start first."""
        with self._lock:
            rows = [self._row(listed) for listed in runs.values()]
            known = {listed.home for listed in runs.values()}
            for path in [path for path in self._kept if path.parent not in known]:
                del self._kept[path]
        return sorted(rows, key=lambda row: row["started"] or 0.0, reverse=True)

    def state(self, listed: ListedRun) -> State:
        with self._lock:
            return state_of(self._tail(listed), is_live=holds_lock(listed.run))

    def plan(self, listed: ListedRun) -> PlanFile:
        with self._lock:
            return self._read(listed.run.plan, read_plan_file, PlanFile())

    def _tail(self, listed: ListedRun) -> Tail | None:
        return self._read(listed.run.journal, read_tail, None)

    def _row(self, listed: ListedRun) -> Row:
        plan = self._read(listed.run.plan, read_plan_file, PlanFile())
        task = self._read(listed.run.config, _read_task, "")
        tail = self._tail(listed)
        lives = holds_lock(listed.run)
        known = tail or Tail()
        started, seconds = _times(known, listed, lives=lives)
        row: Row = {
            "id": listed.id,
            "name": printable(listed.name),
            "root": listed.root.id,
            "state": state_of(tail, is_live=lives),
            "task": task,
            "engine": plan.engine,
            "strategy": plan.strategy,
            "devices": plan.devices_text,
            "world": len(plan.devices),
            "step": known.step,
            "steps": plan.steps,
            "loss": known.loss,
            "rate": None if known.rate is None else {"value": known.rate[0], "unit": known.rate[1]},
            "started": started,
            "seconds": seconds,
        }
        if row["state"] == "failed":
            row["cause"] = redact(printable(known.cause))
        return row

    def _read(self, path: Path, read: Callable[[Path], T], missing: T) -> T:
        """The content of a file: read anew where its size or time has changed."""
        try:
            status = os.stat(path, follow_symlinks=False)
            stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
            if self._kept.get(path, ((), None))[0] != stamp:
                self._kept[path] = stamp, read(path)
        except OSError:
            return missing
        value: T = self._kept[path][1]
        return value


def state_of(tail: Tail | None, *, is_live: bool) -> State:
    """The state of a run. tail: of its journal; None: there is no journal."""
    if tail and tail.end in {"finished", "failed", "stopped"}:
        return tail.end  # type: ignore[return-value]
    if is_live:
        return "running" if tail and tail.trains else "starting"
    return "interrupted" if tail and tail.last_time is not None else "not started"


def _times(tail: Tail, listed: ListedRun, *, lives: bool) -> tuple[float | None, float | None]:
    """When the last start began, and its seconds so far."""
    if lives:
        holder = read_holder(listed.run)
        began = holder.since if holder else tail.start_time or tail.first_time
        return began, None if began is None else max(0.0, time.time() - began)
    if tail.last_time is None:
        return None, None
    if tail.start_time is not None:
        began = tail.start_time
    elif tail.seconds is not None:
        began = tail.last_time - tail.seconds
    else:
        began = tail.first_time if tail.first_time is not None else tail.last_time
    return began, max(0.0, tail.last_time - began)


def _read_task(path: Path) -> str:
    """The task that config.yaml names, as it is shown: a user's file without its directory."""
    match = _TASK.search(read_file_bytes(path, _MOST_CONFIG))
    try:
        value = yaml.safe_load(match[0]) if match else None
    except yaml.YAMLError:
        return ""
    task = value.get("task") if isinstance(value, dict) else None
    if not isinstance(task, str):
        return ""
    file, colon, name = task.rpartition(":")
    return printable(f"{os.path.basename(file)}{colon}{name}")

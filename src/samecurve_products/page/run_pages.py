"""The pages of runs, kept while they are looked at: what was read of a journal, and its blocks.

A few runs are kept, the last used ones. Each has a lock of its own, so that ten tabs on one run
cost one reading. A long journal is read by a child process (indexer.py); what that process has read
so far is shown.
"""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from samecurve.seam import SamecurveError, is_live, printable
from samecurve_products.page.actions import possible
from samecurve_products.page.answers import json_text
from samecurve_products.page.devices import device_readings
from samecurve_products.page.indexer import LONG, Indexer, journal_size, state_path
from samecurve_products.page.plan_file import PlanFile
from samecurve_products.page.roots import ListedRun
from samecurve_products.page.run_list import RunList
from samecurve_products.report.blocks import text as text_block
from samecurve_products.report.columns import columns_of
from samecurve_products.report.journal_reader import JournalReader
from samecurve_products.report.reading import read_run
from samecurve_products.report.record import RunRecord
from samecurve_products.report.redact import redact_blocks
from samecurve_products.report.run_page import chart_blocks, head_blocks, static_blocks

_KEPT = 8  # runs
_AT_ONCE = 1 << 18  # bytes of one reading
_BUDGET = 0.25  # seconds of reading for one answer
_FRESH = 0.2  # seconds in which a reading counts
_BLOCKS_FRESH = 2.0  # seconds in which the blocks of a live run count
_MOST_TABS = 64  # whose points are kept as text
_WORTH_SAVING = 1 << 20  # bytes read since the state was loaded


class RunPages:
    """The pages of the runs that were looked at last."""

    def __init__(self, runs: RunList, indexer: Indexer) -> None:
        self._runs, self._indexer = runs, indexer
        self._lock = threading.Lock()
        self._open: OrderedDict[Path, OpenRun] = OrderedDict()

    def answer(self, listed: ListedRun, generation: str, count: int, blocks: str) -> str:
        """The answer to a poll, as JSON: what is new since the page that has `count` points.

        generation, count: of the points that the browser has
        blocks: the hash of the blocks that it has
        """
        opened = self._opened(listed)
        state = self._runs.state(listed)
        with opened.lock:
            live = is_live(listed.run)
            opened.refresh(live=live)
            points = opened.columns(generation, count)
            hash_now, page = opened.blocks(live=live)
            head = {
                "hash": hash_now,
                "state": state,
                "live": live,
                "devices": self._runs.plan(listed).use,
                "actions": possible(listed, state, live=live),
                "reading": opened.reading,
                "sensors": {"devices": opened.sensors(self._runs.plan(listed))},
            }
        parts = [json_text(head)[:-1], f',"runs":[{points}]']
        if hash_now != blocks:
            parts.append(f',"page":{page}')
        return "".join([*parts, "}"])

    def record(self, listed: ListedRun) -> RunRecord:
        """The run as it stands, for a page of several runs. RunError: its plan can't be read."""
        opened = self._opened(listed)
        live = is_live(listed.run)
        with opened.lock:
            opened.refresh(live=live)
            return opened.record(live=live)

    def forget(self, listed: ListedRun) -> None:
        """Drop a run that was removed, and the state of its reader."""
        with self._lock:
            self._open.pop(listed.home, None)
        with suppress(OSError):
            state_path(listed.home).unlink()

    def _opened(self, listed: ListedRun) -> "OpenRun":
        with self._lock:
            opened = self._open.pop(listed.home, None) or OpenRun(listed, self._indexer)
            self._open[listed.home] = opened
            old = self._open.popitem(last=False)[1] if len(self._open) > _KEPT else None
        if old is not None:
            with old.lock:
                old.keep_state()
        return opened


class OpenRun:
    """A run that is looked at. All methods are called with its lock held."""

    def __init__(self, listed: ListedRun, indexer: Indexer) -> None:
        self.lock = threading.Lock()
        self.reading = 1.0  # share of the journal that was read
        self._found, self._indexer = listed, indexer
        self._state_path = state_path(listed.home)
        self._reader: JournalReader | None = None
        self._state_time = 0  # of the state that was loaded
        self._state_position = 0
        self._fresh_until = 0.0
        self._base: RunRecord | None = None  # plan, config and checkpoints
        self._base_stamp: object = None
        self._error: SamecurveError | None = None  # why they can't be read
        self._page, self._hash = "", ""
        self._page_stamp: object = None
        self._page_fresh_until = 0.0
        self._columns: dict[tuple[str, int], str] = {}

    # -- reading

    def refresh(self, *, live: bool) -> None:
        """Read what the run has written since the last look."""
        now = time.monotonic()
        if now < self._fresh_until:
            return
        reader = self._reader or self._load()
        before = reader.position
        size = journal_size(self._found.home)
        if size - reader.position > LONG and self._indexer.want(self._found.home):
            if _time_of(self._state_path) != self._state_time:
                reader = self._load()
            self.reading = min(0.999, reader.position / size)
        else:
            until = now + _BUDGET
            while not (ended := reader.read(_AT_ONCE)) and time.monotonic() < until:
                pass
            self.reading = 1.0 if ended or not size else min(0.999, reader.position / size)
        if reader.position != before or reader is not self._reader:
            self._columns.clear()
        self._reader = reader
        self._read_base(reader, live=live)
        self._fresh_until = time.monotonic() + _FRESH

    def _load(self) -> JournalReader:
        self._state_time = _time_of(self._state_path)
        reader = JournalReader.load(self._found.home, self._state_path)
        reader.read(0)  # a state of another journal is dropped
        self._state_position = reader.position
        return reader

    def keep_state(self) -> None:
        """Save the reader's state, where it would take a while to read it all again."""
        reader = self._reader
        if reader is None or reader.position - self._state_position < _WORTH_SAVING:
            return
        with suppress(OSError):  # a cache that can't be written to costs time alone
            self._state_path.parent.mkdir(parents=True, exist_ok=True)
            reader.save(self._state_path)

    def _read_base(self, reader: JournalReader, *, live: bool) -> None:
        """Read plan, config and checkpoints again, if they may have changed."""
        home, counts = self._found.home, reader.content.counts
        stamp = (
            *(_time_of(home / name) for name in ("plan.json", "config.yaml", "checkpoints")),
            counts["planned"],
            counts["saved"],
            reader.content.identity,
            # a last line without its end is no fault while it is being written, or is not read yet
            is_growing := live or self.reading < 1,
        )
        if stamp == self._base_stamp:
            return
        self._base_stamp, self._error = stamp, None
        try:
            self._base = read_run(home, live=is_growing, journal=reader)
        except SamecurveError as error:
            self._base, self._error = None, error

    def record(self, *, live: bool) -> RunRecord:
        """The run as it stands. SamecurveError: its plan can't be read."""
        if self._error is not None:
            raise self._error
        assert self._base is not None
        assert self._reader is not None
        base = self._base
        return replace(
            self._reader.content,
            live=live,
            plan_json=base.plan_json,
            plan=base.plan,
            origins=base.origins,
            formulas=base.formulas,
            began_from=base.began_from,
            config=base.config,
            checkpoints=base.checkpoints,
            faults=base.faults,
        )

    # -- what the browser gets

    def columns(self, generation: str, count: int) -> str:
        """The points after those that the browser has, as JSON."""
        assert self._reader is not None
        text = self._columns.get((generation, count))
        if text is None:
            since = (generation, count) if generation else None
            columns = columns_of(self._reader.content, since)
            run = {"name": printable(self._found.name), "colour": 0, "columns": columns}
            text = json_text(run)
            if len(self._columns) < _MOST_TABS:
                self._columns[generation, count] = text
        return text

    def blocks(self, *, live: bool) -> tuple[str, str]:
        """The page without its columns, as JSON, and before it its hash."""
        assert self._reader is not None
        content = self._reader.content
        stamp = (
            self._base_stamp,
            live,
            self._reader.position,
            content.steps.generation,
        )
        now = time.monotonic()
        is_old = stamp != self._page_stamp and (now > self._page_fresh_until or not live)
        if not self._page or is_old:
            page = self._make_page(live=live)
            self._page = json_text(redact_blocks(page))
            self._hash = sha256(self._page.encode()).hexdigest()[:16]
            self._page_stamp, self._page_fresh_until = stamp, now + _BLOCKS_FRESH
        return self._hash, self._page

    def _make_page(self, *, live: bool) -> dict[str, Any]:
        name = printable(self._found.name)
        try:
            record = self.record(live=live)
        except SamecurveError as error:
            words = f"{error.cause}; {error.remedy}" if error.remedy else error.cause
            note = text_block(words, tone="bad", title="This run can't be read")
            return {"title": name, "head": [note], "charts": [], "static": []}
        return {
            "title": name,
            "head": head_blocks(record, name, self.picture),
            "charts": chart_blocks(record, name),
            "static": static_blocks(record),
        }

    @property
    def picture(self) -> Callable[[str], str | None]:
        return picture_of(self._found)

    def sensors(self, plan: PlanFile) -> list[dict[str, Any]]:
        """The activity of each device, by the last line of sensors."""
        assert self._reader is not None
        sensors = self._reader.content.sensors
        return device_readings(plan, sensors[-1].values if len(sensors) else {})


def picture_of(listed: ListedRun) -> Callable[[str], str | None]:
    """A function from a picture's path in the run to its address on the page."""

    def address(name: str) -> str | None:
        path = PurePosixPath(name)
        if path.parent != PurePosixPath("samples") or path.suffix != ".png":
            return None
        return f"/api/runs/{listed.id}/picture/{path.name}"

    return address


def _time_of(path: Path) -> int:
    """When a file was changed last; 0: it is not there."""
    try:
        return os.stat(path, follow_symlinks=False).st_mtime_ns
    except OSError:
        return 0

"""Checkpoints, written in a thread beside the training and published by a rename.

A kill at any instant leaves the last good checkpoint. Each rank writes its arrays into a scratch
directory, and then a marker with their hashes. One rank waits for all markers, writes the manifest,
and renames the directory to its final name. These threads call no collective.
"""

import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from samecurve.checkpoint import (
    MANIFEST,
    CorruptCheckpointError,
    is_step_name,
    name_of,
    read_manifest,
)
from samecurve.checkpoint.format import load, make_manifest, verify_checkpoint, write_pieces
from samecurve.core.config import MetricGoal
from samecurve.core.protocols import ArrayShard, Checkpoint, Rank
from samecurve.core.system import explain_os_error, regular_only, sync_directory, write_json
from samecurve.errors import RunError
from samecurve.units import show_bytes

_POLL = 0.01
_LAST_MOMENT = 3.0  # seconds
_LOOKS = 10  # tries to find a checkpoint that is not removed while it is read
_HEADROOM = 1.05  # factor of the arrays' bytes: headers and the file system need some too


@dataclass(frozen=True)
class Published:
    """The result of a save."""

    step: int
    path: str
    bytes: int
    seconds: float  # from before the copies to the rename
    blocked: float  # the part of these seconds in which training stood still
    manifest_hash: str


@dataclass(frozen=True, kw_only=True)
class Publisher:
    """How one rank publishes the checkpoints, in the store's thread."""

    keep: int  # how many of the newest checkpoints stay, beside the best; 0: all
    best: MetricGoal  # the metric by which a checkpoint is the best
    meta: Callable[[int], Mapping[str, object]]  # step -> the manifest's entries beside the arrays
    before: Callable[[], None]  # called before the rename: syncs the journal
    published: Callable[[Published], None]  # called after the rename


class Store:
    """Writes this rank's part of each checkpoint. One rank's store also publishes the whole.

    home: the run's directory of checkpoints.
    attempt: the name of this start.
    publisher: None: another rank publishes.
    """

    def __init__(
        self, home: Path, rank: Rank, *, attempt: str, publisher: Publisher | None
    ) -> None:
        self._home, self._rank = home, rank
        self._attempt, self._publisher = attempt, publisher
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._abandoned = threading.Event()

    def save(
        self,
        step: int,
        pieces: Sequence[ArrayShard],
        loop: Mapping[str, Any],
        *,
        began: float | None = None,
    ) -> None:
        """Start to write a checkpoint. Waits only for an earlier save that is still under way.

        began: perf_counter() before the pieces were copied from the devices; None: now

        RunError: the earlier save failed, or there is no room for this one.
        """
        began = time.perf_counter() if began is None else began
        self._join()
        size = sum(piece.buffer.nbytes for piece in pieces)
        scratch = self._home / f".{name_of(step)}.{self._attempt}"
        try:
            self._check_room(step, size)
            scratch.mkdir(exist_ok=True)
        except OSError as error:
            raise self._failed(error) from error
        blocked = time.perf_counter() - began

        def write() -> None:
            try:
                self._write(scratch, pieces)
                if not self._publisher:
                    return
                meta = {**self._publisher.meta(step), "loop": dict(loop)}
                manifest = self._publish(self._publisher, step, scratch, meta)
                if manifest is None:
                    return
                path, seconds = self._home / name_of(step), time.perf_counter() - began
                save = Published(
                    step,
                    str(path),
                    sum(int(file["bytes"]) for file in manifest["files"].values()),
                    seconds=seconds,
                    blocked=blocked,
                    manifest_hash=manifest["hash"],
                )
                self._publisher.published(save)
                prune(self._home, self._publisher.keep, self._publisher.best)
            except BaseException as error:  # check() raises it in the loop
                self._error = error

        self._thread = threading.Thread(target=write, name=f"save-{step}")
        self._thread.start()

    def load(self, step: int) -> Checkpoint | None:
        path = self._home / name_of(step)
        return load(path) if path.is_dir() else None

    def check(self) -> bool:
        """Whether a save is still under way. RunError: it has failed."""
        is_saving = self._thread is not None and self._thread.is_alive()
        if self._error is not None:
            raise self._failed(self._error) from self._error
        return is_saving

    def _check_room(self, step: int, size: int) -> None:
        """Check the free space. RunError: there is no room for this rank's part."""
        free = shutil.disk_usage(self._home).free
        if free < size * _HEADROOM:
            raise RunError(
                f"no room for the checkpoint of step {step}: this rank's part needs"
                f" {show_bytes(size)}, {show_bytes(free)} are free at {self._home}",
                "free some space and run the same command again: it goes on from the last save",
                str(self._home),
            )

    def _failed(self, error: BaseException) -> RunError:
        if isinstance(error, RunError):
            return error
        cause = f"{type(error).__name__}: {error}"
        remedy = "run the same command again: it goes on from the last save"
        if isinstance(error, OSError):
            cause, remedy = explain_os_error(error, self._home)
        return RunError(f"saving a checkpoint failed: {cause}", remedy)

    def close(self) -> None:
        """Wait for the save under way. RunError: the save failed."""
        self._join()

    def abandon(self) -> None:
        """End a save under way, because the run has failed.

        The save has a moment to end well; after that it waits for no other rank.
        """
        if self._thread is not None:
            self._thread.join(_LAST_MOMENT)
        self._abandoned.set()
        if self._thread is not None:
            self._thread.join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _write(self, scratch: Path, pieces: Sequence[ArrayShard]) -> None:
        """Write this rank's file, and then the marker that says that the file is whole."""
        index, world_size = self._rank.index, self._rank.world_size
        written = write_pieces(scratch / f"rank-{index}-of-{world_size}.safetensors", pieces)
        write_json(scratch / _marker(index), asdict(written))

    def _publish(
        self, publisher: Publisher, step: int, scratch: Path, meta: Mapping[str, object]
    ) -> Mapping[str, Any] | None:
        """Wait for all ranks, write the manifest, and rename.

        Returns the manifest; None: the save was abandoned.
        """
        markers = [scratch / _marker(index) for index in range(self._rank.world_size)]
        while not all(marker.exists() for marker in markers):
            if self._abandoned.wait(_POLL):
                return None
        written = [json.loads(marker.read_text()) for marker in markers]
        manifest = make_manifest(meta, written)
        write_json(scratch / MANIFEST, manifest)
        for marker in markers:
            marker.unlink()
        sync_directory(scratch)
        publisher.before()
        final = self._home / name_of(step)
        if final.exists():  # this step was saved before the run was resumed from an older one
            _remove(final)
        scratch.rename(final)
        sync_directory(self._home)
        return manifest


def _marker(rank: int) -> str:
    return f".rank-{rank}.json"


def checkpoints(home: Path) -> list[Path]:
    """The published checkpoints in a directory, newest step first. Other files are passed over."""
    if not home.is_dir():
        return []
    return sorted(
        (path for path in home.glob("step-*") if is_step_name(path.name) and path.is_dir()),
        reverse=True,
    )


def set_aside(path: Path) -> Path:
    """Rename a checkpoint so that nothing takes it for one any more. Returns its new path."""
    aside = path.with_name(f"void-{path.name}-{time.time_ns():x}")
    path.rename(aside)
    return aside


def prune(home: Path, keep: int, goal: MetricGoal) -> None:
    """Remove old checkpoints, except the newest `keep` and the one whose evaluation is the best.

    keep: 0: nothing is removed. A checkpoint that is damaged stays for its owner to look at.
    """
    if not keep:
        return
    paths = [path for path in checkpoints(home) if _looks_whole(path)]
    best = best_first(paths, goal)[:1]
    for path in paths[keep:]:
        if path not in best:
            _remove_unless_held(path)


def best_first(paths: Sequence[Path], goal: MetricGoal) -> list[Path]:
    """The checkpoints that were evaluated at their own step, best first; of equals the oldest."""
    values = {path: value for path in paths if (value := _value(path, goal)) is not None}
    sign = 1 if goal.mode == "min" else -1
    return sorted(values, key=lambda path: (sign * values[path], path.name))


@contextmanager
def hold(path: Path) -> Iterator[None]:
    """Keep prune() from removing this checkpoint while the block runs, even in a live run.

    FileNotFoundError: the checkpoint is gone already.
    """
    with open(path / MANIFEST, "rb", opener=regular_only) as file:
        # waits for a process that is just removing the checkpoint, which takes no time
        fcntl.flock(file, fcntl.LOCK_SH)
        os.stat(path / MANIFEST)
        yield


def _remove_unless_held(path: Path) -> None:
    with open(path / MANIFEST, "rb", opener=regular_only) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # the next save looks again
            return
        except OSError:  # a file system without locks
            pass
        gone = _rename_away(path)
    shutil.rmtree(gone, ignore_errors=True)


def newest(home: Path) -> tuple[Path | None, list[str]]:
    """Find the newest whole checkpoint. Also returns a line for each newer one that is damaged.

    A checkpoint that a live run removes while it is read is not damaged: there is a newer one then.
    """
    damaged: list[str] = []
    for _ in range(_LOOKS):
        damaged, all_there = [], True
        for path in checkpoints(home):
            try:
                verify_checkpoint(path)
                return path, damaged
            except CorruptCheckpointError as error:
                if path.exists():
                    damaged.append(f"checkpoint {path.name} is damaged: {error}")
                else:
                    all_there = False
        if all_there:
            break
    return None, damaged


def sweep(home: Path) -> None:
    """Remove what interrupted saves left. The caller holds the run's lock."""
    for path in home.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def _looks_whole(path: Path) -> bool:
    """Whether all files have their sizes. verify() reads the files too, before a resume."""
    try:
        files = read_manifest(path)["files"]
        return all((path / name).stat().st_size == files[name]["bytes"] for name in files)
    except (CorruptCheckpointError, OSError):
        return False


def _value(path: Path, goal: MetricGoal) -> float | None:
    """The metric of the evaluation at this very step; None: not evaluated, or not finite."""
    try:
        manifest = read_manifest(path)
    except CorruptCheckpointError:
        return None
    loop = manifest["loop"]
    if loop.get("metrics_step") != manifest["step"]:
        return None
    value: float | None = loop.get("metrics", {}).get(goal.metric)
    return value


def _remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first: a kill in between leaves no half checkpoint."""
    shutil.rmtree(_rename_away(path), ignore_errors=True)


def _rename_away(path: Path) -> Path:
    gone = path.with_name(f".{path.name}.gone-{os.getpid()}-{time.monotonic_ns()}")
    path.rename(gone)
    return gone

"""Faults planted in a rank: where it is reached, the process kills, stops or spoils itself.

CHAOS_HOME/plants.json lists the faults. They happen in this order, each once: fired-N.json in the
same directory says that the fault N has happened, when, and how far the rank was.
"""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any

_now = time.time  # which a planted clock does not change
WHERE = (
    *("import", "model", "split check"),
    *("data", "forward", "backward", "reduce", "reduce begun"),
    *("update", "half an update", "updated"),
    *("save", "half a shard", "shard", "marker", "manifest", "rename", "renamed"),
    *("removal", "half a removal"),
    *("journal", "evaluate", "end"),
)
# reached before a step is trained, whatever the step of the plant
AT_START = WHERE[:3]
# reached by the rank alone that publishes checkpoints and keeps the journal
OF_FIRST_RANK = ("manifest", "rename", "renamed", "removal", "half a removal", "journal")


@dataclass(frozen=True)
class Plant:
    """A fault of one rank."""

    where: str  # one of WHERE
    rank: int
    step: int  # the fault happens there in this step, or the first time after it
    how: str = "SIGKILL"  # a signal, or a method of Plants
    value: float = 0.0  # what the method takes
    always: bool = False  # it happens in every start


@dataclass(frozen=True)
class Fired:
    """What a rank left in the moment of its fault."""

    time: float
    step: int  # steps that it had finished
    saving: int  # the step of the newest save that it had begun, or that it went on from


class Plants:
    """The faults of this process."""

    def __init__(self, home: Path, rank: int | None) -> None:
        """rank: None: this process is no rank, and nothing happens in it."""
        self._home, self._rank = home, rank
        path = home / "plants.json"
        plants = json.loads(path.read_text()) if rank is not None and path.exists() else []
        self._plants = [Plant(**plant) for plant in plants]
        self._step, self._saving = -1, 0
        self._lock = threading.Lock()
        self.slower = 0.0  # more seconds of each microbatch
        self.spoils_loss = False

    @classmethod
    def of_this_process(cls) -> "Plants":
        rank = os.environ.get("RANK")
        return cls(Path(os.environ["CHAOS_HOME"]), int(rank) if rank is not None else None)

    @property
    def is_training(self) -> bool:
        return self._step >= 0

    def reach(self, where: str, action: Callable[[], object] | None = None) -> None:
        """The process has come to a place. action: what is done there beforehand, half of it."""
        with self._lock:
            number = self._due(where)
            if number is None:
                return
            if action:
                action()
            self._fire(number)

    def _due(self, where: str) -> int | None:
        """The number of the fault that is to happen here now."""
        for number, plant in enumerate(self._plants):
            if self._mark(number).exists() and not plant.always:
                continue
            is_here = (plant.where, plant.rank) == (where, self._rank)
            is_now = where in AT_START or 0 <= plant.step <= self._step
            return number if is_here and is_now else None
        return None

    def _mark(self, number: int) -> Path:
        return self._home / f"fired-{number}.json"

    def _fire(self, number: int) -> None:
        plant = self._plants[number]
        fired = Fired(_now(), self._step, self._saving)
        scratch = self._home / f".fired-{number}"
        scratch.write_text(json.dumps(asdict(fired)))
        scratch.rename(self._mark(number))
        if plant.how.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, plant.how))
            if plant.how != "SIGSTOP":
                time.sleep(60)
            return
        getattr(self, plant.how)(plant.value)

    # what may happen beside a signal

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def slow(self, seconds: float) -> None:
        self.slower = seconds

    def nan(self, _: float) -> None:
        self.spoils_loss = True

    def clock(self, seconds: float) -> None:
        """The clock jumps."""
        time.time = lambda: _now() + seconds
        nanoseconds = time.time_ns
        time.time_ns = lambda: nanoseconds() + int(seconds * 1e9)

    def fill_disk(self, _: float) -> None:
        """No byte is left where the run is."""
        with open(self._home / "run" / "filler", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                return

    def make_read_only(self, _: float) -> None:
        """The file system of the checkpoints takes no more writes, as after a disk's error."""
        place = str(self._home / "run" / "checkpoints")
        subprocess.run(["mount", "--bind", place, place], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", place], check=True)

    def cut_data(self, _: float) -> None:
        os.truncate(self._home / "rows.bin", 4096)

    def flip_bit(self, rank: float) -> None:
        """A bit of a rank's file in the newest checkpoint flips; then this process dies."""
        self._damage(_flip_bit, f"rank-{rank:g}-of-*.safetensors")

    def cut_file(self, rank: float) -> None:
        self._damage(_cut, f"rank-{rank:g}-of-*.safetensors")

    def remove_file(self, rank: float) -> None:
        self._damage(Path.unlink, f"rank-{rank:g}-of-*.safetensors")

    def cut_manifest(self, _: float) -> None:
        self._damage(_cut, "manifest.json")

    def remove_manifest(self, _: float) -> None:
        self._damage(Path.unlink, "manifest.json")

    def flip_bit_of_manifest(self, _: float) -> None:
        self._damage(_flip_bit, "manifest.json")

    def _damage(self, damage: Callable[[Path], object], pattern: str) -> None:
        newest = max((self._home / "run" / "checkpoints").glob("step-*"))
        [path] = newest.glob(pattern)
        damage(path)
        (self._home / "damaged").write_text(newest.name)
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    # the places

    def wrap(self) -> None:
        """Make the functions of a rank call reach()."""
        if self._rank is None:
            return
        self._wrap_heartbeat()
        self._wrap_step()
        self._wrap_begin_of_saves()
        self._wrap_saves()
        self._wrap_journal()

    def _wrap_heartbeat(self) -> None:
        from samecurve.observe import Heartbeat

        beat = Heartbeat.__call__

        def beat_and_reach(heartbeat: Any, step: int, activity: Any) -> None:
            if self._step < 0:
                self._saving = step  # of the save that this start went on from
            self._step = step
            beat(heartbeat, step, activity)
            self.reach(activity)

        Heartbeat.__call__ = beat_and_reach  # type: ignore[method-assign, assignment]

    def _wrap_step(self) -> None:
        import torch
        import torch.distributed as dist

        from samecurve.torch_engine.step.training_step import TrainingStep

        all_reduce, move, update = dist.all_reduce, TrainingStep.move_weights, torch._fused_adamw_

        @wraps(all_reduce)
        def reduce(*arguments: Any, **options: Any) -> Any:
            self.reach("reduce")
            work = all_reduce(*arguments, **options)
            self.reach("reduce begun")
            return work

        @wraps(move)
        def move_weights(*arguments: Any, **options: Any) -> Any:
            self.reach("update")
            move(*arguments, **options)
            self.reach("updated")

        def half(*arguments: Any, **options: Any) -> Any:
            self.reach("half an update", lambda: arguments[0][0].add_(1.0))
            return update(*arguments, **options)

        dist.all_reduce = reduce
        TrainingStep.move_weights = move_weights  # type: ignore[method-assign]
        torch._fused_adamw_ = half

    def _wrap_begin_of_saves(self) -> None:
        from samecurve.checkpoint.store import Store

        check_room = Store._check_room

        def begin(store: Any, step: int, size: int) -> None:
            self._saving = step  # this rank's part of the save before it has ended
            check_room(store, step, size)

        Store._check_room = begin  # type: ignore[method-assign, assignment]

    def _wrap_saves(self) -> None:
        from samecurve.checkpoint import MANIFEST
        from samecurve.checkpoint import store as module

        store: Any = module
        write_pieces, write_json = store.write_pieces, store.write_json
        sync_directory, rename_away = store.sync_directory, store._rename_away

        def pieces(path: Path, *arguments: Any) -> Any:
            written = write_pieces(path, *arguments)
            self.reach("half a shard", lambda: _cut(path))
            self.reach("shard")
            return written

        def json_file(path: Path, value: object) -> None:
            if path.name == MANIFEST:
                self.reach("manifest")
            write_json(path, value)
            if path.name != MANIFEST:
                self.reach("marker")

        def sync(path: Path) -> None:
            if not path.name.startswith("."):
                self.reach("renamed")
            sync_directory(path)
            if path.name.startswith("."):
                self.reach("rename")

        def away(path: Path) -> Path:
            gone: Path = rename_away(path)
            self.reach("removal")
            self.reach("half a removal", lambda: next(gone.glob("*.safetensors")).unlink())
            return gone

        store.write_pieces, store.write_json = pieces, json_file
        store.sync_directory, store._rename_away = sync, away
        if os.environ.get("CHAOS_WITHOUT") == "rename":
            _save_in_place()

    def _wrap_journal(self) -> None:
        from samecurve.observe import Journal, line_of

        flush = Journal.flush

        def half(journal: Any) -> None:
            lines = journal._pending + "".join(map(line_of, journal._events)).encode()
            os.write(journal._descriptor, lines[: max(len(lines) - 20, 1)])

        def flush_or_tear(journal: Any) -> None:
            if any(event.kind == "step" for event in journal._events):
                self.reach("journal", lambda: half(journal))
            flush(journal)

        Journal.flush = flush_or_tear  # type: ignore[method-assign, assignment]


def _save_in_place() -> None:
    """Checkpoints are written where they are found: what a kill leaves of them is seen."""
    from samecurve.checkpoint import MANIFEST, store
    from samecurve.checkpoint.format import make_manifest
    from samecurve.core.system import write_json

    class_: Any = store.Store
    write = class_._write

    def final(scratch: Path) -> Path:
        place = scratch.with_name(scratch.name.removeprefix(".").partition(".")[0])
        place.mkdir(exist_ok=True)
        return place

    def write_there(self: Any, scratch: Path, pieces: Any) -> None:
        write(self, final(scratch), pieces)

    def publish(self: Any, _publisher: Any, _step: int, scratch: Path, meta: Any) -> Any:
        markers = [final(scratch) / store._marker(index) for index in range(self._rank.world_size)]
        while not all(marker.exists() for marker in markers):
            time.sleep(0.01)
        written = [json.loads(marker.read_text()) for marker in markers]
        manifest = make_manifest(meta, written)
        write_json(final(scratch) / MANIFEST, manifest)
        for marker in markers:
            marker.unlink()
        shutil.rmtree(scratch)
        return manifest

    class_._write, class_._publish = write_there, publish


def _flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)

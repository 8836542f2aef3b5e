"""A run's checkpoint, opened to read the model's weights: the newest whole one, or one by name."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from samecurve.checkpoint import MANIFEST, CorruptCheckpointError, read_manifest
from samecurve.checkpoint.format import Arrays, verify_checkpoint
from samecurve.checkpoint.store import best_first, checkpoints, hold, newest
from samecurve.core.config.loading import load_of_run
from samecurve.core.config.sections import Config
from samecurve.core.protocols import StoredArrays
from samecurve.core.system.cache import cache_home
from samecurve.core.weights import AVERAGE
from samecurve.errors import UserError
from samecurve.run.directory import Run
from samecurve.run.trust import check_trusted
from samecurve.tasks import Tasks, entry_of

if TYPE_CHECKING:  # its engine is imported late
    from samecurve.tasks.adapter import TaskAdapter

_PREFIX = "model/"
_DIGEST = "frozen/sha256"
# a live run may take an older checkpoint away at any time, and then there is a newer one
_TRIES = 5


class ArrayView(Mapping[str, NDArray[Any]]):
    """Stored arrays under names of their own. An array is read when it is asked for."""

    def __init__(self, places: Mapping[str, tuple[StoredArrays, str]]) -> None:
        """places: name -> the arrays that hold it, and its name among them."""
        self._places = places

    def __getitem__(self, name: str) -> NDArray[Any]:
        arrays, stored_name = self._places[name]
        return arrays[stored_name]

    def shape(self, name: str) -> tuple[int, ...]:
        arrays, stored_name = self._places[name]
        return arrays.shape(stored_name)

    def part(self, name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> NDArray[Any]:
        arrays, stored_name = self._places[name]
        return arrays.part(stored_name, offsets, shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class Weights(ArrayView):
    """The model's arrays in a checkpoint: a moving average, where there is one, for a weight."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        names = [name.removeprefix(_PREFIX) for name in arrays if name.startswith(_PREFIX)]
        averaged = {name: f"{AVERAGE}{name}" in arrays for name in names}
        super().__init__(
            {name: (arrays, f"{AVERAGE if averaged[name] else _PREFIX}{name}") for name in names}
        )
        # the names of the checkpoint's other arrays
        self.others = [name for name in arrays if not name.startswith(_PREFIX)]

    @property
    def base_digest(self) -> bytes | None:
        """The digest of frozen weights that the checkpoint leaves out; None: it leaves none out."""
        return self._arrays[_DIGEST].tobytes() if _DIGEST in self._arrays else None

    def dtype(self, name: str) -> str:
        return self._arrays.dtype(self._places[name][1])


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint whose files are open."""

    run: Run
    path: Path
    manifest: Mapping[str, Any]
    weights: Weights
    notes: list[str]  # what the user should know (a damaged checkpoint passed over)
    trust: bool = False  # run the code that the run's config names, wherever it lies

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @cached_property
    def config(self) -> Config:
        """The run's config. UserError: it names code that is not trusted."""
        check_trusted(self.run, trust=self.trust, where="RUN")
        return load_of_run(self.run.document_for_use(), Tasks()).config

    @cached_property
    def task(self) -> "TaskAdapter":
        """The run's task, opened to use its model."""
        entry = entry_of(self.config.task)
        return entry.open_trained(self.config, cache_home(), self.run.assets)


def open_checkpoint(path: Path, where: str = "RUN", *, trust: bool = False) -> OpenedCheckpoint:
    """Open the newest whole checkpoint of a run directory, or one checkpoint by its own path.

    where: the argument that names the path
    trust: as OpenedCheckpoint.trust

    UserError: the path is neither, or nothing is saved yet.
    """
    for tries_left in reversed(range(_TRIES)):
        run, checkpoint, notes = _locate(path, where)
        try:
            manifest = read_manifest(checkpoint)
            arrays = Arrays(checkpoint, manifest)
            arrays.hold()
            weights = Weights(arrays)
            return OpenedCheckpoint(
                run=run,
                path=checkpoint,
                manifest=manifest,
                weights=weights,
                notes=notes,
                trust=trust,
            )
        except (CorruptCheckpointError, OSError):
            if not tries_left or checkpoint.exists():
                raise
    raise AssertionError("unreachable")


def best_checkpoint(path: Path, where: str = "RUN") -> Path:
    """The checkpoint of a run whose evaluation was the best, among those that are kept.

    where: the argument that names the run

    UserError: the path is no run, none of its checkpoints was evaluated at its own step, or the
    best one is damaged.
    """
    run = Run(path)
    run.check(where)
    if not run.exists():
        raise UserError(
            f"{path} is no run directory, whose best checkpoint could be chosen",
            "the run's directory; or leave --best (best=True) out to name one checkpoint",
            where,
        )
    for checkpoint in best_first(checkpoints(run.checkpoints), run.read_plan().best):
        try:
            verify_checkpoint(checkpoint)
            return checkpoint
        except CorruptCheckpointError as error:
            if not checkpoint.exists():  # a live run has removed it: it has a better one
                continue
            raise UserError(
                f"checkpoint {checkpoint.name}, the best of {path}, is damaged: {error}",
                f"put a copy of it in its place, in {run.checkpoints}; or name another checkpoint"
                " there, without --best (best=True)",
                where,
            ) from None
    raise UserError(
        f"none of the checkpoints of {path} was evaluated at its own step",
        "--set train.eval_every=N --set train.save_every=N when it is trained: then each better one"
        " is saved",
        where,
    )


@contextmanager
def held(path: Path, where: str = "RUN") -> Iterator[OpenedCheckpoint]:
    """Open a checkpoint, and keep it on disk while the block runs.

    Other processes can open it too: a live run does not remove it meanwhile.
    """
    with ExitStack() as stack:
        for tries_left in reversed(range(_TRIES)):
            checkpoint = open_checkpoint(path, where)
            try:
                stack.enter_context(hold(checkpoint.path))
                break
            except FileNotFoundError:
                if not tries_left:
                    raise
        yield checkpoint


def _locate(path: Path, where: str) -> tuple[Run, Path, list[str]]:
    """Find the run and its checkpoint. The lines are about damaged checkpoints passed over."""
    if (path / MANIFEST).is_file():
        path = path.resolve() if path.is_symlink() else path
        run = Run(path.resolve().parent.parent)
        run.check(where)
        try:
            verify_checkpoint(path)
        except CorruptCheckpointError as error:
            raise UserError(
                f"checkpoint {path}: {error}",
                "name the run directory: its newest whole checkpoint is taken",
                where,
            ) from None
        if not run.config.is_file():
            raise UserError(
                f"checkpoint {path} lies in no run directory: {run.config} is missing",
                "leave checkpoints where their run has put them, or copy the whole run",
                where,
            )
        return run, path, []
    run = Run(path)
    run.check(where)
    if not run.exists() and checkpoints(run.checkpoints):
        raise UserError(
            f"{path} has lost its plan.json",
            f"name one of its checkpoints, in {run.checkpoints}",
            where,
        )
    if not run.exists():
        raise UserError(
            f"{path} is neither a run directory nor a checkpoint",
            "a directory that `samecurve train` made, such as runs/tiny-20260101-120000",
            where,
        )
    checkpoint, damaged = newest(run.checkpoints)
    if checkpoint is None and damaged:
        raise UserError(
            f"{path} has no whole checkpoint: " + "; ".join(damaged),
            f"put a copy of the damaged checkpoint in its place, in {run.checkpoints}; or train"
            " anew, with another --save-dir",
            where,
        )
    if checkpoint is None:
        raise UserError(
            f"{path} has no checkpoint yet",
            "let it train until it has saved (train.save_every)",
            where,
        )
    return run, checkpoint, damaged

"""What a run has learned: its newest whole checkpoint, and the model with its weights.

Runs in this process; nothing is trained.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from samecurve.checkpoint.format import Arrays, verify
from samecurve.checkpoint.manifest import MANIFEST, CorruptCheckpointError, read_manifest
from samecurve.checkpoint.store import hold, newest
from samecurve.core.config.sections import Config
from samecurve.core.weights.weight_check import AVERAGE
from samecurve.errors import UserError
from samecurve.run.directory.run_directory import Run
from samecurve.run.trust import check_trusted
from samecurve.system import cache_home
from samecurve.tasks import Tasks, entry_of

if TYPE_CHECKING:  # its engine is imported late
    from samecurve.core.protocols import StoredArrays
    from samecurve.tasks.adapter.engine_adapter import EngineAdapter

_PREFIX = "model/"
_DIGEST = "frozen/sha256"
# a live run may take an older checkpoint away at any time, and then there is a newer one
_TRIES = 5


class Weights(Mapping[str, NDArray[Any]]):
    """The model's arrays of a checkpoint, each read when it is asked for."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self._names = [name.removeprefix(_PREFIX) for name in arrays if name.startswith(_PREFIX)]
        # where each lies: its moving average, if there is one, stands for a weight
        self._places = {
            name: f"{AVERAGE}{name}" if f"{AVERAGE}{name}" in arrays else f"{_PREFIX}{name}"
            for name in self._names
        }
        # names of what else the checkpoint holds
        self.others = [name for name in arrays if not name.startswith(_PREFIX)]

    @property
    def base_digest(self) -> bytes | None:
        """Of the frozen weights that the checkpoint leaves out; None: it has all."""
        return self._arrays[_DIGEST].tobytes() if _DIGEST in self._arrays else None

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._arrays[self._places[name]]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._arrays.shape(self._places[name])

    def part(self, name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> NDArray[Any]:
        return self._arrays.part(self._places[name], offsets, shape)

    def dtype(self, name: str) -> str:
        return self._arrays.dtype(self._places[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint, its files open."""

    run: Run
    path: Path
    manifest: Mapping[str, Any]
    weights: Weights
    notes: list[str]  # what the user should know (a damaged checkpoint passed over)
    trust: bool = False  # the code that its config names may be run, wherever it lies

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @cached_property
    def config(self) -> Config:
        """UserError: it names code that is not trusted."""
        check_trusted(self.run, trust=self.trust, where="RUN")
        return self.run.read_config(Tasks())

    @cached_property
    def task(self) -> "EngineAdapter":
        """The run's task, to use its model."""
        entry = entry_of(self.config.task)
        return entry.open_trained(self.config, cache_home(), self.run.assets)

    def model(self) -> Any:
        """With its weights, in eval mode. UserError: the base beneath them is another by now."""
        digest = self.weights.base_digest
        if digest is None:
            return self.task.load(self.weights)
        from samecurve.run.weights.base import Base, OnBase, base_weights

        weights: StoredArrays = self.weights
        if base := Base.kept_by(self.run):
            base.check_unchanged()
        if below := base_weights(self.run, self.task, self.config):
            weights = OnBase(self.weights, below.arrays)
        seed = int(self.manifest["fixed"]["seed"])
        return self.task.load_on_base(weights, seed, digest, str(self.path))


def open_checkpoint(path: Path, where: str = "RUN", *, trust: bool = False) -> OpenedCheckpoint:
    """The newest whole checkpoint of a run directory, or one checkpoint by its own path.

    where: the argument that named it
    trust: see OpenedCheckpoint

    UserError: neither, or none saved yet.
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


@contextmanager
def held(path: Path, where: str = "RUN") -> Iterator[OpenedCheckpoint]:
    """open_checkpoint(), which other processes can open, too, for as long as the block runs: a live
    run leaves it where it is.
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
    """The run, its checkpoint, and lines about damaged ones that were passed over."""
    if (path / MANIFEST).is_file():
        path = path.resolve() if path.is_symlink() else path
        run = Run(path.resolve().parent.parent)
        run.check(where)
        try:
            verify(path)
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
    if not run.exists() and run.checkpoints.is_dir():
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
    if checkpoint is None:
        raise UserError(
            f"{path} has no whole checkpoint yet" + "".join(f"; {line}" for line in damaged),
            "let it train until it has saved (train.save_every)",
            where,
        )
    return run, checkpoint, damaged


def load(run: Any, *, trust: bool = False) -> Any:
    """The model of a run with its weights, in eval mode.

    A torch.nn.Module; a flax.nnx.Module for a user task that jax trained.

    run: a run directory (its newest whole checkpoint is taken), one checkpoint, or what
        samecurve.train() gave

    trust: run the code that the run's config names, though it came with the run or lies outside of
        the working directory

    Warns of a damaged checkpoint passed over.
    """
    checkpoint = open_checkpoint(
        Path(getattr(run, "directory", run)), "samecurve.load", trust=trust
    )
    for note in checkpoint.notes:
        warnings.warn(note, stacklevel=2)
    return checkpoint.model()

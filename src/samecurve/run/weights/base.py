"""The base of a run that trains something small on it: weights that stay where they are.

The run keeps their path and the SHA-256 of each file (base.json), not the weights. Another base is
refused before anything is trained on it, or made with it.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.config.sections import Config
from samecurve.core.planning.facts import Facts
from samecurve.core.protocols import Checkpoint, StoredArrays
from samecurve.errors import RunError, UserError
from samecurve.run.directory.run_directory import Run
from samecurve.run.resume import Origin
from samecurve.run.weights.foreign_weights import SourceArray
from samecurve.run.weights.init_weights import fitting_arrays, placed, read_initial_weights
from samecurve.system import cache_home, read_file_bytes
from samecurve.tasks import open_task
from samecurve.tasks.adapter.engine_adapter import EngineAdapter
from samecurve.units import first_and_count

_MOST_JSON = 1 << 24  # bytes of base.json
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".index.json")
_PREFIX = "model/"


@dataclass(frozen=True)
class Base:
    path: str  # absolute: a file of weights, or a directory with some
    files: Mapping[str, str]  # SHA-256 by name: the weights, and the config beside them

    @classmethod
    def of(cls, path: Path) -> "Base":
        """As it is now."""
        path = path.resolve()
        files = [path]
        if path.is_dir():
            files = sorted(f for f in path.iterdir() if _belongs(f.name) and f.is_file())
        with ThreadPoolExecutor() as pool:
            hashes = dict(zip([f.name for f in files], pool.map(_sha256, files), strict=True))
        return cls(str(path), hashes)

    @classmethod
    def kept_by(cls, run: Run) -> "Base | None":
        """None: the run has none. RunError: its file is damaged."""
        if not run.base.is_file():
            return None
        try:
            values = json.loads(read_file_bytes(run.base, _MOST_JSON))
            return cls(str(values["path"]), {str(k): str(v) for k, v in values["files"].items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RunError(
                f"{run.base} can't be read: {error}", "put the file back", str(run.base)
            ) from None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def check_unchanged(self) -> None:
        """UserError: its files are others by now, or gone."""
        _refuse_other(self, Base.of(Path(self.path)) if Path(self.path).exists() else None)


def choose_base(
    origin: Origin, init_from: Path | None, config: Config, facts: Facts
) -> Base | None:
    """Of a task with a frozen base; None: its values follow from the seed.

    origin: what the run goes on from; its notes grow by what the user should know
    init_from: --init-from, or what the config's model begins from

    UserError: the weights don't fit the model, or are not those that the run began with.
    """
    before = _base_before(origin)
    path = init_from or (Path(before.path) if before else None)
    if path is None:
        return None
    if before and not path.exists():
        _refuse_other(before, None)
    with placed(config, path):
        source = read_initial_weights(path, config, facts)
    now = Base.of(path)
    if not now.files:
        raise UserError(
            f"{path} has no files of weights of its own",
            "a directory as save_pretrained() or `samecurve export` writes it",
            "model",
        )
    if before:
        _refuse_other(before, now)
    elif origin.run or origin.checkpoint:
        raise UserError(
            f"this run began with a base of the seed's own values, not with {path}",
            "leave --init-from out to go on with it, or another --save-dir",
            "--init-from",
        )
    else:
        origin.notes.extend(source.notes)
    return now


def _base_before(origin: Origin) -> Base | None:
    if origin.run is not None and (base := Base.kept_by(origin.run)):
        return base
    return Base.kept_by(Run(origin.checkpoint.parent.parent)) if origin.checkpoint else None


def _refuse_other(before: Base, now: Base | None) -> None:
    """UserError: the files are not those of before. now: None: there are none."""
    remedy = "the files as they were, or a new run with another --save-dir"
    if now is None:
        raise UserError(
            f"the base of this run, {before.path}, is not there any more", remedy, before.path
        )
    names = sorted({*before.files, *now.files})
    changed = [name for name in names if before.files.get(name) != now.files.get(name)]
    if changed:
        first = changed[0]
        was, has = (base.files.get(first, "none")[:16] for base in (before, now))
        raise UserError(
            f"{now.path} is not the base that this run began with: {first_and_count(changed)}"
            f" changed (SHA-256 of {first} {was}, now {has})",
            remedy,
            now.path,
        )


def base_weights(run: Run, task: object, config: Config) -> Checkpoint | None:
    """The base's arrays by a checkpoint's names, read when asked for; None: the run has none.

    Its hashes are not compared: check_unchanged().

    task: the config's, where it is open
    """
    base = Base.kept_by(run)
    if base is None:
        return None
    opened = task if isinstance(task, EngineAdapter) else open_task(config, cache_home())
    arrays, _ = fitting_arrays(Path(base.path), config, opened.model_arrays(), opened.task)
    return Checkpoint(
        path=base.path, step=0, epoch=0, consumed=0, arrays=_SourceArrays(arrays), loop={}
    )


class _SourceArrays(Mapping[str, NDArray[Any]]):
    """As StoredArrays. Arrays are read whole: a part of one is cut out of it."""

    def __init__(self, arrays: Mapping[str, SourceArray]) -> None:
        self._arrays = {f"{_PREFIX}{name}": array for name, array in arrays.items()}

    def __getitem__(self, name: str) -> NDArray[Any]:
        return np.ascontiguousarray(self._arrays[name].read()).reshape(self.shape(name))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._arrays[name].shape

    def part(self, name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> NDArray[Any]:
        box = tuple(slice(o, o + size) for o, size in zip(offsets, shape, strict=True))
        return np.ascontiguousarray(self[name][box])

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


class OnBase(Mapping[str, NDArray[Any]]):
    """A model's arrays by name: those of a checkpoint, over those of its base."""

    def __init__(self, own: Any, base: StoredArrays) -> None:
        self._own, self._base = own, base
        self._names = list(dict.fromkeys([*own, *(name.removeprefix(_PREFIX) for name in base)]))

    def __getitem__(self, name: str) -> NDArray[Any]:
        array: NDArray[Any]
        array = self._own[name] if name in self._own else self._base[_PREFIX + name]
        return array

    def shape(self, name: str) -> tuple[int, ...]:
        shape: tuple[int, ...]
        is_own = name in self._own
        shape = self._own.shape(name) if is_own else self._base.shape(_PREFIX + name)
        return shape

    def part(self, name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> NDArray[Any]:
        box = tuple(slice(o, o + size) for o, size in zip(offsets, shape, strict=True))
        return self[name][box]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _belongs(name: str) -> bool:
    return name.endswith(_WEIGHTS) or name == "config.json"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Weights from a run, a checkpoint or another library's files, read under a checkpoint's names."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.checkpoint import DTYPES, MANIFEST
from samecurve.core.config.document import read_document
from samecurve.core.config.loading import load_of_run
from samecurve.core.config.sections import Config
from samecurve.core.planning.facts import DescribedArrays
from samecurve.errors import SamecurveError, UserError
from samecurve.run.directory import Run
from samecurve.run.weights.opened_checkpoint import OpenedCheckpoint, open_checkpoint
from samecurve.tasks import Tasks, entry_of
from samecurve.tasks.user_class import place_of
from samecurve.units import first_and_count

WHERE = "--init-from"
# what DistributedDataParallel, DataParallel and torch.compile put before names
_WRAPPERS = ("module.", "_orig_mod.")
STORED_DTYPES = {name: stored for stored, name in DTYPES.items()}  # numpy's name -> a file's


@dataclass(frozen=True)
class SourceArray:
    """An array of a source of weights."""

    dtype: str  # in its file
    shape: tuple[int, ...]  # as in a checkpoint
    read: Callable[[], NDArray[Any]]  # reads its values


@dataclass(frozen=True)
class ForeignWeights:
    """The content of a source, before it is compared with the model."""

    arrays: Mapping[str, SourceArray]  # by their names in the source
    model_fields: Mapping[str, Any]  # the source's `model` section, or {"config.json": path}
    notes: list[str]  # what the user should know


def _fields_of(checkpoint: OpenedCheckpoint) -> Mapping[str, Any]:
    """The run's `model` section. The section of a user's class is taken as it stands, unread."""
    document = checkpoint.run.read_document().value
    if place_of(document.get("task")) is None:
        return checkpoint.config.model.model_dump()
    section = document.get("model")
    return section if isinstance(section, dict) else {}


def read_source(path: Path) -> ForeignWeights:
    """Open the weights at a path. UserError: there is nothing, or they can't be read."""
    if (path / MANIFEST).is_file() or Run(path).exists():
        checkpoint = open_checkpoint(path, WHERE)
        weights = checkpoint.weights
        if weights.base_digest is not None:
            raise UserError(
                f"{path} keeps only what was trained on a frozen base, not the base itself",
                f"`samecurve export {path} --to DIR` writes files to begin from: --init-from DIR",
                WHERE,
            )
        arrays = {
            name: SourceArray(
                DTYPES[weights.dtype(name)],
                weights.shape(name),
                partial(weights.__getitem__, name),
            )
            for name in weights
        }
        where = f"the weights are those of step {checkpoint.step} of {checkpoint.run.home}"
        return ForeignWeights(arrays, _fields_of(checkpoint), [*checkpoint.notes, where])
    if not path.exists():
        raise UserError(
            f"there is no {path}",
            "a run, a checkpoint, a .safetensors or .pt file, or a directory with one",
            WHERE,
        )
    from samecurve.torch_engine.model.weight_files import read_weights

    files, notes = read_weights(path)
    arrays = {
        name: SourceArray(array.dtype, array.shape, array.read) for name, array in files.items()
    }
    home = path if path.is_dir() else path.parent
    return ForeignWeights(arrays, _fields_beside(home), notes)


def _fields_beside(home: Path) -> Mapping[str, Any]:
    """The fields of the model, read from a file beside the weights.

    `samecurve export` writes config.yaml there, the Hugging Face libraries config.json.
    """
    if (home / "config.yaml").is_file():
        try:
            document = read_document(home / "config.yaml")
            return load_of_run(document, Tasks()).config.model.model_dump()
        except SamecurveError:
            return {}  # another program's
    config_json = home / "config.json"
    return {"config.json": config_json} if config_json.is_file() else {}


def map_names(
    config: Config, foreign_names: Iterable[str], model: DescribedArrays
) -> tuple[dict[str, str], list[str]]:
    """Translate foreign names into ours. Returns them, and what the user should know.

    Prefixes of wrappers are taken off, and another library's names become ours.
    UserError: two names become one.
    """
    unwrapped, prefixes = _strip_wrappers(list(foreign_names), model.arrays)
    names_here = {name: name for name in unwrapped.values()}
    task = entry_of(config.task).object_with("load_hf", config)
    if task is not None:
        names_here = task.load_hf(list(unwrapped.values()))
    mapped = {
        foreign_name: names_here[name]
        for foreign_name, name in unwrapped.items()
        if name in names_here
    }
    twice = [name for name, count in Counter(mapped.values()).items() if count > 1]
    if twice:
        raise UserError(
            f"two arrays of the source would be called {twice[0]}", "weights of one model", WHERE
        )
    notes = []
    if prefixes:
        notes.append(f"taken off their names: {', '.join(prefixes)}")
    not_needed = [name for name in unwrapped.values() if name not in names_here]
    if not_needed:
        notes.append(f"left out, since it follows from the config: {first_and_count(not_needed)}")
    return mapped, notes


def _strip_wrappers(
    foreign_names: list[str], model_names: Iterable[str]
) -> tuple[dict[str, str], list[str]]:
    """Take off the prefixes of wrappers. Returns foreign name -> name, and the prefixes.

    A prefix that the model's own names have stays.
    """
    removable = [p for p in _WRAPPERS if not all(name.startswith(p) for name in model_names)]
    names = {name: name for name in foreign_names}
    stripped = []
    while names:
        common = [p for p in removable if all(name.startswith(p) for name in names.values())]
        if not common:
            break
        names = {foreign: name.removeprefix(common[0]) for foreign, name in names.items()}
        stripped.append(common[0])
    inner = "._orig_mod."
    wrapped_within = any(inner in name for name in names.values())
    if wrapped_within and not any(inner in name for name in model_names):
        names = {foreign: name.replace(inner, ".") for foreign, name in names.items()}
        stripped.append("_orig_mod. within names")
    return names, stripped


def drop_aliases(
    arrays: Mapping[str, SourceArray], aliases: Mapping[str, str], path: Path
) -> tuple[dict[str, SourceArray], list[str]]:
    """Leave one name for each array that the model holds once.

    UserError: the source has other values under the other name.
    """
    distinct = dict(arrays)
    notes = []
    for alias, name in aliases.items():
        other = distinct.pop(alias, None)
        if other is None:
            continue
        if name in distinct and not _are_equal(distinct[name], other):
            raise UserError(
                f"{path}: {alias} and {name} differ; this model has one array for both",
                "a model that does not tie them (model.tie_embeddings: false for the decoder)",
                WHERE,
            )
        distinct.setdefault(name, other)
        notes.append(f"{alias} is {name}, which is held once")
    return distinct, notes


def _are_equal(one: SourceArray, other: SourceArray) -> bool:
    return one.shape == other.shape and np.array_equal(one.read(), other.read())


def dtype_notes(config: Config, arrays: Mapping[str, SourceArray]) -> list[str]:
    """Say which arrays change their number format to that of the parameters."""
    param_dtype = "float64" if config.train.precision == "f64" else "float32"
    counts = Counter(
        array.dtype
        for array in arrays.values()
        if array.dtype.startswith(("float", "bfloat")) and array.dtype != param_dtype
    )
    return [
        f"{count} arrays of {dtype} become {param_dtype}" for dtype, count in sorted(counts.items())
    ]

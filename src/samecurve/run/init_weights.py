"""--init-from: weights without optimizer state, from a run, a checkpoint, or others' files.

They are checked against the model before anything is written. What was read is copied into the run
(`initial/`, a checkpoint without more than the model), so that a run killed before its first save
begins with the same weights again, whatever has become of their source; and so that each rank reads
only its part.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.checkpoint.format import make_manifest, verify, write_pieces
from samecurve.checkpoint.manifest import MANIFEST, CorruptCheckpointError
from samecurve.core.config.document import read_file
from samecurve.core.config.loading import load
from samecurve.core.config.sections import Config
from samecurve.core.planning.facts import Facts
from samecurve.core.protocols import ArrayShard
from samecurve.core.weight_check import check_weights
from samecurve.errors import SamecurveError, UserError
from samecurve.run.directory import SCRATCH, Run
from samecurve.run.load import open_checkpoint
from samecurve.run.resume import Origin
from samecurve.system import sync_directory, write_json
from samecurve.tasks import Tasks, load_hf, unlike
from samecurve.units import first_and_count, show_bytes, show_count

_WHERE = "--init-from"
# what DistributedDataParallel, DataParallel and torch.compile put before names
_WRAPPERS = ("module.", "_orig_mod.")
_FILE = 1 << 30  # bytes of a file of the copy, and so what is held in memory at once
_STORED_DTYPES = {"float64": "F64", "float32": "F32", "int64": "I64", "int32": "I32"}
_NUMPY_DTYPES = {stored: name for name, stored in _STORED_DTYPES.items()}
_EIGHT_BYTES = {"float64", "int64", "complex128"}  # others are copied in four


@dataclass(frozen=True)
class SourceArray:
    """One array of a source."""

    dtype: str  # in its file
    shape: tuple[int, ...]  # as a checkpoint has it
    read: Callable[[], NDArray[Any]]  # its values, exactly


@dataclass(frozen=True)
class Source:
    """Weights that fit the model."""

    path: Path  # absolute
    arrays: Mapping[str, SourceArray]  # by a checkpoint's names
    buffers: frozenset[str]  # those of them that may be infinite
    notes: tuple[str, ...]  # what the user should know


def choose_initial_weights(
    origin: Origin, init_from: Path | None, config: Config, facts: Facts
) -> Source | None:
    """The weights that a run is to be given now; None: it has them, or begins without.

    origin: what the run goes on from; its notes grow by what the user should know
    init_from: --init-from

    UserError: the run began otherwise, the weights don't fit, or the run's copy is damaged.
    """
    if origin.run is not None and origin.own:
        _check_own_weights(origin.run, origin, init_from)
        return None
    if init_from is None:
        return None
    if origin.checkpoint is not None:
        raise UserError(
            "this run begins from a checkpoint, which has weights of its own",
            "one of --resume and --init-from",
            _WHERE,
        )
    return read_initial_weights(init_from, config, facts)


def _check_own_weights(run: Run, origin: Origin, init_from: Path | None) -> None:
    """UserError: a run that is gone on with began from other weights, or its copy is damaged."""
    source = run.weights_path()
    if init_from and str(init_from.resolve()) != source:
        began = "did not begin from weights that were given to it"
        if source:
            began = f"began from the weights {source}"
        raise UserError(
            f"{run.home} {began}; it can't begin again from {init_from}",
            "leave --init-from out to go on with it, or another --save-dir",
            _WHERE,
        )
    if not source:
        return
    if origin.checkpoint is not None:
        if init_from:
            origin.notes.append(
                f"{_WHERE} {init_from} has no effect any more: this run began from it, and goes on"
                " from its own checkpoint"
            )
        return
    try:
        verify(run.initial, weights_only=True)
    except CorruptCheckpointError as error:
        raise UserError(
            f"{run.initial}, the weights that this run began from: {error}",
            "another --save-dir begins anew",
            str(run.home),
        ) from None
    origin.notes.append(f"with the weights of {source}, as they were when this run began")


def read_initial_weights(path: Path, config: Config, facts: Facts) -> Source:
    """Weights to begin from, checked, none of their values read but where two names share them.

    UserError: what they are instead.
    """
    foreign = _read_source(path)
    names, naming_notes = _map_names(config, foreign.arrays, facts)
    arrays = {name: foreign.arrays[foreign_name] for foreign_name, name in names.items()}
    arrays, tying_notes = _drop_aliases(arrays, facts.aliases, path)
    check_weights(
        {name: array.shape for name, array in arrays.items()},
        facts.arrays,
        facts.buffers,
        str(path),
    )
    fatal, differing = unlike(config, foreign.model_fields)
    if fatal:
        raise UserError(
            f"{path} is of another model: {', '.join(fatal)}",
            "the model.* fields of the model that these weights are of",
            _WHERE,
        )
    not_floating = [
        f"{name} ({array.dtype})"
        for name, array in arrays.items()
        if not array.dtype.startswith(("float", "bfloat", "complex")) and name not in facts.buffers
    ]
    if not_floating:
        raise UserError(
            f"{path}: no floating values in {first_and_count(not_floating)}",
            "weights as they were trained, not packed or quantized",
            _WHERE,
        )
    size = sum(int(np.prod(array.shape)) for array in arrays.values())
    summary = (
        f"weights of {path}: {len(arrays)} arrays, {show_count(size)} numbers; no optimizer state"
        " and no position: this run begins at its own step 0"
    )
    notes = [summary, *foreign.notes, *naming_notes, *tying_notes, *_dtype_notes(config, arrays)]
    if differing:
        notes.append(f"the weights were trained otherwise: {', '.join(differing)}")
    absent = [name for name in facts.buffers if name not in arrays]
    if absent:
        notes.append(f"not among the weights, so as the model has them: {first_and_count(absent)}")
    return Source(path.resolve(), arrays, frozenset(facts.buffers), tuple(notes))


def keep(source: Source, run: Run) -> None:
    """Copy what was read into the directory that is to be a run, under a scratch name.

    publish() gives it its own. UserError: no room, or values that are not finite.
    """
    size = 0
    for array in source.arrays.values():
        itemsize = 8 if array.dtype in _EIGHT_BYTES else 4
        size += int(np.prod(array.shape)) * itemsize
    free = shutil.disk_usage(run.home).free
    if free < size * 1.05:
        raise UserError(
            f"{show_bytes(free)} are free at {run.home}; a copy of the weights needs"
            f" {show_bytes(size)}",
            "free some space, or another --save-dir",
            "--save-dir",
        )
    scratch = run.home / SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        scratch.mkdir()
        written = [
            write_pieces(scratch / f"weights-{number:05d}.safetensors", pieces).to_json()
            for number, pieces in enumerate(_pieces(source), 1)
        ]
        write_json(
            scratch / MANIFEST,
            make_manifest(
                {"step": 0, "epoch": 0, "consumed": 0, "loop": {}, "source": str(source.path)},
                written,
            ),
        )
        sync_directory(scratch)
    except OSError as error:
        raise UserError(
            f"copying the weights of {source.path} failed: {error}",
            "is there room, and is the source whole? free some space, or get it again",
            _WHERE,
        ) from None


def publish(run: Run) -> None:
    (run.home / SCRATCH).rename(run.initial)
    sync_directory(run.home)


def _pieces(source: Source) -> Iterator[list[ArrayShard]]:
    """In files of about _FILE bytes."""
    pieces: list[ArrayShard] = []
    for name, array in sorted(source.arrays.items()):
        try:
            values = np.ascontiguousarray(array.read())
        except SamecurveError:
            raise
        except Exception as error:  # whatever its library raises where a file ends too soon
            raise UserError(
                f"{source.path}: {name} can't be read: {error}", "is it whole? get it again", _WHERE
            ) from None
        if (
            values.dtype.kind == "f"
            and name not in source.buffers
            and not np.isfinite(values).all()
        ):
            raise UserError(
                f"{source.path}: {name} has values that are not finite",
                "weights of a sound model, such as an older checkpoint",
                _WHERE,
            )
        if values.size:
            pieces.append(
                ArrayShard(
                    f"model/{name}",
                    _STORED_DTYPES[values.dtype.name],
                    array.shape,
                    (0,) * len(array.shape),
                    values.reshape(array.shape),
                )
            )
        if sum(piece.buffer.nbytes for piece in pieces) >= _FILE:
            yield pieces
            pieces = []
    if pieces:
        yield pieces


@dataclass(frozen=True)
class _Foreign:
    """What a source holds, before it is compared with the model."""

    arrays: Mapping[str, SourceArray]  # by their names there
    model_fields: Mapping[str, Any]  # of their model: a `model` section, or {"config.json": path}
    notes: list[str]  # what the user should know


def _read_source(path: Path) -> _Foreign:
    if (path / MANIFEST).is_file() or Run(path).exists():
        checkpoint = open_checkpoint(path, _WHERE)
        weights = checkpoint.weights
        arrays = {
            name: SourceArray(
                _NUMPY_DTYPES[weights.dtype(name)],
                weights.shape(name),
                partial(weights.__getitem__, name),
            )
            for name in weights
        }
        where = f"they are those of step {checkpoint.step} of {checkpoint.run.home}"
        fields = checkpoint.config.model.model_dump()
        return _Foreign(arrays, fields, [*checkpoint.notes, where])
    if not path.exists():
        raise UserError(
            f"there is no {path}",
            "a run, a checkpoint, a .safetensors or .pt file, or a directory with one",
            _WHERE,
        )
    from samecurve.torch_engine.weight_files import read_weights

    files, notes = read_weights(path)
    arrays = {
        name: SourceArray(array.dtype, array.shape, array.read) for name, array in files.items()
    }
    home = path if path.is_dir() else path.parent
    return _Foreign(arrays, _fields_beside(home), notes)


def _fields_beside(home: Path) -> Mapping[str, Any]:
    """What lies beside the files of weights and tells of their model.

    It is what `samecurve export` wrote there, or the Hugging Face libraries.
    """
    if (home / "config.yaml").is_file():
        try:
            return load(read_file(home / "config.yaml"), Tasks()).config.model.model_dump()
        except SamecurveError:
            return {}  # another program's
    config_json = home / "config.json"
    return {"config.json": config_json} if config_json.is_file() else {}


def _map_names(
    config: Config, foreign_names: Iterable[str], facts: Facts
) -> tuple[dict[str, str], list[str]]:
    """Foreign names -> ours, and what the user should know.

    What wrappers put before names is taken off; another library's names become ours.
    UserError: two become one.
    """
    unwrapped, prefixes = _strip_wrappers(list(foreign_names), facts.arrays)
    names_here = load_hf(config, list(unwrapped.values()))
    mapped = {
        foreign_name: names_here[name]
        for foreign_name, name in unwrapped.items()
        if name in names_here
    }
    twice = [name for name, count in Counter(mapped.values()).items() if count > 1]
    if twice:
        raise UserError(
            f"two arrays of the source would be called {twice[0]}", "weights of one model", _WHERE
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
    """Foreign name -> name without what wrappers put before it; and what was taken off.

    What the model's own names have too stays.
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


def _drop_aliases(
    arrays: Mapping[str, SourceArray], aliases: Mapping[str, str], path: Path
) -> tuple[dict[str, SourceArray], list[str]]:
    """One name for what the model holds once.

    UserError: the source has other values under its other name.
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
                _WHERE,
            )
        distinct.setdefault(name, other)
        notes.append(f"{alias} is {name}, which is held once")
    return distinct, notes


def _are_equal(one: SourceArray, other: SourceArray) -> bool:
    return one.shape == other.shape and np.array_equal(one.read(), other.read())


def _dtype_notes(config: Config, arrays: Mapping[str, SourceArray]) -> list[str]:
    """What becomes of the number formats that are not the parameters' own."""
    param_dtype = "float64" if config.train.precision == "f64" else "float32"
    counts = Counter(
        array.dtype
        for array in arrays.values()
        if array.dtype.startswith(("float", "bfloat")) and array.dtype != param_dtype
    )
    return [
        f"{count} arrays of {dtype} become {param_dtype}" for dtype, count in sorted(counts.items())
    ]

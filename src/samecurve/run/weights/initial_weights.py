"""--init-from: weights without optimizer state, from a run, a checkpoint, or other programs' files.

The weights are compared with the model before anything is written. Then they are copied into the
run (`initial/`, a checkpoint of nothing but the model). So a run killed before its first save
begins with the same weights again, whatever has become of the source, and each rank reads only its
part.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from samecurve.checkpoint import MANIFEST, CorruptCheckpointError
from samecurve.checkpoint.format import make_manifest, verify_checkpoint, write_pieces
from samecurve.core.config.sections import Config
from samecurve.core.planning.facts import DescribedArrays, Facts
from samecurve.core.protocols import ArrayShard
from samecurve.core.system import sync_directory, write_json
from samecurve.core.system.cache import cache_home
from samecurve.core.weights import check_weights
from samecurve.errors import SamecurveError, UserError
from samecurve.run.directory import SCRATCH, Run
from samecurve.run.resume import Origin
from samecurve.run.weights.foreign_weights import (
    STORED_DTYPES,
    WHERE,
    ForeignWeights,
    SourceArray,
    drop_aliases,
    dtype_notes,
    map_names,
    read_source,
)
from samecurve.tasks import entry_of
from samecurve.units import first_and_count, show_bytes, show_count

_FILE = 1 << 30  # bytes of a file of the copy, and so what is held in memory at once
_EIGHT_BYTES = {"float64", "int64", "uint64", "complex128"}  # others are copied in four


@dataclass(frozen=True)
class Source:
    """Weights that fit the model."""

    path: Path  # absolute
    arrays: Mapping[str, SourceArray]  # by a checkpoint's names
    buffers: frozenset[str]  # the arrays that may be infinite
    notes: tuple[str, ...]  # what the user should know


def choose_initial_weights(
    origin: Origin, init_from: Path | None, config: Config, facts: Facts
) -> Source | None:
    """Weights to copy into a run that begins; None: the run has its weights, or needs none.

    origin: what the run goes on from; what the user should know is added to its notes
    init_from: --init-from, or what the config's model begins from

    UserError: the run began from other weights, they don't fit, or the run's copy is damaged.
    """
    by_config = init_from is not None and init_from == entry_of(config.task).first_weights(config)
    if origin.run is not None and origin.own:
        check_own_weights(origin.run, origin, init_from, by_config=by_config)
        return None
    if init_from is None or (by_config and origin.checkpoint is not None):
        return None
    if origin.checkpoint is not None:
        raise UserError(
            "this run begins from a checkpoint, which has weights of its own",
            "one of --resume and --init-from",
            WHERE,
        )
    with placed(config, init_from):
        return read_initial_weights(init_from, config, facts)


@contextmanager
def placed(config: Config, path: Path) -> Iterator[None]:
    """Report errors about weights that the config names at the config's key, not at the flag."""
    try:
        yield
    except UserError as error:
        if error.where != WHERE or path != entry_of(config.task).first_weights(config):
            raise
        raise UserError(error.cause, error.remedy, "model.path") from None


def check_own_weights(run: Run, origin: Origin, init_from: Path | None, *, by_config: bool) -> None:
    """Check a run to go on with. UserError: it began from other weights, or its copy is damaged."""
    source = run.weights_path()
    if init_from and str(init_from.resolve()) != source:
        began = "did not begin from weights that were given to it"
        if source:
            began = f"began from the weights {source}"
        raise UserError(
            f"{run.home} {began}; it can't begin again from {init_from}",
            "leave --init-from out to go on with it, or another --save-dir",
            WHERE,
        )
    if not source:
        return
    if origin.checkpoint is not None:
        if init_from and not by_config:
            origin.notes.append(
                f"{WHERE} {init_from} has no effect any more: this run began from it, and goes on"
                " from its own checkpoint"
            )
        return
    try:
        verify_checkpoint(run.initial, weights_only=True)
    except CorruptCheckpointError as error:
        raise UserError(
            f"{run.initial}, the weights that this run began from: {error}",
            "another --save-dir begins anew",
            str(run.home),
        ) from None
    origin.notes.append(f"with the weights of {source}, as they were when this run began")


def read_initial_weights(path: Path, config: Config, facts: Facts) -> Source:
    """Open weights to begin from, and compare them with the model.

    Values are read only where two names share them. UserError: the weights don't fit.
    """
    arrays, foreign = fitting_arrays(path, config, facts.model)
    fatal, differing = _unlike(config, foreign.model_fields)
    if fatal:
        raise UserError(
            f"{path} is of another model: {', '.join(fatal)}",
            "the model.* fields of the model that these weights are of",
            WHERE,
        )
    not_floating = [
        f"{name} ({array.dtype})"
        for name, array in arrays.items()
        if not array.dtype.startswith(("float", "bfloat", "complex"))
        and name not in facts.model.buffers
    ]
    if not_floating:
        raise UserError(
            f"{path}: no floating values in {first_and_count(not_floating)}",
            "weights as they were trained, not packed or quantized",
            WHERE,
        )
    size = sum(int(np.prod(array.shape)) for array in arrays.values())
    summary = (
        f"weights of {path}: {len(arrays)} arrays, {show_count(size)} numbers; no optimizer state"
        " and no position: this run begins at its own step 0"
    )
    notes = [summary, *foreign.notes, *dtype_notes(config, arrays)]
    if differing:
        notes.append(f"the weights were trained otherwise: {', '.join(differing)}")
    absent = [name for name in facts.model.buffers if name not in arrays]
    if absent:
        notes.append(f"not among the weights, so as the model has them: {first_and_count(absent)}")
    return Source(path.resolve(), arrays, frozenset(facts.model.buffers), tuple(notes))


def _unlike(config: Config, fields: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[str]]:
    """How foreign weights differ from the config's model, though their shapes may fit.

    Two lists: what makes the weights meaningless here, and what only changes their use.

    fields: the `model` section of the weights' own run, or {"config.json": path}
    """
    task = entry_of(config.task).object_with("unlike", config)
    if task is not None:
        fatal, differing = task.unlike(fields)
        return fatal, differing
    here = config.model.model_dump()
    differing = [
        f"{name} {value}, here {here[name]}"
        for name, value in fields.items()
        if name in here and here[name] != value
    ]
    return [], differing


def fitting_arrays(
    path: Path, config: Config, model: DescribedArrays, task: Any = None
) -> tuple[Mapping[str, SourceArray], ForeignWeights]:
    """The arrays of a source by a checkpoint's names, and the source itself.

    task: the config's task, if it is open

    UserError: the arrays are not this model's.
    """
    foreign = read_source(path)
    names, naming_notes = map_names(config, foreign.arrays, model)
    stored = {name: foreign.arrays[foreign_name] for foreign_name, name in names.items()}
    entry = entry_of(config.task)
    arrays: Mapping[str, SourceArray] = stored
    if entry.has("convert_weights", config):
        arrays = (task or entry.open(config, cache_home()).task).convert_weights(stored)
    arrays, tying_notes = drop_aliases(arrays, model.aliases, path)
    trained = model.arrays.keys() - set(model.frozen) if model.frozen_base else set()
    check_weights(
        {name: array.shape for name, array in arrays.items()},
        model.arrays,
        {*model.buffers, *trained},
        str(path),
    )
    notes = [*foreign.notes, *naming_notes, *tying_notes]
    return arrays, replace(foreign, notes=notes)


def keep(source: Source, run: Run) -> None:
    """Copy the weights into the directory of a run that begins, under a scratch name.

    publish() gives the copy its own name. UserError: no room, or values that are not finite.
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
            asdict(write_pieces(scratch / f"weights-{number:05d}.safetensors", pieces))
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
            "free some space; if there is enough, copy or download the source again",
            WHERE,
        ) from None


def publish(run: Run) -> None:
    """Give the copy of the weights its own name."""
    (run.home / SCRATCH).rename(run.initial)
    sync_directory(run.home)


def _pieces(source: Source) -> Iterator[list[ArrayShard]]:
    """Read the arrays in groups, each for a file of about _FILE bytes."""
    pieces: list[ArrayShard] = []
    for name, array in sorted(source.arrays.items()):
        try:
            values = np.ascontiguousarray(array.read())
        except SamecurveError:
            raise
        except Exception as error:  # whatever its library raises where a file ends too soon
            raise UserError(
                f"{source.path}: {name} can't be read: {error}", "is it whole? get it again", WHERE
            ) from None
        if (
            values.dtype.kind == "f"
            and name not in source.buffers
            and not np.isfinite(values).all()
        ):
            raise UserError(
                f"{source.path}: {name} has values that are not finite",
                "weights of a sound model, such as an older checkpoint",
                WHERE,
            )
        if values.size:
            pieces.append(
                ArrayShard(
                    f"model/{name}",
                    STORED_DTYPES[values.dtype.name],
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

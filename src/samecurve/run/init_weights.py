"""--init-from: weights without state, from a run, a checkpoint, or files that others made, checked
against the model before anything is written.

What was read is copied into the run (`initial/`, a checkpoint without more than the model), so that
a run killed before its first save begins with the same weights again, whatever has become of their
source; and so that each rank reads only its part.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.checkpoint.format import (
    MANIFEST,
    CorruptCheckpointError,
    make_manifest,
    verify,
    write_pieces,
)
from samecurve.core.config.document import read_file
from samecurve.core.config.sections import Config, load
from samecurve.core.planning.facts import Facts
from samecurve.core.protocols import ArrayShard
from samecurve.core.weight_check import check_weights
from samecurve.errors import SamecurveError, UserError
from samecurve.run.directory import SCRATCH, Run
from samecurve.run.load import find
from samecurve.system import sync_directory, write_json
from samecurve.tasks import Tasks, load_hf, unlike
from samecurve.units import first_and_count, show_bytes, show_count

_WHERE = "--init-from"
_WRAPPERS = (
    "module.",
    "_orig_mod.",
)  # what DistributedDataParallel, DataParallel and torch.compile put before names
_FILE = 1 << 30  # bytes of a file of the copy, and so what is held in memory at once
_KINDS = {"float64": "F64", "float32": "F32", "int64": "I64", "int32": "I32"}
_WIDE = {"float64", "int64", "complex128"}
_LONG = {"F64": "float64", "F32": "float32", "I64": "int64", "I32": "int32"}


@dataclass(frozen=True)
class Given:
    """One array of a source.

    dtype: in its file. shape: as a checkpoint has it. read: its values, exactly.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], NDArray[Any]]


@dataclass(frozen=True)
class Source:
    """Weights that fit the model.

    path: absolute. arrays: by a checkpoint's names. buffers: those of them that may be infinite.
    words: what the user should know.
    """

    path: Path
    arrays: Mapping[str, Given]
    buffers: frozenset[str]
    words: tuple[str, ...]


def weights_for(
    run: Run | None,
    own: bool,
    goes_on: bool,
    asked: Path | None,
    config: Config,
    facts: Facts,
    words: list[str],
) -> Source | None:
    """The weights that a run is to be given now; None: it has them, or begins without.

    run: that is gone on with. own: its checkpoint is in it. goes_on: it has one. asked:
    --init-from. words: grows by what the user should know. UserError: the run began otherwise, or
    the weights don't fit, or the run's copy of them is damaged.
    """
    if run is None or not own:
        if asked and goes_on:
            raise UserError(
                "this run begins from a checkpoint, which has weights of its own",
                "one of --resume and --init-from",
                _WHERE,
            )
        return examine(asked, config, facts) if asked else None
    began = run.weights_path()
    if asked and str(asked.resolve()) != began:
        how = (
            f"began from the weights {began}"
            if began
            else "did not begin from weights that were given to it"
        )
        raise UserError(
            f"{run.home} {how}; it can't begin again from {asked}",
            "leave --init-from out to go on with it, or another --save-dir",
            _WHERE,
        )
    if began and goes_on and asked:
        words.append(
            f"{_WHERE} {asked} has no effect any more: this run began from it, and goes on from its"
            " own checkpoint"
        )
    if began and not goes_on:
        try:
            verify(run.initial)
        except CorruptCheckpointError as error:
            raise UserError(
                f"{run.initial}, the weights that this run began from: {error}",
                "another --save-dir begins anew",
                str(run.home),
            ) from None
        words.append(f"with the weights of {began}, as they were when this run began")
    return None


def examine(path: Path, config: Config, facts: Facts) -> Source:
    """Weights to begin from, checked, none of their values read but where two names share them.

    UserError: what they are instead.
    """
    given, said, words = _read(path)
    names, more = _named(config, given, facts)
    arrays = {name: given[theirs] for theirs, name in names.items()}
    arrays, most = _untied(arrays, facts.aliases, path)
    check_weights(
        {name: array.shape for name, array in arrays.items()},
        facts.arrays,
        facts.buffers,
        str(path),
    )
    fatal, differ = unlike(config, said)
    if fatal:
        raise UserError(
            f"{path} is of another model: {', '.join(fatal)}",
            "the model.* fields of the model that these weights are of",
            _WHERE,
        )
    odd = [
        f"{name} ({array.dtype})"
        for name, array in arrays.items()
        if not array.dtype.startswith(("float", "bfloat", "complex")) and name not in facts.buffers
    ]
    if odd:
        raise UserError(
            f"{path}: no floating values in {first_and_count(odd)}",
            "weights as they were trained, not packed or quantized",
            _WHERE,
        )
    size = sum(int(np.prod(array.shape)) for array in arrays.values())
    first = (
        f"weights of {path}: {len(arrays)} arrays, {show_count(size)} numbers; no optimizer state"
        " and no position: this run begins at its own step 0"
    )
    words = [first, *words, *more, *most, *_kinds(config, arrays)]
    if differ:
        words.append(f"the weights were trained otherwise: {', '.join(differ)}")
    if lacking := [name for name in facts.buffers if name not in arrays]:
        words.append(f"not among the weights, so as the model has them: {first_and_count(lacking)}")
    return Source(path.resolve(), arrays, frozenset(facts.buffers), tuple(words))


def keep(source: Source, run: Run) -> None:
    """Copy what was read into the directory that is to be a run, under a scratch name (publish()
    gives it its own). UserError: no room, values that are not finite.
    """
    size = sum(
        int(np.prod(array.shape)) * (8 if array.dtype in _WIDE else 4)
        for array in source.arrays.values()
    )
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
                    _KINDS[values.dtype.name],
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


def _read(path: Path) -> tuple[dict[str, Given], Mapping[str, Any], list[str]]:
    """Arrays by their names there, what is said of their model, and what the user should know."""
    if (path / MANIFEST).is_file() or Run(path).exists():
        found = find(path, _WHERE)
        weights = found.weights
        arrays = {
            name: Given(
                _LONG[weights.dtype(name)],
                weights.shape(name),
                lambda name=name: weights[name],  # type: ignore[misc]
            )
            for name in weights
        }
        return (
            arrays,
            found.config.model.model_dump(),
            [*found.notes, f"they are those of step {found.step} of {found.run.home}"],
        )
    if not path.exists():
        raise UserError(
            f"there is no {path}",
            "a run, a checkpoint, a .safetensors or .pt file, or a directory with one",
            _WHERE,
        )
    from samecurve.torch_engine.weight_files import read_weights

    foreign, words = read_weights(path)
    home = path if path.is_dir() else path.parent
    return (
        {name: Given(array.dtype, array.shape, array.read) for name, array in foreign.items()},
        _said(home),
        words,
    )


def _said(home: Path) -> Mapping[str, Any]:
    """What lies beside the files of weights and tells of their model: of `samecurve export`, or of
    the Hugging Face libraries.
    """
    if (home / "config.yaml").is_file():
        try:
            return load(read_file(home / "config.yaml"), Tasks()).config.model.model_dump()
        except SamecurveError:
            return {}  # another program's
    return {"config.json": home / "config.json"} if (home / "config.json").is_file() else {}


def _named(
    config: Config, given: Mapping[str, Given], facts: Facts
) -> tuple[dict[str, str], list[str]]:
    """Their names -> ours: what wrappers put before names is taken off, and another library's names
    become ours. UserError: two become one.
    """
    names = {name: name for name in given}
    taken = []
    while prefix := next(
        (
            p
            for p in _WRAPPERS
            if names
            and all(n.startswith(p) for n in names.values())
            and not all(n.startswith(p) for n in facts.arrays)
        ),
        None,
    ):
        names = {theirs: name.removeprefix(prefix) for theirs, name in names.items()}
        taken.append(prefix)
    if any("._orig_mod." in name for name in names.values()) and not any(
        "._orig_mod." in name for name in facts.arrays
    ):
        names = {theirs: name.replace("._orig_mod.", ".") for theirs, name in names.items()}
        taken.append("_orig_mod. within names")
    mapped = load_hf(config, list(names.values()))
    found = {theirs: mapped[name] for theirs, name in names.items() if name in mapped}
    twice = [name for name, count in Counter(found.values()).items() if count > 1]
    if twice:
        raise UserError(
            f"two arrays of the source would be called {twice[0]}", "weights of one model", _WHERE
        )
    words = [f"taken off their names: {', '.join(taken)}"] if taken else []
    if left := [name for name in names.values() if name not in mapped]:
        words.append(f"left out, since it follows from the config: {first_and_count(left)}")
    return found, words


def _untied(
    arrays: Mapping[str, Given], aliases: Mapping[str, str], path: Path
) -> tuple[dict[str, Given], list[str]]:
    """One name for what the model holds once.

    UserError: the source has other values under its other name.
    """
    found = dict(arrays)
    words = []
    for alias, name in aliases.items():
        other = found.pop(alias, None)
        if other is None:
            continue
        if name in found and (
            found[name].shape != other.shape or not np.array_equal(found[name].read(), other.read())
        ):
            raise UserError(
                f"{path}: {alias} and {name} differ; this model has one array for both",
                "a model that does not tie them (model.tie_embeddings: false for the decoder)",
                _WHERE,
            )
        found.setdefault(name, other)
        words.append(f"{alias} is {name}, which is held once")
    return found, words


def _kinds(config: Config, arrays: Mapping[str, Given]) -> list[str]:
    """What becomes of the number formats that are not the parameters' own."""
    own = "64" if config.train.precision == "f64" else "32"
    counts = Counter(
        array.dtype
        for array in arrays.values()
        if array.dtype.startswith(("float", "bfloat")) and array.dtype != f"float{own}"
    )
    return [f"{count} arrays of {kind} become float{own}" for kind, count in sorted(counts.items())]

"""--init-from: an adapter that this or another tool has written, to train it on.

The base beneath it is the config's. The adapter's arrays are copied into the run (`initial/`), as
weights are that a whole model begins with.
"""

import math
import re
from collections.abc import Iterable
from pathlib import Path

from samecurve.core.config.sections import Config
from samecurve.core.planning.facts import Facts
from samecurve.core.system.cache import cache_home
from samecurve.errors import UserError
from samecurve.run.directory import Run
from samecurve.run.resume import Origin
from samecurve.run.weights.foreign_weights import WHERE, dtype_notes
from samecurve.run.weights.initial_weights import Source, check_own_weights
from samecurve.tasks import entry_of
from samecurve.units import show_count

CONFIG_FILE = "adapter_config.json"  # beside an adapter's weights, as peft writes it
_OF_ADAPTERS = re.compile(r"[._]lora[._]|\.dora_scale$|\.lokr_w[12]")  # in names of arrays
# files with an adapter alone: of the peft library, of diffusers, of `samecurve export`
_FILES = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors", "lora.safetensors")


def choose_adapter(
    origin: Origin, init_from: Path | None, config: Config, facts: Facts
) -> Source | None:
    """The adapter to copy into a run that begins; None: the run has it already, or needs none.

    origin: what the run goes on from; what the user should know is added to its notes
    init_from: --init-from, if the user gave it

    UserError: the run began from another adapter, or the adapter doesn't fit.
    """
    if origin.run is not None and origin.own and origin.run.initial.is_dir():
        check_own_weights(origin.run, origin, init_from, by_config=False)
        return None
    if init_from is None:
        return None
    source = read_first_adapter(init_from, config, facts)
    if source is not None and (origin.run is not None or origin.checkpoint is not None):
        raise UserError(
            f"this run has an adapter of its own, and did not begin with the one of {init_from}",
            "leave --init-from out to go on with it, or another --save-dir",
            WHERE,
        )
    return source


def read_first_adapter(path: Path, config: Config, facts: Facts) -> Source | None:
    """Open an adapter to begin with, and compare it with the model's. No value is read.

    Returns None where the path has whole weights, or the task has no adapters.

    UserError: the adapter doesn't fit, or this run trains none.
    """
    entry = entry_of(config.task)
    file = _file_of(path)
    if file is None or not entry.has("read_adapter", config):
        return None
    from samecurve.torch_engine.model.weight_files import read_metadata, read_weights

    arrays, _ = read_weights(file)
    if not is_adapter(arrays):
        return None
    if not facts.model.frozen_base or entry.first_weights(config) is None:
        raise UserError(
            f"{path} is an adapter, and this run trains none on weights from files",
            "model.path: the model that the adapter is for, and model.adapter: {}",
            WHERE,
        )
    metadata = dict(read_metadata(file))
    beside = file.with_name(CONFIG_FILE)
    if beside.is_file():
        metadata[CONFIG_FILE] = beside.read_text(errors="replace")
    try:
        task = entry.open(config, cache_home()).task
        adapter, lines = task.read_adapter(arrays, facts.model.arrays, metadata)
    except UserError as error:
        raise UserError(f"{path}: {error.cause}", error.remedy, error.where) from None
    size = show_count(sum(math.prod(array.shape) for array in adapter.values()))
    summary = (
        f"adapter of {path}: {len(adapter)} arrays, {size} numbers; no optimizer state and no"
        " position: this run begins at its own step 0"
    )
    notes = (summary, *lines, *dtype_notes(config, adapter))
    return Source(path.resolve(), adapter, frozenset(), notes)


def is_adapter(names: Iterable[str]) -> bool:
    """Whether the arrays of a file are an adapter's, by their names."""
    return any(map(_OF_ADAPTERS.search, names))


def _file_of(path: Path) -> Path | None:
    """The file that may hold an adapter alone; None: the path is of other weights, or of none."""
    if path.is_file():
        return path if path.suffix == ".safetensors" else None
    if Run(path).exists():
        return None
    return next((path / name for name in _FILES if (path / name).is_file()), None)

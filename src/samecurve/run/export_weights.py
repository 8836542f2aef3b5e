"""`samecurve export RUN --to DIR`: a run's weights and config for other programs.

The export takes place in this process. The directory appears whole under its name, or not at all.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samecurve.core.config.document import dump_document
from samecurve.core.config.sections import Config
from samecurve.errors import RunError, UserError
from samecurve.run.weights.opened_checkpoint import OpenedCheckpoint, open_checkpoint
from samecurve.run.weights.trained_model import trained_model
from samecurve.tasks.protocol import MEMBERS, ExportedFile
from samecurve.tasks.user_class import place_of
from samecurve.terminal import printable
from samecurve.units import show_bytes

DTYPES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}
_FILE = "model.safetensors"
_ADAPTER_FILE = "adapter_model.safetensors"


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The result of an export."""

    step: int
    arrays: int
    files: int  # of weights
    weight_bytes: int
    dtype: str  # of the floating values, as torch names it
    metrics: Mapping[str, float]
    arrays_left_out: int  # arrays of the checkpoint that are no weights
    notes: list[str]  # what the user should know


def export(
    path: Path, to: Path, form: str | None, dtype: str | None, largest: int, *, trust: bool = False
) -> Exported:
    """Write the weights of a run, or of one checkpoint, into the directory `to`.

    form: safetensors, huggingface or peft; None: the task's own, else safetensors
    dtype: a key of DTYPES; None: as trained
    largest: bytes of a file of weights
    trust: run the code that the run's config names, wherever it lies

    UserError: `to` holds something, no room, a form that the task lacks, or values beyond the dtype
    """
    _check_free(to)
    checkpoint = open_checkpoint(path, trust=trust)
    task, notes = checkpoint.task, list(checkpoint.notes)
    form = _checked_form(form, checkpoint)
    model = trained_model(checkpoint)
    tensors = task.named_tensors(model)
    if form == "huggingface":
        tensors = _distinct(tensors)
    torch_dtype = DTYPES[dtype or ("f64" if checkpoint.config.train.precision == "f64" else "f32")]
    if any(tensor.is_complex() and tensor.itemsize > 8 for tensor in tensors.values()):
        notes.append("complex values are written as complex64: safetensors has no wider ones")
    size = sum(_written_bytes(tensor, torch_dtype) for tensor in tensors.values())
    with _new_directory(to, size) as scratch:
        written = _in_form(form, checkpoint, tensors, scratch, torch_dtype)
        notes += [*written.lines, *(task.call("export", model, scratch) or ())]
        tensors = dict(written.tensors)
        sizes = {name: _written_bytes(tensor, torch_dtype) for name, tensor in tensors.items()}
        _check_room(to, sum(sizes.values()))  # of packed weights, what they become
        metadata = {"samecurve_step": str(checkpoint.step)}
        files = write_weights(scratch, written, dtype=torch_dtype, largest=largest, more=metadata)
        _write_config(scratch, checkpoint)
        usage = written.usage or _load_weights_code(checkpoint.config, files)
        home = Path("DIR", written.file).parent
        _write_readme(scratch, checkpoint, usage=usage, dtype=torch_dtype, home=home)
    return Exported(
        step=checkpoint.step,
        arrays=len(tensors),
        files=files,
        weight_bytes=sum(sizes.values()),
        dtype=torch_dtype,
        metrics=_metrics(checkpoint),
        arrays_left_out=len(checkpoint.weights.others),
        notes=notes,
    )


def _checked_form(form: str | None, checkpoint: OpenedCheckpoint) -> str:
    """The form to write. form: None: the task's own. UserError: the task does not write it."""
    methods = checkpoint.task.methods
    form = form or methods.export_format
    if form in methods.exports:
        return form
    if form not in {"safetensors", "huggingface", "peft"}:
        known = ", ".join(["safetensors", *methods.exports])
        raise UserError(
            f"--format {form}: {checkpoint.config.task} is not written so", known, "--format"
        )
    if form == "huggingface" and methods.export_hf is None:
        raise UserError(
            f"{checkpoint.config.task} is not known to the Hugging Face libraries: its class has no"
            " export_hf()",
            f"--format safetensors, or write {MEMBERS['export_hf']}",
            "--format",
        )
    if form == "peft" and methods.export_adapter is None:
        raise UserError(
            f"{checkpoint.config.task} has no adapter that peft knows: its class has no"
            " export_adapter()",
            f"--format safetensors, or write {MEMBERS['export_adapter']}",
            "--format",
        )
    return form


def _in_form(
    form: str, checkpoint: OpenedCheckpoint, tensors: Mapping[str, Any], scratch: Path, dtype: str
) -> ExportedFile:
    """The weights by their names in this form; what belongs beside them is written."""
    task = checkpoint.task
    if form in task.methods.exports:
        exported: ExportedFile = task.call("export_as", form, tensors, scratch, dtype)
        return exported
    if form == "peft":
        own, lines = task.call("export_adapter", tensors, scratch)
        return ExportedFile(_ADAPTER_FILE, own, _PEFT_CODE, lines, whole=True)
    if form == "huggingface":
        renamed, lines = task.call("export_hf", tensors, scratch, dtype)
        return ExportedFile(_FILE, renamed, _TRANSFORMERS_CODE, lines)
    return ExportedFile(_FILE, tensors, "")


def _write_config(directory: Path, checkpoint: OpenedCheckpoint) -> None:
    """Write the run's config, and the task's class, where the run keeps it."""
    text = dump_document(checkpoint.config.model_dump(mode="json"))
    (directory / "config.yaml").write_text(text)
    if checkpoint.run.task.is_file():
        shutil.copyfile(checkpoint.run.task, directory / checkpoint.run.task.name)


def _check_free(to: Path) -> None:
    """Check the target. UserError: there is a file, or a directory with something in it."""
    if not os.path.lexists(to):
        return
    remedy = "another --to; nothing is overwritten"
    if not to.is_dir():
        raise UserError(f"{to} is there already", remedy, "--to")
    if any(to.iterdir()):
        raise UserError(f"{to} is there already, and holds something", remedy, "--to")


def _distinct(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Leave tied weights once, under the first of their names."""
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(tensor.data_ptr() if tensor.numel() else id(tensor), name)
    return {name: tensors[name] for name in first.values()}


@contextmanager
def _new_directory(to: Path, size: int) -> Iterator[Path]:
    """A scratch directory with room for so many bytes, which is `to` once the block has ended.

    Nothing is left of it where the block fails.
    """
    scratch = to.absolute().with_name(f".{to.absolute().name}.{os.getpid()}.part")
    try:
        scratch.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"{to} can't be made: {error.strerror}", "--to DIR where you may write", "--to"
        ) from None
    try:
        _check_room(to, size)
        yield scratch
        scratch.rename(to)
    except OSError as error:
        raise RunError(
            f"{to} can't be written: {error}", "another --to, or free some space", "--to"
        ) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_room(to: Path, size: int) -> None:
    """Check the free space at `to`. UserError: fewer bytes are free."""
    free = shutil.disk_usage(to.absolute().parent).free
    if free < size * 1.05:
        raise UserError(
            f"{show_bytes(free)} are free at {to.absolute().parent}; the weights need"
            f" {show_bytes(size)}",
            "free some space, another --to, or --dtype bf16",
            "--to",
        )


def _written_bytes(tensor: Any, dtype: str) -> int:
    """The bytes that a tensor takes in a file."""
    itemsize = tensor.itemsize
    if tensor.is_complex():
        itemsize = 8  # complex64
    elif tensor.is_floating_point():
        itemsize = {"float64": 8, "float32": 4}.get(dtype, 2)
    return int(tensor.numel() * itemsize)


def _shards(sizes: Mapping[str, int], largest: int) -> list[dict[str, int]]:
    """Divide the arrays into files of at most `largest` bytes. A larger array has its own file."""
    shards: list[dict[str, int]] = [{}]
    for name, size in sizes.items():
        if shards[-1] and sum(shards[-1].values()) + size > largest:
            shards.append({})
        shards[-1][name] = size
    return shards


def write_weights(
    home: Path, written: ExportedFile, *, dtype: str, largest: int, more: Mapping[str, str]
) -> int:
    """Write one file, or several with an index for the Hugging Face libraries.

    dtype: of the floating values, as torch names it. largest: bytes of a file
    more: metadata beside that of `written`
    Returns the number of files.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    sizes = {name: _written_bytes(tensor, dtype) for name, tensor in written.tensors.items()}
    shards = _shards(sizes, sum(sizes.values()) if written.whole else largest)
    metadata = {"format": "pt", **more, **written.metadata}
    places = {}
    for name_of_shard, shard in _with_file_names(shards, written.file):
        try:
            save_file(
                {name: convert_tensor(name, written.tensors[name], dtype) for name in shard},
                home / name_of_shard,
                metadata,
            )
        except SafetensorError as error:  # the library wraps the system's error in its own
            raise OSError(str(error)) from error
        places.update(dict.fromkeys(shard, Path(name_of_shard).name))
    if len(shards) > 1:
        total = sum(sum(shard.values()) for shard in shards)
        (home / f"{written.file}.index.json").write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=1) + "\n"
        )
    return len(shards)


def _with_file_names(
    shards: list[dict[str, int]], file: str
) -> Iterator[tuple[str, dict[str, int]]]:
    """Each shard with its file name. file: the name where there is one shard."""
    if len(shards) == 1:
        yield file, shards[0]
        return
    stem = file.removesuffix(".safetensors")
    for number, shard in enumerate(shards, 1):
        yield f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors", shard


def convert_tensor(name: str, tensor: Any, dtype: str) -> Any:
    """Copy a tensor in the dtype to write. Two names of one tensor would not be written."""
    import torch

    if tensor.is_complex():
        return tensor.to(torch.complex64).contiguous().clone()
    if not tensor.is_floating_point():
        return tensor.contiguous().clone()
    converted = tensor.to(getattr(torch, dtype)).contiguous().clone()
    if (tensor.isfinite() & ~converted.isfinite()).any():
        raise UserError(
            f"{name} has values beyond the range of {dtype}",
            "--dtype bf16, which reaches as far as f32",
            "--dtype",
        )
    return converted


def _metrics(checkpoint: OpenedCheckpoint) -> dict[str, float]:
    """The metrics and the step of the last evaluation before the checkpoint."""
    loop = checkpoint.manifest["loop"]
    metrics = {name: value for name, value in loop.get("metrics", {}).items() if value is not None}
    if not metrics or loop.get("metrics_step") is None:
        return {}
    return {**metrics, "step": loop["metrics_step"]}


def _write_readme(
    directory: Path, checkpoint: OpenedCheckpoint, *, usage: str, dtype: str, home: Path
) -> None:
    """Write a page about the files. home: where the weights lie, for a reader"""
    config = checkpoint.config
    paragraphs = [
        f"# {checkpoint.run.home.resolve().name}, step {checkpoint.step}",
        f"Weights ({dtype}) of a run of Samecurve, task `{config.task}`, engine {config.engine};"
        " `config.yaml` is its config. Optimizer state is not here."
        + _evaluation_sentence(_metrics(checkpoint)),
        f"```python\n{usage}\n```",
        f"`samecurve train -f config.yaml --init-from {home}` trains on from these weights.",
    ]
    (directory / "README.md").write_text(printable("\n\n".join(paragraphs) + "\n"))


_TRANSFORMERS_CODE = """from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("DIR")"""


_PEFT_CODE = """from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("BASE")  # adapter_config.json says which
model = PeftModel.from_pretrained(base, "DIR")"""


def _load_weights_code(config: Config, files: int) -> str:
    """The lines of Python that load the files of weights."""
    is_flax = config.engine == "jax" and place_of(config.task) is not None
    library = "numpy" if is_flax else "torch"
    lines = [f"from safetensors.{library} import load_file", ""]
    if files == 1:
        lines.append('weights = load_file("DIR/model.safetensors")')
    else:
        lines = ["from pathlib import Path", "", *lines, "weights = {}"]
        lines.append('for file in Path("DIR").glob("*.safetensors"):')
        lines.append("    weights.update(load_file(file))")
    if is_flax:
        lines.append("# by the paths of the nnx.Params, joined by dots")
    else:
        lines.append("model.load_state_dict(weights)")
    return "\n".join(lines)


def _evaluation_sentence(metrics: Mapping[str, float]) -> str:
    if not metrics:
        return ""
    shown = ", ".join(f"{name} {value:.6g}" for name, value in metrics.items() if name != "step")
    return f" Evaluated at step {metrics['step']}: {shown}."

"""`samecurve export RUN --to DIR`: a run's weights and config for other programs.

Runs in this process; what is written appears whole under its name, or not at all.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samecurve.core.config.document import dump
from samecurve.errors import RunError, UserError
from samecurve.run.load import Found, find
from samecurve.tasks.protocol import MEMBERS
from samecurve.units import show_bytes

DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Exported:
    """What an export came to.

    dtype: of its floating values, as torch names it. files: of weights. left: arrays of the
    checkpoint that are no weights. notes: what the user should know.
    """

    step: int
    arrays: int
    files: int
    bytes: int
    dtype: str
    metrics: Mapping[str, float]
    left: int
    notes: list[str]


def export(path: Path, to: Path, form: str, dtype: str | None, largest: int) -> Exported:
    """path: a run or one checkpoint.

    form: safetensors or huggingface. dtype: of DTYPES; None: as trained. largest: bytes of a file
    of weights.

    UserError: `to` holds something, there is no room, the form is not for this task, the values
    don't fit the dtype.
    """
    if os.path.lexists(to) and (not to.is_dir() or any(to.iterdir())):
        raise UserError(
            f"{to} is there already{', and holds something' if to.is_dir() else ''}",
            "another --to; nothing is overwritten",
            "--to",
        )
    found = find(path)
    config = found.config
    task, notes = found.task, list(found.notes)
    if form == "huggingface" and not hasattr(task.task, "export_hf"):
        raise UserError(
            f"{config.task} is not known to the Hugging Face libraries: its class has no"
            " export_hf()",
            f"--format safetensors, or write {MEMBERS['export_hf']}",
            "--format",
        )
    model = found.model()
    tensors = task.named_tensors(model)
    if form == "huggingface":
        tensors = _distinct(tensors)
    kind = DTYPES[dtype] if dtype else {"f64": "float64"}.get(config.train.precision, "float32")
    size = sum(_bytes(tensor, kind) for tensor in tensors.values())
    if any(tensor.is_complex() and tensor.itemsize > 8 for tensor in tensors.values()):
        notes.append("complex values are written as complex64: safetensors has no wider ones")
    scratch = _scratch(to, size)
    try:
        if form == "huggingface":
            tensors, more = task.export_hf(tensors, scratch, kind)
            notes += more
        notes += task.export(model, scratch)
        sizes = {name: _bytes(tensor, kind) for name, tensor in tensors.items()}
        shards = _shards(sizes, largest)
        _write_weights(scratch, tensors, shards, kind, found.step)
        (scratch / "config.yaml").write_text(dump(config.model_dump(mode="json")))
        (scratch / "README.md").write_text(_readme(found, form, kind, len(shards)))
        scratch.rename(to)
    except OSError as error:
        raise RunError(
            f"{to} can't be written: {error}", "another --to, or free some space", "--to"
        ) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Exported(
        found.step,
        len(tensors),
        len(shards),
        size,
        kind,
        _metrics(found),
        len(found.weights.others),
        notes,
    )


def _distinct(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tied weights once, under the first of their names."""
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(tensor.data_ptr() if tensor.numel() else id(tensor), name)
    return {name: tensors[name] for name in first.values()}


def _scratch(to: Path, size: int) -> Path:
    """A directory beside `to`, with room for so many bytes."""
    scratch = to.absolute().with_name(f".{to.absolute().name}.{os.getpid()}.part")
    try:
        scratch.mkdir(parents=True)
        free = shutil.disk_usage(scratch).free
    except OSError as error:
        raise UserError(
            f"{to} can't be made: {error.strerror}", "--to DIR where you may write", "--to"
        ) from None
    if free < size * 1.05:
        scratch.rmdir()
        raise UserError(
            f"{show_bytes(free)} are free at {to.absolute().parent}; the weights need"
            f" {show_bytes(size)}",
            "free some space, another --to, or --dtype bf16",
            "--to",
        )
    return scratch


def _bytes(tensor: Any, kind: str) -> int:
    """As it will be written."""
    each = (
        8
        if tensor.is_complex()
        else (
            {"float64": 8, "float32": 4}.get(kind, 2)
            if tensor.is_floating_point()
            else tensor.itemsize
        )
    )
    return int(tensor.numel() * each)


def _shards(sizes: Mapping[str, int], largest: int) -> list[dict[str, int]]:
    """Names and bytes, in files of at most `largest` bytes (more only where one array alone has
    more).
    """
    shards: list[dict[str, int]] = [{}]
    for name, size in sizes.items():
        if shards[-1] and sum(shards[-1].values()) + size > largest:
            shards.append({})
        shards[-1][name] = size
    return shards


def _write_weights(
    home: Path, tensors: Mapping[str, Any], shards: list[dict[str, int]], kind: str, step: int
) -> None:
    """One file, or several with an index, as the Hugging Face libraries read them."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    places = {}
    for file, shard in _named(shards):
        try:
            save_file(
                {name: converted(name, tensors[name], kind) for name in shard},
                home / file,
                {"format": "pt", "samecurve_step": str(step)},
            )
        except SafetensorError as error:  # the library wraps the system's error in its own
            raise OSError(str(error)) from error
        places.update(dict.fromkeys(shard, file))
    if len(shards) > 1:
        total = sum(sum(shard.values()) for shard in shards)
        (home / _INDEX).write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=1) + "\n"
        )


def _named(shards: list[dict[str, int]]) -> Iterator[tuple[str, dict[str, int]]]:
    if len(shards) == 1:
        yield _FILE, shards[0]
        return
    for number, shard in enumerate(shards, 1):
        yield f"model-{number:05d}-of-{len(shards):05d}.safetensors", shard


def converted(name: str, tensor: Any, kind: str) -> Any:
    """A copy of its own: two names of one tensor would not be written."""
    import torch

    if tensor.is_complex():
        return tensor.to(torch.complex64).contiguous().clone()
    if not tensor.is_floating_point():
        return tensor.contiguous().clone()
    made = tensor.to(getattr(torch, kind)).contiguous().clone()
    if (tensor.isfinite() & ~made.isfinite()).any():
        raise UserError(
            f"{name} has values beyond the range of {kind}",
            "--dtype bf16, which reaches as far as f32",
            "--dtype",
        )
    return made


def _metrics(found: Found) -> dict[str, float]:
    """Of the last evaluation before the checkpoint, with its step."""
    loop = found.manifest["loop"]
    metrics = {name: value for name, value in loop.get("metrics", {}).items() if value is not None}
    return (
        {**metrics, "step": loop["metrics_step"]}
        if metrics and loop.get("metrics_step") is not None
        else {}
    )


def _readme(found: Found, form: str, kind: str, files: int) -> str:
    config = found.config
    metrics = _metrics(found)
    measured = (
        f" Evaluated at step {metrics['step']}:"
        f" {', '.join(f'{name} {value:.6g}' for name, value in metrics.items() if name != 'step')}."
        if metrics
        else ""
    )
    if form == "huggingface":
        use = (
            "from transformers import AutoModelForCausalLM\n\nmodel ="
            ' AutoModelForCausalLM.from_pretrained("DIR")'
        )
    else:
        flax = config.engine == "jax" and ".py:" in config.task
        read = (
            'load_file("DIR/model.safetensors")'
            if files == 1
            else (
                '{name: value for file in Path("DIR").glob("*.safetensors") for name, value in'
                " load_file(file).items()}"
            )
        )
        use = (
            "from pathlib import Path\n\n" if files > 1 else ""
        ) + f"from safetensors.{'numpy' if flax else 'torch'} import load_file\n\nweights = {read}"
        use += (
            "  # by the paths of the nnx.Params, joined by dots"
            if flax
            else "\nmodel.load_state_dict(weights)"
        )
    return (
        f"# {found.run.home.resolve().name}, step {found.step}\n\nWeights ({kind}) of a run of"
        f" Samecurve, task `{config.task}`, engine {config.engine}; `config.yaml` is its config."
        f" Optimizer state is not here.{measured}\n\n```python\n{use}\n```\n\n`samecurve train -f"
        " config.yaml --init-from DIR` trains on from these weights.\n"
    )

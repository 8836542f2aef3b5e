"""The flags that say what the config says, and how they, --set and the file become one config.

The later wins: default < file < --set < flag.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from samecurve.cli.options import Option, RankCount
from samecurve.core.planning.strategies import strategy_help
from samecurve.errors import InvalidConfigError, UserError

if TYPE_CHECKING:
    from samecurve.core.config.document import Document
    from samecurve.core.config.importers import ConvertedConfig
    from samecurve.core.config.loading import LoadedConfig

Flags = Mapping[str, Any]  # of a command line: parameter -> value; None: not given


@dataclass(frozen=True)
class _ValueFlag:
    """A flag that only names a config value."""

    names: tuple[str, ...]  # after the first those of other tools, kept out of help
    key: str
    help: str  # empty: the flag itself is another tool's, and hidden
    type: type = str

    @property
    def parameter(self) -> str:
        return self.names[0].removeprefix("--").replace("-", "_")


def _flag(*names: str, key: str, help: str = "", type: type = str) -> _ValueFlag:  # noqa: A002 as click names them
    return _ValueFlag(names, key, help, type)


_VALUE_FLAGS = (
    _flag("--devices", key="devices.use", help="auto, all, cpu, cpu:N, or indices: 0,1"),
    _flag(
        "--strategy",
        "--multi-gpu",
        key="devices.strategy",
        help=strategy_help(),
    ),
    _flag("--engine", key="engine", help="torch, jax"),
    _flag(
        "--sync-backend",
        "--backend",
        "--distributed-backend",
        key="devices.sync",
        help="auto, cpu, gloo, nccl",
    ),
    _flag("--dtype", key="train.precision", help="f32, bf16, f16, f64"),
    _flag("--seq-len", key="model.max_seq_len", type=int, help="tokens of a sample"),
    _flag("--lr", key="optimizer.lr", type=float, help="peak learning rate"),
    _flag("--weight-decay", key="optimizer.weight_decay", type=float, help="on matrices only"),
    _flag(
        "--scale-lr",
        key="schedule.scale_lr",
        help="none, linear, sqrt: by batch / schedule.base_batch",
    ),
    _flag("--warmup", key="schedule.warmup", type=int, help="steps"),
    _flag(
        "--balance",
        key="devices.balance",
        help=(
            "even, measured, or relative speeds: 2,1; dp and ddp assign microbatches by them; same"
            " results"
        ),
    ),
    _flag(
        "--compress",
        key="devices.compress",
        help="none, bf16, fp16, powersgd: what ddp reduces gradients as; changes results",
    ),
    _flag(
        "--num-workers",
        key="data.workers",
        type=int,
        help="processes a device that read samples; 0: a thread of the rank",
    ),
    _flag("--prefetch", key="data.prefetch", type=int, help="steps prepared ahead"),
    _flag(
        "--max-checkpoints",
        key="train.keep",
        type=int,
        help="newest checkpoints kept, beside the best; 0: all",
    ),
    _flag(
        "--max-restarts",
        key="devices.max_restarts",
        type=int,
        help="starts after a failure, from the last save",
    ),
    _flag("--launcher", key="devices.launcher", help="direct, elastic, spawn"),
    _flag(
        "--port",
        "--master-port",
        key="devices.port",
        type=int,
        help="of the rendezvous; 0: any free one",
    ),
    _flag("--wandb", key="track.wandb", help="off, offline, online: W&B too"),
    _flag("--mode", key="data.mode"),
    _flag("--arch", key="model.arch"),
    _flag("--cssm", key="model.cssm"),
)


def config_options(command: Callable[..., None]) -> Callable[..., None]:
    """All flags that load_config() reads, on a verb's function."""
    option = partial(click.option, cls=Option)
    options = [
        option("-f", "--file", "--config-path", "file", type=Path, help="the config, YAML or JSON"),
        option(
            "-d",
            "--data",
            "data",
            type=str,
            help="data.source: text, a directory, a glob, a .bin of raw tokens, python-stdlib",
        ),
        option(
            "--gpus",
            "--gpu-ids",
            "--device-ids",
            "gpus",
            type=str,
            metavar="0,1",
            help="GPUs by index, as CUDA_VISIBLE_DEVICES leaves them",
        ),
        option(
            "--num-gpus",
            "--nproc",
            "--nproc-per-node",
            "num_gpus",
            type=RankCount(each_gpu=0),
            hidden=True,
        ),
        *(
            option(
                *flag.names, flag.parameter, type=flag.type, help=flag.help, hidden=not flag.help
            )
            for flag in _VALUE_FLAGS
        ),
        option("--no-amp", is_flag=True, help="precision f32"),
        option("--bf16", is_flag=True, hidden=True),
        option("--exact", is_flag=True, help="the same bits on any number of devices"),
        option(
            "--compile",
            is_flag=True,
            help="compile the model's blocks: faster steps, slower first ones",
        ),
        option(
            "--tensorboard",
            is_flag=True,
            help="TensorBoard too: logs/tensorboard in the run directory",
        ),
        option(
            "--no-preflight",
            is_flag=True,
            help="no first collective with a time limit before training",
        ),
        option("--spawn", is_flag=True, hidden=True),
        option("--distributed-data-loading", is_flag=True, hidden=True),
        option("--batch-size", type=int, help="samples per device and accumulation step"),
        option(
            "--grad-accum",
            "--grad-accum-steps",
            "grad_accum",
            type=int,
            help="accumulation steps before an optimizer step",
        ),
        option(
            "--global-batch",
            type=int,
            help="samples of a step over all devices, whatever their number",
        ),
        option("--epochs", type=float, help="length of the run in epochs"),
        option(
            "--max-steps",
            type=int,
            help="length of the run in steps; 0 with --epochs: whole epochs",
        ),
        option("--warmup-epochs", type=float, help="warm-up in epochs"),
        option(
            "--set",
            "settings",
            multiple=True,
            metavar="KEY=VALUE",
            help="any config value: --set optimizer.clip=0.5",
        ),
    ]
    for decorate in reversed(options):
        command = decorate(command)
    return command


def load_config(flags: Flags, *, say: bool, loud: bool = True) -> "LoadedConfig":
    """File, then --set, then flags: the later wins.

    A file of another tool is converted first.

    say: whether notes are printed; False where stdout is for JSON
    loud: False where another process says what was converted
    """
    from samecurve.core.config.document import Document, parse_setting, read_file
    from samecurve.core.config.importers import convert
    from samecurve.tasks.class_place import find_kept_class

    file: Path | None = flags["file"]
    document = read_file(file) if file else Document()
    if file:
        find_kept_class(document, file.parent)
    converted = convert(document)
    if converted:
        document = converted.document
        if loud:
            note = (
                f"note   {file} is a config of {converted.tool}; `samecurve convert {file} --to"
                " NEW.yaml` writes it as one of Samecurve"
            )
            click.echo("\n".join([note, *converted.summary_lines()]), err=True)
    for setting in flags["settings"]:
        key, value = parse_setting(setting)
        document.set(key, value, f"--set {key}")
    for flag in _VALUE_FLAGS:
        value = flags[flag.parameter]
        if value is not None:
            document.set(flag.key, value, flag.names[0])
    _apply_flags(document, flags)
    batch_note = apply_batch(
        document, flags["batch_size"], flags["grad_accum"], flags["global_batch"]
    )
    if not file and not document.value:
        raise UserError("no config was given", "-f FILE, for example -f models/tiny.yaml", "-f")
    if flags["distributed_data_loading"] and say and loud:
        click.echo(
            "note   --distributed-data-loading: always so; each rank reads only its own samples",
            err=True,
        )
    loaded = _load(document, file.stem if file else "run", converted)
    return replace(
        loaded,
        notes=(batch_note,) if batch_note else (),
        run_directory=converted.run_directory if converted else None,
    )


def _load(document: "Document", name: str, converted: "ConvertedConfig | None") -> "LoadedConfig":
    """The document, checked.

    InvalidConfigError: what another tool's config asks for and is not served, with all that is
    wrong otherwise.
    """
    from samecurve.core.config.loading import load
    from samecurve.tasks import Tasks

    unsettled = converted.unresolved(document) if converted else []
    try:
        loaded = load(document, Tasks(), name)
    except InvalidConfigError as wrong:
        raise InvalidConfigError([*unsettled, *wrong.errors]) from None
    except UserError as wrong:
        if unsettled:
            raise InvalidConfigError([*unsettled, wrong]) from None
        raise
    if unsettled:
        raise InvalidConfigError(unsettled)
    return loaded


def _apply_flags(document: "Document", flags: Flags) -> None:
    """Flags that mean more than one value, or a value of another form."""
    if flags["data"] is not None:
        document.set("data.source", flags["data"], "-d")
    _only_one(flags, "dtype", "no_amp", "bf16")
    _only_one(flags, "launcher", "spawn")
    _only_one(flags, "warmup", "warmup_epochs")
    switches = {
        "--no-amp": ("train.precision", "f32"),
        "--bf16": ("train.precision", "bf16"),
        "--spawn": ("devices.launcher", "spawn"),
        "--exact": ("train.exact", True),
        "--compile": ("train.compile", True),
        "--tensorboard": ("track.tensorboard", True),
        "--no-preflight": ("devices.preflight", 0),
    }
    for name, (key, value) in switches.items():
        if flags[name.removeprefix("--").replace("-", "_")]:
            document.set(key, value, name)
    _apply_devices(document, flags["devices"], flags["gpus"], flags["num_gpus"])
    _apply_length(document, flags["epochs"], flags["max_steps"])
    if flags["warmup_epochs"] is not None:
        document.set("schedule.warmup", _epochs(flags["warmup_epochs"]), "--warmup-epochs")


def _apply_devices(
    document: "Document", devices: str | None, gpus: str | None, count: int | None
) -> None:
    values = {"--devices": devices, "--gpus": gpus, "--num-gpus": count}
    names = [name for name, value in values.items() if value is not None]
    if len(names) > 1:
        raise UserError(f"{' and '.join(names)} both name devices", "give one of them", names[0])
    if gpus is not None:
        if gpus.startswith("cpu"):
            raise UserError(f"--gpus {gpus} names no GPU", f"--devices {gpus}", "--gpus")
        document.set("devices.use", gpus, "--gpus")
    if count is not None:
        if count < 0:
            raise UserError(f"--num-gpus {count}", "a number of GPUs, or 0 for all", "--num-gpus")
        document.set("devices.use", ",".join(map(str, range(count))) or "all", "--num-gpus")


def _apply_length(document: "Document", epochs: float | None, steps: int | None) -> None:
    section = document.value.get("train")
    config_steps = section.get("steps") if isinstance(section, dict) else None
    if epochs is not None and steps:
        raise UserError(
            f"--epochs {epochs:g} and --max-steps {steps} both fix the length",
            "give one of them",
            "--max-steps",
        )
    if epochs is None and steps == 0:
        if str(config_steps).endswith("ep"):
            return  # the config says how many
        raise UserError(
            "--max-steps 0 means whole epochs", "say how many: --epochs N", "--max-steps"
        )
    if epochs is not None:
        document.set("train.steps", _epochs(epochs), "--epochs")
    elif steps is not None:
        document.set("train.steps", steps, "--max-steps")


def _epochs(count: float) -> str:
    return f"{count:.9f}".rstrip("0").rstrip(".") + "ep"


def _only_one(flags: Flags, *parameters: str) -> None:
    used = [name for name in parameters if flags[name] is not None and flags[name] is not False]
    names = [f"--{name.replace('_', '-')}" for name in used]
    if len(names) > 1:
        raise UserError(
            f"{' and '.join(names)} contradict each other", "give one of them", names[0]
        )


def apply_batch(
    document: "Document", batch_size: int | None, grad_accum: int | None, global_batch: int | None
) -> str | None:
    """--batch-size and --grad-accum replace the batch section, or --global-batch fixes the product.

    Returns what to say of it.
    """
    values = {
        "samples": (global_batch, "--global-batch"),
        "per_device": (batch_size, "--batch-size"),
        "accumulate": (grad_accum, "--grad-accum"),
    }
    if all(value is None for value, _ in values.values()):
        return None
    section = document.value.get("batch")
    old = section if isinstance(section, dict) else {}
    if global_batch is None and batch_size is None and old.get("per_device") is None:
        raise UserError(
            f"--grad-accum {grad_accum} needs a batch per device; the config gives"
            f" {old.get('samples', 'no')} samples over all devices",
            f"--batch-size N --grad-accum {grad_accum}; or leave it out: the plan finds the"
            " accumulation steps",
            "--grad-accum",
        )
    remaining = {}
    if global_batch is None:
        remaining = {key: old[key] for key in ("per_device", "accumulate") if key in old}
    places = {key: document.origin_of(("batch", key)) for key in remaining}
    document.set("batch", {}, "flags")
    for key, value in remaining.items():
        document.set(f"batch.{key}", value, places[key])
    for key, (new_value, flag) in values.items():
        if new_value is not None:
            document.set(f"batch.{key}", new_value, flag)
    if global_batch is not None or old.get("samples") is None:
        return None
    return (
        f"--batch-size is per device: it replaces the config's {old['samples']} samples over all"
        " devices (--global-batch fixes those)"
    )

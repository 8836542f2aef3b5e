"""The flags that say what the config says, and how they, --set and the file become one config.

The later wins: default < file < --set < flag.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from samecurve.cli.apply_flags import Flags, apply_batch, apply_flags, let_devices_win
from samecurve.cli.options import Option, rank_count
from samecurve.core.planning.strategies import strategy_help
from samecurve.errors import InvalidConfigError, UserError

if TYPE_CHECKING:
    from samecurve.core.config.document import Document
    from samecurve.core.config.importers import ConvertedConfig
    from samecurve.core.config.loading import LoadedConfig


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


_TASK_FLAGS = tuple(flag for flag in _VALUE_FLAGS if not flag.help)  # fields of some tasks


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
            type=rank_count(each_gpu=0),
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


def load_config(
    flags: Flags, *, say: bool, loud: bool = True, trains: bool = True
) -> "LoadedConfig":
    """File, then --set, then flags: the later wins.

    A file of another tool is converted first.

    say: whether notes are printed; False where stdout is for JSON
    loud: False where another process says what was converted
    trains: False where flags may do without a file, since nothing is trained
    """
    from samecurve.core.config.document import parse_setting

    file: Path | None = flags["file"]
    document, converted = _read(file, loud=loud)
    for setting in flags["settings"]:
        key, value = parse_setting(setting)
        document.set(key, value, f"--set {key}")
    if trains and not file and "task" not in document.value:
        raise _no_config(flags)
    for_another_task = [flag for flag in _TASK_FLAGS if _is_new(document, flag, flags)]
    for flag in _VALUE_FLAGS:
        value = flags[flag.parameter]
        if value is not None:
            document.set(flag.key, value, flag.names[0])
    apply_flags(document, flags)
    notes = [
        let_devices_win(document) if converted else None,
        apply_batch(document, flags["batch_size"], flags["grad_accum"], flags["global_batch"]),
    ]
    if flags["distributed_data_loading"] and say and loud:
        click.echo(
            "note   --distributed-data-loading: always so; each rank reads only its own samples",
            err=True,
        )
    loaded = _load(document, file.stem if file else "run", converted)
    for flag in for_another_task:
        _check_is_read(loaded.config.task, flag, flags[flag.parameter])
    return replace(
        loaded,
        notes=tuple(note for note in notes if note),
        run_directory=converted.run_directory if converted else None,
    )


def _read(file: Path | None, *, loud: bool) -> "tuple[Document, ConvertedConfig | None]":
    """A file's document, in our words, and how it was converted if it is another tool's."""
    from samecurve.core.config.document import Document, read_file
    from samecurve.core.config.importers import convert
    from samecurve.tasks.class_place import find_kept_class

    if file is None:
        return Document(), None
    document = read_file(file)
    find_kept_class(document, file.parent)
    converted = convert(document)
    if converted is None:
        return document, None
    if loud:
        note = (
            f"note   {file} is a config of {converted.tool}; `samecurve convert {file} --to"
            " NEW.yaml` writes it as one of Samecurve"
        )
        click.echo("\n".join([note, *converted.summary_lines()]), err=True)
    return converted.document, converted


def _no_config(flags: Flags) -> UserError:
    """With what is wrong with the flags beside that."""
    from samecurve.cli.missing_config import no_config
    from samecurve.core.config.unsupported import task_needed

    errors = [no_config()]
    for flag in _TASK_FLAGS:
        needed = task_needed(flag.key)
        if flags[flag.parameter] is not None and needed:
            what, remedy = needed
            errors.append(UserError(f"{flag.key} is for {what}", remedy, flag.names[0]))
    return errors[0] if len(errors) == 1 else InvalidConfigError(errors)


def _is_new(document: "Document", flag: _ValueFlag, flags: Flags) -> bool:
    """Whether a flag brings a field that neither the file nor --set has."""
    return flags[flag.parameter] is not None and tuple(flag.key.split(".")) not in document.origins


def _check_is_read(task: str, flag: _ValueFlag, value: str) -> None:
    """UserError: the task's class takes any field, and its source does not name this one."""
    from samecurve.tasks.source_words import mentions

    name = flag.key.rpartition(".")[2]
    if not mentions(task, name):
        raise UserError(
            f"{flag.names[0]} {value}: task {task} reads no {flag.key}",
            f"leave it out; --set {flag.key}={value} hands it to the class all the same",
            flag.names[0],
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

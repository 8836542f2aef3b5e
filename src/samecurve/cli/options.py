"""The flags that say what the config says, and how they, --set and the file become one: flag >
--set > file > default.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from samecurve.errors import ConfigErrors, UserError

if TYPE_CHECKING:
    from samecurve.core.config.document import Document
    from samecurve.core.config.importers import Converted
    from samecurve.core.config.sections import Loaded

# flag -> config key, for flags that only name a value. The names after the first are those of other
# tools, kept out of help.
_VALUES: list[tuple[tuple[str, ...], str, Any, str]] = [
    (("--devices",), "devices.use", str, "auto, all, cpu, cpu:N, or indices: 0,1"),
    (("--strategy", "--multi-gpu"), "devices.strategy", str, "auto, single, dp, ddp, fsdp, hsdp"),
    (("--engine",), "engine", str, "torch, jax"),
    (
        ("--sync-backend", "--backend", "--distributed-backend"),
        "devices.sync",
        str,
        "auto, cpu, gloo, nccl",
    ),
    (("--dtype",), "train.precision", str, "f32, bf16, f16, f64"),
    (("--seq-len",), "model.max_seq_len", int, "tokens of a sample"),
    (("--lr",), "optimizer.lr", float, "peak learning rate"),
    (("--weight-decay",), "optimizer.weight_decay", float, "on matrices only"),
    (
        ("--scale-lr",),
        "schedule.scale_lr",
        str,
        "none, linear, sqrt: by batch / schedule.base_batch",
    ),
    (("--warmup",), "schedule.warmup", int, "steps"),
    (
        ("--balance",),
        "devices.balance",
        str,
        "even, measured, or relative speeds: 2,1; dp and ddp deal slots by them; same results",
    ),
    (
        ("--compress",),
        "devices.compress",
        str,
        "none, bf16, fp16, powersgd: what ddp reduces gradients as; changes results",
    ),
    (
        ("--num-workers",),
        "data.workers",
        int,
        "processes a device that read samples; 0: a thread of the rank",
    ),
    (("--prefetch",), "data.prefetch", int, "steps prepared ahead"),
    (("--max-checkpoints",), "train.keep", int, "newest checkpoints kept, beside the best"),
    (
        ("--max-restarts",),
        "devices.max_restarts",
        int,
        "starts after a failure, from the last save",
    ),
    (("--launcher",), "devices.launcher", str, "direct, elastic, spawn"),
    (("--port",), "devices.port", int, "of the rendezvous; 0: any free one"),
    (("--wandb",), "track.wandb", str, "off, offline, online: W&B too"),
    (("--mode",), "data.mode", str, ""),
    (("--arch",), "model.arch", str, ""),
    (("--cssm",), "model.cssm", str, ""),
]
_HIDDEN = {"--mode", "--arch", "--cssm"}
_LATER = {"--suite"}


def dashes(name: str) -> str:
    """Underscores and dashes are one."""
    return name.replace("_", "-")


def terminated(number: int, _: object) -> None:
    """SIGTERM before anything runs: leave, nothing being half done."""
    sys.exit(128 + number)


class Verb(click.Command):
    """A flag of a later version is refused by name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for argument in args:
            flag = dashes(argument.partition("=")[0])
            if flag in _LATER:
                raise click.UsageError(f"{flag} is not in this version")
        return super().parse_args(ctx, args)


class Option(click.Option):
    """Help shows an option's own name; those that other tools gave it work too."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        names, self.opts = self.opts, self.opts[: 1 + (not self.opts[0].startswith("--"))]
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts = names


def config_options(command: Callable[..., None]) -> Callable[..., None]:
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
        option("--num-gpus", "--nproc", "num_gpus", type=int, hidden=True),
        *(
            option(*names, _parameter(names), type=kind, help=text, hidden=names[0] in _HIDDEN)
            for names, _, kind, text in _VALUES
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
        option("--batch-size", type=int, help="samples per device and round"),
        option(
            "--grad-accum",
            "--grad-accum-steps",
            "grad_accum",
            type=int,
            help="rounds before a step",
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


def _parameter(names: tuple[str, ...]) -> str:
    return names[0].removeprefix("--").replace("-", "_")


def load_config(flags: dict[str, Any], say: bool, loud: bool = True) -> "Loaded":
    """File, then --set, then flags: the later wins.

    A file of another tool is converted first, and how is said, unless another process says it
    (loud).
    """
    from samecurve.core.config.document import Document, parse_setting, read_file
    from samecurve.core.config.importers import convert

    file: Path | None = flags["file"]
    document = read_file(file) if file else Document()
    converted = convert(document)
    if converted:
        document = converted.document
    if converted and loud:
        click.echo(
            "\n".join(
                [
                    (
                        f"note   {file} is a config of {converted.tool}; `samecurve convert {file}"
                        " --to NEW.yaml` writes it as one of Samecurve"
                    ),
                    *converted.lines(),
                ]
            ),
            err=True,
        )
    for setting in flags["settings"]:
        key, value = parse_setting(setting)
        document.set(key, value, f"--set {key}")
    for names, key, _, _ in _VALUES:
        value = flags[_parameter(names)]
        if value is not None:
            document.set(key, value, names[0])
    _apply_flags(document, flags)
    note = apply_batch(document, flags["batch_size"], flags["grad_accum"], flags["global_batch"])
    if not file and not document.value:
        raise UserError("no config was given", "-f FILE, for example -f models/tiny.yaml", "-f")
    if flags["distributed_data_loading"] and say and loud:
        click.echo(
            "note   --distributed-data-loading: always so; each rank reads only its own samples",
            err=True,
        )
    return _load(document, file.stem if file else "run", converted, note)


def _load(
    document: "Document", name: str, converted: "Converted | None", note: str | None
) -> "Loaded":
    """ConfigErrors: what another tool's config asks for and is not served, with all that is wrong
    otherwise.
    """
    from samecurve.core.config.sections import load
    from samecurve.tasks import Tasks

    unsettled = converted.unsettled(document) if converted else []
    try:
        loaded = load(document, Tasks(), name)
    except ConfigErrors as wrong:
        raise ConfigErrors([*unsettled, *wrong.errors]) from None
    except UserError as wrong:
        raise (ConfigErrors([*unsettled, wrong]) if unsettled else wrong) from None
    if unsettled:
        raise ConfigErrors(unsettled)
    return replace(
        loaded, notes=(note,) if note else (), home=converted.home if converted else None
    )


def _apply_flags(document: "Document", flags: dict[str, Any]) -> None:
    """Flags that mean more than one value, or a value of another form."""
    if flags["data"] is not None:
        document.set("data.source", flags["data"], "-d")
    _only_one(flags, "dtype", "no_amp", "bf16")
    _only_one(flags, "launcher", "spawn")
    for flag, key, value in (
        ("no_amp", "train.precision", "f32"),
        ("bf16", "train.precision", "bf16"),
        ("spawn", "devices.launcher", "spawn"),
    ):
        if flags[flag]:
            document.set(key, value, f"--{flag.replace('_', '-')}")
    for flag, key in (
        ("exact", "train.exact"),
        ("compile", "train.compile"),
        ("tensorboard", "track.tensorboard"),
    ):
        if flags[flag]:
            document.set(key, True, f"--{flag}")
    if flags["no_preflight"]:
        document.set("devices.preflight", 0, "--no-preflight")
    _apply_devices(document, flags["devices"], flags["gpus"], flags["num_gpus"])
    _apply_length(document, flags["epochs"], flags["max_steps"])
    if flags["warmup_epochs"] is not None:
        document.set("schedule.warmup", _epochs(flags["warmup_epochs"]), "--warmup-epochs")


def _apply_devices(
    document: "Document", devices: str | None, gpus: str | None, count: int | None
) -> None:
    given = [
        flag
        for flag, value in (("--devices", devices), ("--gpus", gpus), ("--num-gpus", count))
        if value is not None
    ]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} both name devices", "give one of them", given[0])
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
    given = section.get("steps") if isinstance(section, dict) else None
    if epochs is not None and steps:
        raise UserError(
            f"--epochs {epochs:g} and --max-steps {steps} both fix the length",
            "give one of them",
            "--max-steps",
        )
    if epochs is None and steps == 0:
        if str(given).endswith("ep"):
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


def _only_one(flags: dict[str, Any], *names: str) -> None:
    given = [f"--{name.replace('_', '-')}" for name in names if flags[name]]
    if len(given) > 1:
        raise UserError(
            f"{' and '.join(given)} contradict each other", "give one of them", given[0]
        )


def apply_batch(
    document: "Document", batch_size: int | None, grad_accum: int | None, global_batch: int | None
) -> str | None:
    """--batch-size and --grad-accum replace the batch section, unless --global-batch fixes the
    product. Returns what to say of it.
    """
    given = {
        "samples": (global_batch, "--global-batch"),
        "per_device": (batch_size, "--batch-size"),
        "accumulate": (grad_accum, "--grad-accum"),
    }
    if all(value is None for value, _ in given.values()):
        return None
    section = document.value.get("batch")
    old = section if isinstance(section, dict) else {}
    if global_batch is None and batch_size is None and old.get("per_device") is None:
        raise UserError(
            f"--grad-accum {grad_accum} needs a batch per device; the config gives"
            f" {old.get('samples', 'no')} samples over all devices",
            f"--batch-size N --grad-accum {grad_accum}; or leave it out: the plan finds the rounds",
            "--grad-accum",
        )
    kept = (
        {}
        if global_batch is not None
        else {k: v for k, v in old.items() if k in {"per_device", "accumulate"}}
    )
    places = {k: document.place(("batch", k)) for k in kept}
    document.set("batch", {}, "flags")
    for key, value in kept.items():
        document.set(f"batch.{key}", value, places[key])
    for key, (new, flag) in given.items():
        if new is not None:
            document.set(f"batch.{key}", new, flag)
    replaced = global_batch is None and old.get("samples") is not None
    return (
        f"--batch-size is per device: it replaces the config's {old['samples']} samples over all"
        " devices (--global-batch fixes those)"
        if replaced
        else None
    )

"""The verbs. A verb parses, builds the config, calls one function and prints one thing; nothing heavy is imported for help or a config error."""

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from lockstep import __version__
from lockstep.errors import LockstepError, UserError

if TYPE_CHECKING:
    from lockstep.core.config import Loaded
    from lockstep.core.document import Document

# flag -> config key, for flags that only name a value. The names after the first are those of other tools, kept out of help.
_VALUES: list[tuple[tuple[str, ...], str, Any, str]] = [
    (("--devices",), "devices.use", str, "auto, all, cpu, cpu:N, or indices: 0,1"),
    (("--strategy", "--multi-gpu"), "devices.strategy", str, "auto, single, ddp"),
    (("--engine",), "engine", str, "torch"),
    (("--sync-backend", "--backend", "--distributed-backend"), "devices.sync", str, "auto, cpu, gloo, nccl"),
    (("--dtype",), "train.precision", str, "f32, bf16, f16, f64"),
    (("--seq-len",), "model.max_seq_len", int, "tokens of a sample"),
    (("--lr",), "optimizer.lr", float, "peak learning rate"),
    (("--weight-decay",), "optimizer.weight_decay", float, "on matrices only"),
    (("--scale-lr",), "schedule.scale_lr", str, "none, linear, sqrt: by batch / schedule.base_batch"),
    (("--warmup",), "schedule.warmup", int, "steps"),
    (("--prefetch",), "data.prefetch", int, "steps prepared ahead"),
    (("--max-checkpoints",), "train.keep", int, "newest checkpoints kept, beside the best"),
    (("--launcher",), "devices.launcher", str, "elastic, spawn"),
    (("--port",), "devices.port", int, "of the rendezvous; 0: any free one"),
    (("--mode",), "data.mode", str, ""),
    (("--arch",), "model.arch", str, ""),
    (("--cssm",), "model.cssm", str, ""),
]
_HIDDEN = {"--mode", "--arch", "--cssm"}
_LATER_FLAGS = {"--num-workers", "--compile", "--exact", "--compress", "--init-from", "--max-restarts", "--probe-batch", "--no-preflight", "--nnodes", "--rdzv", "--node-rank", "--machine"}
_LATER_VERBS = {"check", "run", "verify", "bench", "profile", "eval", "init", "compare-runs", "report", "export", "data", "convert", "submit", "ui"}


def _dashes(name: str) -> str:
    return name.replace("_", "-")


class Verbs(click.Group):
    """`lockstep -f FILE` is `lockstep train -f FILE`; a verb or flag of a later version is refused by name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in {"--help", "--version"}:
            args = ["train", *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and _dashes(args[0]) in _LATER_VERBS:
            raise click.UsageError(f"lockstep {args[0]} is not in this version; here: {', '.join(self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


class Verb(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for argument in args:
            flag = _dashes(argument.partition("=")[0])
            if flag in _LATER_FLAGS:
                raise click.UsageError(f"{flag} is not in this version")
        return super().parse_args(ctx, args)


@click.group(cls=Verbs, context_settings={"token_normalize_func": _dashes, "help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lockstep")
def cli() -> None:
    """Train one model on one device or on many, with the same loss curve.

    \b
    lockstep train -f models/tiny.yaml --devices cpu:2
    lockstep plan  -f models/tiny.yaml
    """


def _config_options(command: Callable[..., None]) -> Callable[..., None]:
    options = [
        click.option("-f", "--file", "--config-path", "file", type=Path, help="the config, YAML or JSON"),
        click.option("-d", "--data", "data", type=str, help="data.source: text, a directory, a glob, a .bin of raw tokens, python-stdlib"),
        click.option("--gpus", "--gpu-ids", "--device-ids", "gpus", type=str, metavar="0,1", help="GPUs by index, as CUDA_VISIBLE_DEVICES leaves them"),
        click.option("--num-gpus", "--nproc", "num_gpus", type=int, hidden=True),
        *(click.option(*names, _parameter(names), type=kind, help=text, hidden=names[0] in _HIDDEN) for names, _, kind, text in _VALUES),
        click.option("--no-amp", is_flag=True, help="precision f32"),
        click.option("--bf16", is_flag=True, hidden=True),
        click.option("--spawn", is_flag=True, hidden=True),
        click.option("--distributed-data-loading", is_flag=True, hidden=True),
        click.option("--batch-size", type=int, help="samples per device and round"),
        click.option("--grad-accum", "--grad-accum-steps", "grad_accum", type=int, help="rounds before a step"),
        click.option("--global-batch", type=int, help="samples of a step over all devices, whatever their number"),
        click.option("--epochs", type=float, help="length of the run in epochs"),
        click.option("--max-steps", type=int, help="length of the run in steps; 0 with --epochs: whole epochs"),
        click.option("--warmup-epochs", type=float, help="warm-up in epochs"),
        click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="any config value: --set optimizer.clip=0.5"),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _parameter(names: tuple[str, ...]) -> str:
    return names[0].removeprefix("--").replace("-", "_")


@cli.command(cls=Verb)
@_config_options
@click.option("--save-dir", "--checkpoint-dir", "save_dir", type=Path, help="the run directory; runs/NAME-TIME if not given")
@click.option("--resume", default="auto", show_default=True, metavar="auto|never|PATH", help="auto: go on where the run directory, or an unfinished run of this config, exists")
@click.option("--new-batch", is_flag=True, help="on a resume, take the config's batch instead of the run's own")
@click.option("--stop-after", type=click.IntRange(min=1), help="save and leave after so many steps; the schedule keeps its length")
@click.option("--headless", is_flag=True, help="JSON lines on stdout, nothing else there")
def train(save_dir: Path | None, resume: str, new_batch: bool, stop_after: int | None, headless: bool, **flags: Any) -> None:
    """Train. Run the same command again to go on."""
    signal.signal(signal.SIGTERM, _terminated)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _join(lambda: _load(flags, say=not headless), headless, save_dir, resume, stop_after, new_batch)
    loaded = _load(flags, say=not headless)
    from lockstep.launch.prepare import Options, done_line, prepare

    options = Options(save_dir, resume, stop_after, new_batch)
    prepared = prepare(loaded, options)
    if prepared.done:
        prepared.lock.release()
        click.echo(done_line(prepared), err=headless)
        return
    from lockstep.launch.local import launch

    sys.exit(launch(prepared, loaded.config.devices, headless))


def _join(read: "Callable[[], Loaded]", headless: bool, *options: Any) -> NoReturn:
    """Started by torchrun: be one of its ranks."""
    from lockstep.launch.cluster import rank_from
    from lockstep.launch.prepare import Options
    from lockstep.launch.worker import joined

    sys.exit(joined(rank_from(os.environ), read, Options(*options), headless))


@cli.command(cls=Verb)
@_config_options
@click.option("--json", "as_json", is_flag=True, help="the plan as JSON")
def plan(as_json: bool, **flags: Any) -> None:
    """What train would do, and why. Trains nothing."""
    loaded = _load(flags, say=not as_json)
    import json

    from lockstep.core.config import flatten
    from lockstep.launch.prepare import make_plan
    from lockstep.observe.banner import table

    made, facts = make_plan(loaded)
    if as_json:
        click.echo(json.dumps({"plan": made.to_json(), "origins": loaded.origins, "formulas": facts.formulas}, indent=1))
    else:
        click.echo("\n".join([*(f"note   {note}" for note in loaded.notes), table(made, loaded.origins, flatten(loaded.config), facts.formulas)]))


@cli.command(cls=Verb)
@click.argument("run", type=Path)
@click.option("--prompt", default="", help="what the text begins with")
@click.option("--tokens", type=click.IntRange(1, 100_000), default=200, show_default=True, help="length of the continuation")
@click.option("--temperature", type=click.FloatRange(0, 10), default=0.8, show_default=True, help="0: always the likeliest token")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="the same seed gives the same text")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1")
def sample(run: Path, prompt: str, tokens: int, temperature: float, seed: int, device: str) -> None:
    """What the model of a RUN makes, from its newest checkpoint (or the checkpoint named)."""
    from lockstep.launch.sampling import sample as make
    from lockstep.observe.console import printable

    made = make(run, prompt, tokens, temperature, seed, device)
    for note in made.notes:
        click.echo(f"warn   {note}", err=True)
    click.echo(printable(made.text) if sys.stdout.isatty() else made.text)


@cli.command(cls=Verb)
@click.option("--table", is_flag=True, help="as a table of keys, defaults and meanings (Markdown)")
def schema(table: bool) -> None:
    """The JSON Schema of the config, for editors."""
    import json

    from lockstep.core.schema import as_table, json_schema
    from lockstep.tasks import Tasks

    click.echo(as_table(Tasks()) if table else json.dumps(json_schema(Tasks()), indent=1))


def _load(flags: dict[str, Any], say: bool) -> "Loaded":
    """File, then --set, then flags: the later wins."""
    from lockstep.core.config import apply_batch_flags, load
    from lockstep.core.document import Document, parse_setting, read_file
    from lockstep.tasks import Tasks

    file: Path | None = flags["file"]
    document = read_file(file) if file else Document()
    for setting in flags["settings"]:
        key, value = parse_setting(setting)
        document.set(key, value, f"--set {key}")
    for names, key, _, _ in _VALUES:
        value = flags[_parameter(names)]
        if value is not None:
            document.set(key, value, names[0])
    _apply_flags(document, flags)
    note = apply_batch_flags(document, flags["batch_size"], flags["grad_accum"], flags["global_batch"])
    if not file and not document.value:
        raise UserError("no config was given", "-f FILE, for example -f models/tiny.yaml", "-f")
    if flags["distributed_data_loading"] and say:
        click.echo("note   --distributed-data-loading: always so; each rank reads only its own samples", err=True)
    loaded = load(document, Tasks(), file.stem if file else "run")
    return replace(loaded, notes=(note,)) if note else loaded


def _apply_flags(document: "Document", flags: dict[str, Any]) -> None:
    """Flags that mean more than one value, or a value of another form."""
    if flags["data"] is not None:
        document.set("data.source", flags["data"], "-d")
    for flag, key, value in (("no_amp", "train.precision", "f32"), ("bf16", "train.precision", "bf16"), ("spawn", "devices.launcher", "spawn")):
        if flags[flag]:
            document.set(key, value, f"--{flag.replace('_', '-')}")
    _apply_devices(document, flags["devices"], flags["gpus"], flags["num_gpus"])
    _apply_length(document, flags["epochs"], flags["max_steps"])
    if flags["warmup_epochs"] is not None:
        document.set("schedule.warmup", f"{flags['warmup_epochs']:g}ep", "--warmup-epochs")


def _apply_devices(document: "Document", devices: str | None, gpus: str | None, count: int | None) -> None:
    given = [flag for flag, value in (("--devices", devices), ("--gpus", gpus), ("--num-gpus", count)) if value is not None]
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
    if epochs is not None and steps:
        raise UserError(f"--epochs {epochs:g} and --max-steps {steps} both fix the length", "give one of them", "--max-steps")
    if epochs is None and steps == 0:
        raise UserError("--max-steps 0 means whole epochs", "say how many: --epochs N", "--max-steps")
    if epochs is not None:
        document.set("train.steps", f"{epochs:g}ep", "--epochs")
    elif steps is not None:
        document.set("train.steps", steps, "--max-steps")


def _terminated(number: int, _: object) -> None:
    """SIGTERM before anything runs: leave, nothing being half done."""
    sys.exit(128 + number)


def main() -> None:
    """Every failure ends here, once, as the last thing printed."""
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Exit as leaving:
        sys.exit(leaving.exit_code)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        click.echo(f"error: {error.format_message()}\n  remedy: {context.command_path if context else 'lockstep'} --help", err=True)
        sys.exit(error.exit_code)
    except LockstepError as error:
        click.echo(_shown(error), err=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("stopped before anything was trained", err=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)


def _shown(error: LockstepError) -> str:
    return "\n".join(f"error: {line}" if index == 0 or not line.startswith("  ") else line for index, line in enumerate(str(error).splitlines())) if isinstance(error, UserError) else f"error: {error}"

"""The verbs.

A verb parses, builds the config, calls one function and prints one thing; nothing heavy is imported
for help or a config error.
"""

import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from samecurve import __version__
from samecurve.cli import artifacts as after
from samecurve.cli import experiments as before
from samecurve.cli.options import Option, Verb, config_options, dashes, load_config, terminated
from samecurve.errors import SamecurveError, UserError

if TYPE_CHECKING:
    from samecurve.core.config.sections import Loaded

_LATER_VERBS = {"check", "init", "data", "submit", "ui"}


class Verbs(click.Group):
    """`samecurve -f FILE` is `samecurve train -f FILE`; a verb or flag of a later version is
    refused by name.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in {"--help", "--version"}:
            args = ["train", *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and dashes(args[0]) in _LATER_VERBS:
            raise click.UsageError(
                f"samecurve {args[0]} is not in this version; here:"
                f" {', '.join(self.list_commands(ctx))}"
            )
        return super().resolve_command(ctx, args)


@click.group(
    cls=Verbs,
    context_settings={"token_normalize_func": dashes, "help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="samecurve")
def cli() -> None:
    """Train one model on one device or on many, with the same loss curve.

    \b
    samecurve train -f models/tiny.yaml --devices cpu:2
    samecurve plan  -f models/tiny.yaml
    """


@cli.command(cls=Verb)
@config_options
@click.option(
    "--save-dir",
    "--checkpoint-dir",
    "save_dir",
    cls=Option,
    type=Path,
    help="the run directory; runs/NAME-TIME if not given",
)
@click.option(
    "--resume",
    default="auto",
    show_default=True,
    metavar="auto|never|PATH",
    help="auto: go on where the run directory, or an unfinished run of this config, exists",
)
@click.option(
    "--new-batch",
    is_flag=True,
    help="on a resume, take the config's batch instead of the run's own",
)
@click.option(
    "--stop-after",
    type=click.IntRange(min=1),
    help="save and leave after so many steps; the schedule keeps its length",
)
@click.option(
    "--nnodes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="hosts; the same command on each (engine jax)",
)
@click.option("--rdzv", metavar="HOST:PORT", help="where they meet: on the first of them")
@click.option("--node-rank", type=click.IntRange(min=0), help="which of them this is, from 0")
@click.option("--headless", is_flag=True, help="JSON lines on stdout, nothing else there")
@before.init_from
@before.probe
def train(
    save_dir: Path | None,
    resume: str,
    new_batch: bool,
    stop_after: int | None,
    headless: bool,
    probe_batch: bool,
    nnodes: int,
    rdzv: str | None,
    node_rank: int | None,
    init_from: Path | None,
    **flags: Any,
) -> None:
    """Train. Run the same command again to go on."""
    signal.signal(signal.SIGTERM, terminated)
    from samecurve.worker.cluster_env import one_of, started

    if nnodes == 1 and (rdzv is not None or node_rank is not None):
        raise click.UsageError("--rdzv and --node-rank are for several hosts: give --nnodes too")
    if nnodes > 1:
        os.environ.update(one_of(nnodes, rdzv, node_rank))
    if nnodes > 1 or started(os.environ):
        if probe_batch:
            raise click.UsageError(
                "--probe-batch starts processes of its own; try it first with `samecurve plan"
                " --probe-batch`"
            )
        _join(
            lambda loud: load_config(flags, say=not headless, loud=loud),
            headless,
            save_dir,
            resume,
            stop_after,
            new_batch,
            init_from,
        )
    loaded = load_config(flags, say=not headless)
    from samecurve.launch.monitors import done_line
    from samecurve.run.prepare import prepare
    from samecurve.run.resume import Options

    options = Options(save_dir, resume, stop_after, new_batch, init_from)
    prepared = prepare(
        loaded,
        options,
        before.probed(loaded) if probe_batch else None,
        measure=before.measuring(loaded),
    )
    if prepared.done:
        prepared.lock.release()
        click.echo(done_line(prepared), err=headless)
        return
    from samecurve.launch.local import launch

    sys.exit(launch(prepared, loaded.config.devices, headless))


def _join(read: "Callable[[bool], Loaded]", headless: bool, *options: Any) -> NoReturn:
    """Started as one of several: be one of the ranks."""
    from samecurve.launch.external import run_as_external_rank
    from samecurve.run.resume import Options
    from samecurve.system import die_with
    from samecurve.worker.cluster_env import from_slurm, rank_from

    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(os.getppid())
    elif "RANK" not in os.environ:
        os.environ.update(from_slurm(os.environ))
    sys.exit(run_as_external_rank(rank_from(os.environ), read, Options(*options), headless))


@cli.command(context_settings={"allow_interspersed_args": False}, options_metavar="[OPTIONS] [-m]")
@click.option(
    "--gpus",
    metavar="0,1",
    help="one rank on each of these, as CUDA_VISIBLE_DEVICES leaves them; all if not given",
)
@click.option(
    "--nproc",
    type=int,
    metavar="N",
    help="so many ranks: on the first N GPUs, or on the CPU where there is none",
)
@click.option(
    "--output",
    type=click.Choice(["all", "first", "files"]),
    default="all",
    show_default=True,
    help="on the screen: every rank's lines, the first rank as it is, or none",
)
@click.option(
    "--log-dir",
    type=Path,
    metavar="DIR",
    help="rank-N.log of every rank; runs/SCRIPT-TIME/logs if not given",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="start all ranks anew so often after a failure; the script resumes by itself",
)
@click.option(
    "--hang-floor",
    type=click.IntRange(min=0),
    default=600,
    show_default=True,
    metavar="S",
    help=(
        "seconds in which a rank enters no collective that are never taken for a hang; 0: not"
        " watched"
    ),
)
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module's name, as for python -m")
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def run(script: str, arguments: tuple[str, ...], **options: Any) -> None:
    """Any script that torchrun starts, on all devices of this machine.

    What follows SCRIPT is the script's.
    """
    signal.signal(signal.SIGTERM, terminated)
    from samecurve.launch.script.run import Request
    from samecurve.launch.script.run import run as launch

    sys.exit(launch(Request(script, arguments, **options)))


@cli.command(cls=Verb)
@click.option("--table", is_flag=True, help="as a table of keys, defaults and meanings (Markdown)")
def schema(table: bool) -> None:
    """The JSON Schema of the config, for editors."""
    import json

    from samecurve.core.config.json_schema import as_table, json_schema
    from samecurve.tasks import Tasks

    click.echo(as_table(Tasks()) if table else json.dumps(json_schema(Tasks()), indent=1))


@cli.command(cls=Verb)
@click.argument("old", type=Path)
@click.option(
    "--to",
    "new",
    type=Path,
    required=True,
    metavar="NEW.yaml",
    help="the file to write; one that exists is refused",
)
def convert(old: Path, new: Path) -> None:
    """Another tool's config (OLD) as one of Samecurve's: Oxidizr's YAML, OneTrainer's JSON."""
    from samecurve.errors import ConfigErrors
    from samecurve.run.convert import convert as write

    converted, errors = write(old, new)
    click.echo("\n".join(converted.lines()))
    home = f" --save-dir {shlex.quote(converted.home)}" if converted.home else ""
    click.echo(
        f"wrote  {new}, which is refused until what follows is settled"
        if errors
        else f"wrote  {new}; samecurve train -f {shlex.quote(str(new))}{home}"
    )
    if errors:
        raise ConfigErrors(errors)


for _verb in (
    before.plan,
    before.verify,
    before.profile,
    before.bench,
    after.sample,
    after.evaluate,
    after.export,
    after.report,
    after.compare_runs,
):
    cli.add_command(_verb)


def main() -> None:
    """Every failure ends here, once, as the last thing printed."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        cli.main(standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as leaving:
        sys.exit(leaving.exit_code)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        click.echo(
            f"error: {error.format_message()}\n  remedy:"
            f" {context.command_path if context else 'samecurve'} --help",
            err=True,
        )
        sys.exit(error.exit_code)
    except SamecurveError as error:
        click.echo(_shown(error), err=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("stopped before anything was trained", err=True)
        sys.exit(130)
    except OSError as error:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), 1
        )  # what is still buffered can't be written either
        if not isinstance(error, BrokenPipeError):
            click.echo(f"error: {error}", err=True)
        sys.exit(1)


def _shown(error: SamecurveError) -> str:
    return (
        "\n".join(
            f"error: {line}" if index == 0 or not line.startswith("  ") else line
            for index, line in enumerate(str(error).splitlines())
        )
        if isinstance(error, UserError)
        else f"error: {error}"
    )

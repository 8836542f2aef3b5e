"""`samecurve run`."""

import sys
from typing import Any

import click

from samecurve.cli.options import PATH, GroupedVerb, Option, rank_count
from samecurve.cli.unknown_arguments import TORCHRUN_HINTS
from samecurve.terminal import echo


class RunCommand(GroupedVerb):
    """Refuse torchrun's flags for several hosts, and name the command that serves the purpose."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name in TORCHRUN_HINTS:
                raise _several_hosts(error.option_name) from None
            raise


def _several_hosts(flag: str) -> click.UsageError:
    return click.UsageError(
        f"{flag}: samecurve run starts the ranks of this machine alone; over several hosts torchrun"
        " starts the same script on each: torchrun --nnodes N --rdzv-endpoint HOST:PORT SCRIPT"
    )


@click.command(
    cls=RunCommand,
    help_group="Train",
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS] [-m]",
)
@click.option(
    "--gpus",
    metavar="0,1",
    help="one rank on each of these, as CUDA_VISIBLE_DEVICES leaves them; all if not given",
)
@click.option(
    "--nproc",
    "--nproc-per-node",
    "nproc",
    cls=Option,
    type=rank_count(each_gpu=None),
    metavar="N",
    help="so many ranks: on the first N GPUs, or on the CPU where there is none",
)
@click.option(
    "--output",
    type=click.Choice(["all", "first", "files"], case_sensitive=False),
    default="all",
    show_default=True,
    help="on the screen: every rank's lines, the first rank as it is, or none",
)
@click.option(
    "--log-dir",
    type=PATH,
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
@click.option("--standalone", is_flag=True, hidden=True)
@click.option("--nnodes", hidden=True)
@click.option("--master-port", hidden=True)
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module's name, as for python -m")
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def run(
    script: str,
    arguments: tuple[str, ...],
    *,
    standalone: bool,
    nnodes: str | None,
    master_port: str | None,
    **options: Any,
) -> None:
    """Run any script that torchrun starts, on all devices here.

    What follows SCRIPT is the script's.
    """
    if nnodes not in {None, "1", "1:1"}:
        raise _several_hosts(f"--nnodes {nnodes}")
    if standalone:
        echo("note   --standalone: always so", err=True)
    if master_port is not None:
        note = f"note   --master-port {master_port} is not used: each run takes a free port"
        echo(note, err=True)
    from samecurve.launch.script.script_attempt import Request
    from samecurve.launch.script.script_run import run as run_script

    sys.exit(run_script(Request(script, arguments, **options)))

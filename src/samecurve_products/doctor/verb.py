"""`samecurve check`."""

import os
import sys
from pathlib import Path

import click

from samecurve.cli.completion import words_of_key
from samecurve.cli.options import Option
from samecurve.seam import PATH, Verb, echo


@click.command(cls=Verb, help_group="Begin")
@click.option(
    "--devices",
    default="auto",
    show_default=True,
    shell_complete=words_of_key("devices.use"),
    help="auto, all, cpu, cpu:N, or indices: 0,1",
)
@click.option(
    "--gpus",
    "--gpu-ids",
    "--device-ids",
    cls=Option,
    metavar="0,1",
    help="GPUs by index, as CUDA_VISIBLE_DEVICES leaves them",
)
@click.option(
    "--save-dir",
    type=PATH,
    default=Path("runs"),
    show_default=True,
    metavar="PATH",
    help="where runs will be saved: its disk is checked",
)
@click.option(
    "--limit",
    type=click.FloatRange(min=1),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="for ranks that try collectives together: what takes longer is killed",
)
@click.option("--json", "as_json", is_flag=True, help="the checks as JSON")
@click.option(
    "--report", is_flag=True, help="a block to paste into a bug report; secrets are hidden"
)
def check(
    *,
    devices: str,
    gpus: str | None,
    save_dir: Path,
    limit: float,
    as_json: bool,
    report: bool,
) -> None:
    """Is this machine fit to train? What is wrong, and what to do.

    Tries collectives between all devices. Exit code 1 if a check is FAIL.
    """
    from samecurve.seam import alone
    from samecurve_products.doctor import output
    from samecurve_products.doctor.run import CheckRequest, MachineCheck
    from samecurve_products.doctor.system import load_note

    if as_json and report:
        raise click.UsageError("--json and --report are two forms of one answer: leave one out")
    if gpus and devices != "auto":
        raise click.UsageError("--gpus and --devices contradict each other: give one of them")
    alone("check")
    is_text = not as_json and not report
    request = CheckRequest(
        devices=gpus or devices,
        save_dir=save_dir,
        limit=limit,
        environment=dict(os.environ),
        say=lambda line: echo(f"       {line}", err=True),
    )
    machine = MachineCheck(request)
    checks = []
    for number, one in enumerate(machine.checks(), 1):
        checks.append(one)
        if is_text:
            echo(output.line_of(number, one))
    if as_json:
        echo(output.json_of(checks))
    elif report:
        echo(output.report_of(checks, os.environ, home=Path.home(), logs=machine.logs))
    else:
        note = load_note()
        echo("\n".join([*([note] if note else []), output.summary_of(checks)]))
        echo(f"next   {machine.next_line}")
    sys.exit(1 if any(one.status == "FAIL" for one in checks) else 0)

"""`samecurve queue`."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from samecurve.cli.options import save_dir_option
from samecurve.seam import PATH, ConfigVerb, UserError, Verb, VerbGroup, echo, keeping, load_config
from samecurve.terminal import printable_line

if TYPE_CHECKING:
    from samecurve_products.page.jobs.busy import Devices
    from samecurve_products.page.jobs.job import Job

_queue_option = click.option(
    "--queue",
    "home",
    type=PATH,
    default=Path("queue"),
    show_default=True,
    metavar="DIR",
    help="the directory of the queue",
)


class AddVerb(ConfigVerb):
    """`queue add` keeps its options as they were typed: they become the job's command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["typed"] = list(args)
        return super().parse_args(ctx, args)


@click.group(cls=VerbGroup, help_group="Machines and queues")
def queue() -> None:
    """Jobs that wait for devices and run in order."""


@queue.command(cls=AddVerb)
@save_dir_option
@_queue_option
def add(*, save_dir: Path | None, home: Path, **flags: Any) -> None:
    """Put a run at the end of the queue. It takes the options of train.

    The config is checked now, and read again when the job starts.
    """
    from samecurve.features.balance import balance_of
    from samecurve.seam import choose_devices, make_plan, probe, python_module
    from samecurve_products.page.jobs.queue import NewJob, Queue

    loaded = load_config(flags, say=True)
    if balance_of(loaded.config) != "measured":  # else only the start itself can plan
        make_plan(loaded)
    config, jobs = loaded.config, Queue(home)
    devices = choose_devices(config.devices, config.engine, probe()).value
    words = _without(click.get_current_context().meta["typed"], "--queue")
    with jobs.held():
        run = save_dir or Path("runs") / jobs.free_run(loaded.name, Path("runs"))
        if save_dir is None:
            words += ["--save-dir", str(run)]
        job = jobs.add(
            NewJob(
                name=loaded.name,
                argv=python_module("samecurve", "train", *words),
                cwd=Path.cwd(),
                devices=tuple(dict.fromkeys(device.place for device in devices)),
                run=run.resolve(),
            )
        )
    echo(f"added  job {job.id}  {job.name}  {run}")
    from samecurve_products.page.jobs.work import has_worker

    if not has_worker(jobs):
        echo("nothing works on this queue: `samecurve queue work`, or the page of `samecurve ui`")


@queue.command(name="list", cls=Verb)
@click.option("--json", "as_json", is_flag=True, help="the jobs as JSON")
@_queue_option
def list_jobs(*, as_json: bool, home: Path) -> None:
    """Show the jobs that run, wait, or have ended."""
    from samecurve.seam import Column, table_text
    from samecurve_products.page.jobs.queue import Queue, job_rows
    from samecurve_products.page.jobs.work import has_worker

    jobs = Queue(home)
    rows = job_rows(jobs, _devices())
    if as_json:
        echo(json.dumps({"jobs": rows, "paused": not has_worker(jobs)}, indent=1))
        return
    for file in jobs.broken():
        echo(f"{printable_line(str(file))} is no job: its content can't be read; delete the file")
    if not rows:
        echo(f"{home} has no job")
        return
    columns = [Column(name) for name in ("job", "name", "state", "devices", "")]
    keys = ("id", "name", "state", "devices", "why")
    shown = [[printable_line(row.get(key, "")) for key in keys] for row in rows]
    echo(table_text(columns, shown))


@queue.command(cls=Verb)
@click.argument("job", metavar="JOB")
@_queue_option
def remove(*, job: str, home: Path) -> None:
    """Remove a job that waits or has ended.

    JOB: its id, the beginning of its id, or its name.
    """
    from samecurve_products.page.jobs.queue import Queue

    jobs = Queue(home)
    removed = jobs.find(job)
    jobs.remove(removed)
    echo(f"removed job {removed.id}  {printable_line(removed.name)}")


@queue.command(cls=Verb)
@click.argument("job", metavar="JOB")
@click.option("--yes", is_flag=True, help="accept without a question, after you have looked")
@_queue_option
def accept(*, job: str, yes: bool, home: Path) -> None:
    """Show a foreign job's command, and let it run in its turn.

    A job is foreign if its file lies in the queue without a mark of yours. JOB: as in remove.
    """
    from samecurve_products.page.jobs.queue import Queue

    jobs = Queue(home)
    received = jobs.find(job)
    if not received.foreign:
        raise UserError(f"job {received.name} is marked already", "nothing is to be done", "JOB")
    name = printable_line(received.name)
    echo(f"foreign  job {received.id}  {name}: {received.foreign}")
    echo(f"  command  {printable_line(received.command)}")
    echo(f"  folder   {printable_line(str(received.cwd))}")
    if not yes:
        if sys.stdin is None or not sys.stdin.isatty():
            raise UserError(
                "nobody is there to answer whether this command is yours",
                "read the command above; --yes accepts it",
                "--yes",
            )
        if not click.confirm("Run this command in its turn?"):
            echo("left as it is")
            return
    jobs.accept(received)
    echo(f"accepted job {received.id}  {name}")


@queue.command(cls=Verb)
@click.option("--forever", is_flag=True, help="wait for new jobs when none is left")
@_queue_option
def work(*, forever: bool, home: Path) -> None:
    """Start each job when its devices are free.

    It ends when no job is left but foreign ones (see accept), with exit code 1 if one is left.

    Ctrl-C ends this command, and leaves the jobs running.
    """
    from samecurve_products.page.jobs.queue import Queue
    from samecurve_products.page.jobs.work import work as work_on
    from samecurve_products.page.jobs.work import working

    def say(what: str, job: "Job") -> None:
        reason = job.outcome().why
        name = printable_line(job.name)
        echo(f"{what:8} job {job.id}  {name}{f': {reason}' if reason else ''}")
        if what == "failed":
            echo("\n".join(f"  {line}" for line in job.log_tail().splitlines()))

    jobs = Queue(home)
    kept = "jobs that run go on; the same command goes on with the others"
    foreign = [job for job in jobs.jobs() if job.outcome().state == "foreign"]
    for job in foreign:
        say("foreign", job)
    with working(jobs, "`samecurve queue work`"), keeping(kept):
        failed = work_on(jobs, _devices(), forever=forever, say=say)
    if failed or foreign:
        sys.exit(1)


def _devices() -> "Devices":
    from samecurve_products.page.jobs.busy import Devices, runs_below

    return Devices(runs_below(Path.cwd()))


def _without(words: list[str], flag: str) -> list[str]:
    """The words without a flag and its value."""
    kept, skip = [], False
    for word in words:
        if skip or word == flag or word.startswith(f"{flag}="):
            skip = word == flag
            continue
        kept.append(word)
    return kept

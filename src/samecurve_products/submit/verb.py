"""`samecurve submit`."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from samecurve.cli.options import dashes
from samecurve.cli.train import train
from samecurve.seam import PATH, ConfigVerb, VerbGroup, echo, load_config

if TYPE_CHECKING:
    from samecurve.seam import LoadedConfig, Plan
    from samecurve_products.submit.engine import Submission
    from samecurve_products.submit.job import Job

_OF_TRAIN = {"save_dir", "resume", "new_batch", "stop_after", "headless", "init_from"}
_TRAIN_OPTIONS = [option for option in train.params if option.name in _OF_TRAIN]
_JOB_OPTIONS = [
    click.Option(
        ["--nodes"], type=click.IntRange(min=1), default=1, show_default=True, help="machines"
    ),
    click.Option(
        ["--gpus-per-node"],
        type=click.IntRange(min=0),
        required=True,
        help="GPUs of a machine; 0: CPU ranks, with --devices cpu:N",
    ),
    click.Option(
        ["--gpu-type"],
        metavar="NAME",
        help="which GPUs they are, as H100: the plan is made for them",
    ),
    click.Option(["--dry-run"], is_flag=True, help="write the file and say where; submit nothing"),
    click.Option(["--write"], type=PATH, metavar="FILE", help="where the job's file is written"),
    click.Option(
        ["--save-seconds"],
        type=click.IntRange(min=20),
        default=120,
        show_default=True,
        help="from the request to stop to the end: one step and one save",
    ),
    click.Option(
        ["--restarts"],
        type=click.IntRange(min=0),
        default=3,
        show_default=True,
        help="starts after a failure, without a save in between",
    ),
    click.Option(
        ["--no-plan"],
        is_flag=True,
        help="submit without a plan, where the data is not on this machine",
    ),
]


class SubmitVerb(ConfigVerb):
    """An engine's verb: options of the config, of train, of every job, and the engine's own.

    Options of train are kept as they were typed: they become the job's command.
    """

    def __init__(self, *, params: list[click.Parameter], **attributes: Any) -> None:
        super().__init__(params=[*_TRAIN_OPTIONS, *_JOB_OPTIONS, *params], **attributes)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, list(args))
        own = {parameter.name for parameter in train.params} - {"nnodes", "rdzv", "node_rank"}
        typed, _, _ = self.make_parser(ctx).parse_args(list(args))
        words = []
        for option in train.params:
            if option.name in typed and option.name in own:
                words += _as_typed(option, typed[option.name])
        ctx.meta["words"] = tuple(words)
        return rest


def _as_typed(option: click.Parameter, value: Any) -> list[str]:
    name = option.opts[0]
    if isinstance(option, click.Option) and option.is_flag:
        return [name]
    values = value if isinstance(value, list) else [value]
    return [word for each in values for word in (name, str(each))]


@click.group(
    cls=VerbGroup,
    help_group="Machines and queues",
    context_settings={"token_normalize_func": dashes},
)
def submit() -> None:
    """Hand a run to an engine: Slurm, SkyPilot, Kubernetes, Ray.

    The plan is made for the machines that are asked for: what can't run there is refused before it
    waits in a queue.
    """


@dataclass(frozen=True)
class _Wanted:
    """The values of _JOB_OPTIONS, and what the config says."""

    loaded: "LoadedConfig"
    planned: "Plan | None"
    job: "Job"
    file: Path | None
    dry_run: bool


def _read(flags: dict[str, Any], *, shared: str = "", default_home: Path | None = None) -> _Wanted:
    """Read what every engine needs, and plan.

    shared: the directory that the job sees, where it is not this one
    default_home: of the run, without --save-dir; None: a new one below runs
    """
    from samecurve.run.run_names import free_name
    from samecurve_products.submit.job import Job, Nodes, checked_name, plan_job, ranks_per_node

    nodes = Nodes(
        count=flags.pop("nodes"),
        gpus=flags.pop("gpus_per_node"),
        gpu_type=flags.pop("gpu_type") or "",
    )
    file, dry_run, no_plan = (flags.pop(name) for name in ("write", "dry_run", "no_plan"))
    words = list(click.get_current_context().meta["words"])
    run = flags["save_dir"]
    loaded = load_config(flags, say=True)
    planned = None if no_plan else plan_job(loaded, nodes)
    ranks = ranks_per_node(loaded.config, nodes, planned)
    if run is None:
        run = default_home / loaded.name if default_home else free_name(loaded.name)
        words += ["--save-dir", str(run)]
    job = Job(
        name=checked_name(run.name),
        words=tuple(words),
        run=run,
        directory=Path(shared) if shared else Path.cwd(),
        nodes=nodes,
        ranks_per_node=ranks,
        engine=loaded.config.engine,
        restarts=flags.pop("restarts"),
        save_seconds=flags.pop("save_seconds"),
    )
    return _Wanted(loaded, planned, job, file, dry_run)


def _hand_over(wanted: _Wanted, make: Callable[["Job", Path | None], "Submission"]) -> None:
    """Show the plan and the file, write the file, and submit it."""
    from samecurve.seam import banner
    from samecurve_products.submit.engine import submit as submit_file
    from samecurve_products.submit.engine import write

    submission = make(wanted.job, wanted.file)
    lines = [f"note   {note}" for note in wanted.loaded.notes]
    if wanted.planned:
        lines += banner(wanted.planned)
    else:
        lines.append(
            "note   not planned: whether the run fits is seen when it starts (--gpu-type H100, and"
            " no --no-plan, to know it now)"
        )
    echo("\n".join([*lines, "", submission.text]))
    write(submission)
    if wanted.dry_run:
        echo(f"wrote  {submission.path}; nothing is submitted: {' '.join(submission.argv)}")
        return
    echo(f"wrote  {submission.path}")
    sys.stdout.flush()
    answer = submit_file(submission)
    echo("\n".join(part for part in (answer, f"run    {wanted.job.run}") if part))


@submit.command(cls=SubmitVerb)
@click.option("--partition", "-p", metavar="NAME", help="of the cluster")
@click.option("--account", metavar="NAME", help="who pays")
@click.option("--time", metavar="LIMIT", help="the time limit, as sbatch takes it: 04:00:00")
@click.option(
    "--save-signal",
    type=click.Choice(["TERM", "INT"]),
    default="TERM",
    show_default=True,
    help="sent before the time limit; USR1 and USR2 have other uses in a run",
)
@click.option("--python", default=sys.executable, help="of the machines; this one if not given")
@click.option(
    "--sbatch",
    "directives",
    multiple=True,
    metavar="OPTION",
    help="any other option of sbatch: --sbatch=--constraint=h100",
)
def slurm(
    *,
    partition: str | None,
    account: str | None,
    time: str | None,
    save_signal: str,
    python: str,
    directives: tuple[str, ...],
    **flags: Any,
) -> None:
    """Write a script for sbatch, and submit it."""
    from samecurve_products.submit.slurm import SlurmOptions, slurm_submission

    options = SlurmOptions(
        python=python,
        partition=partition,
        account=account,
        time=time,
        save_signal=save_signal,
        directives=directives,
    )
    _hand_over(_read(flags), lambda job, path: slurm_submission(job, options, path))


_volume_option = click.option(
    "--volume", metavar="NAME:/PATH", help="what all machines share, and where they see it"
)


@submit.command(cls=SubmitVerb)
@click.option("--infra", metavar="WHERE", help="aws, gcp/us-central1, k8s; any if not given")
@click.option(
    "--setup",
    metavar="COMMAND",
    help="what a fresh machine runs first; in a checkout `pip install -e .` if not given",
)
@_volume_option
@click.option(
    "--managed", is_flag=True, help="sky jobs launch: another machine when one is taken away"
)
def skypilot(
    *, infra: str | None, setup: str | None, volume: str | None, managed: bool, **flags: Any
) -> None:
    """Write a YAML for sky launch, and submit it."""
    from samecurve_products.submit.skypilot import SkyPilotOptions, skypilot_submission
    from samecurve_products.submit.volume import read_volume

    shared = read_volume(volume)
    options = SkyPilotOptions(infra=infra, setup=setup, volume=shared, managed=managed)
    home = Path(shared.path if shared else "runs")
    wanted = _read(flags, shared=".", default_home=home)
    _hand_over(wanted, lambda job, path: skypilot_submission(job, options, path))


@submit.command(cls=SubmitVerb)
@click.option("--image", required=True, help="of the container: with Python and samecurve")
@_volume_option
@click.option("--workdir", metavar="DIR", help="FILE is seen from there; the volume's if not given")
@click.option("--namespace", metavar="NAME", help="of the job; kubectl's own if not given")
@click.option("--memory", metavar="SIZE", help="of a machine, as 64Gi")
@click.option("--cpus", metavar="N", help="of a machine")
def k8s(
    *,
    image: str,
    volume: str | None,
    workdir: str | None,
    namespace: str | None,
    memory: str | None,
    cpus: str | None,
    **flags: Any,
) -> None:
    """Write a TrainJob of Kubeflow Trainer for kubectl, and submit it."""
    from samecurve_products.submit.kubernetes import KubernetesOptions, kubernetes_submission
    from samecurve_products.submit.volume import read_volume

    shared = read_volume(volume)
    options = KubernetesOptions(
        image=image, volume=shared, namespace=namespace, memory=memory, cpus=cpus
    )
    home = Path(shared.path if shared else "runs")
    directory = workdir or (shared.path if shared else "/")
    wanted = _read(flags, shared=directory, default_home=home)
    _hand_over(wanted, lambda job, path: kubernetes_submission(job, options, path))


@submit.command(cls=SubmitVerb)
@click.option("--address", metavar="URL", help="of Ray's dashboard; RAY_ADDRESS, or a Ray here")
@click.option(
    "--min-workers",
    type=click.IntRange(min=1),
    help="go on with as few as these when others are lost; all of them if not given",
)
@click.option("--python", default=sys.executable, help="with ray[train]; this one if not given")
def ray(*, address: str | None, min_workers: int | None, python: str, **flags: Any) -> None:
    """Write a program for Ray, and run or submit it."""
    from samecurve_products.submit.ray_job import RayOptions, ray_submission

    options = RayOptions(python=python, address=address, min_workers=min_workers)
    _hand_over(_read(flags), lambda job, path: ray_submission(job, options, path))

"""A job as one YAML that `sky launch` and `sky jobs launch` take.

SkyPilot runs the same command on each machine, and says in the environment which machine is the
first. Each machine starts its own ranks.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samecurve.errors import START_AGAIN
from samecurve.seam import UserError, checkout
from samecurve_products.submit.engine import MADE_BY, Submission, yaml_text
from samecurve_products.submit.job import AGAIN, PORT, Job
from samecurve_products.submit.volume import Volume

_INSTALL = "pip install skypilot"
_HERE = "set -e\n"
_HOSTS = (
    'first=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\n'
    f'exec {{command}} --nnodes "$SKYPILOT_NUM_NODES" --rdzv "$first:{PORT}"\n'
)


@dataclass(frozen=True, kw_only=True)
class SkyPilotOptions:
    """What only SkyPilot's job has."""

    infra: str | None = None  # where: aws, gcp/us-central1, k8s
    setup: str | None = None  # None: the copied directory is a checkout, which is installed
    volume: Volume | None = None
    managed: bool = False  # SkyPilot starts it again on another machine when one is taken away


def skypilot_submission(job: Job, options: SkyPilotOptions, path: Path | None) -> Submission:
    """The job as a YAML for SkyPilot. UserError: the machines would not share the run."""
    path = path or Path(f"{job.name}.sky.yaml")
    _check_shared(job, options)
    command = job.shell_command("python3")
    if "--max-restarts" not in job.words:
        command += f" --max-restarts {job.restarts}"
    run = f"exec {command}\n" if job.nodes.count == 1 else _HOSTS.format(command=command)
    content: dict[str, Any] = {
        "name": job.name,
        "num_nodes": job.nodes.count,
        "resources": _resources(job, options),
        "workdir": str(job.directory),
        "envs": {"SAMECURVE_LEAVE_SECONDS": str(job.leave_seconds)},
        "setup": options.setup or _setup_of_checkout(),
        "run": _HERE + run,
    }
    if options.volume:
        content["volumes"] = {options.volume.path: options.volume.name}
    text = yaml_text([content])
    launch = ("sky", "jobs", "launch") if options.managed else ("sky", "launch")
    return Submission(
        path=path,
        text=f"# {MADE_BY} skypilot: {job.name} on {job.nodes}\n{text}",
        argv=(*launch, "--yes", "--detach-run", str(path)),
        install=_INSTALL,
        streams=True,
    )


def _setup_of_checkout() -> str:
    """What installs the directory that is copied. UserError: it has no Samecurve."""
    if checkout() == Path.cwd().resolve():
        return "pip install -e ."
    raise UserError(
        "a fresh machine has no Samecurve, and the directory that is copied to it has none either",
        "start this in the checkout of Samecurve; or copy a wheel of it into this directory"
        " (`make dist` builds one), and --setup 'pip install NAME.whl'",
        "--setup",
    )


def _resources(job: Job, options: SkyPilotOptions) -> dict[str, Any]:
    resources: dict[str, Any] = {}
    if options.infra:
        resources["infra"] = options.infra
    if job.nodes.gpus:
        if not job.nodes.gpu_type:
            raise UserError(
                "SkyPilot looks for machines by their GPU", "--gpu-type H100", "--gpu-type"
            )
        resources["accelerators"] = f"{job.nodes.gpu_type}:{job.nodes.gpus}"
    resources["job_recovery"] = {"recover_on_exit_codes": [START_AGAIN, AGAIN]}
    return resources


def _check_shared(job: Job, options: SkyPilotOptions) -> None:
    """UserError: a machine, or the next start, would not find the run."""
    if "://" in str(job.run) or (options.volume and options.volume.holds(job.run)):
        return
    why = ""
    if job.nodes.count > 1:
        why = f"{job.nodes.count} machines would each have a run directory of their own"
    elif options.managed:
        why = "a machine that is taken away would take the run directory with it"
    if why:
        raise UserError(
            f"{job.run} lies on each machine's own disk: {why}",
            "--volume NAME:/PATH, a volume of SkyPilot, and a --save-dir below /PATH",
            "--save-dir",
        )

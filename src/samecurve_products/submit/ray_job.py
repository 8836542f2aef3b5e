"""A job as a short Python program for Ray, and what that program calls.

Ray places the workers and starts them again when one is lost, on fewer or more machines. Each
worker runs the usual command as a child, as one rank; the run directory has the checkpoints, and
Ray has none.
"""

import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samecurve.run.directory import SUBMITTED
from samecurve.seam import Call, UserError, child_environment, start_process
from samecurve.worker import rank_environment
from samecurve_products.submit.engine import MADE_BY, Submission
from samecurve_products.submit.job import NEVER, Job

_INSTALL = 'pip install "ray[train]"'
_PROGRAM = """\
# {made_by} ray: {name} on {nodes}
from samecurve_products.submit.ray_job import fit

raise SystemExit(
    fit(
        words={words!r},
        directory={directory!r},
        storage={storage!r},
        num_workers={num_workers!r},
        gpus_per_worker={gpus},
        restarts={restarts},
        environment={environment!r},
    )
)
"""


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """What only Ray's job has."""

    python: str
    address: str | None = None  # of a cluster's dashboard; None: RAY_ADDRESS, or a Ray of its own
    min_workers: int | None = None  # None: always as many as asked for


def ray_submission(job: Job, options: RayOptions, path: Path | None) -> Submission:
    """The job as a program for Ray. UserError: more workers at least than at most."""
    path = path or Path(f"{job.name}.ray.py")
    most = job.num_ranks
    least = options.min_workers or most
    if least > most:
        raise UserError(f"--min-workers {least} of {most}", f"1 to {most}", "--min-workers")
    text = _PROGRAM.format(
        made_by=MADE_BY,
        name=job.name,
        nodes=job.nodes,
        words=list(job.words),
        directory=str(job.directory),
        storage=str(job.run.absolute() / SUBMITTED / "ray"),
        num_workers=most if least == most else (least, most),
        gpus=_gpus_per_worker(job),
        restarts=job.restarts,
        environment={"SAMECURVE_LEAVE_SECONDS": str(job.leave_seconds)},
    )
    argv: tuple[str, ...] = (options.python, "-P", str(path))
    if options.address:
        argv = ("ray", "job", "submit", "--address", options.address)
        argv += ("--working-dir", str(path.absolute().parent), "--", "python3", "-P", path.name)
    return Submission(
        path=path,
        text=text,
        argv=argv,
        install=_INSTALL,
        streams=True,
        library="ray" if options.python == sys.executable and not options.address else "",
    )


def _gpus_per_worker(job: Job) -> int:
    return job.nodes.gpus // job.ranks_per_node


def fit(
    *,
    words: Sequence[str],
    directory: str,
    storage: str,
    num_workers: int | tuple[int, int],
    gpus_per_worker: int,
    restarts: int,
    environment: dict[str, str],
) -> int:
    """Train with Ray's workers, each a rank. Returns the run's exit code.

    words: of `samecurve train`
    storage: where Ray keeps what it notes about the job
    num_workers: or the fewest and the most
    """
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(include_dashboard=False, runtime_env={"env_vars": environment}, log_to_driver=True)
    per_worker = {"CPU": 1, "GPU": gpus_per_worker} if gpus_per_worker else {"CPU": 1}
    trainer = TorchTrainer(
        _train_as_worker,
        train_loop_config={"words": list(words), "directory": directory},
        torch_config=TorchConfig(backend="gloo"),  # of Ray's own group, which only finds a port
        scaling_config=ScalingConfig(
            num_workers=num_workers,
            use_gpu=bool(gpus_per_worker),
            resources_per_worker=per_worker,
        ),
        run_config=RunConfig(
            storage_path=storage, failure_config=FailureConfig(max_failures=restarts)
        ),
    )
    return int(trainer.fit().return_value)


def _train_as_worker(config: dict[str, Any]) -> int:
    """Be one worker: run the command as a rank. Returns its exit code.

    RuntimeError: Ray should start all ranks again.
    """
    import ray.util
    from ray import train
    from ray.train.collective import broadcast_from_rank_zero

    context = train.get_context()
    here = [ray.util.get_node_ip_address(), _free_port()]
    host, port = broadcast_from_rank_zero(here)
    variables = rank_environment(
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        local_rank=context.get_local_rank(),
        local_world_size=context.get_local_world_size(),
        host=host,
        port=port,
    )
    train = Call(
        "samecurve.cli.entry",
        ("train", *config["words"]),
        "run_words",
        environment=child_environment(**variables),
        ended_by=signal.SIGTERM,  # it is asked to stop when Ray ends this worker
    )
    code = start_process(train, cwd=Path(config["directory"])).wait()
    if code not in {0, NEVER}:
        raise RuntimeError(f"exit code {code} of samecurve train {shlex.join(config['words'])}")
    return code


def _free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])

"""Mistakes with Slurm that would give another run than the one that was asked for.

Slurm's variables show them before anything starts. Each is refused, since a guess would end in
several runs beside each other, each of one rank.
"""

from collections.abc import Mapping

from samecurve.errors import UserError

_WHERE = "environment"
_SRUN = "srun samecurve train ..., one task for each GPU (--ntasks-per-node)"


def check_slurm_job(environment: Mapping[str, str], *, own_directory: bool) -> None:
    """Check the place of this process in its Slurm job.

    own_directory: the command names the run that it begins or goes on with

    UserError: it would train on a part of the job, or beside others in one run.
    """
    if "SLURM_JOB_ID" not in environment or "RANK" in environment:
        return  # torchrun has said which rank this is, in a job or not
    is_array = int(environment.get("SLURM_ARRAY_TASK_COUNT", "1")) > 1
    if is_array and not own_directory:
        raise UserError(
            "the tasks of a job array would all go on with the same run",
            "give each task a run of its own: --save-dir runs/NAME-$SLURM_ARRAY_TASK_ID",
            "--save-dir",
        )
    if "SLURM_STEP_NUM_TASKS" in environment:
        _check_sees_gpus_of_node(environment)
        return
    is_task = "SLURM_STEP_ID" in environment or environment.get("SLURM_PROCID", "0") != "0"
    if is_task and int(environment.get("SLURM_NTASKS", "1")) > 1:
        raise UserError(
            f"task {environment.get('SLURM_PROCID', '?')} of {environment['SLURM_NTASKS']}, but"
            " SLURM_STEP_NUM_TASKS is not set: each task would train by itself",
            "let Slurm's variables through to this process: a container, `env -i` or `ssh` drops"
            " them",
            _WHERE,
        )
    if is_task:
        return
    if "SLURMD_NODENAME" not in environment:
        raise UserError(
            f"this shell belongs to Slurm job {environment['SLURM_JOB_ID']}, but it is not on a"
            " machine of the job (salloc leaves it on the login node)",
            f"{_SRUN}; to train here all the same: env -u SLURM_JOB_ID samecurve train ...",
            _WHERE,
        )
    nodes = int(environment.get("SLURM_JOB_NUM_NODES", "1"))
    if nodes > 1:
        raise UserError(
            f"the job has {nodes} machines, and this process would train on one of them alone",
            _SRUN,
            _WHERE,
        )


def _check_sees_gpus_of_node(environment: Mapping[str, str]) -> None:
    """UserError: each task of a machine sees one GPU only."""
    tasks, nodes = (
        int(environment.get(name, "1")) for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES")
    )
    if "SLURM_GPUS_PER_TASK" in environment and tasks > nodes:
        raise UserError(
            "--gpus-per-task hides from each task the GPUs of the others, which a rank counts to"
            " find its own",
            "--gpus-per-node=N (or --gres=gpu:N) in its place",
            _WHERE,
        )

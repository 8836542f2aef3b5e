"""Places in a Slurm job from which another run would start than the one that was asked for."""

import pytest

from samecurve.errors import UserError
from samecurve.worker import from_slurm, leave_seconds
from samecurve.worker.slurm_env import check_slurm_job
from slurm import slurm_variables

# as Slurm 22.05 sets them in the script of a job with two machines, and in the shell of salloc
SCRIPT = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0",
    "SLURMD_NODENAME": "n1",
}
LOGIN = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "8"}
TASK = {**slurm_variables(1, 7), "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}
ARRAY = {**TASK, "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "4"}


@pytest.mark.parametrize(
    ("environment", "cause", "remedy"),
    [
        pytest.param(ARRAY, "tasks of a job array", "SLURM_ARRAY_TASK_ID", id="job array"),
        pytest.param(LOGIN, "not on a machine of the job", "srun samecurve", id="login node"),
        pytest.param(SCRIPT, "one of them alone", "srun samecurve", id="script without srun"),
        pytest.param(
            {name: value for name, value in TASK.items() if name != "SLURM_STEP_NUM_TASKS"},
            "task 1 of 2, but SLURM_STEP_NUM_TASKS is not set: each task would train by itself",
            "a container",
            id="two worlds of one",
        ),
        pytest.param(
            {**TASK, "SLURM_GPUS_PER_TASK": "1", "SLURM_STEP_NUM_NODES": "1"},
            "hides from each task",
            "--gpus-per-node",
            id="a GPU a task",
        ),
    ],
)
def test_a_place_that_gives_another_run_is_refused(
    environment: dict[str, str], cause: str, remedy: str
) -> None:
    with pytest.raises(UserError) as refusal:
        check_slurm_job(environment, own_directory=False)
    assert cause in refusal.value.cause
    assert remedy in refusal.value.remedy


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({}, id="no Slurm"),
        pytest.param({**SCRIPT, "SLURM_JOB_NUM_NODES": "1"}, id="a script on one machine"),
        pytest.param(TASK, id="srun"),
        pytest.param(ARRAY, id="a job array, each task with a run of its own"),
        pytest.param({**SCRIPT, "RANK": "1"}, id="torchrun in a script"),
    ],
)
def test_a_place_that_gives_the_run_is_not(environment: dict[str, str]) -> None:
    check_slurm_job(environment, own_directory=True)


def test_the_first_machine_is_read_without_scontrol(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container has no scontrol. Where the list is missing too, no host is guessed."""
    monkeypatch.setenv("PATH", "")
    machines = {**TASK, "SLURM_STEP_NODELIST": "gpu[07-09,12]"}
    assert from_slurm(machines)["MASTER_ADDR"] == "gpu07"
    del machines["SLURM_STEP_NODELIST"]
    with pytest.raises(UserError, match="SLURM_STEP_NODELIST is not set"):
        from_slurm(machines)


def test_the_time_to_leave_is_what_the_engine_grants() -> None:
    name = "SAMECURVE_LEAVE_SECONDS"
    assert [leave_seconds({}), leave_seconds({name: "110"})] == [20, 110]
    with pytest.raises(UserError, match="LEAVE_SECONDS is '-1'"):
        leave_seconds({name: "-1"})

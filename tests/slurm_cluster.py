"""A Slurm of two machines on this one, from the distribution's packages, for as long as a test.

Its daemons run beside whatever Slurm the machine has: with their own configuration, sockets and
directories, and with names for the two machines that only they see.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from commands import free_port

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "unshare")
_CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={home}/munge/socket,cred_expire=5
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
KillWait=5
JobAcctGatherType=jobacct_gather/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no Slurm here; '' if there can."""
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: munge slurmctld slurmd slurm-client)"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root here"


@contextmanager
def slurm(home: Path) -> Iterator[dict[str, str]]:
    """A Slurm whose files are below home. Gives the variables with which its commands reach it."""
    host = socket.gethostname()
    for name in ("munge", "state", "spool-n1", "spool-n2"):
        (home / name).mkdir(mode=0o700)
    config = home / "slurm.conf"
    config.write_text(
        _CONFIG.format(
            home=home, host=host, port=free_port(), first=free_port(), second=free_port()
        )
    )
    (home / "hosts").write_text(f"{Path('/etc/hosts').read_text()}\n127.0.0.1 n1 n2\n")
    key = home / "munge/key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o600)
    environment = {**os.environ, "SLURM_CONF": str(config)}
    places = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    munge = [f"--{option}={home}/munge/{name}" for option, name in places.items()]
    as_a_node = f"mount --bind {home}/hosts /etc/hosts; exec slurmd -D -N"
    with ExitStack() as daemons:
        for name, command in {
            "munged": ["munged", "--force", "--foreground", f"--key-file={key}", *munge],
            "slurmctld": ["slurmctld", "-D"],
            "n1": ["unshare", "-m", "bash", "-c", f"{as_a_node} n1"],
            "n2": ["unshare", "-m", "bash", "-c", f"{as_a_node} n2"],
        }.items():
            daemons.enter_context(_daemon(command, home / f"{name}.out", environment))
            time.sleep(1)
        try:
            _wait_for_nodes(environment)
            yield environment
        finally:
            _end_jobs(environment)


@contextmanager
def _daemon(command: list[str], output: Path, environment: dict[str, str]) -> Iterator[None]:
    with open(output, "wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_nodes(environment: dict[str, str]) -> None:
    for _ in range(60):
        states = _output(["sinfo", "-h", "-N", "-o", "%T"], environment).split()
        if states == ["idle", "idle"]:
            return
        time.sleep(0.5)
    raise AssertionError(f"the machines are {states}")


def _end_jobs(environment: dict[str, str]) -> None:
    jobs = _output(["squeue", "-h", "-o", "%i"], environment).split()
    if jobs:
        subprocess.run(["scancel", *jobs], env=environment, check=False)
    for _ in range(40):
        if not _output(["squeue", "-h"], environment):
            return
        time.sleep(0.5)


def _output(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.stdout.strip()

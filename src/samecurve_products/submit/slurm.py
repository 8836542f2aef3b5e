"""A job as a script for `sbatch`, with one task of `srun` a rank.

The ranks find each other from Slurm's variables (worker/__init__.py). The script starts them
again inside the job when one fails. Before the time limit Slurm sends the steps SIGTERM: the run
saves and leaves with exit code 143, and the script puts the job back into the queue. The script has
no signal handler: whoever cancels the job ends the script, and nothing starts again.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samecurve.run.directory import SUBMITTED
from samecurve.seam import UserError
from samecurve_products.submit.engine import MADE_BY, Submission
from samecurve_products.submit.job import AGAIN, NEVER, Job

_INSTALL = "submit on a login node of the cluster, where Slurm's commands are"
_LOG = f"{SUBMITTED}/%j.log"  # a file a job; a job that is queued again appends
_SIGNALS = {"TERM": AGAIN, "INT": 130}  # those that ask a run to stop -> its exit code
_SCRIPT = """\
#!/bin/bash
# {made_by} slurm: {name} on {nodes}
{directives}
export SAMECURVE_GROUP=slurm-$SLURM_JOB_ID     # this job may take over the run from a lost machine
export SAMECURVE_LEAVE_SECONDS={leave}         # to end the step and save, once asked to stop
run={run}
restarts={restarts}     # after a failure, without a step saved in between
newest() {{ ls -1t "$run/checkpoints" 2>/dev/null | head -n 1; }}

begun=$(newest)
saved=$begun
left=$restarts
while true; do
  srun --kill-on-bad-exit=1 {command}
  code=$?
  case $code in
    0 | {never}) exit $code ;;     # done, or refused: another start would end in the same way
    {again})     # a signal, after saving: the time limit is near
      if [ "$(newest)" = "$begun" ]; then
        echo "submit: nothing was saved in the time of this job: give it a longer --time" >&2
        exit $code
      fi
      echo "submit: saved before the time limit; back into the queue" >&2
      scontrol requeue "$SLURM_JOB_ID" || exit $code
      sleep 600     # Slurm ends this script
      exit $code ;;
    {person}) exit $code ;;     # a signal that a person has sent, after saving
  esac
  if [ "$(newest)" != "$saved" ]; then
    saved=$(newest)
    left=$restarts
  fi
  if [ "$left" -le 0 ]; then
    echo "submit: failed $((restarts + 1)) times without saving a step in between" >&2
    exit $code
  fi
  left=$((left - 1))
  echo "submit: a rank failed (exit code $code); starting again, $left more are left" >&2
done
"""


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What only Slurm's job has."""

    python: str
    partition: str | None = None
    account: str | None = None
    time: str | None = None  # the time limit, in sbatch's words
    save_signal: str = "TERM"
    directives: Sequence[str] = ()  # options of sbatch, as they are


def slurm_submission(job: Job, options: SlurmOptions, path: Path | None) -> Submission:
    """The job as a script for sbatch. UserError: an option can't stand in a script."""
    path = path or job.run / SUBMITTED / "job.sbatch"
    text = _SCRIPT.format(
        made_by=MADE_BY,
        name=job.name,
        nodes=job.nodes,
        directives="\n".join(f"#SBATCH {line}" for line in _directives(job, options)),
        leave=job.leave_seconds,
        run=shlex.quote(str(job.run)),
        restarts=job.restarts,
        command=job.shell_command(options.python),
        never=NEVER,
        again=_SIGNALS[options.save_signal],
        person=next(code for name, code in _SIGNALS.items() if name != options.save_signal),
    )
    return Submission(path=path, text=text, argv=("sbatch", str(path)), install=_INSTALL)


def _directives(job: Job, options: SlurmOptions) -> list[str]:
    log = f"{job.run.absolute()}/{_LOG}"
    lines = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes.count}",
        f"--ntasks-per-node={job.ranks_per_node}",
        f"--chdir={job.directory}",
        f"--output={log}",
        "--open-mode=append",
        "--requeue",
        f"--signal={options.save_signal}@{job.save_seconds}",
    ]
    if job.nodes.gpus:
        lines.append(f"--gpus-per-node={job.nodes.gpus}")
    for name in ("partition", "account", "time"):
        value = getattr(options, name)
        if value is not None:
            lines.append(f"--{name}={value}")
    lines += options.directives
    for line in lines:
        _check(line)
    return lines


def _check(line: str) -> None:
    """UserError: sbatch would read the line as something else."""
    name, _, value = line.partition("=")
    if not re.fullmatch(r"--?[\w-]+", name):
        raise UserError(
            f"{line!r} is no option of sbatch", "for example --sbatch=--constraint=h100", "--sbatch"
        )
    if name == "--array":
        raise UserError(
            "an array would give one run to several jobs",
            "submit each run by itself; docs/submit.md has a script for arrays",
            "--sbatch",
        )
    if re.search(r"[\s'\"\\#]", value) or ("%" in value and not value.endswith(_LOG)):
        raise UserError(
            f"{line!r} has a blank, a quotation mark or a % sign, which sbatch would read",
            "a directory and values without them",
            name,
        )

"""Samecurve from Python: plan, train and verify in scripts and notebooks, and read run directories.

Training runs in fresh processes through the command line, so that the run is the same as on a
terminal. An interrupt stops the run in order. The run ends when the process that began it ends.
"""

import json
import sys
from typing import Any

from samecurve.api.arguments import Configured, command_line
from samecurve.api.process import Progress, error_of, run_verb
from samecurve.api.results import Run as Run
from samecurve.api.results import Verified as Verified
from samecurve.cli.load_config import load_config, measure_before, probe_facts
from samecurve.cli.other_machine import request_of
from samecurve.core.planning.plan import Plan
from samecurve.run.prepare import make_plan
from samecurve.storage.url import is_url, parse_url, run_home


def plan(
    task: type | Configured | None = None, config: Configured | None = None, **flags: Any
) -> Plan:
    """Plan what train() would do.

    task, config: as train() has them
    flags: those of the command line, as names

    UserError: anything that can't be honoured.
    """
    with command_line("plan", task, config, flags) as (_, options):
        request = request_of(options["machine"], options["mfu"], options["bench"], options["chart"])
        loaded = load_config(options, say=False)
        if request:
            return request.predict(loaded).plan_or_refuse
        facts = probe_facts(loaded) if options["probe_batch"] else None
        accepted_plan, _ = make_plan(loaded, facts, measure_before())
        return accepted_plan


def train(
    task: type | Configured | None = None,
    config: Configured | None = None,
    *,
    quiet: bool = False,
    **flags: Any,
) -> Run:
    """Train as `samecurve train` does, show the progress, and return the run.

    task: your own class, wherever it is defined; the config then names no task. Or the config
    config: a file, or its content as a mapping
    quiet: show nothing but what the user's own code prints
    flags: as plan()

    UserError: something can't be honoured; RunError: it failed. KeyboardInterrupt: it was stopped
    in order, after saving, and the same call goes on.
    """
    progress = Progress(quiet=quiet)
    with command_line("train", task, config, flags) as (arguments, _):
        try:
            code, errors = run_verb("train", arguments, progress.show, sys.stderr)
        except KeyboardInterrupt:
            if progress.directory is None:
                raise KeyboardInterrupt("stopped before anything was trained") from None
            raise KeyboardInterrupt(
                f"stopped; {progress.directory} holds what was trained, and the same call goes on"
            ) from None
        finally:
            progress.close()
        if 0 < code < 128 or code < 0:
            raise error_of(errors, code)
    home = progress.directory or flags.get("save_dir") or flags["resume"]
    return Run(run_home(parse_url(str(home), "save_dir")) if is_url(home) else home)


def verify(
    task: type | Configured | None = None,
    config: Configured | None = None,
    *,
    quiet: bool = False,
    **flags: Any,
) -> Verified:
    """Test whether the number of devices changes the result, as `samecurve verify` does.

    task, config: as train() has them
    quiet: do not show the rows of the table as they come
    flags: as plan()

    UserError: something can't be honoured; RunError: it could not be tried.
    """
    answer: list[str] = []
    table = None if quiet else sys.stdout
    with command_line("verify", task, config, flags) as (arguments, _):
        code, errors = run_verb("verify", arguments, answer.append, table)
        if code not in {0, 1} or not answer:
            raise error_of(errors, code)
    return Verified(json.loads("".join(answer)))

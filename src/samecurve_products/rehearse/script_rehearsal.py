"""The rehearsal of any command: it runs as it stands, and sees emulated GPUs."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from samecurve.seam import scratch
from samecurve_products.rehearse.child import run_child
from samecurve_products.rehearse.config_rehearsal import gpus_in_words
from samecurve_products.rehearse.emulator import Emulation, environment_of
from samecurve_products.rehearse.failure import failure_of_script, with_failure
from samecurve_products.rehearse.rehearsal import Memory, Rehearsal, StepCosts
from samecurve_products.rehearse.report_files import Report


@dataclass(frozen=True, kw_only=True)
class ScriptRequest:
    """A command that is to be rehearsed.

    output: the file descriptor of its stdout: 1, or 2 where stdout is for JSON
    """

    words: Sequence[str]
    emulation: Emulation
    limit: int  # bytes of a GPU
    output: int
    say: Callable[[str], None]


def rehearse_script(request: ScriptRequest) -> Rehearsal:
    """Run a command with emulated GPUs; its output passes through. UserError: it can't start."""
    with scratch("rehearse") as home:
        request.say(f"{shlex.join(request.words)} on {gpus_in_words(request.emulation)}")
        ended = run_child(
            request.words,
            environment_of(request.emulation, home),
            output=request.output,
            shows_errors=True,
        )
        report = Report(home)
    findings = [*report.findings()]
    if ended.code:
        findings = with_failure(failure_of_script(ended, report.steps + 1), findings)
    costs = report.costs()
    return Rehearsal(
        command=shlex.join(request.words),
        gpus=request.emulation.devices,
        gpu=request.emulation.gpu,
        plan="",
        steps=report.steps,
        steps_asked=0,
        exit_code=ended.code,
        findings=tuple(findings),
        costs=costs,
        memory=Memory(peak=report.peak, limit=request.limit) if report.steps else None,
        losses=None,
        notes=() if ended.code else tuple(_notes(costs)),
    )


def _notes(costs: StepCosts | None) -> Iterator[str]:
    """What was not rehearsed, where the command has come to its end."""
    if costs is None:
        yield (
            "no step of an optimizer of torch was seen on the emulated GPUs: does the command train"
            " there? A step ends with a call of optimizer.step()"
        )
    elif not costs.operations:
        yield (
            "its steps ran on the CPU: they launched no operation on a GPU. Does the command move"
            ' its model and its batches there, such as with model.to("cuda")?'
        )

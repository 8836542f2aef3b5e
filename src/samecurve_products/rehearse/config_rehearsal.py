"""A config's rehearsal: `samecurve train` on emulated GPUs, and the same steps on one CPU device.

Both are ordinary runs, each in a process and a directory of its own; their journals are compared.
"""

import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from samecurve.features.guard import is_probed
from samecurve.observe.plan_text import strategy_text
from samecurve.seam import (
    Plan,
    arithmetic,
    child_environment,
    counted,
    python_module,
    read_events,
    scratch,
)
from samecurve_products.rehearse.child import Ended, output_file, run_child
from samecurve_products.rehearse.emulator import Emulation, environment_of
from samecurve_products.rehearse.failure import error_of_run, failure_of_run, with_failure
from samecurve_products.rehearse.rehearsal import Finding, Losses, Memory, Rehearsal
from samecurve_products.rehearse.report_files import Report

# the largest relative difference of a loss that rounding in this precision explains in a few steps
TOLERANCE = {"f64": 1e-10, "f32": 1e-4, "bf16": 2e-2, "f16": 2e-2}
_REFUSED = 2  # the exit code of a config that train refuses
# a rehearsal tells no tracker of itself, and starts nothing twice
_ALONE = {
    "track.tensorboard": "false",
    "track.wandb": "off",
    "track.mlflow": "false",
    "track.trackio": "false",
    "track.others": "[]",
    "devices.max_restarts": "0",
}
# what a config says of many devices, as it is on one
_ONE_DEVICE = {
    "devices.strategy": "auto",
    "devices.sync": "auto",
    "devices.balance": "even",
    "devices.compress": "none",
    "devices.shards": "null",
    "devices.offload": "false",
    "devices.offload_frozen": "0",
    "devices.memory": "null",
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be rehearsed.

    words: the config's flags as they were typed, without devices, steps and trackers
    words_on_cpu: those of them that one CPU device shares: no strategy, no batch
    compiles: whether the config compiles the model's blocks, which takes Triton on a GPU
    """

    words: tuple[str, ...]
    words_on_cpu: tuple[str, ...]
    emulation: Emulation
    limit: int  # bytes of a GPU
    steps: int
    compiles: bool
    say: Callable[[str], None]


@dataclass(frozen=True)
class TrainedSteps:
    """What a run's journal says. plan: None where the run was refused before it had one"""

    ended: Ended
    plan: Plan | None
    losses: tuple[float | None, ...]
    memory: int  # bytes on the fullest device; 0: unknown


def rehearse_config(request: Request) -> Rehearsal:
    """Rehearse a config. UserError: one CPU device refuses the config too."""
    with scratch("rehearse") as home:
        reports = home / "report"
        reports.mkdir()
        request.say(f"{counted(request.steps, 'step')} on {gpus_in_words(request.emulation)}")
        gpus = ",".join(map(str, range(request.emulation.devices)))
        words = [*request.words, "--devices", gpus]
        emulated = _train(
            home / "emulated", request, words, environment_of(request.emulation, reports)
        )
        on_cpu = None
        if emulated.ended.code in {0, _REFUSED}:
            request.say("the same steps on one CPU device, to compare the losses")
            words = _words_on_cpu(request, emulated.plan)
            on_cpu = _train(home / "cpu", request, words, child_environment())
        report = Report(reports, _probed_steps(request.steps, emulated.plan))
        return _rehearsal(request, report, emulated, on_cpu)


def _probed_steps(steps: int, plan: Plan | None) -> set[int]:
    """The steps, counted from 1, in which the run proves itself: a long run has few of them."""
    if plan is None:
        return set()
    return {step + 1 for step in range(steps) if is_probed(plan, step, first_step=0)}


def gpus_in_words(emulation: Emulation) -> str:
    return f"{counted(emulation.devices, 'emulated GPU')} ({emulation.gpu})"


def _words_on_cpu(request: Request, plan: Plan | None) -> list[str]:
    """The flags with which one CPU device trains what the plan trains on GPUs."""
    words = [*request.words_on_cpu, *_settings(_ONE_DEVICE), "--devices", "cpu"]
    if plan is not None:
        words += ["--global-batch", str(plan.batch.global_batch_size)]
        words += _settings({"train.precision": plan.compute.precision, "train.amp": "false"})
    return words


def _settings(values: Mapping[str, str]) -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def _train(
    home: Path, request: Request, flags: Sequence[str], environment: Mapping[str, str]
) -> TrainedSteps:
    home.mkdir()
    settings = {**_ALONE, "train.compile": "false"} if request.compiles else _ALONE
    words = [*flags, *_settings(settings), "--max-steps", str(request.steps)]
    words += ["--save-dir", str(home / "run")]
    output = output_file(home / "output")
    try:
        ended = run_child(
            python_module("samecurve", "train", *words),
            environment,
            output=output,
            shows_errors=False,
        )
    finally:
        os.close(output)
    return _read_run(home / "run" / "journal.jsonl", ended)


def _read_run(journal: Path, ended: Ended) -> TrainedSteps:
    plan: Plan | None = None
    losses: list[float | None] = []
    memory = 0
    for event in read_events(journal) if journal.exists() else ():
        if event.kind == "planned":
            plan = Plan.from_json(event.values["plan"])
        elif event.kind == "step":
            losses.append(event.values["loss"])
        memory = max(memory, event.values.get("memory_bytes") or 0)
    return TrainedSteps(ended, plan, tuple(losses), memory)


def _rehearsal(
    request: Request, report: Report, emulated: TrainedSteps, on_cpu: TrainedSteps | None
) -> Rehearsal:
    """The result of both runs. UserError: one CPU device refuses the config too."""
    findings, notes = [*report.findings()], []
    if request.compiles:
        notes.append("train.compile was left out: Triton's kernels are not emulated")
    losses = None
    if emulated.ended.code:
        if on_cpu is not None and on_cpu.ended.code == _REFUSED:
            raise error_of_run(on_cpu.ended)
        step = len(emulated.losses) + 1 if emulated.plan else 0
        failure = failure_of_run(emulated.ended, step)
        findings = with_failure(failure, findings)
    elif on_cpu is not None and on_cpu.ended.code:
        cause = error_of_run(on_cpu.ended).cause
        notes.append(f"the losses were not compared: one CPU device can't train this: {cause}")
    elif on_cpu is not None and emulated.plan is not None:
        tolerance = TOLERANCE[emulated.plan.compute.precision]
        losses = compare(emulated.losses, on_cpu.losses, tolerance)
        findings += _losses_finding(losses)
    plan = emulated.plan
    return Rehearsal(
        command=shlex.join(request.words),
        gpus=request.emulation.devices,
        gpu=request.emulation.gpu,
        plan=f"{strategy_text(plan)}, {plan.compute.precision}, {arithmetic(plan)}" if plan else "",
        steps=len(emulated.losses),
        steps_asked=request.steps,
        exit_code=emulated.ended.code,
        findings=tuple(findings),
        costs=report.costs(),
        memory=Memory(
            peak=emulated.memory or report.peak,
            limit=request.limit,
            estimate=plan.memory_estimate if plan else None,
        ),
        losses=losses,
        notes=tuple(notes),
    )


def compare(
    emulated: Sequence[float | None], on_cpu: Sequence[float | None], tolerance: float
) -> Losses:
    """The losses of both runs, and the largest relative difference of a step."""
    pairs = zip_longest(emulated, on_cpu)
    difference = max((_relative(*pair) for pair in pairs), default=0.0)
    return Losses(
        emulated=tuple(emulated),
        on_cpu=tuple(on_cpu),
        difference=difference,
        tolerance=tolerance,
    )


def _relative(loss: float | None, other: float | None) -> float:
    if loss is None or other is None:
        return 0.0 if loss is other else math.inf
    return abs(loss - other) / max(abs(other), 1e-30)


def _losses_finding(losses: Losses) -> list[Finding]:
    """A finding, if the losses differ by more than rounding explains."""
    if losses.difference <= losses.tolerance:
        return []
    pairs = [*zip_longest(losses.emulated, losses.on_cpu)]
    step, pair = next(
        (step, pair) for step, pair in enumerate(pairs, 1) if _relative(*pair) > losses.tolerance
    )
    emulated, on_cpu = ("not finite" if loss is None else f"{loss:.6g}" for loss in pair)
    return [
        Finding(
            kind="losses",
            text=f"{emulated} on the emulated GPUs, {on_cpu} on one CPU device",
            remedy="look first at the races above; `samecurve verify` compares layouts on CPUs",
            step=step,
        )
    ]

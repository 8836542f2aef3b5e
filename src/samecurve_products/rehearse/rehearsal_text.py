"""A rehearsal as a person reads it: a line for each question, what was found below its line."""

import json
from collections.abc import Iterator

from samecurve.observe import finite
from samecurve.seam import counted, show_bytes
from samecurve_products.rehearse.rehearsal import FAILING, WARNING, Finding, Rehearsal

_NAME_WIDTH = 24
_INDENT = " " * 9
_MOST_SHOWN = 12  # findings of one kind
_NOT_SHOWN = (
    "speed, the choice of kernels (flash attention, cuDNN), Triton, the real NCCL, a driver's own"
    " faults: a first short run on the real machine"
)
_REMEDIES = {
    "race": (
        "have the stream that comes second wait: torch.cuda.current_stream().wait_stream(other), or"
        " event.wait()"
    ),
    "use_after_free": "tensor.record_stream(stream), where another stream uses the tensor",
    "pinned_source": "event.synchronize() before a pinned buffer is written again",
    "late_copy": "wait before the copy is read: torch.cuda.current_stream().synchronize()",
    "host_read": "copy it to the host first: tensor.cpu()",
    "not_deterministic": (
        "none is needed for a run that is not exact; --exact (train.exact: true) is refused with"
        " these"
    ),
    "collective": (
        "every rank must call the same collectives, with the same sizes, in one order: look for a"
        " condition on the rank, or data of unequal length"
    ),
    "hang": "no rank may leave, or skip a call, while others still call collectives",
}
# kinds that have a line even where nothing was found
_ALWAYS = ("race", "host_read", "host sync")


def as_json(rehearsal: Rehearsal) -> str:
    return json.dumps(finite(rehearsal.to_json()), indent=1)


def as_text(rehearsal: Rehearsal) -> str:
    """The report: a line for each question, FAIL and WARN with their findings below."""
    lines = [
        *_head(rehearsal),
        _runs(rehearsal),
        *_of_kind(rehearsal, "failed"),
        *_losses(rehearsal),
        *_memory(rehearsal),
    ]
    kinds = dict.fromkeys([*_ALWAYS, *(finding.kind for finding in rehearsal.findings)])
    for kind in kinds:
        if kind not in {"failed", "losses", "out of memory"}:
            lines += _kind(rehearsal, kind)
    lines += _costs(rehearsal)
    lines += [f"note     {note}" for note in rehearsal.notes]
    lines += [f"unseen   {_NOT_SHOWN}", _verdict(rehearsal)]
    return "\n".join(lines)


def _head(rehearsal: Rehearsal) -> Iterator[str]:
    gpus = f"{counted(rehearsal.gpus, 'emulated GPU')} ({rehearsal.gpu}"
    if rehearsal.memory:
        gpus += f", {show_bytes(rehearsal.memory.limit)} each"
    yield f"rehearsed on {gpus}); experimental"
    if rehearsal.plan:
        yield f"plan     {rehearsal.plan}"


def _row(status: str, name: str, text: str) -> str:
    return f"{status:<8} {name:<{_NAME_WIDTH}} {text}"


def _runs(rehearsal: Rehearsal) -> str:
    steps = counted(rehearsal.steps, "step")
    if rehearsal.steps_asked:
        steps = f"{rehearsal.steps} of {counted(rehearsal.steps_asked, 'step')}"
    if rehearsal.exit_code:
        return _row("FAIL", "runs", f"{steps}, then exit code {rehearsal.exit_code}")
    return _row("PASS", "runs", f"{steps}, to the end")


def _of_kind(rehearsal: Rehearsal, kind: str) -> Iterator[str]:
    """The lines of each finding of a kind."""
    found = [finding for finding in rehearsal.findings if finding.kind == kind]
    for finding in found[:_MOST_SHOWN]:
        yield from _finding_lines(finding)
    if len(found) > _MOST_SHOWN:
        yield f"{_INDENT}and {len(found) - _MOST_SHOWN} more: --json lists all"


def _finding_lines(finding: Finding) -> Iterator[str]:
    """The user's line first, then what was found there."""
    words = []
    if finding.kind == "host sync":
        words.append(f"{finding.times:.3g} a step")
    elif finding.step:
        words.append(f"step {finding.step}")
    if finding.processes > 1:
        words.append(f"in {finding.processes} processes")
    place = f"{finding.place}: " if finding.place else ""
    if finding.kind == "race" and not finding.place:
        place = "the backward pass, which has no Python line: "
    detail = f" ({', '.join(words)})" if words else ""
    first, *more = finding.text.strip().splitlines() or [""]
    yield f"{_INDENT}{place}{first}{detail}"
    yield from (f"{_INDENT}  {line.strip()}" for line in more[:6])
    if finding.inside:
        yield f"{_INDENT}  inside: {finding.inside}"
    if finding.there:
        yield f"{_INDENT}  other line: {finding.there}"
    if finding.remedy:
        yield f"{_INDENT}  remedy: {finding.remedy}"


def _losses(rehearsal: Rehearsal) -> Iterator[str]:
    losses = rehearsal.losses
    if losses is None:
        return
    difference = f"{losses.difference:.1e} apart at most (relative; {losses.tolerance:.0e} allowed)"
    if any(finding.kind == "losses" for finding in rehearsal.findings):
        yield _row("FAIL", "losses", f"not those of one CPU device: {difference}")
        yield from _of_kind(rehearsal, "losses")
    else:
        yield _row("PASS", "losses", f"those of one CPU device: {difference}")


def _memory(rehearsal: Rehearsal) -> Iterator[str]:
    memory = rehearsal.memory
    if memory is None or not memory.peak:
        yield from _of_kind(rehearsal, "out of memory")
        return
    text = f"{show_bytes(memory.peak)} at most on a GPU of {show_bytes(memory.limit)}"
    text += f"; the plan estimates {show_bytes(memory.estimate)}" if memory.estimate else ""
    is_out = any(finding.kind == "out of memory" for finding in rehearsal.findings)
    yield _row("FAIL" if is_out else "PASS", "memory", text)
    yield from _of_kind(rehearsal, "out of memory")


def _kind(rehearsal: Rehearsal, kind: str) -> Iterator[str]:
    name = FAILING.get(kind) or WARNING.get(kind) or kind
    found = [finding for finding in rehearsal.findings if finding.kind == kind]
    if not found:
        reached = rehearsal.steps or not rehearsal.exit_code
        yield _row("PASS", name, "none") if reached else _row("-", name, "no step was reached")
        return
    text = counted(len(found), "place")
    if kind == "host sync":
        total = sum(finding.times for finding in found)
        text += f", {total:.3g} a step: the host waits there for the GPU, which then idles"
    yield _row("WARN" if kind in WARNING else "FAIL", name, text)
    yield from _of_kind(rehearsal, kind)
    if kind in _REMEDIES:
        yield f"{_INDENT}remedy: {_REMEDIES[kind]}"


def _costs(rehearsal: Rehearsal) -> Iterator[str]:
    costs = rehearsal.costs
    if costs is None:
        return
    yield (
        f"a step   {costs.operations:.0f} operations launched on each GPU;"
        f" {_mean(costs.collectives, 'collective')}, {show_bytes(costs.collective_bytes)} in all;"
        f" {_mean(costs.copies_to_device, 'copy')} to the GPU, {costs.copies_to_host:.3g} to the"
        " host"
    )
    if costs.own_syncs:
        own = _mean(costs.own_syncs, "host sync")
        yield f"{_INDENT}{own} of samecurve itself: metrics, read one step late"


def _mean(number: float, noun: str) -> str:
    """'1 copy', '2.5 copies': a mean of steps."""
    if number == 1:
        return f"1 {noun}"
    return (
        f"{number:.3g} {noun.removesuffix('y')}ies" if noun[-1] == "y" else f"{number:.3g} {noun}s"
    )


def _verdict(rehearsal: Rehearsal) -> str:
    failing = [finding for finding in rehearsal.findings if finding.fails]
    if failing:
        return f"result   {counted(len(failing), 'finding')} would fail, or train wrong, on GPUs"
    if rehearsal.costs and not rehearsal.costs.operations:
        return "result   nothing was rehearsed: no step ran on an emulated GPU"
    return "result   nothing found that would fail on GPUs"

"""`samecurve compare-runs A B`: are two runs equal to the last bit, and if not, where do they part?

Read from what runs leave behind: every step's loss and gradient norm, in full precision; hashes of
the state, array by array (train.exact); and, at the last step at which both saved, the arrays
themselves. Nothing is trained, and live runs may be compared.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from samecurve.checkpoint.format import MANIFEST, load, name_of
from samecurve.checkpoint.store import checkpoints
from samecurve.core.config.sections import flatten
from samecurve.core.determinism.digest import digest
from samecurve.core.events import Event
from samecurve.errors import SamecurveError, UserError
from samecurve.observe.journal import read_events
from samecurve.run.directory import Run
from samecurve.tasks import Tasks

_FIGURES = ("loss", "grad_norm")
_ASIDE = (
    "devices.",
    "train.hash_every",
    "train.log_every",
    "train.eval_every",
    "train.save_every",
    "train.sample_every",
    "train.keep",
    "data.prefetch",
)  # what changes no result
_SHOWN = 6


@dataclass(frozen=True)
class Difference:
    """Where two runs part. step: the first that differs. what: a figure, or arrays of the state."""

    step: int
    what: str
    first: Any
    second: Any


@dataclass
class Comparison:
    """steps, hashes: how many were held against each other; saved: the step whose arrays were.

    asked: what the configs and plans say otherwise. arrays: that differ, at the first hash or save
    where any does; of: how many there are; equal_until: the last hash or save before it that was
    equal.
    """

    steps: int = 0
    hashes: int = 0
    saved: int | None = None
    asked: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    figure: Difference | None = None
    arrays: list[str] = field(default_factory=list)
    arrays_at: int | None = None
    of: int = 0
    equal_until: int | None = None

    @property
    def equal(self) -> bool:
        return self.figure is None and not self.arrays


def compare_runs(first: Path, second: Path, as_json: bool) -> int:
    """Prints what was found.

    Returns the exit code: 0 if all that both runs have is equal, 1 if not.
    """
    found = compare(first, second)
    if as_json:
        click.echo(json.dumps({"equal": found.equal, **asdict(found)}, indent=1))
    else:
        click.echo("\n".join(described(found, first, second)))
    return 0 if found.equal else 1


def compare(first: Path, second: Path) -> Comparison:
    """UserError: one is no run, or they have nothing in common that could be compared."""
    runs = [_opened(first), _opened(second)]
    events = [read_events(run.journal) for run in runs]
    found = Comparison(asked=_asked(runs[0], runs[1]))
    _compare_steps(_by_step(events[0], "step"), _by_step(events[1], "step"), found)
    hashes = [
        {step: event.values["arrays"] for step, event in _by_step(own, "hashed").items()}
        for own in events
    ]
    saved = [
        {int(path.name.removeprefix("step-")): path for path in checkpoints(run.checkpoints)}
        for run in runs
    ]
    both = sorted(hashes[0].keys() & hashes[1].keys())
    found.hashes = len(both)
    for step in both:
        if _compare_arrays(step, hashes[0][step], hashes[1][step], found):
            break
    else:
        _compare_saved(saved[0], saved[1], found)
    if not (found.steps or found.hashes or found.saved):
        raise UserError(
            f"{first} and {second} have no step in common",
            "runs that trained the same steps",
            str(second),
        )
    return found


def _opened(path: Path) -> Run:
    run = Run(path)
    if not run.exists() or not run.journal.is_file():
        inside = f"; {path.parent.parent} may be the run" if (path / MANIFEST).is_file() else ""
        raise UserError(
            f"{path} is no run directory",
            f"a directory with plan.json and journal.jsonl in it{inside}",
            str(path),
        )
    return run


def _by_step(events: Sequence[Event], kind: str) -> dict[int, Event]:
    """The last of each: what came before a resume is void."""
    return {event.step: event for event in events if event.kind == kind}


def _asked(first: Run, second: Run) -> dict[str, tuple[Any, Any]]:
    """What was asked for otherwise, and what the plans made of it, where it bears on results."""
    sides = []
    for run in (first, second):
        plan = run.read_plan()
        values = {
            key: value
            for key, value in flatten(run.read_config(Tasks())).items()
            if not key.startswith(_ASIDE)
        }
        fixed = {
            "slot": plan.micro_batch_size,
            "seed": plan.fixed.seed,
            "threads": plan.threads if plan.engine == "torch" else None,
            "data": plan.fixed.fingerprint,
            "made on": plan.fixed.computed_on,
        }
        sides.append(
            {
                **values,
                **{f"plan: {name}": value for name, value in fixed.items()},
                "plan: batch": plan.global_batch_size,
            }
        )
    return {
        key: (sides[0].get(key), sides[1].get(key))
        for key in {**sides[0], **sides[1]}
        if sides[0].get(key) != sides[1].get(key)
    }


def _compare_steps(
    first: Mapping[int, Event], second: Mapping[int, Event], found: Comparison
) -> None:
    both = sorted(first.keys() & second.keys())
    found.steps = len(both)
    for step in both:
        for name in _FIGURES:
            ours, theirs = first[step].values.get(name), second[step].values.get(name)
            if ours != theirs:
                found.figure = Difference(step, name, ours, theirs)
                return


def _compare_arrays(
    step: int, first: Mapping[str, str], second: Mapping[str, str], found: Comparison
) -> bool:
    """Whether any differs. The model's are named first."""
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    found.of = len({**first, **second})
    if not names:
        found.equal_until = step
        return False
    found.arrays, found.arrays_at = (
        sorted(names, key=lambda name: not name.startswith("model/")),
        step,
    )
    return True


def _compare_saved(
    first: Mapping[int, Path], second: Mapping[int, Path], found: Comparison
) -> None:
    """The arrays of the last step at which both saved."""
    both = sorted(first.keys() & second.keys())
    if not both:
        return
    step = both[-1]
    try:
        arrays = [
            {name: digest(array).hex() for name, array in load(side[step]).arrays.items()}
            for side in (first, second)
        ]
    except (OSError, SamecurveError) as error:
        raise UserError(
            f"{name_of(step)} can't be read: {error}",
            "a run that does not take its older checkpoints away meanwhile",
            str(first[step].parent),
        ) from None
    found.saved = step
    _compare_arrays(step, arrays[0], arrays[1], found)


def described(found: Comparison, first: Path, second: Path) -> list[str]:
    lines = [
        f"asked  {key}: {_short(ours)} against {_short(theirs)}"
        for key, (ours, theirs) in found.asked.items()
    ]
    held = [
        f"{found.steps} steps (loss, grad_norm)",
        f"{found.hashes} hashes of the state",
        *([f"the arrays saved at step {found.saved}"] if found.saved is not None else []),
    ]
    if found.equal:
        return [
            *lines,
            f"equal  {first} and {second}, to the last bit: {', '.join(held)}",
            *_advice(found),
        ]
    # step; within it the loss, which the arrays come after, then those, which say more than the
    # norm of all gradients; the line
    parted = []
    if found.figure:
        at = found.figure
        parted.append(
            (
                at.step,
                0 if at.what == "loss" else 2,
                (
                    f"differ step {at.step}: {at.what} {_full(at.first)} against"
                    f" {_full(at.second)}{_apart(at)}; equal in every step before"
                ),
            )
        )
    if found.arrays and found.arrays_at is not None:
        before = f"; all equal at step {found.equal_until}" if found.equal_until is not None else ""
        more = f" and {len(found.arrays) - _SHOWN} more" if len(found.arrays) > _SHOWN else ""
        parted.append(
            (
                found.arrays_at,
                1,
                (
                    f"differ step {found.arrays_at}: {', '.join(found.arrays[:_SHOWN])}{more}, of"
                    f" {found.of} arrays{before}"
                ),
            )
        )
    elif found.equal_until is not None:
        parted.append(
            (
                found.equal_until,
                1,
                (
                    f"equal  step {found.equal_until}: all arrays, at the last step that both"
                    " hashed or saved"
                ),
            )
        )
    return [*lines, *(line for *_, line in sorted(parted)), *_advice(found)]


def _advice(found: Comparison) -> list[str]:
    if found.hashes or found.equal:
        return (
            []
            if found.hashes
            else ["note   neither was hashed: --exact writes hashes of the state into the journal"]
        )
    return [
        "note   no hash in common: --exact --set train.hash_every=1 in both runs shows the first"
        " array that differs"
    ]


def _apart(figure: Difference) -> str:
    if not all(isinstance(value, int | float) for value in (figure.first, figure.second)):
        return ""
    return (
        " (relative"
        f" {abs(figure.first - figure.second) / max(abs(figure.first), abs(figure.second), np.finfo(np.float64).tiny):.1e})"
    )


def _full(value: Any) -> str:
    return "not finite" if value is None else repr(value)


def _short(value: Any) -> str:
    text = "(none)" if value is None else str(value)
    return text if len(text) <= 48 else f"{text[:45]}..."

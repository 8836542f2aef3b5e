"""`samecurve compare-runs A B`: are two runs equal to the last bit, and if not, where do they part?

The comparison reads files of runs: every step's loss and gradient norm in full precision, hashes of
the state's arrays (train.exact), and the arrays of the last step at which both runs saved. Nothing
is trained, and live runs may be compared.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from samecurve.checkpoint.format import Arrays, verify
from samecurve.checkpoint.manifest import MANIFEST, CorruptCheckpointError
from samecurve.checkpoint.store import checkpoints
from samecurve.core.events import Event
from samecurve.core.weights import digest
from samecurve.errors import UserError
from samecurve.observe.journal import read_events
from samecurve.run.directory.run_directory import Run
from samecurve.tasks.user_class.class_place import identity_of
from samecurve.terminal import echo
from samecurve.units import some

_METRICS = ("loss", "grad_norm")
# config keys that affect no result
_NEUTRAL = (
    "devices.",
    "train.hash_every",
    "train.log_every",
    "train.eval_every",
    "train.save_every",
    "train.sample_every",
    "train.keep",
    "data.prefetch",
)
_MAX_NAMES = 6  # most arrays that are named
# names in --json, which stay the same
_JSON_KEYS = {"plan: microbatch": "plan: slot", "plan: computed on": "plan: made on"}


@dataclass(frozen=True)
class Difference:
    """The first metric in which two runs differ."""

    step: int
    what: str  # loss or grad_norm
    first: float | None
    second: float | None


@dataclass
class Comparison:
    """A comparison of two runs: common steps, and where the runs diverge."""

    settings: dict[str, tuple[Any, Any]]  # differences of configs and plans
    steps: int = 0  # compared
    hashes: int = 0  # compared
    saved: int | None = None  # the step whose saved arrays were compared
    metric: Difference | None = None
    arrays: list[str] = field(default_factory=list)  # that differ at the step arrays_at
    arrays_at: int | None = None  # the step of that hash or save
    num_arrays: int = 0
    equal_until: int | None = None  # the last equal hash or save before that step

    @property
    def equal(self) -> bool:
        return self.metric is None and not self.arrays

    def to_json(self) -> dict[str, Any]:
        return {
            "equal": self.equal,
            "steps": self.steps,
            "hashes": self.hashes,
            "saved": self.saved,
            "asked": {_JSON_KEYS.get(key, key): pair for key, pair in self.settings.items()},
            "figure": asdict(self.metric) if self.metric else None,
            "arrays": self.arrays,
            "arrays_at": self.arrays_at,
            "of": self.num_arrays,
            "equal_until": self.equal_until,
        }


def compare_runs(first: Path, second: Path, *, as_json: bool) -> int:
    """Print the comparison of two runs.

    Returns the exit code: 0 if everything that both runs have is equal, else 1.
    """
    comparison = compare(first, second)
    if as_json:
        echo(json.dumps(comparison.to_json(), indent=1))
    else:
        echo("\n".join(describe_comparison(comparison, first, second)))
    return 0 if comparison.equal else 1


def compare(first: Path, second: Path) -> Comparison:
    """Compare two runs. UserError: one is no run, or they have nothing in common."""
    runs = [_open_run(first), _open_run(second)]
    events = [read_events(run.journal) for run in runs]
    comparison = Comparison(_different_settings(*runs))
    _compare_steps(comparison, *(_by_step(each, "step") for each in events))
    _compare_hashes(comparison, *(_by_step(each, "hashed") for each in events))
    if not comparison.arrays:
        _compare_saved(comparison, *(_checkpoints_by_step(run) for run in runs))
    if not (comparison.steps or comparison.hashes or comparison.saved):
        raise UserError(
            f"{first} and {second} have no step in common",
            "compare runs that trained the same steps",
            str(second),
        )
    return comparison


def _open_run(path: Path) -> Run:
    run = Run(path)
    run.check(str(path))
    if not run.exists() or not run.journal.is_file():
        remedy = "a directory with plan.json and journal.jsonl in it"
        if (path / MANIFEST).is_file():
            remedy += f"; {path.parent.parent} may be the run"
        raise UserError(f"{path} is no run directory", remedy, str(path))
    return run


def _by_step(events: Sequence[Event], kind: str) -> dict[int, Event]:
    """The last event of each step: earlier ones were made void by a resume."""
    return {event.step: event for event in events if event.kind == kind}


def _checkpoints_by_step(run: Run) -> dict[int, Path]:
    return {int(path.name.removeprefix("step-")): path for path in checkpoints(run.checkpoints)}


def _different_settings(first: Run, second: Run) -> dict[str, tuple[Any, Any]]:
    """Settings that differ in the configs or plans and can change results.

    A setting that only one run has counts for model and data.
    """
    settings, others = _settings(first), _settings(second)
    in_both = settings.keys() & others.keys()
    return {
        key: (settings.get(key), others.get(key))
        for key in {**settings, **others}
        if settings.get(key) != others.get(key)
        and (key in in_both or key.startswith(("model.", "data.")))
    }


def _settings(run: Run) -> dict[str, Any]:
    plan = run.read_plan()
    config = _dotted(run.read_document().value)
    return {
        **{key: value for key, value in config.items() if not key.startswith(_NEUTRAL)},
        "task": identity_of(str(config.get("task", "language"))),
        "plan: microbatch": plan.batch.micro_batch_size,
        "plan: seed": plan.fixed.seed,
        "plan: threads": plan.compute.threads if plan.layout.engine == "torch" else None,
        "plan: data": plan.fixed.fingerprint,
        "plan: computed on": plan.fixed.computed_on,
        "plan: batch": plan.batch.global_batch_size,
    }


def _dotted(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A config with dotted keys. It is compared as it is, without validation."""
    values: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, dict):
            values |= _dotted(value, f"{prefix}{key}.")
        else:
            values[prefix + key] = value
    return values


def _compare_steps(
    comparison: Comparison, first: Mapping[int, Event], second: Mapping[int, Event]
) -> None:
    common = sorted(first.keys() & second.keys())
    comparison.steps = len(common)
    for step in common:
        for name in _METRICS:
            value, other = first[step].values.get(name), second[step].values.get(name)
            if value != other:
                comparison.metric = Difference(step, name, value, other)
                return


def _compare_hashes(
    comparison: Comparison, first: Mapping[int, Event], second: Mapping[int, Event]
) -> None:
    """Compare hashes up to the first step at which an array differs."""
    common = sorted(
        step
        for step in first.keys() & second.keys()
        if all(isinstance(each[step].values.get("arrays"), dict) for each in (first, second))
    )
    comparison.hashes = len(common)
    for step in common:
        _compare_arrays(
            comparison, step, first[step].values["arrays"], second[step].values["arrays"]
        )
        if comparison.arrays:
            return


def _compare_arrays(
    comparison: Comparison, step: int, first: Mapping[str, str], second: Mapping[str, str]
) -> None:
    """Compare arrays by their digests. The model's arrays are named first."""
    names = {**first, **second}
    comparison.num_arrays = len(names)
    unequal = [name for name in names if first.get(name) != second.get(name)]
    if unequal:
        comparison.arrays = sorted(unequal, key=lambda name: not name.startswith("model/"))
        comparison.arrays_at = step
    else:
        comparison.equal_until = step


def _compare_saved(
    comparison: Comparison, first: Mapping[int, Path], second: Mapping[int, Path]
) -> None:
    """Compare the arrays of the last step at which both runs saved."""
    common = sorted(first.keys() & second.keys())
    if not common:
        return
    step = common[-1]
    comparison.saved = step
    _compare_arrays(comparison, step, _digests(first[step]), _digests(second[step]))


def _digests(checkpoint: Path) -> dict[str, str]:
    """Digests of a checkpoint's arrays. UserError: its files are damaged or gone."""
    try:
        arrays = Arrays(checkpoint, verify(checkpoint))
        return {name: digest(array).hex() for name, array in arrays.items()}
    except (OSError, CorruptCheckpointError) as error:
        raise UserError(
            f"{checkpoint.name} can't be read: {error}",
            "compare runs with complete checkpoints; a live run removes old ones (train.keep)",
            str(checkpoint),
        ) from None


def describe_comparison(comparison: Comparison, first: Path, second: Path) -> list[str]:
    """The lines that are printed. first, second: the runs' directories."""
    lines = [
        f"asked  {key}: {_short(value)} against {_short(other)}"
        for key, (value, other) in comparison.settings.items()
    ]
    if comparison.equal:
        compared = [
            f"{comparison.steps} steps (loss, grad_norm)",
            f"{comparison.hashes} hashes of the state",
        ]
        if comparison.saved is not None:
            compared.append(f"the arrays saved at step {comparison.saved}")
        lines.append(f"equal  {first} and {second}, to the last bit: {', '.join(compared)}")
    else:
        lines += _difference_lines(comparison)
    return [*lines, *_advice(comparison)]


def _difference_lines(comparison: Comparison) -> list[str]:
    """Differences by step; within a step the loss, then the arrays, then the norm.

    The arrays stand before the norm, since they say more than the norm of all gradients.
    """
    differences: list[tuple[int, int, str]] = []  # step, order within it, line
    if metric := comparison.metric:
        line = (
            f"differ step {metric.step}: {metric.what} {_full(metric.first)} against"
            f" {_full(metric.second)}{_relative(metric)}; equal in every step before"
        )
        place = 0 if metric.what == "loss" else 2
        differences.append((metric.step, place, line))
    until = comparison.equal_until
    if comparison.arrays and comparison.arrays_at is not None:
        names = some(comparison.arrays, _MAX_NAMES)
        line = f"differ step {comparison.arrays_at}: {names}, of {comparison.num_arrays} arrays"
        if until is not None:
            line += f"; all equal at step {until}"
        differences.append((comparison.arrays_at, 1, line))
    elif until is not None:
        line = f"equal  step {until}: all arrays, at the last step that both hashed or saved"
        differences.append((until, 1, line))
    return [line for _, _, line in sorted(differences)]


def _advice(comparison: Comparison) -> list[str]:
    if comparison.hashes:
        return []
    if comparison.equal:
        return ["note   neither was hashed: --exact writes hashes of the state into the journal"]
    return [
        "note   no hash in common: --exact --set train.hash_every=1 in both runs shows the first"
        " array that differs"
    ]


def _relative(metric: Difference) -> str:
    if metric.first is None or metric.second is None:
        return ""
    largest = max(abs(metric.first), abs(metric.second), np.finfo(np.float64).tiny)
    return f" (relative {abs(metric.first - metric.second) / largest:.1e})"


def _full(value: float | None) -> str:
    return "not finite" if value is None else repr(value)


def _short(value: object) -> str:
    text = "(none)" if value is None else str(value)
    if len(text) > 48:
        return f"{text[:45]}..."
    return text

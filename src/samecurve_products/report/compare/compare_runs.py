"""Compare two runs: are they equal to the last bit, and if not, where do they part?

The comparison reads files of runs: every step's loss and gradient norm in full precision, hashes of
the state's arrays (train.hash_every), and the arrays of the last step at which both runs saved.
Nothing is trained, and live runs may be compared.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.checkpoint import MANIFEST
from samecurve.core.feature_list import listed_with
from samecurve.observe import events_of_file
from samecurve.seam import Run, SamecurveError, UserError, checkpoints, some
from samecurve.tasks.user_class import identity_of
from samecurve_products.report.compare.compare_arrays import ArrayDifference, compare_saved_arrays
from samecurve_products.report.record import RunRecord
from samecurve_products.report.steps import number

# steps, and below each the metrics; nan: not finite
StepMetrics = tuple[NDArray[np.int64], NDArray[np.float64]]

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
    distances: list[ArrayDifference] = field(default_factory=list)  # of saved arrays, as `arrays`
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
            "distances": {one.name: _finite(one.distance) for one in self.distances},
            "equal_until": self.equal_until,
        }


def compare(first: Path, second: Path) -> Comparison:
    """Compare two runs. UserError: one is no run, or they have nothing in common."""
    runs = [_open_run(first), _open_run(second)]
    journals = [_read_journal(run.journal) for run in runs]
    comparison = Comparison(_different_settings(*runs))
    _compare_steps(comparison, *(journal.steps for journal in journals))
    _compare_hashes(comparison, *(journal.hashes for journal in journals))
    if not comparison.arrays:
        _compare_saved(comparison, *(_checkpoints_by_step(run) for run in runs))
    if not (comparison.steps or comparison.hashes or comparison.saved):
        raise UserError(
            f"{first} and {second} have no step in common",
            "compare runs that trained the same steps",
            str(second),
        )
    return comparison


def bits_lines(records: Sequence[RunRecord]) -> list[str]:
    """Whether runs are equal to the last bit: the first one against each other.

    []: a run's bits follow its devices, or there is only one run.
    """
    first, *others = records
    if not all(record.plan_json.get("exact") for record in records):
        return []
    lines = []
    for other in others:
        directories = first.directory, other.directory
        try:
            lines += describe_comparison(compare(*directories), *directories)
        except SamecurveError as error:
            lines.append(f"note   {error.cause}")
    return lines


def _open_run(path: Path) -> Run:
    run = Run(path)
    run.check(str(path))
    if not run.exists() or not run.journal.is_file():
        remedy = "a directory with plan.json and journal.jsonl in it"
        if (path / MANIFEST).is_file():
            remedy += f"; {path.parent.parent} may be the run"
        raise UserError(f"{path} is no run directory", remedy, str(path))
    return run


@dataclass
class _Journal:
    """The values by which two journals are compared, without what a resume made void."""

    steps: StepMetrics
    hashes: dict[int, Mapping[str, str]]  # digests of arrays, by step


def _read_journal(path: Path) -> _Journal:
    """Read the steps' metrics in full precision, 24 bytes a step."""
    steps, metrics = array("q"), [array("d") for _ in _METRICS]
    hashes: dict[int, Mapping[str, str]] = {}
    for event in events_of_file(path):
        if event.kind == "step":
            steps.append(event.step)
            for name, column in zip(_METRICS, metrics, strict=True):
                column.append(number(event.values.get(name)))
        elif event.kind == "hashed" and isinstance(event.values.get("arrays"), dict):
            hashes[event.step] = event.values["arrays"]
        elif event.kind == "resumed":
            while steps and steps[-1] > event.step:
                steps.pop()
                for column in metrics:
                    column.pop()
            hashes = {step: arrays for step, arrays in hashes.items() if step <= event.step}
    # backwards: of a step that is there twice the last one is compared
    return _Journal((np.array(steps)[::-1], np.array(metrics)[:, ::-1]), hashes)


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
    watchers = [row for row in listed_with(plan.features) if not row.changes_results]
    neutral = (*_NEUTRAL, *(key for row in watchers for key in row.keys))
    return {
        **{key: value for key, value in config.items() if not key.startswith(neutral)},
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


def _compare_steps(comparison: Comparison, first: StepMetrics, second: StepMetrics) -> None:
    common, places, others = np.intersect1d(first[0], second[0], return_indices=True)
    comparison.steps = len(common)
    values, other_values = first[1][:, places], second[1][:, others]
    unequal = (values != other_values) & ~(np.isnan(values) & np.isnan(other_values))
    if not unequal.any():
        return
    at = int(unequal.any(axis=0).argmax())
    metric = int(unequal[:, at].argmax())
    value, other = (
        None if np.isnan(each[metric, at]) else float(each[metric, at])
        for each in (values, other_values)
    )
    comparison.metric = Difference(int(common[at]), _METRICS[metric], value, other)


def _compare_hashes(
    comparison: Comparison,
    first: Mapping[int, Mapping[str, str]],
    second: Mapping[int, Mapping[str, str]],
) -> None:
    """Compare hashes up to the first step at which an array differs."""
    common = sorted(first.keys() & second.keys())
    comparison.hashes = len(common)
    for step in common:
        _compare_arrays(comparison, step, first[step], second[step])
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
    different, comparison.num_arrays = compare_saved_arrays(first[step], second[step])
    if different:
        comparison.arrays = [one.name for one in different]
        comparison.distances, comparison.arrays_at = different, step
    else:
        comparison.equal_until = step


def _finite(distance: float | None) -> float | None:
    """The distance for JSON, which has no infinities."""
    return distance if distance is not None and np.isfinite(distance) else None


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
        names = some([str(one) for one in comparison.distances] or comparison.arrays, _MAX_NAMES)
        line = f"differ step {comparison.arrays_at}: {names}, of {comparison.num_arrays} arrays"
        furthest = _furthest(comparison.distances)
        if furthest and furthest not in comparison.distances[:_MAX_NAMES]:
            line += f", most of all {furthest}"
        if until is not None:
            line += f"; all equal at step {until}"
        differences.append((comparison.arrays_at, 1, line))
    elif until is not None:
        line = f"equal  step {until}: all arrays, at the last step that both hashed or saved"
        differences.append((until, 1, line))
    return [line for _, _, line in sorted(differences)]


def _furthest(distances: Sequence[ArrayDifference]) -> ArrayDifference | None:
    with_numbers = [one for one in distances if one.distance is not None]
    return max(with_numbers, key=lambda one: one.distance or 0.0, default=None)


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

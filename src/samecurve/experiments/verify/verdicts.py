"""Compare each layout with one device: how much results differ, and where they diverge."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.protocols import StoredArrays
from samecurve.core.weights import combined, digest
from samecurve.errors import UserError
from samecurve.experiments.layout_runner import LayoutRunner, Trajectory
from samecurve.experiments.layouts import Layout
from samecurve.launch.pool import JobFailedError
from samecurve.units import first_and_count, some

TOLERANCE = {"f64": 1e-10, "f32": 1e-5}  # relative
_ROUNDING = 1e-12  # share of the largest gradient; smaller gradients are rounding noise


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Largest relative differences of a layout to the reference; its fields are --json's keys."""

    layout: str
    loss: float
    grad_norm: float
    parameters: float
    worst: float
    first_step: int | None  # first step whose loss or norm exceeds the tolerance
    verdict: str  # PASS, FAIL; FAILED: the layout did not finish
    culprit: str  # what is wrong, and where
    seconds: float
    hash: str = ""  # of the last state


def compare_layouts(
    runner: LayoutRunner, layouts: Sequence[Layout], tolerance: float
) -> Iterator[Verdict]:
    """Compare layouts with one device, and give one verdict after the other.

    tolerance: relative; 0: every bit counts

    UserError, before the first verdict: a layout is not possible, or the loss does not add up.
    """
    layouts = list(dict.fromkeys(layouts))
    for layout in layouts:
        _check_layout(runner, layout)
    for layout in layouts:
        reference = _reference(runner, layout)
        began = time.perf_counter()
        try:
            trajectory = runner.trajectory(layout)
        except JobFailedError as error:
            yield _failed(layout, error, time.perf_counter() - began)
            continue
        seconds = time.perf_counter() - began
        yield judge(str(layout), trajectory, reference, tolerance=tolerance, seconds=seconds)


def _reference(runner: LayoutRunner, layout: Layout) -> Trajectory:
    """Train the reference. UserError: the plan on one device is refused."""
    try:
        return runner.reference(layout.engine)
    except JobFailedError as error:
        raise error.refusal or error from None


def _check_layout(runner: LayoutRunner, layout: Layout) -> None:
    """Check a layout. UserError: it can't be planned, or has more legs than steps."""
    for leg in layout.legs:
        if runner.same_bits and leg.engine != layout.engine:
            raise UserError(
                f"layout {layout}: the two engines compute with different kernels, so their bits"
                " differ",
                "layouts of one engine with --bits, or leave --bits out",
                "--layouts",
            )
        try:
            runner.plan(leg)
        except UserError as error:
            raise UserError(f"layout {layout}: {error.cause}", error.remedy, error.where) from None
    count = len(layout.legs)
    if count > runner.steps:
        raise UserError(
            f"layout {layout} changes {count - 1} times in {runner.steps} steps",
            f"--steps {count} or more",
            "--steps",
        )


def _failed(layout: Layout, error: JobFailedError, seconds: float) -> Verdict:
    return Verdict(
        layout=str(layout),
        loss=np.inf,
        grad_norm=np.inf,
        parameters=np.inf,
        worst=np.inf,
        first_step=None,
        verdict="FAILED",
        culprit=f"{error.cause}. Remedy: {error.remedy}" if error.remedy else error.cause,
        seconds=seconds,
    )


def judge(
    layout: str, trajectory: Trajectory, reference: Trajectory, *, tolerance: float, seconds: float
) -> Verdict:
    losses = _relative_differences(trajectory.losses, reference.losses)
    norms = _relative_differences(trajectory.norms, reference.norms)
    parameters = _distances(
        {
            name.removeprefix("model/"): (trajectory.arrays[name], reference.arrays[name])
            for name in reference.arrays
            if name.startswith("model/")
        }
    )
    largest = max(losses), max(norms), max(parameters.values())
    worst = max(largest)
    steps = zip(losses, norms, strict=True)
    exceeding = [step for step, pair in enumerate(steps, start=1) if max(pair) > tolerance]
    first_step = exceeding[0] if exceeding else None
    unequal = [] if tolerance else _unequal_arrays(trajectory.arrays, reference.arrays)
    in_float32 = trajectory.in_float32 or reference.in_float32
    is_rounding = bool(tolerance and in_float32) and worst <= TOLERANCE["f32"]
    passed = is_rounding or (worst <= tolerance and not unequal)
    if worst <= tolerance:
        culprit = f"the last state alone differs: {first_and_count(unequal)}" if unequal else ""
    elif is_rounding:
        culprit = f"it differs by no more than float32 rounds: {in_float32}; or --dtype f32"
    elif losses[0] > tolerance:
        culprit = (
            "step 1: the loss differs before any update: other samples, other weights of them, or"
            " another start"
        )
    else:
        gradient = {
            name: (value, reference.gradient[name]) for name, value in trajectory.gradient.items()
        }
        culprit = _first_culprit(first_step, _distances(gradient), parameters, tolerance)
        culprit += _without_gradient(parameters, reference.gradient, tolerance)
    return Verdict(
        layout=layout,
        loss=largest[0],
        grad_norm=largest[1],
        parameters=largest[2],
        worst=worst,
        first_step=first_step,
        verdict="PASS" if passed else "FAIL",
        culprit=culprit,
        seconds=seconds,
        hash=combined(_digests(trajectory.arrays)),
    )


def _first_culprit(
    first_step: int | None,
    gradient: Mapping[str, float],
    parameters: Mapping[str, float],
    tolerance: float,
) -> str:
    """The stage at which layouts diverge after an equal first loss, and the worst parameters."""
    if any(distance > tolerance for distance in gradient.values()):
        furthest = _furthest(gradient, tolerance)
        return f"step 1: the loss is equal, the gradient is not: {furthest}"
    where = f"step {first_step}" if first_step else "the last step"
    furthest = _furthest(parameters, tolerance)
    return f"{where}: the first loss and gradient are equal; what came after is not: {furthest}"


def _without_gradient(
    parameters: Mapping[str, float], gradient: Mapping[str, NDArray[Any]], tolerance: float
) -> str:
    """A remark, if all trained parameters that differ have gradients of mere rounding noise; else
    ''. Buffers and copies of parameters, which have no gradient, may follow them.

    gradient: gradients of the reference's first step
    """
    differing = [name for name, distance in parameters.items() if not distance <= tolerance]
    off = [name for name in differing if name in gradient]
    if not off:
        return ""
    norms = {name: float(np.linalg.norm(array)) for name, array in gradient.items()}
    bound = _ROUNDING * max(norms.values())
    if not 0 < max(norms[name] for name in off) <= bound:
        return ""
    return (
        ". Their gradient is rounding alone, which AdamW makes whole steps of: the loss does not"
        " depend on them (a bias before BatchNorm does nothing: bias=False)"
    ) + (", and running means and averages follow them" if len(off) < len(differing) else "")


def _digests(arrays: StoredArrays) -> dict[str, str]:
    return {name: digest(array).hex() for name, array in arrays.items()}


def _unequal_arrays(arrays: StoredArrays, expected: StoredArrays) -> list[str]:
    """Arrays of a state, optimizer state included, that differ in at least one bit."""
    digests, expected_digests = _digests(arrays), _digests(expected)
    names = {**digests, **expected_digests}
    return sorted(name for name in names if digests.get(name) != expected_digests.get(name))


def _furthest(distances: Mapping[str, float], tolerance: float) -> str:
    """The parameters that differ most, and the number of parameters that differ."""
    off = sorted(
        (name for name, distance in distances.items() if not distance <= tolerance),
        key=lambda name: -np.nan_to_num(distances[name], nan=np.inf),
    )
    names = some([f"{name} (by {distances[name]:.1e})" for name in off], 3)
    return f"{names}, of {len(distances)} parameters"


def _relative_differences(
    values: Sequence[float | None], expected: Sequence[float | None]
) -> list[float]:
    """Relative differences by step. A step that one side lacks (None) differs infinitely."""
    return [_relative_difference(*pair) for pair in zip(values, expected, strict=True)]


def _relative_difference(value: float | None, expected: float | None) -> float:
    if value == expected:
        return 0.0
    if value is None or expected is None:
        return np.inf
    return _comparable(abs(value - expected) / max(abs(expected), 1e-300))


def _distances(pairs: Mapping[str, tuple[Any, Any]]) -> dict[str, float]:
    """The norm of each array's difference, relative to the norm of all expected arrays.

    It is not relative to the array itself: the gradient of a bias before a BatchNorm is mere
    rounding noise, which AdamW still turns into steps.
    """
    distances = {}
    with np.errstate(invalid="ignore"):  # equal infinities of a mask
        for name, (array, expected) in pairs.items():
            difference = np.where(array == expected, 0.0, array - expected)
            distances[name] = float(np.linalg.norm(difference.ravel()))
    squares = 0.0
    for _, expected in pairs.values():
        finite = expected[np.isfinite(expected)]
        squares += float(np.sum(np.square(finite, dtype=np.float64)))
    scale = float(np.sqrt(squares)) or 1.0
    return {name: _comparable(distance / scale) for name, distance in distances.items()}


def _comparable(distance: float) -> float:
    """The value with infinity in place of NaN, which max() would ignore."""
    return float("inf") if np.isnan(distance) else distance

"""How fast a model carries rounding on: two runs on one device, of which one begins with the last
digit of one weight changed. Layouts round in other ways than one device, so their curves diverge as
fast, unless every bit is kept.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.checkpoint import MANIFEST, name_of, read_manifest
from samecurve.checkpoint.format import load, make_manifest, write_pieces
from samecurve.core.protocols import ArrayShard
from samecurve.core.system import write_json
from samecurve.errors import ASK_SAME_BITS, UserError
from samecurve.experiments.layout_runner import LayoutRunner
from samecurve.observe import read_events
from samecurve.run.directory import Run

FAR = 1e-3  # relative: by so much of the loss curves have diverged
_OF_A_MANIFEST = {"version", "files", "arrays", "hash"}  # what make_manifest() adds


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """The result; its fields are --json's keys.

    weight: whose last digit was changed, after the first step
    carried: the first step whose loss differs by more than FAR, relative; None: no step does
    difference: of the loss in that step, or the largest of the last ten steps
    """

    dtype: str
    weight: str
    steps: int
    carried: int | None
    difference: float
    seconds: float


def measure_rounding(runner: LayoutRunner, steps: int) -> Rounding:
    """Train both runs, for so many steps, or as many as the run has.

    runner: of the config in its own precision

    UserError: too few steps, or no weight whose last digit could be changed.
    """
    began, steps = time.perf_counter(), min(steps, runner.most_steps)
    if steps < 2:
        raise UserError(
            "--rounding compares the steps after the first one, and there is none",
            "--rounding N, or a run of several steps",
            "--rounding",
        )
    as_it_is = runner.run_unbroken("as-it-is", steps)
    first = as_it_is.checkpoints / name_of(1)
    norm = _values(as_it_is, "grad_norm")[0]
    weight, place = _choose_weight(first, runner.first_gradient(as_it_is, norm))
    nudged = as_it_is.home.with_name("nudged-start") / name_of(1)
    _write_nudged(first, nudged, weight, place)
    other = runner.run_unbroken("nudged", steps, nudged)
    pairs = zip(_values(as_it_is, "loss")[1:], _values(other, "loss"), strict=True)
    differences = [_difference(*pair) for pair in pairs]
    far = (step for step, difference in enumerate(differences, 2) if not difference <= FAR)
    carried = next(far, None)
    index = ", ".join(map(str, place))
    return Rounding(
        dtype=runner.config.train.precision,
        weight=f"{weight}[{index}]" if index else weight,
        steps=steps,
        carried=carried,
        difference=differences[carried - 2] if carried else max(differences[-10:]),
        seconds=time.perf_counter() - began,
    )


def rounding_line(rounding: Rounding) -> str:
    what = f"the last digit of {rounding.weight} in {rounding.dtype}"
    if rounding.carried is None:
        return (
            f"round  {what} does not change the loss by {FAR:g} within {rounding.steps} steps: by"
            f" {rounding.difference:.1e} then"
        )
    return (
        f"round  {what} changes the loss by {rounding.difference:.1e} at step {rounding.carried}:"
        f" runs in other layouts part as fast; {ASK_SAME_BITS} keeps every bit"
    )


def rounding_json(rounding: Rounding) -> dict[str, Any]:
    values = asdict(rounding)
    return {
        **values,
        "difference": rounding.difference if np.isfinite(rounding.difference) else None,
    }


def _values(run: Run, name: str) -> list[float | None]:
    steps = (event for event in read_events(run.journal) if event.kind == "step")
    return [event.values[name] for event in steps]


def _difference(value: float | None, expected: float | None) -> float:
    """Relative; a loss that is finite on one side only differs infinitely."""
    if value == expected:
        return 0.0
    if value is None or expected is None:
        return np.inf
    return abs(value - expected) / max(abs(expected), 1e-300)


def _choose_weight(
    checkpoint: Path, gradient: Mapping[str, NDArray[Any]]
) -> tuple[str, tuple[int, ...]]:
    """A trained number of the model on which the loss depends: that with the largest gradient in
    the first step; where the optimizer's state does not tell it, the largest number of all.

    UserError: no array has floating-point numbers.
    """
    arrays = load(checkpoint).arrays
    largest: tuple[float, str, tuple[int, ...]] = (0.0, "", ())
    for name, values in arrays.items():
        parameter = name.removeprefix("model/")
        is_trained = not gradient or parameter in gradient
        if not name.startswith("model/") or values.dtype.kind != "f" or not is_trained:
            continue
        judged = np.abs(gradient[parameter] if gradient else values)
        if judged.size and judged.shape == values.shape:
            place = np.unravel_index(int(judged.argmax()), judged.shape)
            largest = max(largest, (float(judged[place]), name, tuple(map(int, place))))
    if not largest[1]:
        raise UserError(
            "--rounding found no weight whose last digit it could change",
            "leave --rounding out",
            "--rounding",
        )
    return largest[1], largest[2]


def _write_nudged(source: Path, target: Path, name: str, place: tuple[int, ...]) -> None:
    """Write a checkpoint anew, with one number moved by one unit in its last place."""
    pieces, manifest = [], read_manifest(source)
    for each, array in load(source).arrays.items():
        values = np.array(array, order="C")
        if each == name:
            values[place] = np.nextafter(values[place], values.dtype.type(np.inf))
        dtype, shape = manifest["arrays"][each]["dtype"], values.shape
        pieces.append(ArrayShard(each, dtype, shape, (0,) * values.ndim, values))
    target.mkdir(parents=True)
    written = asdict(write_pieces(target / "nudged.safetensors", pieces))
    meta = {key: value for key, value in manifest.items() if key not in _OF_A_MANIFEST}
    write_json(target / MANIFEST, make_manifest(meta, [written]))

"""Verdicts on numbers: whether a loss adds up over samples. split_errors.py explains them to the
user.

The split check computes the loss of some samples all at once, once more, and in parts in reversed
order. Sums and weights are added over microbatches and devices and divided once, so a loss that
does not add up here gives another curve on another number of devices.

Tolerances are relative to the largest of the sums that are compared, and allow what rounding can
change. Adding in another order moves a sum by some units of its last digit, and a deep model by
some hundreds of them. The last digit is 1e-16 in float64 and 6e-8 in float32. Narrower formats
round each product to 4e-3 or 5e-4, but each row by itself, so that a sum over samples moves less
than a single number. Where the weights are kept in float32, the loss is computed in float32.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from samecurve.errors import UserError
from samecurve.units import join_words

Format = Literal["f64", "f32", "narrow"]
TOLERANCE: Mapping[Format, float] = {"f64": 1e-9, "f32": 1e-5, "narrow": 1e-2}
# A smaller difference in float32 may be rounding: float64 decides, where it can be computed.
DOUBTFUL = 1e-2
# the tolerance where float64 can't be computed
SURE: Mapping[Format, float] = {"f64": 1e-9, "f32": 1e-4, "narrow": 2e-2}
# The same for gradients, relative to the norm of all gradients. Any difference in float32 and below
# is doubtful.
GRADIENTS: Mapping[Format, float] = {"f64": 1e-9, "f32": 1e-4, "narrow": 5e-2}
SURE_GRADIENTS: Mapping[Format, float] = {"f64": 1e-9, "f32": 1e-2, "narrow": 0.1}

GRADIENT = "its gradient"  # among numbers by name, as "loss"
IN_FLOAT32 = "computes in float32 in an f64 run"  # a line says so where the loss shows it


def steps_tried(first: int, steps: int, steps_per_epoch: int) -> list[int]:
    """Later steps at which a loss that depends on the step is tried too: ever farther apart, with
    the first step of the next epoch and the last step of the run.

    first: the step at which the run begins; steps: of the whole run
    """
    distances = [4**power for power in range(steps.bit_length() // 2 + 1)]
    of_epoch = (first // steps_per_epoch + 1) * steps_per_epoch
    later = {*(first + distance for distance in distances), of_epoch, steps - 1}
    return sorted(step for step in later if first < step < steps)


class Trial(NamedTuple):
    """The loss of some samples, as numbers."""

    samples: int
    sum: float
    weight: float


def no_trial(rows: Sequence[int]) -> Trial:
    """The trial of a loss that can't be computed."""
    return Trial(len(rows), math.nan, math.nan)


def two_parts(rows: Sequence[int]) -> list[Sequence[int]]:
    """Two unequal parts in reversed order; a single row is not divided."""
    turned = list(reversed(rows))
    if len(turned) < 2:
        return [turned]
    cut = max(1, 3 * len(turned) // 8)
    return [turned[:cut], turned[cut:]]


def three_parts(rows: Sequence[int]) -> list[Sequence[int]]:
    """Two parts of one row each and the rest, in reversed order."""
    turned = list(reversed(rows))
    return [part for part in (turned[:1], turned[1:2], turned[2:]) if part]


class GradientNorms(NamedTuple):
    """Norms of one parameter's gradient.

    whole: of all samples
    difference: of the gradient of all samples minus the gradients of all parts
    parts: of each part
    """

    whole: float
    difference: float
    parts: Sequence[float]


Kind = Literal["repeat", "finite", "unweighted", "weight", "mean", "coupled", "gradient"]


@dataclass(frozen=True)
class Finding:
    """A loss or gradient that does not add up, or does not repeat.

    kind: "finite": the loss of a part is not a finite number; "unweighted": the weight is the same
        whatever is counted; "coupled": none of the other kinds
    text: the end of a sentence that begins with what was computed, with the numbers
    difference: relative to the largest of the numbers compared
    """

    kind: Kind
    text: str
    difference: float = math.inf


def compare_repeats(whole: Trial, again: Trial, tolerance: float) -> Finding | None:
    """Compare the losses of the same samples, computed twice; None: they agree."""
    off = relative_difference([whole.sum], [again.sum])
    difference = max(off, relative_difference([whole.weight], [again.weight]))
    if difference <= tolerance:
        return None
    what, first, second = "sum", whole.sum, again.sum
    if off <= tolerance:
        what, first, second = "weight", whole.weight, again.weight
    text = f"gives the {what} {_shown(first, second)} for the same {samples_text(whole.samples)}"
    return Finding("repeat", text, difference)


def compare_parts(whole: Trial, parts: Sequence[Trial], tolerance: float) -> Finding | None:
    """Compare the loss of all samples at once with the losses of its parts; None: it adds up, or
    the loss of all samples is not finite, so that there is nothing to compare.
    """
    if not _is_finite(whole):
        return None
    for part in parts:
        if not _is_finite(part):
            text = (
                f"is {number_text(whole.sum)} for {samples_text(whole.samples)}, and"
                f" {number_text(part.sum)} for {number_text(part.samples)} of them"
            )
            return Finding("finite", text)
    weights, sums = [part.weight for part in parts], [part.sum for part in parts]
    off = relative_difference([whole.weight], weights)
    if off > tolerance:
        return _wrong_weight(whole, parts, off, tolerance)
    off = relative_difference([whole.sum], sums)
    if off <= tolerance:
        return None
    factor = _factor_of_mean(whole, parts, max(tolerance, 1e-6))
    shown = _whole_and_parts(whole, parts, sums)
    if factor is not None:
        text = f"gives the sum {shown}: that is their mean, 1/{factor:g} of their sum"
        return Finding("mean", text, off)
    together = f"together {number_text(sum(sums))} ({_percent(off)} off)"
    return Finding("coupled", f"gives the sum {shown}, {together}", off)


def has_even_weights(trials: Sequence[Trial]) -> bool:
    """Whether each sample has the same weight, as far as parts show it."""
    each = [trial.weight / trial.samples for trial in trials]
    return all(math.isclose(one, each[0]) for one in each)


def rows_of_odd_weight(whole: Trial, alone: Sequence[Trial], tolerance: float) -> list[int]:
    """Numbers of the samples that may have another weight alone than beside others; none where the
    weights of all of them add up.

    alone: the loss of each sample by itself
    """
    weights = [trial.weight for trial in alone]
    odd = [at for at, trial in enumerate(alone) if not _is_finite(trial)]
    if odd or relative_difference([whole.weight], weights) <= tolerance:
        return odd if _is_finite(whole) else []
    return [at for at, weight in enumerate(weights) if weight == min(weights)]


def _is_finite(trial: Trial) -> bool:
    return math.isfinite(trial.sum) and math.isfinite(trial.weight)


def compare_gradients(
    whole: Trial, parts: Sequence[Trial], norms: Mapping[str, GradientNorms], tolerance: float
) -> Finding | None:
    """Compare the gradient of all samples with those of its parts; None: each parameter's gradient
    adds up, or a gradient is not finite.

    norms: by the parameter's name; the tolerance is relative to the norm over all parameters.
    """
    columns = [[n.whole for n in norms.values()]]
    columns += [[n.parts[at] for n in norms.values()] for at in range(len(parts))]
    largest = max(math.hypot(*column) for column in columns)
    off = {name: n.difference / largest for name, n in norms.items() if n.difference}
    if not math.isfinite(largest) or not off:
        return None
    name = max(off, key=lambda each: off[each])
    if off[name] <= tolerance:
        return None
    norm = norms[name]
    shown = _whole_and_parts(whole._replace(sum=norm.whole), parts, norm.parts)
    text = (
        f"adds up, and its gradient does not: that of {name} has the norm {shown}; the sum of these"
        f" is {_percent(off[name])} off"
    )
    return Finding("gradient", text, off[name])


def _wrong_weight(whole: Trial, parts: Sequence[Trial], off: float, tolerance: float) -> Finding:
    weights = [part.weight for part in parts]
    if all(relative_difference([whole.weight], [weight]) <= tolerance for weight in weights):
        of_each = _parts_alone(parts, as_for=True)
        text = f"gives weight {whole.weight:g} for {samples_text(whole.samples)} as for {of_each}"
        return Finding("unweighted", f"{text}: weights don't add up", off)
    shown = _whole_and_parts(whole._replace(sum=whole.weight), parts, weights)
    text = f"gives weight {shown}, together {number_text(sum(weights))}: weights don't add up"
    return Finding("weight", text, off)


def _factor_of_mean(whole: Trial, parts: Sequence[Trial], tolerance: float) -> float | None:
    """The factor by which the loss of all samples is too small, where it is the mean of the parts,
    weighted by their samples or by their weights; None: it is no such mean.
    """
    for sizes in ([part.samples for part in parts], [part.weight for part in parts]):
        total = math.fsum(sizes)
        if not total:
            continue
        mean = math.fsum(p.sum * size for p, size in zip(parts, sizes, strict=True)) / total
        if relative_difference([whole.sum], [mean]) <= tolerance:
            return total
    return None


def relative_difference(one: Sequence[float], others: Sequence[float]) -> float:
    """The difference of two totals, relative to the largest number in them; 0 if both are nan."""
    largest = max(map(abs, [*one, *others]))
    difference = abs(math.fsum(one) - math.fsum(others)) if math.isfinite(largest) else math.nan
    if math.isnan(difference):
        return 0.0 if str(one) == str(others) else math.inf
    return difference / largest if difference else 0.0


def _whole_and_parts(whole: Trial, parts: Sequence[Trial], numbers: Sequence[float]) -> str:
    alone = f"{_parts_alone(parts)} {join_words([number_text(number) for number in numbers])}"
    return f"{number_text(whole.sum)} for {samples_text(whole.samples)}, {alone}"


def _parts_alone(parts: Sequence[Trial], *, as_for: bool = False) -> str:
    if all(part.samples == 1 for part in parts):
        return "each of them alone" if as_for else "which alone give"
    sizes = join_words([str(part.samples) for part in parts])
    return f"{sizes} of them" if as_for else f"of which {sizes} give"


def samples_text(samples: int) -> str:
    return "two samples" if samples == 2 else f"{samples} sample{'' if samples == 1 else 's'}"


def _shown(first: float, second: float) -> str:
    """Show two numbers with as many digits as are needed to tell them apart."""
    for digits in (6, 10, 17):
        texts = f"{first:.{digits}g}", f"{second:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return " and ".join(texts)


def number_text(value: float) -> str:
    return f"{value:.6g}"


def _percent(difference: float) -> str:
    return f"{100 * difference:.2g} %"


def rounding_line(what: str) -> str:
    """A line for the user. what: a function that computes in float32, with its place"""
    return (
        f"{what} {IN_FLOAT32}: the loss agrees between numbers of devices to about 1e-6 there, as"
        " float32 rounds, not to 1e-12"
    )


def lines_or_refuse(
    error: UserError | None, *, repeats: bool, is_split: bool, allowed: bool
) -> list[str]:
    """Warnings for the user about a loss that does not add up and is trained nevertheless.

    error: what the split check found; None: nothing, so there are no warnings
    repeats: whether the same samples gave the same loss
    is_split: whether a step has several microbatches
    allowed: train.allow_coupled

    UserError: the error itself, where the loss must not be trained.
    """
    if error is None:
        return []
    if not allowed and (is_split or not repeats):
        raise error
    place = f"{error.where}: " if error.where else ""
    if allowed:
        return [f"{place}{error.cause}. Trained all the same (train.allow_coupled)"]
    return [
        f"{place}{error.cause}. One microbatch on one device trains it as it is; the result will"
        " not carry over to several"
    ]

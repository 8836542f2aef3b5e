"""Verdicts on losses that are taken whole and in parts, from numbers alone."""

import math

import pytest

from samecurve.data.feed import samples_tried
from samecurve.errors import UserError
from samecurve.features.guard.additivity import (
    Trial,
    compare_parts,
    compare_repeats,
    lines_or_refuse,
)
from samecurve.features.guard.split_errors import Evidence, Place, explain

PARTS = [Trial(3, 6.0, 3.0), Trial(5, 4.0, 5.0)]


@pytest.mark.parametrize(
    ("whole", "kind", "says"),
    [
        (Trial(8, 10.0, 8.0), None, ""),
        (Trial(8, 10.0 + 5e-5, 8.0), None, ""),
        (Trial(8, math.nan, 8.0), None, ""),
        (Trial(8, 10.1, 8.0), "coupled", "10.1 for 8 samples, of which 3 and 5 give 6 and 4"),
        (Trial(8, (3 * 6 + 5 * 4) / 8, 8.0), "mean", "that is their mean, 1/8 of their sum"),
        (
            Trial(8, 10.0, 7.0),
            "weight",
            "gives weight 7 for 8 samples, of which 3 and 5 give 3 and",
        ),
    ],
)
def test_sums_and_weights_of_parts_add_up(whole: Trial, kind: str | None, says: str) -> None:
    finding = compare_parts(whole, PARTS, 1e-5)
    assert (finding and finding.kind) == kind
    assert says in (finding.text if finding else "")


def test_a_weight_that_does_not_count_is_told_apart() -> None:
    finding = compare_parts(Trial(2, 3.0, 1.0), [Trial(1, 1.0, 1.0), Trial(1, 2.0, 1.0)], 1e-5)
    assert finding
    assert finding.kind == "unweighted"
    assert finding.text.startswith("gives weight 1 for two samples as for each of them alone")


def test_terms_that_cancel_are_measured_by_the_largest_of_them() -> None:
    parts = [Trial(1, 1e6, 1.0), Trial(1, -1e6, 1.0)]
    assert compare_parts(Trial(2, 1.0, 2.0), parts, 1e-5) is None
    assert compare_parts(Trial(2, 100.0, 2.0), parts, 1e-5)


def test_a_part_without_a_number_is_a_finding() -> None:
    finding = compare_parts(Trial(8, 10.0, 8.0), [Trial(3, math.nan, 3.0), PARTS[1]], 1e-5)
    assert finding
    assert "is 10 for 8 samples, and nan for 3 of them" in finding.text


def test_repeats_are_compared_and_shown_with_as_many_digits_as_differ() -> None:
    whole = Trial(4, 1.0, 4.0)
    assert compare_repeats(whole, Trial(4, 1.0 + 1e-12, 4.0), 1e-9) is None
    finding = compare_repeats(whole, Trial(4, 1.0 + 1e-8, 4.0), 1e-9)
    assert finding
    assert "1 and 1.00000001 for the same 4 samples" in finding.text


def test_what_is_counted_once_a_microbatch_is_told_with_its_size() -> None:
    """Each pair lacks the same that two single samples have."""
    singles = [Trial(1, value + 0.5, 1.0) for value in (1.0, 2.0, 4.0)]
    pairs = {(0, 1): Trial(2, 3.5, 2.0), (0, 2): Trial(2, 5.5, 2.0), (1, 2): Trial(2, 6.5, 2.0)}
    finding = compare_parts(Trial(3, 7.5, 3.0), [singles[0], Trial(2, 6.5, 2.0)], 1e-5)
    assert finding
    evidence = Evidence(
        ids=[7, 8, 9], singles=singles, pairs=pairs, place=Place("Tensor.add", "my.py:3", "added")
    )
    error = explain(finding, evidence, rounded=1e-5)
    assert str(error).startswith("my.py:3: the loss counts 0.5 once for each microbatch")
    assert "penalty * len(x)" in error.remedy


def test_the_two_samples_that_see_each_other_most_are_named() -> None:
    singles = [Trial(1, 1.0, 1.0)] * 3
    pairs = {(0, 1): Trial(2, 2.1, 2.0), (0, 2): Trial(2, 2.0, 2.0), (1, 2): Trial(2, 2.5, 2.0)}
    finding = compare_parts(Trial(3, 3.9, 3.0), [singles[0], Trial(2, 2.5, 2.0)], 1e-5)
    assert finding
    place = Place("Tensor.matmul", "my.py:9", "pairs")
    error = explain(
        finding, Evidence(ids=[7, 8, 9], singles=singles, pairs=pairs, place=place), rounded=1e-5
    )
    assert "Samples 8 and 9 see each other: alone they give 1 and 1, together 2.5" in error.cause
    assert error.where == "my.py:9"
    assert "batch_loss" in error.remedy


def test_what_is_refused_and_what_is_said() -> None:
    error = UserError("the cause", "the remedy", "my.py:1")
    assert lines_or_refuse(None, repeats=True, is_split=True, allowed=False) == []
    for repeats, is_split in ((True, True), (False, False)):
        with pytest.raises(UserError):
            lines_or_refuse(error, repeats=repeats, is_split=is_split, allowed=False)
        (line,) = lines_or_refuse(error, repeats=repeats, is_split=is_split, allowed=True)
        assert line.startswith("my.py:1: the cause. Trained all the same")
    (line,) = lines_or_refuse(error, repeats=True, is_split=False, allowed=False)
    assert "will not carry over" in line


def test_no_more_samples_than_a_microbatch_has_but_two() -> None:
    assert [samples_tried(size) for size in (1, 5, 100)] == [2, 5, 16]

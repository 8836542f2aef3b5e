"""How losses are held against the golden ones: what passes, what fails, and what is said."""

import json
from collections.abc import Callable

import pytest
from benchmarks.golden import FILE, allowed, compare, furthest, golden_losses
from benchmarks.golden_cases import CASES, STEPS
from benchmarks.gpu_result import golden_lines

from samecurve.errors import RunError

GOLDEN = {"f64": [4.0, 2.0], "bf16": [4.01, 2.0]}
Losses = dict[tuple[str, str], list[float]]


def trained(losses: Losses) -> Callable[[str, str], list[float]]:
    """Losses by precision and kind of device; a run that has none fails."""

    def train(precision: str, kind: str) -> list[float]:
        if (precision, kind) not in losses:
            raise RunError("rank 0 of 1: out of memory\nmore")
        return losses[precision, kind]

    return train


def verdicts(losses: Losses) -> list[tuple[str, int | None, str]]:
    rows = compare("case", GOLDEN, "cuda", trained(losses))
    return [(row.verdict, row.step, row.why) for row in rows]


def test_rounding_passes_and_anything_more_fails() -> None:
    """In bf16 four times its own distance from f64, 0.25 %, is allowed."""
    near: Losses = {("f64", "cuda"): [4.0, 2.0 + 1e-10], ("bf16", "cuda"): [4.04, 2.0]}
    assert verdicts(near) == [("PASS", 2, ""), ("PASS", 1, "")]
    far: Losses = {
        ("f64", "cuda"): [4.0, 2.0 + 1e-9],
        ("f64", "cpu"): [4.0, 2.0],
        ("bf16", "cuda"): [4.1, 2.0],
        ("bf16", "cpu"): [4.01, 2.0],
    }
    assert [verdict for verdict, *_ in verdicts(far)] == ["FAIL", "FAIL"]
    assert verdicts(far)[0][2] == "5.0e-10 from this machine's CPUs, at step 2"


def test_another_run_by_other_libraries_is_told_from_a_fault_of_the_gpu() -> None:
    other: Losses = {("f64", "cuda"): [5.0, 3.0], ("f64", "cpu"): [5.0, 3.0]}
    (verdict, _, why), failed = verdicts(other)
    assert verdict == "PASS"
    assert "5.0e-01 from the golden losses: the libraries here make another run" in why
    assert failed == ("FAIL", None, "rank 0 of 1: out of memory")


def test_a_loss_that_is_missing_or_no_number_is_infinitely_far() -> None:
    assert furthest([4.0], [4.0, 2.0]) == (2, float("inf"))
    assert furthest([4.0, None], [4.0, 2.0]) == (2, float("inf"))


def test_the_benchmark_names_what_is_too_far() -> None:
    rows = [vars(row) for row in compare("case", GOLDEN, "cpu", trained({("f64", "cpu"): [4, 3]}))]
    assert golden_lines(json.loads(json.dumps(rows))) == [
        "  losses beside golden ones: 2 FAIL",
        "    case in f64: 5.0e-01 away, 1.0e-10 allowed",
        "    case in bf16: rank 0 of 1: out of memory",
    ]


def test_each_case_has_golden_losses_of_each_step() -> None:
    assert list(golden_losses()) == list(CASES)
    for name, known in json.loads(FILE.read_text())["cases"].items():
        assert known["command"] == CASES[name].command("f64")
        assert list(known["losses"]) == ["f64", CASES[name].precision]
        assert {len(losses) for losses in known["losses"].values()} == {STEPS}
        assert known["allowed"] == pytest.approx(
            {precision: allowed(known["losses"], precision) for precision in known["losses"]}
        )

"""OMP_NUM_THREADS is obeyed, and the plan says so."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samecurve.core.planning.facts import Facts
from samecurve.core.planning.planner import plan
from samecurve.observe.plan_text import decisions
from samecurve.probe import probe
from tiny import MACHINE, config_of, tiny_values

FACTS = Facts.of(
    samples=100,
    eval_samples=0,
    tokens_per_sample=16,
    params=1000,
    trainable=1000,
    blocks=2,
    bytes_per_sample=1,
    flops_per_sample=None,
    coupled=(),
    fingerprint="",
)


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "2,1"}, 2),
        ({"OMP_NUM_THREADS": ""}, None),
        ({"OMP_NUM_THREADS": "0"}, None),
        ({"OMP_NUM_THREADS": "many"}, None),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, None),
        ({"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "x"}, 2),
    ],
)
def test_the_variable(
    variables: dict[str, str], threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert probe().threads == threads


def test_the_plan_obeys_it_and_says_so() -> None:
    def planned(**devices: Any) -> str:
        config = config_of(tiny_values(Path("x"), devices={"use": "cpu:2", **devices}))
        made = plan(config, replace(MACHINE, threads=1), FACTS)
        return f"{decisions(made)['threads']}: {made.reasons['threads']}"

    assert planned() == "1 a rank: OMP_NUM_THREADS; devices.threads wins"
    assert planned(threads=3) == "3 a rank: devices.threads"

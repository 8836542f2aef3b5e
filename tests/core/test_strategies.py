"""One row says all there is to know of a strategy: config, --help, docs and engines follow it."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from samecurve.core.config.json_schema import json_schema
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.same_bits import SameBits
from samecurve.core.strategies import (
    STRATEGIES,
    STRATEGY_NAMES,
    auto_strategy,
    strategies_of,
    strategy_help,
)
from samecurve.errors import UserError
from samecurve.tasks import Tasks

ROOT = Path(__file__).parents[2]
ENGINES = ("torch", "jax")


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_serves_just_the_strategies_of_its_rows(engine: str) -> None:
    served: set[str]
    if engine == "torch":
        from samecurve.torch_engine import strategies as of_torch

        served = set(of_torch.STRATEGIES)
    else:
        from samecurve.jax_engine import strategies

        served = set(strategies.STRATEGIES)
    assert served == {row.name for row in strategies_of(engine)}


@pytest.mark.parametrize("engine", ENGINES)
def test_auto_has_one_strategy_for_each_case(engine: str) -> None:
    cases = [row.auto for row in strategies_of(engine) if row.auto]
    assert sorted(cases) == ["one device", "only a shard fits", "the model fits"]
    assert auto_strategy(engine, "one device").takes_one_device
    assert auto_strategy(engine, "only a shard fits").sharding == "all devices"


def test_exact_is_refused_where_the_row_does_not_name_the_tree() -> None:
    """As for a new strategy that CONTRIBUTING's recipe adds."""
    ddp = next(row for row in strategies_of("torch") if row.name == "ddp")
    fields = {"strategy": "late", "num_devices": 2, "devices": ()}
    spec = replace(ddp, reducers=("collective",))
    devices: Any = SimpleNamespace(devices=SimpleNamespace(strategy="late"))
    same_bits = SameBits(devices, Machine(devices=(), links=(), host_bytes=1, cores=1), None, 8)
    new: Any = SimpleNamespace(spec=spec, **fields)
    with pytest.raises(UserError, match="strategy late can't add along the step's tree"):
        same_bits.check_layout(new)
    new.spec = ddp
    same_bits.check_layout(new)
    served = {(row.engine, row.name) for row in STRATEGIES.values() if "tree" in row.reducers}
    assert served == STRATEGIES.keys()


def test_the_config_and_help_offer_what_there_are_rows_for() -> None:
    schema = json_schema(Tasks())
    strategy = schema["$defs"]["Devices"]["properties"]["strategy"]
    assert strategy["enum"] == ["auto", *STRATEGY_NAMES]
    assert all(f"; {name}: " in strategy_help() for name in STRATEGY_NAMES)


def test_a_name_is_tested_only_in_its_row_and_in_the_engines_dicts() -> None:
    names = "|".join(STRATEGY_NAMES)
    compared = rf"""[!=]=\s*["'](?:{names})["']"""
    listed = rf"""\bin [\[({{][^\])}}]*["'](?:{names})["']"""
    comparison = re.compile(f"{compared}|{listed}")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / "src/samecurve").rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if comparison.search(line)
    ]
    assert found == []

"""A rank's data is what the plan was made for."""

from dataclasses import replace
from pathlib import Path

import pytest

from samecurve.core.planning.planner import plan
from samecurve.errors import UserError
from samecurve.worker.rank_main import _check_data
from tiny import FACTS, MACHINE, config_of, tiny_values


class Words:
    """As a task is to _check_data: its data, and by what it is known."""

    def __init__(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint

    def fingerprint(self) -> str:
        return self._fingerprint

    def train_data(self) -> range:
        return range(100)


def test_data_of_another_order_in_each_process_is_refused(tmp_path: Path) -> None:
    """The remedy is not only to wait for files: a vocabulary made of a set never rests."""
    facts = replace(FACTS, fingerprint="one order")
    accepted = plan(config_of(tiny_values(tmp_path)), MACHINE, facts)
    _check_data(Words("one order"), accepted)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="the order of a set, hash") as raised:
        _check_data(Words("another"), accepted)  # type: ignore[arg-type]
    assert "sorted(set(...))" in raised.value.remedy

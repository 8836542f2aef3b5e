"""A rank's data is what the plan was made for."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from samecurve.core.planning.planner import plan
from samecurve.errors import UserError
from samecurve.worker.rank_main import _check_data, _prepare_data
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
    facts = FACTS.having(fingerprint="one order")
    accepted = plan(config_of(tiny_values(tmp_path)), MACHINE, facts)
    _check_data(Words("one order"), accepted)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="the order of a set, hash") as raised:
        _check_data(Words("another"), accepted)  # type: ignore[arg-type]
    assert "sorted(set(...))" in raised.value.remedy


@pytest.mark.parametrize("is_ready", [True, False])
def test_rows_are_read_again_once_their_files_are_prepared(
    monkeypatch: pytest.MonkeyPatch, *, is_ready: bool
) -> None:
    """Before that no process can read them. A run that is asked to stop meanwhile has no files."""
    monkeypatch.setattr("samecurve.worker.prepare_data.prepare_data", lambda *_, **__: is_ready)
    task = Mock()
    task.check_rows.side_effect = UserError("gives other values", "a generator", "task")

    def prepared() -> bool:
        return _prepare_data(Mock(), task, Mock(), loop=Mock(), step=0)

    if not is_ready:
        assert not prepared()
        return
    with pytest.raises(UserError, match="gives other values"):
        prepared()

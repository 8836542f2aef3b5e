"""Few open files: ranks would wait for each other for ever, and hear no signal meanwhile."""

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samecurve.core.config.sections import Devices
from samecurve.errors import RunError, UserError
from samecurve.launch import local
from samecurve.run.preconditions import check_open_files
from samecurve.watch import clear_hang_files, have_met, meeting, num_waiting
from starts import start, values


@pytest.mark.parametrize(("limit", "ranks"), [(16, 2), (27, 2), (31, 4)])
def test_too_few_for_the_ranks_are_refused(
    limit: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, 4096))
    with pytest.raises(UserError, match=f"may open {limit} files") as raised:
        check_open_files(ranks)
    assert "ulimit -n 4096" in raised.value.remedy


@pytest.mark.parametrize(("limit", "ranks"), [(16, 1), (28, 2), (resource.RLIM_INFINITY, 9)])
def test_what_may_suffice_is_not_refused(
    limit: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    check_open_files(ranks)


@pytest.mark.parametrize(
    ("signs", "may_import", "is_given_up"),
    [
        (["meeting-0", "meeting-1"], True, True),
        (["meeting-0"], True, False),  # the other is still importing: the machine is busy
        (["meeting-0"], False, True),
        ([], False, True),
        (["meeting-0", "met-1"], False, False),  # a task may take long to make, without a heartbeat
    ],
)
def test_a_stop_ends_ranks_that_do_not_meet(
    *,
    signs: list[str],
    may_import: bool,
    is_given_up: bool,
    tmp_path: Path,
    corpus: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Ranks that have met save first; ranks that wait for each other have nothing to save."""
    prepared = start(tmp_path / "run", values(corpus, "ddp:2"), cache)
    for name in signs:
        (prepared.run.logs / name).touch()
    monkeypatch.setattr(local, "_MEETS", 0.0)
    monkeypatch.setattr(local, "_IMPORTS", 1e9 if may_import else 0.0)
    killed = RunError("rank 0 was killed")

    def ranks(*_: Any, gives_up: Callable[[], bool], **__: Any) -> RunError:
        assert not gives_up()
        launcher.stop()
        gives_up()  # sees that all wait
        assert gives_up() is is_given_up
        return killed

    monkeypatch.setattr("samecurve.launch.ranks.train_by_ranks", ranks)
    launcher = local._Launcher(prepared, Devices(), None, headless=True)
    failure = launcher._start()
    assert failure is (None if is_given_up else killed)
    assert ("did not meet; nothing to save" in capfd.readouterr().err) is is_given_up


def test_a_failure_is_told_where_the_launcher_killed_nobody(
    tmp_path: Path, corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that fail by themselves after a stop, before they meet, have failed."""
    prepared = start(tmp_path / "run", values(corpus, "ddp:2"), cache)
    failed = RunError("rank 0 failed")

    def ranks(*_: Any, **__: Any) -> RunError:
        launcher.stop()
        return failed

    for name in ("_MEETS", "_IMPORTS"):
        monkeypatch.setattr(local, name, 0.0, raising=False)
    monkeypatch.setattr("samecurve.launch.ranks.train_by_ranks", ranks)
    launcher = local._Launcher(prepared, Devices(), None, headless=True)
    assert launcher._start() is failed


def test_a_rank_shows_whether_it_has_met_the_others(tmp_path: Path) -> None:
    with meeting(tmp_path, 1):
        assert (num_waiting(tmp_path), have_met(tmp_path)) == (1, False)
    assert (num_waiting(tmp_path), have_met(tmp_path)) == (0, True)
    clear_hang_files(tmp_path)
    assert not have_met(tmp_path)

"""Few open files: ranks would wait for each other for ever, and hear no signal meanwhile."""

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samecurve.core.config.sections import Devices
from samecurve.errors import RunError, UserError
from samecurve.launch import launchers, local
from samecurve.run.preconditions import check_open_files
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


@pytest.mark.parametrize("have_met", [False, True])
def test_a_stop_ends_ranks_that_do_not_meet(
    *,
    have_met: bool,
    tmp_path: Path,
    corpus: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Ranks that have met save first; ranks that wait for each other have nothing to save."""
    prepared = start(tmp_path / "run", values(corpus, "ddp:2"), cache)
    if have_met:
        (prepared.run.logs / "heartbeat-0").touch()
    monkeypatch.setattr(local, "_MEETS", 0.0)
    killed = RunError("rank 0 was killed")

    def ranks(*_: Any, gives_up: Callable[[], bool], **__: Any) -> RunError:
        assert not gives_up()
        launcher.stop()
        assert gives_up() is not have_met
        return killed

    monkeypatch.setitem(launchers.LAUNCHERS, "direct", ranks)
    launcher = local._Launcher(prepared, Devices(), None, headless=True)
    failure = launcher._start()
    assert failure is (killed if have_met else None)
    assert ("did not meet; nothing to save" in capfd.readouterr().err) is not have_met

"""A start that ends at any of its writes leaves a directory in which the same command begins."""

import builtins
import errno
import io
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from samecurve.core.config.loading import LoadedConfig
from samecurve.core.planning.facts import Facts
from samecurve.errors import RunError, UserError
from samecurve.run.directory import Run
from samecurve.run.preconditions import make_home, remove_cut_off
from samecurve.run.prepare import StartRequest, prepare
from samecurve.run.resume import Options
from samecurve.run.start_files import PreparedRun
from samecurve.tasks import entry_of
from starts import values
from tiny import MACHINE, config_of

CALLS = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "open")


class Killed(BaseException):
    """The process has ended: it does nothing more."""


class Faults:
    """Fails the n-th write below a directory. ends: so does every later one."""

    def __init__(self, home: Path, at: int, error: BaseException, *, ends: bool) -> None:
        self._home, self._left, self._error, self._ends = str(home), at, error, ends
        self.hit = False

    def look(self, path: object) -> None:
        if not isinstance(path, str | Path) or not str(path).startswith(self._home):
            return
        self._left -= 1
        if self._left == 0 or (self._left < 0 and self._ends):
            self.hit = True
            raise self._error


@pytest.fixture
def facts(corpus: Path, cache: Path) -> Facts:
    config = config_of(values(corpus))
    return entry_of(config.task).facts(config, str(cache))


def begin(home: Path, settings: Mapping[str, Any], facts: Facts) -> PreparedRun:
    loaded = LoadedConfig(config_of(settings), "tiny", {})
    options = Options(save_dir=home)
    request = StartRequest(loaded=loaded, options=options, facts=facts, machine=MACHINE)
    prepared = prepare(request)
    prepared.lock.release()
    return prepared


def begin_with(
    faults: Faults, monkeypatch: pytest.MonkeyPatch, start: Callable[[], PreparedRun]
) -> RunError | None:
    """Begin a run, some of whose writes fail. Returns why it did not begin."""

    def watched(function: Callable[..., Any], *, opens: bool = False) -> Callable[..., Any]:
        def call(path: object, *rest: Any, **named: Any) -> Any:
            mode = named.get("mode", rest[0] if rest else "r")
            if not opens or not isinstance(mode, str) or set(mode) & set("wax+"):
                faults.look(path)
            return function(path, *rest, **named)

        return call

    with monkeypatch.context() as patched:
        for name in CALLS:
            patched.setattr(os, name, watched(getattr(os, name)))
        opened = watched(open, opens=True)
        patched.setattr(builtins, "open", opened)
        patched.setattr(io, "open", opened)
        try:
            start()
        except RunError as error:  # exit code 1
            return error
    return None


def every_write(home: Path, error: BaseException, *, ends: bool) -> Iterator[Faults]:
    """Faults at the first write, the second, and so on, until a start is over before it comes."""
    for number in range(1, 200):
        shutil.rmtree(home, ignore_errors=True)
        faults = Faults(home, number, error, ends=ends)
        yield faults
        if not faults.hit:
            assert number > 10
            return


def test_a_kill_at_any_write_leaves_a_directory_that_begins(
    tmp_path: Path, corpus: Path, facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, settings = tmp_path / "run", values(corpus)
    for faults in every_write(home, Killed(), ends=True):
        with suppress(Killed):
            begin_with(faults, monkeypatch, lambda: begin(home, settings, facts))
        prepared = begin(home, settings, facts)
        assert prepared.run.exists()
        assert not list(home.glob("*.part"))


def test_a_full_disk_is_named_and_the_same_command_begins(
    tmp_path: Path, corpus: Path, facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1: another start fails in the same way until there is room."""
    home, settings = tmp_path / "run", values(corpus)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(home))
    for faults in every_write(home, full, ends=False):
        error = begin_with(faults, monkeypatch, lambda: begin(home, settings, facts))
        if faults.hit and error:  # a write that may fail, such as that of a hint, is passed over
            assert "no space is left" in error.cause
            assert "give the same command again" in error.remedy
        prepared = begin(home, settings, facts)
        assert prepared.run.exists()


def test_what_another_config_has_left_is_not_taken_over(
    tmp_path: Path, corpus: Path, facts: Facts
) -> None:
    """A base, first weights and a store belong to the config of the start that was cut off."""
    run = Run(tmp_path / "run")
    run.initial.mkdir(parents=True)
    (run.home / "lock").touch()
    (run.initial / "weights-00001.safetensors").touch()
    run.base.write_text('{"path": "base", "files": {}}')
    run.remote.write_text('{"url": "s3://bucket/run", "copy": "1"}')
    for path in (run.config, run.home / "plan.json.7.ab.part"):
        path.write_text("{}")
    begin(run.home, values(corpus), facts)
    assert not run.initial.exists()
    assert not run.base.exists()
    assert not run.remote.exists()
    assert run.read_plan().steps == 1


def test_files_of_somebody_else_are_left_alone(tmp_path: Path) -> None:
    """config.yaml and logs/ are names that other programs use too."""
    home = tmp_path / "mine"
    (home / "logs").mkdir(parents=True)
    (home / "config.yaml").write_text("precious")
    with pytest.raises(UserError, match=r"it holds config\.yaml"):
        make_home(home)
    (home / "lock").touch()
    (home / "notes.txt").touch()
    with pytest.raises(UserError, match=r"it holds notes\.txt"):
        make_home(home)


@pytest.mark.parametrize(
    ("lock", "name"),
    [
        ("version 3", "config.yaml"),
        ("", "initial/condition.csv"),
        ("", "source/main.c"),
        ("", "movie.mp4.part"),
        ("", "base.json"),
        ('{"host": "here", "pid": 7}', "remote.json"),
    ],
)
def test_a_name_of_ours_does_not_make_a_file_ours(lock: str, name: str, tmp_path: Path) -> None:
    """A start neither begins among the files of another program nor removes them."""
    home = tmp_path / "mine"
    file = home / name
    file.parent.mkdir(parents=True)
    file.write_text('{"precious": 1}')
    (home / "lock").write_text(lock)
    with pytest.raises(UserError, match=f"it holds {name.partition('/')[0]}"):
        make_home(home)
    remove_cut_off(Run(home))
    assert file.read_text() == '{"precious": 1}'
    assert (home / "lock").read_text() == lock


@pytest.mark.parametrize("left", ["checkpoints/step-00000002", "journal.jsonl"])
def test_a_run_that_has_lost_its_plan_is_named(left: str, tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    (tmp_path / left).mkdir(parents=True)
    with pytest.raises(UserError, match=r"has lost its plan\.json"):
        make_home(tmp_path)

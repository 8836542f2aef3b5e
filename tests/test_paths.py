"""Paths and modules that stand in strings, where no type checker follows a file that moves."""

import ast
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import samecurve
from samecurve.core.events import ACTIVITIES
from samecurve.launch import ranks
from samecurve.launch.script import bootstrap, script_attempt
from samecurve.observe import read_beat
from samecurve.processes import orphan_guard
from samecurve.run.directory.attempt import Attempt
from samecurve.tasks.user_class import pickled_class
from samecurve.watch import flight_recorder, hang_watch
from samecurve.worker import data_workers, rank_main

PACKAGE = Path(samecurve.__file__).parent
SOURCES = PACKAGE.parent


def strings() -> Iterator[tuple[Path, str]]:
    """Every text in the source of the package and of its products."""
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield path, node.value


def test_our_modules_and_files_that_strings_name_are_there() -> None:
    """Modules to run with -m, engines to import late, files that stacks are told by."""
    name = r"samecurve(_products)?(\.[a-z_]\w*)+"
    modules = {text for _, text in strings() if re.fullmatch(name, text)}
    assert {"samecurve.worker.rank_main", "samecurve.worker.data_workers"} <= modules
    modules -= pickled_class._MOVED.keys()  # which pickles of earlier versions name
    assert [name for name in sorted(modules) if not _is_there(name)] == []
    files = {
        file
        for _, text in strings()
        for file in re.findall(r"\bsamecurve/((?:\w+/)+\w+\.py)", text)
    }
    assert {"data/feed.py", "torch_engine/process_group.py"} <= files
    assert [file for file in sorted(files) if not (PACKAGE / file).is_file()] == []


def _is_there(module: str) -> bool:
    """As a module, a folder, or one of the names that the package itself gives."""
    if module.removeprefix("samecurve.") in samecurve.__all__:
        return True
    path = SOURCES.joinpath(*module.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_rooms_that_tracebacks_name_are_there() -> None:
    source = (PACKAGE / "diagnose/tracebacks.py").read_text()
    alternatives = re.findall(r"/samecurve/\(\?:([\w|]+)\)", source)
    rooms = {room for group in alternatives for room in group.split("|")}
    assert {"launch", "worker"} <= rooms
    missing = [room for room in sorted(rooms) if not (PACKAGE / room).exists()]
    assert [room for room in missing if not (PACKAGE / f"{room}.py").exists()] == []


def test_processes_are_started_from_where_their_files_lie() -> None:
    """What the hang watch takes for a data worker, a rank's command, files run by their path."""
    assert data_workers.__name__ == hang_watch.DATA_WORKERS
    assert rank_main.__name__ in ranks.rank_call(Attempt("name", "run")).command
    assert Path(orphan_guard.__file__).is_file()
    assert Path(str(bootstrap.__file__)) == script_attempt.BOOTSTRAP
    assert Path(bootstrap.PACKAGE) == PACKAGE
    assert Path(str(flight_recorder.__file__)) == Path(bootstrap.PACKAGE, bootstrap.RECORDER)


def test_a_scripts_heartbeat_is_one_of_ours(tmp_path: Path) -> None:
    """watch/flight_recorder.py writes it without the package."""
    assert ACTIVITIES[flight_recorder.ACTIVITY] == "step"
    (tmp_path / "heartbeat-0").write_bytes(struct.pack("<qII", 7, flight_recorder.ACTIVITY, 7))
    beat = read_beat(tmp_path / "heartbeat-0")
    assert beat is not None
    assert (beat.step, beat.activity, beat.beats) == (7, "step", 7)

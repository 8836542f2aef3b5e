"""A class as other processes find it: by its file, by its module's name, or kept as it is."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_user import said

from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.errors import UserError
from samecurve.tasks import Tasks, entry_of
from samecurve.tasks.user_class import (
    TASK_PICKLE,
    Place,
    code_of,
    find_pickled_class,
    identity_of,
    pickled_class,
    place_of,
)
from samecurve.tasks.user_class.class_pickler import task_of, write_pickled
from samecurve.tasks.user_class.load_class import load_class
from samecurve.tasks.user_class.pickled_class import read_header

SESSION = """
import functools
import threading
WIDTH = 8
lock = threading.Lock()


def scaled(value):
    return value * WIDTH if value in {"a", "b", 1, 2} else 0


class Task:
    width = 4

    def first(self):
        return scaled(1), self.width

    def name(self):
        return __name__


class Locked(Task):
    def first(self):
        with lock:
            return super().first()
"""


@pytest.fixture
def session() -> dict[str, Any]:
    """What a session has: its `__main__` stands in no file."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(SESSION, "<stdin>", "exec"), namespace)  # as a session does
    return namespace


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with modules of a user's, the one that is worked in."""
    package = tmp_path / "outer" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "outer" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "parts.py").write_text("WIDTH = 7\n")
    (package / "task.py").write_text("from .parts import WIDTH\nclass Task:\n    width = WIDTH\n")
    monkeypatch.chdir(tmp_path)
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if name.startswith("outer"):
            del sys.modules[name]


def loaded(place: Place | None) -> Any:
    assert place is not None
    return load_class(place)


def test_a_kept_class_is_what_the_session_had(session: dict[str, Any], tmp_path: Path) -> None:
    """Its own values and those of the session, as they were when it was kept.

    The session's class is left alone, and functions see a module that can be imported.
    """
    (tmp_path / "first").mkdir()
    task_class = session["Task"]
    session["WIDTH"], task_class.width = 16, 5
    first = write_pickled(task_class, tmp_path / "first")
    session["WIDTH"], task_class.width = 32, 6
    second = write_pickled(task_class, tmp_path)
    method = task_class.first
    for path, values in ((first, (16, 5)), (second, (32, 6)), (first, (16, 5))):
        place = place_of(f"{path}:Task")
        kept = loaded(place)
        assert kept().first() == values
        assert kept is loaded(place)
        assert vars(sys.modules[kept.__module__]) is kept.first.__globals__
        assert sys.modules[kept.first.__globals__["__name__"]].Task is kept
    assert task_class().first() == (32, 6)
    assert task_class.first is method


@pytest.mark.long
def test_one_code_has_one_digest_in_every_process(tmp_path: Path) -> None:
    """As ranks compare it that others started."""
    for home, text in (("a", SESSION), ("b", SESSION), ("c", SESSION.replace("WIDTH if", "7 if"))):
        (tmp_path / home).mkdir()
        pickler = "samecurve.tasks.user_class.class_pickler"
        code = f"{text}\nfrom pathlib import Path\nfrom {pickler} import write_pickled"
        command = [sys.executable, "-c", f"{code}\nwrite_pickled(Task, Path('{home}'))"]
        environment = {**os.environ, "PYTHONHASHSEED": str(ord(home))}
        subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    places = [place_of(f"{tmp_path / home / TASK_PICKLE}:Task") for home in "abc"]
    (same, first), (also, second), (_, other) = (code_of(place) for place in places if place)
    assert same == also == "the class Task of <string>"
    assert first == second != other
    assert identity_of(f"{tmp_path / 'a' / TASK_PICKLE}:Task") == "class Task"
    document = Document({"task": f"runs/gone/{TASK_PICKLE}:Task"})
    find_pickled_class(document, tmp_path / "b")
    assert document.value["task"] == f"{tmp_path / 'b' / TASK_PICKLE}:Task"


def test_what_can_not_be_kept_is_named(session: dict[str, Any], tmp_path: Path) -> None:
    text = said(lambda: write_pickled(session["Locked"], tmp_path))
    assert "Locked uses lock, which can't be taken to another process: TypeError" in text
    assert "in a method of Locked; or give the class a file of its own" in text


def test_another_python_is_told(
    session: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_pickled(session["Task"], tmp_path)
    monkeypatch.setattr(pickled_class, "python_version", lambda: "3.99")
    place = place_of(f"{path}:Task")
    assert "<stdin> was kept by Python 3.1" in said(lambda: loaded(place))
    path.write_bytes(b"\x80\x05")
    assert "can't be read: it is of another form" in said(lambda: read_header(path))


def test_a_module_is_named_and_imported(outside: Path) -> None:
    """With its relative imports; from a directory of which it is a part, or kept by its name."""
    place = place_of("outer.inner.task:Task")
    assert place is not None
    assert (place.path, place.module) == (outside / "outer/inner/task.py", "outer.inner.task")
    task_class = loaded(place)
    assert (task_class.__module__, task_class.width) == ("outer.inner.task", 7)
    assert task_of(task_class, outside) == "outer.inner.task:Task"
    assert not Tasks().knows("outer.missing:Task")
    assert said(lambda: loaded(place._replace(name="Tusk"))).startswith(f"task: {place.path}")
    config = load_document(
        Document({"task": "outer.inner.task:Task", "batch": {"samples": 4}}), Tasks()
    )
    assert entry_of(config.config.task).class_of("torch") is task_class


def test_a_package_that_others_do_not_find_is_kept_with_its_place(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    monkeypatch.syspath_prepend(str(outside))
    place = place_of("outer.inner.task:Task")
    assert place is not None
    assert task_of(loaded(place), outside) == f"{outside / TASK_PICKLE}:Task"
    code = (
        "import sys; from samecurve.tasks.user_class import place_of;"
        "from samecurve.tasks.user_class.load_class import load_class;"
        "print(load_class(place_of(sys.argv[1])).width)"
    )
    command = [sys.executable, "-c", code, f"{outside / TASK_PICKLE}:Task"]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout == "7\n"


def test_a_script_without_a_guard_is_run_up_to_its_call(outside: Path) -> None:
    """It starts no run while it is loaded, and has what stands above the call."""
    script = outside / "script.py"
    script.write_text(
        "import samecurve\nclass Task:\n    width = 3\n\n"
        "try:\n    samecurve.train(Task, {})\nexcept Exception:\n    Task.width = 4\n\n"
        "class Later:\n    pass\n"
    )
    place = place_of("script.py:Task")
    assert place is not None
    assert loaded(place).width == 3
    early = said(lambda: loaded(place._replace(name="Later")))
    assert "loading script.py starts a run, before there is a class Later" in early
    assert 'if __name__ == "__main__":' in early
    sys.modules.pop("helping", None)
    (outside / "helping.py").write_text("import samecurve\nsamecurve.plan(int)\n")
    (outside / "helped.py").write_text("import helping\nclass Task:\n    pass\n")
    helped = place_of("helped.py:Task")
    assert "starts a run, before there is a class Task" in said(lambda: loaded(helped))


@pytest.mark.parametrize("task", ["outer:3", "outer..x:Task", "__main__:Task", ".:Task"])
@pytest.mark.usefixtures("outside")
def test_what_names_no_module(task: str) -> None:
    assert place_of(task) is None


def test_the_header_can_be_read_by_anybody(session: dict[str, Any], tmp_path: Path) -> None:
    path = write_pickled(session["Task"], tmp_path)
    values = json.loads(path.read_bytes().splitlines()[0])
    assert (values["name"], values["origin"], values["declares"]) == ("Task", "<stdin>", False)
    with pytest.raises(UserError, match="No such file"):
        read_header(tmp_path / "gone" / TASK_PICKLE)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("samecurve.core.determinism.mean", "Mean"),
        ("samecurve.core.config.section", "Section"),
        ("samecurve.core.weights.initial_values", "Initial"),
        ("samecurve.tasks.language.sections", "LanguageData"),
        ("samecurve.core.planning.plan", "Plan"),
    ],
)
def test_a_pickle_of_an_earlier_version_finds_what_has_moved(module: str, name: str) -> None:
    stream = io.BytesIO(f"c{module}\n{name}\n.".encode())
    found = pickled_class._Unpickler(stream, "session").load()
    assert found.__name__ == name

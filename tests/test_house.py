"""How large the house is where every run passes through it: bounds that only go down.

A feature that only some runs have costs the others neither a call nor a file. These counts are of
a plain run: one CPU device, nothing asked for.
"""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import grimp
import pytest

from samecurve import seam
from samecurve.core.feature_list import listed
from samecurve.tasks.protocol import OWN_MEMBERS

ROOT = Path(__file__).parent.parent

FILES_OF_A_STEP = 12
CALLS_OF_A_STEP = 100
MODULES_OF_A_RUN = {"--no-exact": 130, "--exact": 149}  # with the guard, which is one feature
LINES_OF_A_FUNCTION = 50
FILES_THAT_SAY_EXACT = 21
CIRCLES = 0
MEMBERS_OF_A_TASK = 30  # beside those of features, and those for weights of other programs
KERNEL = ("core", "run", "launch", "worker", "torch_engine", "jax_engine")
# names of features that the kernel has, in so many files, and why
NAMED = {
    "after_step": (4, "what a user is told to write, and where weights may change"),
    "balance": (5, "remedies and warnings that name its flag; a loss's balance"),
    "compile": (1, "the key that a refused program comes from"),
    "early_stop": (2, "a message about a metric's name; a key of the results file"),
    "ema": (2, "the names of an average's arrays in a checkpoint"),
    "float8": (1, "a number format that a device may lack"),
    "loss_scale": (4, "a number of the step's arithmetic, 1 where there is no scale"),
    "norm_sync": (2, "remedies that name its key"),
    "phases": (5, "updates in turn are a part of a task's protocol: a loss is told its phase"),
    "recompute": (3, "a word of the memory's formula, and of two remedies"),
}
PROMISE_LINES = 580
ROOMS = (*KERNEL, "tasks/adapter", "tasks/user_class")  # where every run passes through
LINES_OF_ROOMS = 43_710
NAMES_OF_THE_SEAM = 90
BEHIND_THE_SEAM = 230  # names of the kernel that products import beside it; to end at 0
README = {"lines": 120, "words": 800}  # two screens; what else there is to say has a page in docs/

# Runs the command line and counts, between two steps of the engine on the main thread, the calls of
# Python functions and the files of ours in which they stand.
_COUNT = """
import os, sys, threading
import samecurve

HOME = os.path.dirname(samecurve.__file__) + os.sep  # a checkout may be called samecurve, too
FIRST, LAST = 43, 55  # between steps 41 and 61, which are probed: the first ones of epochs
steps, calls, files = 0, 0, set()
main_thread = threading.main_thread()


def count(frame, event, argument):
    global steps, calls
    if event != "call" or threading.current_thread() is not main_thread:
        return
    file = frame.f_code.co_filename
    if frame.f_code.co_name == "run" and file.endswith("torch_engine/step/training_step.py"):
        steps += 1
    if FIRST <= steps < LAST:
        calls += 1
        if file.startswith(HOME):
            files.add(file.removeprefix(HOME))


from samecurve.cli.main import main

sys.argv = ["samecurve", *sys.argv[1:]]
sys.setprofile(count)
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
finally:
    sys.setprofile(None)
packages = {"samecurve", "samecurve_products"}
ours = [name for name in sys.modules if name.split(".")[0] in packages]
print("counted", calls // (LAST - FIRST), len(ours), *sorted(files))
"""


def _counted(
    home: Path, *arguments: str, steps: int = 56, profiled: bool = True
) -> tuple[int, int, list[str]]:
    """Python calls and files of one steady step, and modules of ours that the run imports.

    profiled: whether calls are counted, which makes the run some times slower.
    """
    command = ["train", *arguments, "--devices", "cpu", "--max-steps", str(steps)]
    command += ["--save-dir", str(home / "run")]
    code = _COUNT if profiled else _COUNT.replace("sys.setprofile(count)", "pass")
    ended = subprocess.run(
        [sys.executable, "-c", code, *command],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    line = next(line for line in ended.stdout.splitlines() if line.startswith("counted"))
    _, calls, modules, *files = line.split()
    return int(calls), int(modules), files


def test_a_step_passes_through_few_files(tmp_path: Path) -> None:
    """A user's own small model: no call here is the model's."""
    calls, _, files = _counted(tmp_path, "-f", "examples/my_task.yaml")
    assert len(files) <= FILES_OF_A_STEP, "\n".join(files)
    assert calls <= CALLS_OF_A_STEP


@pytest.mark.parametrize("mode", ["--no-exact", pytest.param("--exact", marks=pytest.mark.long)])
def test_a_plain_run_imports_few_modules(mode: str, tmp_path: Path) -> None:
    arguments = ["-f", "models/tiny.yaml", mode]
    arguments += ["-d", "CHANGELOG.md"]  # a small text is soon read, few samples soon evaluated
    arguments += ["--set", "data.eval_samples=8", "--set", "data.sample_tokens=2"]
    _, modules, _ = _counted(tmp_path, *arguments, steps=2, profiled=False)
    assert modules <= MODULES_OF_A_RUN[mode]


def test_functions_are_short() -> None:
    """The lines of a docstring count too."""
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= LINES_OF_A_FUNCTION
    ]
    assert not long, "\n".join(long)


def test_the_rooms_of_every_run_are_small() -> None:
    pages = [page for room in ROOMS for page in (ROOT / "src/samecurve" / room).rglob("*.py")]
    assert sum(page.read_text().count("\n") for page in pages) <= LINES_OF_ROOMS


def test_few_files_know_of_exactness() -> None:
    """core/planning/exact.py decides it. Others ask plan.same_bits, or one of four decisions; those
    that are left name the key, the flag or the column that a user or a file on disk has.
    """
    files = [path for path in (ROOT / "src").rglob("*.py") if "exact" in path.read_text().lower()]
    assert len(files) <= FILES_THAT_SAY_EXACT, "\n".join(map(str, sorted(files)))


def test_no_circles_of_imports() -> None:
    """Late imports and those for type checkers count. The package's own page of public names
    (`samecurve/__init__.py`), which imports each name when it is asked for, does not.
    """
    graph = grimp.build_graph("samecurve", exclude_type_checking_imports=False)
    modules = graph.modules - {"samecurve"}
    imports = {name: graph.find_modules_directly_imported_by(name) & modules for name in modules}
    assert imports["samecurve.core.planning.planner"]
    circles = _circles(imports)
    assert len(circles) <= CIRCLES, "\n".join(map(str, circles))


def test_the_kernel_names_no_feature() -> None:
    """But for the few that are listed above, each with a reason."""
    names = {row.name for row in listed()} | {key for row in listed() for key in row.defaults}
    ordinary = {"compile"}  # torch's own word: it is looked for as the config's key
    words = {name: f"train.{name}" if name in ordinary else name for name in names}
    files = [file for room in KERNEL for file in (ROOT / "src/samecurve" / room).rglob("*.py")]
    texts = {str(file.relative_to(ROOT)): file.read_text() for file in files}
    found = {
        name: [path for path, text in texts.items() if re.search(rf"\b{word}\b", text)]
        for name, word in words.items()
    }
    most = {name: NAMED.get(name, (0, ""))[0] for name in names}
    more = {name: paths for name, paths in found.items() if len(paths) > most[name]}
    assert not more


def test_a_task_has_few_members_of_its_own() -> None:
    assert len(OWN_MEMBERS) <= MEMBERS_OF_A_TASK


def test_a_circle_is_found() -> None:
    assert _circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def _circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules each of which reaches all others of its set (strongly connected)."""
    reached = {module: _reached(module, imports) for module in imports}
    together: dict[frozenset[str], list[str]] = defaultdict(list)
    for module in sorted(imports):
        circle = frozenset(other for other in reached[module] if module in reached[other])
        if len(circle) > 1:
            together[circle].append(module)
    return list(together.values())


def _reached(start: str, imports: dict[str, set[str]]) -> set[str]:
    found, waiting = {start}, [start]
    while waiting:
        new = imports.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def test_the_promise_stands_on_five_pages() -> None:
    pages = [*(ROOT / "src/samecurve/core/determinism").glob("*.py")]
    assert len(pages) == 5
    assert sum(page.read_text().count("\n") for page in pages) <= PROMISE_LINES
    graph = grimp.build_graph("samecurve", exclude_type_checking_imports=False)
    promise = "samecurve.core.determinism"
    inside = {promise, *graph.find_descendants(promise)}
    imported = {name for page in inside for name in graph.find_modules_directly_imported_by(page)}
    assert imported <= inside


def test_products_import_the_seam() -> None:
    """And, until BEHIND_THE_SEAM is 0, names of the kernel that the seam does not have."""
    behind = {
        (node.module, name.name)
        for page in (ROOT / "src/samecurve_products").rglob("*.py")
        for node in ast.walk(ast.parse(page.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module != "samecurve.seam"
        if (node.module or "").partition(".")[0] == "samecurve"
        for name in node.names
    }
    assert len(behind) <= BEHIND_THE_SEAM
    served = {(module, name) for name, module in seam.PLACES.items()}
    assert not behind & served, "the seam has these"


def test_the_seam_is_narrow_and_typed() -> None:
    """Each name is imported for type checkers as it is at run time."""
    assert len(seam.PLACES) <= NAMES_OF_THE_SEAM
    typed = {
        name.asname: node.module
        for node in ast.walk(ast.parse(Path(seam.__file__).read_text()))
        if isinstance(node, ast.ImportFrom)
        for name in node.names
        if name.asname
    }
    assert typed == seam.PLACES


def test_the_readme_is_two_screens() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= README["lines"]
    assert len(text.split()) <= README["words"]

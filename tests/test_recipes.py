"""The recipes of CONTRIBUTING.md, each applied to a copy of the tree as it stands on the page."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_RECIPE = re.compile(r"^### Recipe: (.+)\n((?:.*\n)*?)(?=^### Recipe: |^## Tests$)", re.MULTILINE)
_BLOCK = r"\n\n```(?:python|yaml)?\n((?:.*\n)*?)```$"
_NEW = re.compile(r"^New file `(.+)`:" + _BLOCK, re.MULTILINE)
_EDIT = re.compile(r"^In `(.+?)`, (below|in place of) the line `(.+)`:" + _BLOCK, re.MULTILINE)
_CHECK = re.compile(r"^Check:" + _BLOCK, re.MULTILINE)
_LONG = {
    "a reducer",
    "a strategy",
    "a task",
    "a feature",
    "a config field",
    "an optimizer",
    "a known failure",
}  # a recipe takes some 10 s
RECIPES = dict(_RECIPE.findall((ROOT / "CONTRIBUTING.md").read_text()))


def test_the_page_has_the_recipes() -> None:
    assert set(RECIPES) == {
        *("a strategy", "a reducer", "a task", "a verb", "a config field", "a feature"),
        "an optimizer",
        "a known failure",
    }


@pytest.mark.parametrize("name", ["a feature", "an optimizer"])
def test_what_is_one_folder_edits_no_file(name: str) -> None:
    assert len({Path(path).parent for path, _ in new_files(RECIPES[name])}) == 1
    assert not _EDIT.findall(RECIPES[name])


@pytest.mark.parametrize("name", RECIPES)
def test_each_line_that_a_recipe_changes_stands_once_in_its_file(name: str) -> None:
    edits = _EDIT.findall(RECIPES[name])
    assert len(edits) == RECIPES[name].count("\nIn `"), "an edit that the test can't read"
    for path, _, line, _ in edits:
        assert (ROOT / path).read_text().count(f"{line}\n") == 1, (path, line)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in _LONG)) for name in RECIPES]
)
def test_a_recipe_works_as_it_stands(name: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    # compiled modules are copied, to be compiled once, but none that is being written
    unneeded = shutil.ignore_patterns("*.pyc.*", "old_run", "*.png")
    for folder in ("src", "tests", "examples", "docs"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=unneeded)
    shutil.copy(ROOT / "pyproject.toml", tree)
    _apply(RECIPES[name], tree)
    _install(tree)
    (check,) = _CHECK.findall(RECIPES[name])
    for line in check.splitlines():
        words = line.split()
        command = ["-m", "samecurve", *words[1:]] if words[0] == "samecurve" else words[1:]
        ended = subprocess.run(
            [sys.executable, *command],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree / "src")},
            check=False,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, f"{line}\n{ended.stdout}\n{ended.stderr}"


def _install(tree: Path) -> None:
    """Leave the metadata that pip would leave, with the entry points of pyproject.toml."""
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    info = tree / "src/samecurve-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: samecurve\nVersion: 0\n")
    groups = [
        "\n".join([f"[{group}]", *(f"{name} = {place}" for name, place in points.items())])
        for group, points in {"console_scripts": {}, **project["entry-points"]}.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups))


def new_files(recipe: str) -> list[tuple[str, str]]:
    """The new files of a recipe: paths and texts."""
    return _NEW.findall(recipe)


def _apply(recipe: str, tree: Path) -> None:
    """Write the recipe's new files and change its lines; each line stands once in its file."""
    for path, text in new_files(recipe):
        assert not (tree / path).exists()
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
    edits = _EDIT.findall(recipe)
    assert len(edits) == recipe.count("\nIn `"), "an edit that the test can't read"
    for path, how, line, block in edits:
        text = (tree / path).read_text()
        assert text.count(f"{line}\n") == 1, (path, line)
        kept = f"{line}\n" if how == "below" else ""
        (tree / path).write_text(text.replace(f"{line}\n", kept + block))

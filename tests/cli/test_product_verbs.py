"""A verb that an installed package brings, by an entry point of the group `samecurve.verbs`."""

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoints
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from commands import refused
from samecurve.cli import main as cli_main
from samecurve.cli.main import VERBS, all_verbs, cli, product_verbs
from samecurve.core.entry_points import installed, ours

FILE = """
import click

@click.command()
def greet():
    '''Greet somebody.'''
    click.echo("hello")
"""


ROOT = Path(__file__).parents[2]
OLD_RUN = ROOT / "tests/compat/old_run/run"


def install(home: Path, name: str, **verbs: str) -> None:
    """Leave what pip would leave of a package with these verbs."""
    info = home / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{verb} = {place}" for verb, place in verbs.items()]
    (info / "entry_points.txt").write_text("\n".join(["[samecurve.verbs]", *lines]))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with verbs, as pip would leave it: one is lost, one is named as ours."""
    (tmp_path / "greet_package.py").write_text(FILE)
    greet = "greet_package:greet"
    install(tmp_path, "greetings", greet=greet, lost="greet_package:lost", plan=greet)
    monkeypatch.syspath_prepend(str(tmp_path))
    installed.cache_clear()
    yield
    installed.cache_clear()
    sys.modules.pop("greet_package", None)


@pytest.mark.usefixtures("package")
def test_an_installed_package_brings_a_verb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {"greet", "train"} <= set(all_verbs())
    assert CliRunner().invoke(cli, ["greet"]).output == "hello\n"
    assert "Trains nothing" in CliRunner().invoke(cli, ["plan", "--help"]).output  # ours stays
    said = refused(monkeypatch, capsys, "lost", cwd=tmp_path)
    assert "verb lost of the installed package greetings can't be loaded: " in said
    assert "remedy: install greetings again" in said
    said = refused(monkeypatch, capsys, "gret", cwd=tmp_path)
    assert "there is no verb gret; did you mean greet?" in said


@pytest.mark.usefixtures("package")
def test_help_lists_a_verb_that_names_no_title_below_more(monkeypatch: pytest.MonkeyPatch) -> None:
    brought = {"greet": product_verbs()["greet"]}
    monkeypatch.setattr(cli_main, "product_verbs", lambda: brought)
    assert "\nMore:\n  greet     Greet somebody.\n" in CliRunner().invoke(cli, ["-h"]).output


@pytest.mark.usefixtures("package")
def test_help_tells_of_a_verb_that_can_not_be_loaded() -> None:
    listed = CliRunner().invoke(cli, ["-h"])
    assert listed.exit_code == 0
    assert "lost          verb lost of the installed package greetings" in listed.output


def test_a_verb_of_ours_reads_no_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_main, "product_verb", None)  # a call would raise
    for verb in ("train", "plan", "schema"):
        assert CliRunner().invoke(cli, [verb, "--help"]).exit_code == 0
    assert "rehearse" not in VERBS


def test_the_page_on_packages_shows_a_verb_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/seam.md").read_text()
    (tmp_path / "my_package").mkdir()
    code = page.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "my_package/verbs.py").write_text(code)
    name, place = page.partition('"samecurve.verbs"]\n')[2].partition("\n")[0].split(" = ")
    install(tmp_path, "my-package", **{name: place.strip('"')})
    monkeypatch.syspath_prepend(str(tmp_path))
    installed.cache_clear()
    counted = CliRunner().invoke(cli, [name, str(OLD_RUN)])
    installed.cache_clear()
    assert (counted.exit_code, counted.output) == (0, "4\n"), counted.output


def test_code_that_is_newer_than_its_installation_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after `git pull` in a checkout that was installed before tasks had entry points."""
    old = SimpleNamespace(entry_points=EntryPoints())
    monkeypatch.setattr("samecurve.core.entry_points.distribution", lambda _name: old)
    ours.cache_clear()
    said = refused(monkeypatch, capsys, "ui", cwd=tmp_path)
    assert "this copy of Samecurve is newer than its installation" in said
    assert f"pip install -e {ROOT}" in said

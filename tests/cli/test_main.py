"""The command answers at once: nothing heavy is imported before it is needed."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from commands import command, refused, write_config
from samecurve.cli.main import VERBS, cli


def quickest(arguments: list[str], cwd: Path) -> float:
    """Seconds of a core that the quickest of five took: other processes share the cores, so that a
    clock would measure them too.
    """
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command(*arguments), cwd=cwd, capture_output=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def test_help_is_quick_and_imports_nothing_heavy(tmp_path: Path) -> None:
    program = (
        "import sys, samecurve.cli.main; sys.argv = ['samecurve', '--help']\ntry:"
        " samecurve.cli.main.main()\nfinally: print(sorted(m for m in ('torch', 'numpy',"
        " 'pydantic', 'rich') if m in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "[]"
    assert "train" in done.stdout
    assert quickest(["--help"], tmp_path) < 0.2


def test_a_config_error_is_quick_and_imports_no_torch(tmp_path: Path, corpus: Path) -> None:
    config = write_config(tmp_path, corpus)
    arguments = ["train", "-f", str(config), "--set", "model.hiden_size=3"]
    program = (
        f"import sys, samecurve.cli.main; sys.argv = ['samecurve', *{arguments!r}]\ntry:"
        " samecurve.cli.main.main()\nfinally: print(sorted(m for m in ('torch', 'numpy') if m in"
        " sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (2, "[]")
    assert "did you mean hidden_size?" in done.stderr
    assert quickest(arguments, tmp_path) < 0.5


@pytest.mark.parametrize(
    ("verb", "says"),
    [
        ("trian", "there is no verb trian; did you mean train?"),
        ("compare_run", "there is no verb compare_run; did you mean compare-runs?"),
        ("hallo", "there is no verb hallo; here: bench, compare-runs, "),
        ("submit", "samecurve submit is not in this version; here: bench, "),
    ],
)
def test_a_verb_that_is_not_there(
    verb: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    assert says in refused(monkeypatch, capsys, verb, cwd=tmp_path)


def test_the_readme_has_each_verb_and_help_lists_them_in_order() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert list(VERBS) == sorted(VERBS)
    assert [verb for verb in VERBS if f"| [`samecurve {verb}" not in readme] == []


@pytest.mark.parametrize(
    ("before", "verb", "after"),
    [
        (None, "schema", "PASSIVE"),
        ("active", "schema", "active"),  # the user's own
        (None, "run", None),
    ],
)
def test_idle_threads_sleep(
    before: str | None, verb: str, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside other programs they would spin; what a script's do is its own matter."""
    monkeypatch.setenv("OMP_WAIT_POLICY", before or "")
    if before is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    CliRunner().invoke(cli, [verb, "--no-such-flag"])
    assert os.environ.get("OMP_WAIT_POLICY") == after

"""The command answers at once: nothing heavy is imported before it is needed."""

import resource
import subprocess
import sys
from pathlib import Path

from commands import command, write_config


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

"""A wheel in a new environment, outside of the repository, as a newcomer tries it.

python3.13 tests/wheel_trial.py dist/samecurve-0.2.0-py3-none-any.whl

The environment is made by the Python that runs this file, which needs no package.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 1800  # seconds of a step: torch's CUDA build is large


def try_wheel(distribution: Path, home: Path) -> list[str]:
    """Install a wheel or an sdist below `home`, and use it; return a line for each step.

    CalledProcessError: a step failed. Its output has been printed.
    """
    environment, work = home / "environment", home / "work"
    work.mkdir()
    _run([sys.executable, "-m", "venv", environment], home)
    python = environment / "bin/python"
    constraints: list[str | Path] = ["-c", ROOT / "constraints.txt"]
    _run([python, "-m", "pip", "install", "-q", *constraints, distribution], home)
    samecurve = environment / "bin/samecurve"

    def says(*words: str) -> str:
        return _run([samecurve, *words], work)

    lines = [f"Python {'.'.join(map(str, sys.version_info[:3]))}", says("--version")]
    lines.append(says("examples").splitlines()[0])
    trained = says("train", "-f", "models/tiny.yaml", "--devices", "cpu:2", "--max-steps", "6")
    lines.append(next(line for line in trained.splitlines() if line.startswith("done")))
    checks = json.loads(says("check", "--devices", "cpu:2", "--json"))["checks"]
    lines.append(f"check  {len(checks)} checks, none FAIL")
    verified = says("verify", "-f", "examples/my_task.yaml", "--layouts", "ddp:2,fsdp:2")
    lines.append(next(line for line in verified.splitlines() if line.startswith("PASS")))
    where = _run([python, "-c", "import samecurve; print(samecurve.__file__)"], work)
    assert Path(where.strip()).is_relative_to(environment), where
    return lines


def _run(words: list[str | Path], cwd: Path) -> str:
    """Run a command without the variables that would let it find the repository."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTHON") and name not in {"VIRTUAL_ENV", "SAMECURVE_CACHE"}
    }
    done = subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        env={**kept, "SAMECURVE_CACHE": str(cwd / "cache")},
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
    done.check_returncode()
    return done.stdout


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="samecurve-wheel-") as place:
        for line in try_wheel(Path(sys.argv[1]).resolve(), Path(place)):
            print(line.strip())

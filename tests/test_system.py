"""Remedies name a command that works for this copy: a checkout by its path, a wheel by its name."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from samecurve.system import install_command

ROOT = Path(__file__).parents[1]
ASK = "from samecurve.system import install_command; print(install_command('jax'))"


def test_a_checkout_is_named_by_its_path() -> None:
    assert install_command("jax").endswith(f"pip install -e '{ROOT}[jax]'")


def test_pip_is_named_by_its_python_where_another_one_is_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "pip"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install_command("jax").startswith(f"{sys.executable} -m pip install ")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert install_command("jax").startswith("pip install ")


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, "samecurve[jax]"),  # from an index
        ('{"url": "file:///x/samecurve-0.1.0-py3-none-any.whl", "archive_info": {}}', None),
        (f'{{"url": "file://{ROOT}", "dir_info": {{}}}}', f"{ROOT}[jax]"),  # pip install DIRECTORY
    ],
)
def test_an_installed_wheel_is_named_by_name(
    tmp_path: Path, origin: str | None, expected: str | None
) -> None:
    """Only the files that a wheel would put there, on a path without the checkout."""
    package = tmp_path / "site/samecurve"
    package.mkdir(parents=True)
    for file in ("__init__.py", "system.py"):
        shutil.copy(ROOT / "src/samecurve" / file, package)
    info = tmp_path / "site/samecurve-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: samecurve\nVersion: 0.1.0\n")
    if origin:
        (info / "direct_url.json").write_text(origin)
    answer = subprocess.run(
        [sys.executable, "-S", "-c", ASK],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    ).stdout
    assert (expected or "samecurve[jax]") in answer

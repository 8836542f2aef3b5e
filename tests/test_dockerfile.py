"""The steps of the Dockerfile's CPU image, run as a script in a new environment.

No image is built: a build's own places (/opt, /work) are directories of the test.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from distributions import tracked_files

ROOT = Path(__file__).parents[1]
PLACES = {"/opt": "opt", "/work": "work"}


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's lines: the instruction and its words."""
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    pairs = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    return [(name, words) for name, _, words in pairs]


def moved(words: str, home: Path) -> str:
    """The words, with a build's places below `home`."""
    for place, name in PLACES.items():
        words = re.sub(rf"(?<![\w/]){place}(?=[/\s:]|$)", str(home / name), words)
    return words


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_steps_of_the_cpu_image_and_check_passes(tmp_path: Path) -> None:
    tracked = tracked_files()
    if tracked is None:
        pytest.skip("this is no repository: there is nothing that COPY would take")
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LANG": "C.UTF-8"}
    environment |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    directory, ran = tmp_path, []
    for name, written in instructions():
        words = moved(written, tmp_path)
        if name == "ARG":
            argument, _, default = words.partition("=")
            environment[argument] = default
        elif name == "ENV":
            variable, _, value = words.partition("=")
            environment[variable] = value.replace("$PATH", environment["PATH"])
        elif name == "WORKDIR":
            directory = Path(words)
            directory.mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            assert words == ". ."
            for file in tracked:
                (directory / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / file, directory / file)
        elif name == "RUN":
            done = subprocess.run(
                words,
                shell=True,
                cwd=directory,
                env=environment,
                check=False,
                capture_output=True,
                text=True,
                timeout=1200,
            )
            assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            ran.append(done.stdout)
        else:
            assert name in {"FROM", "ENTRYPOINT", "CMD"}, name
    assert " 0 FAIL" in ran[-1]
    assert (tmp_path / "work/models/tiny.yaml").is_file()
    assert instructions()[-2:] == [("ENTRYPOINT", '["samecurve"]'), ("CMD", '["check"]')]
    shutil.rmtree(tmp_path / "opt")

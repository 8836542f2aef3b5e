"""Where an experiment's runs lie while it lasts."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from samecurve.system import cache_home


@contextmanager
def scratch(name: str) -> Iterator[Path]:
    """A directory that goes with the block.

    What an experiment that was killed left is taken away, too.
    """
    home = cache_home() / name
    home.mkdir(parents=True, exist_ok=True)
    for left in home.iterdir():
        pid = left.name.partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{os.getpid()}-", dir=home) as made:
        yield Path(made)

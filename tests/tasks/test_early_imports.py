"""A task is opened while another thread of the command imports torch (run/warm_start.py)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import samecurve

# a library of that name which takes a while, as torch does
SLOW = """
import time
time.sleep(0.4)
class random:
    get_rng_state = staticmethod(lambda: "before")
    set_rng_state = staticmethod(lambda state: print("put back", state))
class default_generator:
    manual_seed = staticmethod(lambda seed: print("seeded", seed))
"""
OPENING = """
import importlib, sys, threading, time
from samecurve.tasks.adapter.opened_class import _seeded_everywhere
from samecurve.tasks.adapter.returned import is_torch
thread = threading.Thread(target=importlib.import_module, args=("torch.utils.data",))
thread.start()
while "torch" not in sys.modules:
    time.sleep(0.001)
with _seeded_everywhere(7):
    print("open", is_torch([], "Dataset"))
thread.join()
"""


def test_a_module_that_another_thread_imports_is_waited_for(tmp_path: Path) -> None:
    data = tmp_path / "torch" / "utils" / "data.py"
    data.parent.mkdir(parents=True)
    data.write_text("class Dataset: pass\n")
    (tmp_path / "torch" / "__init__.py").write_text(SLOW)
    home = Path(samecurve.__file__).parents[1]
    ended = subprocess.run(
        [sys.executable, "-c", OPENING],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{home}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stderr == ""
    assert ended.stdout.split("\n") == ["seeded 7", "open False", "put back before", ""]


def test_no_code_takes_torch_from_the_table_of_modules() -> None:
    """`import` waits for a module that is half imported; the table gives it as it is. The watch of
    a hanging process must not wait, and user scripts are looked at when they have ended.
    """
    taken = re.compile(r"sys\.modules(\.get\(|\[)\"(torch|jax|flax)")
    home = Path(samecurve.__file__).parent
    files = {str(f.relative_to(home)) for f in home.rglob("*.py") if taken.search(f.read_text())}
    assert files == {"watch/flight_recorder.py", "launch/script/bootstrap.py"}

"""Python runs this file at its start where it is on PYTHONPATH: steps are watched, GPUs emulated.

The emulator has a file of this name too, which Python would no longer find: it is run here. Both
are run by their path, since the rehearsed program may not find this package.
"""

import os
import runpy
from pathlib import Path

if os.environ.get("EMULATED_CUDA") == "1":
    _HOME = Path(__file__).parents[1]
    runpy.run_path(str(_HOME / "step_watch.py"))["install"]()
    runpy.run_path(str(_HOME / "emulated_cuda" / "start" / "sitecustomize.py"))

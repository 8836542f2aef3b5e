"""`python -m samecurve`: the command, which doesn't search the working directory for modules.

Python searches that directory first, and would take a `random.py` there for its own. Where
Samecurve itself is found there only, its child processes find it by PYTHONPATH.
"""

import os
import sys

_FIRST = sys.path[0]
if not sys.flags.safe_path and os.path.isdir(_FIRST) and os.path.samefile(_FIRST, "."):
    del sys.path[0]  # before any other module is imported
    if os.path.samefile(_FIRST, os.path.dirname(os.path.dirname(os.path.abspath(__file__)))):
        places = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([_FIRST, places] if places else [_FIRST])

from samecurve.cli.entry import run  # noqa: E402 - with the search as it is from here on

run()

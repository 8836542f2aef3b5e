"""The command line, which pauses at a place and says so: `python pausing.py PLACE VERB ...`.

PLACE: module:function. Before its first call the file that PAUSED names is made, and 60 s pass.
`exit`: the process pauses when it ends. A second place may follow after a comma.
"""

import atexit
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from samecurve.cli.entry import run


def pausing(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    """The function, which pauses before its first call. number: the place's, from 0."""
    here = Path(f"{os.environ['PAUSED']}{number}")

    def call(*arguments: Any, **named: Any) -> Any:
        if not here.exists():
            here.touch()
            time.sleep(60)
        return function(*arguments, **named)

    return call


def main() -> None:
    del sys.path[0]  # the directory of this file
    for number, place in enumerate(sys.argv.pop(1).split(",")):
        module, _, name = place.partition(":")
        if module == "exit":
            atexit.register(pausing(list, number))
            continue
        *owners, function = name.split(".")
        owner: Any = import_module(module)
        for attribute in owners:
            owner = getattr(owner, attribute)
        setattr(owner, function, pausing(getattr(owner, function), number))
    run()


if __name__ == "__main__":
    main()

"""Where the program keeps what it can make again.

The only file below probe/ that reads the environment: a user's task may open shards, which are
indexed in the cache, before any room above has been imported.
"""

import os
from collections.abc import Mapping
from pathlib import Path


def cache_home(environment: Mapping[str, str] = os.environ) -> Path:
    """The directory of token files, facts and indices.

    SAMECURVE_CACHE names it; else it lies in the user's cache directory.
    """
    if environment.get("SAMECURVE_CACHE"):
        return Path(environment["SAMECURVE_CACHE"])
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "samecurve"

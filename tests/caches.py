"""The cache as older programs left it."""

import json
from pathlib import Path

from samecurve.core.system.cache import CHECKED, MANIFEST


def unmark_checked(cache: Path) -> None:
    """Leave the entries of a cache as they were made before their input was checked."""
    for mark in list(cache.rglob(CHECKED)):
        mark.unlink()
        manifest = mark.with_name(MANIFEST)
        sums = json.loads(manifest.read_text())
        del sums[CHECKED]
        manifest.write_text(json.dumps(sums))

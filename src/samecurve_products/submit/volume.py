"""A volume that all machines of a job see at the same place."""

import re
from dataclasses import dataclass
from pathlib import Path

from samecurve.seam import UserError


@dataclass(frozen=True)
class Volume:
    """name: as the engine knows it. path: where the machines see it."""

    name: str
    path: str

    def holds(self, place: Path) -> bool:
        return place.is_relative_to(self.path)


def read_volume(text: str | None) -> Volume | None:
    """NAME:/PATH. UserError: it is not of this form."""
    if text is None:
        return None
    match = re.fullmatch(r"([a-z0-9][a-z0-9.-]*):(/[^:]+)", text)
    if match is None:
        raise UserError(f"--volume {text} is not NAME:/PATH", "--volume runs:/runs", "--volume")
    return Volume(*match.groups())

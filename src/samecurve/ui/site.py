"""All that one server has: its roots, the runs below them, and what was read of those."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from samecurve.ui.devices import Devices
from samecurve.ui.errors import RefusedError
from samecurve.ui.roots import Catalogue, FoundRun, Root
from samecurve.ui.run_list import RunList


@dataclass
class Site:
    """The state of a server, none of which a run needs."""

    catalogue: Catalogue
    runs: RunList = field(default_factory=RunList)
    devices: Devices = field(default_factory=Devices)

    @classmethod
    def of(cls, roots: Sequence[Root]) -> "Site":
        return cls(Catalogue(roots))

    def find(self, run_id: str) -> FoundRun:
        """The run of an id. RefusedError: there is none."""
        found = self.catalogue.find(run_id)
        if found is None:
            raise RefusedError(
                404, "there is no such run", "it may have been removed: see the list of runs"
            )
        return found

    def begin(self) -> None:
        """Begin what the server does beside its answers."""

    def end(self) -> None:
        """End it."""

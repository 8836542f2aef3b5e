"""All that one server has: its roots, the runs below them, and what was read of those."""

from collections.abc import Sequence
from pathlib import Path

from samecurve_products.page.devices import Devices
from samecurve_products.page.errors import RefusedError
from samecurve_products.page.indexer import Indexer
from samecurve_products.page.jobs.desk import Desk
from samecurve_products.page.roots import Catalogue, ListedRun, Root
from samecurve_products.page.run_list import RunList
from samecurve_products.page.run_pages import RunPages


class Site:
    """The state of a server, none of which a run needs."""

    def __init__(self, roots: Sequence[Root]) -> None:
        self.catalogue = Catalogue(roots)
        self.runs = RunList()
        self.devices = Devices()
        self.desk = Desk(self.catalogue)
        self._indexer = Indexer()
        self.pages = RunPages(self.runs, self._indexer)

    def begin(self) -> None:
        """Begin what the server does beside its answers: the queue, and reading long journals."""
        self.desk.begin()
        self._indexer.begin(listed.home for listed in self.catalogue.runs().values())

    def end(self) -> None:
        """End it. Jobs go on."""
        self._indexer.end()
        self.desk.end()

    def find(self, run_id: str) -> ListedRun:
        """The run of an id. RefusedError: there is none."""
        listed = self.catalogue.find(run_id)
        if listed is None:
            raise RefusedError(
                404, "there is no such run", "it may have been removed: see the list of runs"
            )
        return listed

    def job_logs(self, listed: ListedRun) -> dict[str, Path]:
        """The output of the last command of each kind that was started here for a run, by name."""
        logs: dict[str, Path] = {}
        jobs = [
            job
            for job in self.desk.jobs()
            if job.run == listed.home or str(listed.home) in job.argv
        ]
        for job in sorted(jobs, key=lambda job: job.added, reverse=True):
            verb = next((word for word in ("eval", "sample") if word in job.argv[:4]), "launcher")
            logs.setdefault(verb, job.log)
        return logs

"""Configs of other tools, read as configs of ours.

An installed package brings an importer by an entry point of the group `samecurve.importers`, which
names an object or a module with the members of Importer.
"""

from pathlib import Path
from typing import Protocol

from samecurve.core.config.document import Document
from samecurve.core.entry_points import installed, load
from samecurve.errors import UserError

NOT_IN_THE_FILE = "not in the file"  # begins the origin of what the other tool does by itself


class ImportedConfig(Protocol):
    """A config of another tool, read as a config of ours."""

    @property
    def tool(self) -> str: ...

    @property
    def document(self) -> Document: ...

    @property
    def run_directory(self) -> str | None:
        """The run directory that the other tool's config names."""
        ...

    def summary_lines(self) -> list[str]:
        """What became of each field, as lines for the user."""
        ...

    def unresolved(self, document: Document) -> list[UserError]:
        """The fields that can't be honoured, without those that a flag has settled."""
        ...


class Importer(Protocol):
    """Reads the configs of one tool or of several."""

    def tool_of(self, document: Document) -> str | None:
        """The tool whose config this is. None: the importer does not know it."""
        ...

    def convert(self, document: Document, folder: Path) -> ImportedConfig | None:
        """The config as one of ours. None: the importer does not know it.

        folder: the folder of the config, for the files that it names
        """
        ...


def importer_of(document: Document) -> Importer | None:
    """The first importer that knows a document. None: no installed package knows it."""
    for point in installed("importers").values():
        importer: Importer = load(point, "importer")
        if importer.tool_of(document) is not None:
            return importer
    return None

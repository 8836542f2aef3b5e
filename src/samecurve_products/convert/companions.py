"""Files that another tool's config names: its data sets, its prompts, the settings of an adapter.

Such tools read a relative path from the folder in which they are started. It is looked for from
the folder that the user is in, from the folder of the config, and from the three folders above it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from samecurve.seam import Document, UserError, parse_document

_ABOVE = 3  # folders above that of the config
_MOST_BYTES = 1 << 20
_MOST_FILES = 100_000  # of a folder that is looked through


@dataclass(frozen=True)
class Companions:
    """The files beside a config.

    folder: that the config lies in; None: nothing is read
    within: the folder that every file must lie below, links resolved; None: any
    """

    folder: Path | None = None
    within: Path | None = None

    def document(self, name: object, list_key: str) -> Document | None:
        """A file's values and their places. None: there is no such file.

        list_key: the key of the document that a list becomes

        UserError: the file can't be read.
        """
        path = self._find(name)
        if path is None or not path.is_file():
            return None
        return parse_document(_text_of(path), str(path), list_key=list_key)

    def text(self, name: object) -> str | None:
        """A file's text. None: there is no such file."""
        path = self._find(name)
        return None if path is None or not path.is_file() else _text_of(path)

    def names_in(self, name: object) -> tuple[Path, list[str]] | None:
        """A folder, and the names in it, in order. None: there is no such folder."""
        path = self._find(name)
        if path is None or not path.is_dir():
            return None
        names = [item.name for item, _ in zip(path.iterdir(), range(_MOST_FILES), strict=False)]
        return path, sorted(names)

    def _find(self, name: object) -> Path | None:
        if self.folder is None or not isinstance(name, str) or not name or "\0" in name:
            return None
        for path in self._candidates(Path(name).expanduser()):
            try:
                if path.exists() and (
                    self.within is None or path.resolve().is_relative_to(self.within)
                ):
                    return path
            except OSError:  # a name that is too long, a folder that may not be read
                continue
        return None

    def _candidates(self, path: Path) -> Iterator[Path]:
        if path.is_absolute():
            yield path
            return
        assert self.folder is not None
        if self.within is None:
            yield path
        folder = self.folder.absolute()
        yield from (above / path for above in (folder, *list(folder.parents)[:_ABOVE]))


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) <= _MOST_BYTES:
            return content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        cause = f"{path} can't be read: {error}"
        raise UserError(cause, "a text in UTF-8 that may be read", str(path)) from None
    cause = f"{path} has more than {_MOST_BYTES} bytes"
    raise UserError(cause, "is this the file that the config means?", str(path))

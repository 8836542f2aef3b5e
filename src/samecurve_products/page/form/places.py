"""Places that a browser may name: files below allowed roots, each by an opaque id.

The browser names a config by an id, which is looked up among the files that a search has found.
Values of a config that are paths must lie below a root, links resolved.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samecurve.seam import UserError
from samecurve_products.page.tree import SKIPPED, walk

MOST_BYTES = 1 << 20  # of a config file
_DEPTH = 3
_MOST_CONFIGS, _MOST_FOLDERS = 500, 20_000
_SKIPPED = SKIPPED | {"venv", "runs", "queue", "bench"}
_SUFFIXES = {".yaml", ".yml", ".json", ".toml"}
_WILDCARD = re.compile(r"[*?\[]")
_NO_PATHS = {  # texts that may begin with a slash
    *("data.prompts", "data.negative_prompt"),
    *("data.captions.trigger", "data.captions.separator"),
    *("data.source.caption", "data.source.trigger"),  # of a folder in the list
}
_REMEDY = "move it below one of these folders, or start the page with `samecurve ui . FOLDER`"


@dataclass(frozen=True)
class Roots:
    """The folders that the page may read configs, code and data from, resolved."""

    paths: tuple[Path, ...]

    @classmethod
    def of(cls, paths: Sequence[Path | str]) -> "Roots":
        return cls(tuple(Path(path).resolve() for path in paths))

    def root_of(self, path: Path) -> Path | None:
        """The root that a path lies below, links resolved; None: it lies outside of all."""
        resolved = path.resolve()
        return next((root for root in self.paths if resolved.is_relative_to(root)), None)

    def config_files(self) -> Iterator[tuple[Path, Path]]:
        """Files that may be configs, each with its root: not large, not deep, not hidden."""
        count = 0
        for root in self.paths:
            for folder, names in walk(root, _DEPTH, _MOST_FOLDERS, skipped=_SKIPPED):
                for path in (folder / name for name in sorted(names)):
                    if _may_be_config(path) and count < _MOST_CONFIGS:
                        count += 1
                        yield root, path


def _may_be_config(path: Path) -> bool:
    if path.suffix not in _SUFFIXES or path.name.startswith("."):
        return False
    try:
        return 0 < path.stat().st_size <= MOST_BYTES
    except OSError:
        return False


def check_places(values: Mapping[str, Any], roots: Roots, home: Path) -> list[UserError]:
    """Refuse paths in a config's `model` and `data` that lie below no root.

    values: the config as a document. home: the folder that relative paths begin from
    """
    return [
        UserError(f"{key}: {text} lies outside of the page's folders", _REMEDY, key)
        for key, text in config_texts(values)
        if _lies_outside(text, roots, home)
    ]


def config_texts(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The texts in a config's `model` and `data` that may be paths, each with its key."""
    for section in ("model", "data"):
        for key, text in _texts(values.get(section), section):
            if key not in _NO_PATHS:
                yield key, text


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """The texts within a value, each with its key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(item, f"{key}.{name}")
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, key)


def _lies_outside(text: str, roots: Roots, home: Path) -> bool:
    """Whether a text names a place outside of the roots. Words, and names of hubs, name none."""
    if not text or "\0" in text:
        return bool(text)
    try:
        path = Path(text).expanduser()
        parts = []
        for part in path.parts:  # a pattern names the folder before its first wildcard
            if _WILDCARD.search(part):
                break
            parts.append(part)
        is_outside = roots.root_of(home.joinpath(*parts)) is None
    except (OSError, RuntimeError, ValueError):  # no such user, too long, links in a circle
        return text.startswith(("/", "~"))
    # below the wildcard, too, `..` may lead out
    return is_outside or (len(parts) < len(path.parts) and ".." in path.parts)

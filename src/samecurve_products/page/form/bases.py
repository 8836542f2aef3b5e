"""The bases from which a new run can begin: a preset, a config file, a run to repeat, or just a
task.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from samecurve.seam import Config, Document, Run, Tasks, UserError, parse_document, read_document
from samecurve.tasks.user_class import find_pickled_class
from samecurve_products.init.presets import all_presets
from samecurve_products.page.form.places import Roots
from samecurve_products.page.roots import Catalogue, ListedRun, Root, opaque_id

if TYPE_CHECKING:
    from samecurve_products.convert.converted_config import ConvertedConfig

Kind = Literal["preset", "config", "run", "empty"]
_SECTIONS = Config.model_fields.keys()
# a cheap look before a file is parsed: one of these keys begins a line (or stands in JSON)
_KEYS = re.compile(
    r"(?m)^[\s{]*[\"']?(--)?(task|batch|trainer|multi_gpu|enable_multi_gpu|training_method"
    r"|base_model|model_name_or_path|pretrained_model_name_or_path|job|model_family)[\"']?\s*[:=]"
)
_EMPTY_BATCH = 32  # samples
_GONE = "load the page again: it lists what there is now"


@dataclass(frozen=True)
class BaseName:
    """A base as the browser names it: its kind, and its id; of `empty` the id is a task."""

    kind: Kind
    id: str

    @classmethod
    def of(cls, value: object) -> "BaseName":
        """UserError: the value is no such pair."""
        if isinstance(value, Mapping):
            kind, name = value.get("kind"), value.get("id", "")
            if kind in {"preset", "config", "run", "empty"} and isinstance(name, str):
                return cls(kind, name)
        raise UserError("the request names no base", "choose a preset, a config or a run", "base")


@dataclass(frozen=True)
class Base:
    """A config to begin from, read anew for each request.

    home: the folder in which its command is typed; relative paths begin there
    file: the config file that the command can name as it is; None: one has to be written
    """

    document: Document
    name: str
    title: str
    home: Path
    file: Path | None = None
    notes: tuple[str, ...] = ()
    converted: "ConvertedConfig | None" = None
    needs: tuple[str, ...] = ()  # keys that the user has to give
    run: Run | None = None  # the run that is repeated


@dataclass
class Bases:
    """The bases below the roots. Files that were recognised are not parsed again."""

    roots: Roots
    _known: dict[tuple[Path, int, int], dict[str, str] | None] = field(default_factory=dict)

    def listed(self) -> dict[str, list[dict[str, Any]]]:
        """All bases, and the tasks of an empty one, as /api/form/bases has them."""
        configs = []
        for root, path in self.roots.config_files():
            about = self._about(path)
            if about is not None:
                row = {"id": _id(root, path), "root": root.name}
                configs.append({**row, "path": path.relative_to(root).as_posix(), **about})
        runs = [{"id": listed.id, "name": listed.name} for listed in self._runs()]
        tasks = [{"id": name, "title": name} for name in Tasks().names()]
        presets = [preset.row for preset in all_presets().values()]
        return {"presets": presets, "configs": configs, "runs": runs, "tasks": tasks}

    def open(self, name: BaseName) -> Base:
        """Read a base. UserError: it is no longer there, or can't be read."""
        if name.kind == "preset":
            return self._preset(name.id)
        if name.kind == "config":
            return self._config(name.id)
        if name.kind == "run":
            return self._run(name.id)
        document = Document()
        document.set("task", name.id or "language", "task")
        document.set("batch.samples", _EMPTY_BATCH, "batch.samples")
        short = re.sub(r"\W+", "-", name.id.rpartition(":")[2] or "run").strip("-").lower()
        return Base(document, short, f"A new config: {name.id}", self.roots.paths[0])

    def _about(self, path: Path) -> dict[str, str] | None:
        """Task and title of a config file; None: it is no config."""
        try:
            status = path.stat()
            key = (path, status.st_mtime_ns, status.st_size)
            if key not in self._known:
                self._known[key] = _recognise(path)
            return self._known[key]
        except OSError:
            return None

    def _preset(self, identity: str) -> Base:
        preset = all_presets().get(identity)
        if preset is None:
            raise UserError(f"there is no preset {identity[:40]}", _GONE, "base")
        document = parse_document(preset.text, f"preset {identity}")
        return Base(document, identity, preset.title, self.roots.paths[0], needs=preset.needs)

    def _config(self, identity: str) -> Base:
        from samecurve_products.convert.tools import convert

        for root, path in self.roots.config_files():
            if _id(root, path) != identity:
                continue
            short = path.relative_to(root)
            document = _named(read_document(path), path, short.as_posix())
            find_pickled_class(document, path.parent)
            converted = convert(document, path.parent, root)
            if converted is None:
                return Base(document, path.stem, short.as_posix(), root, short)
            note = f"{short} is a config of {converted.tool}, read as one of Samecurve"
            title = f"{short.as_posix()} ({converted.tool})"
            notes = (note, *converted.summary_lines())
            return Base(
                converted.document, path.stem, title, root, notes=notes, converted=converted
            )
        raise UserError("this config file is no longer there", _GONE, "base")

    def _run(self, identity: str) -> Base:
        for listed in self._runs():
            if listed.id == identity:
                file = listed.run.config
                document = _named(listed.run.read_document(), file, f"{listed.name}/{file.name}")
                name = re.sub(r"-\d{8}-\d{6}(-\d+)?$", "", listed.home.name) or "run"
                title, home = f"The run {listed.name} again", listed.root.path
                return Base(document, name, title, home, run=listed.run)
        raise UserError("this run is no longer there", _GONE, "base")

    def _runs(self) -> list[ListedRun]:
        """The runs below the roots, those with the latest names first."""
        catalogue = Catalogue([Root.of(path) for path in self.roots.paths])
        return sorted(catalogue.runs().values(), key=lambda listed: listed.name, reverse=True)


def _id(root: Path, path: Path) -> str:
    return opaque_id(root, path.relative_to(root).as_posix())


def _named(document: Document, path: Path, name: str) -> Document:
    """The document whose places name the file as the page shows it."""
    for key, place in document.origins.items():
        document.origins[key] = place.replace(str(path), name, 1)
    return document


def _recognise(path: Path) -> dict[str, str] | None:
    """Task and title of a file; None: it is no config of ours or of a tool that is known."""
    from samecurve_products.convert.tools import tool_of

    try:
        text = path.read_text(encoding="utf-8")
        if not _KEYS.search(text):
            return None
        document = parse_document(text, str(path))
    except (OSError, ValueError, UserError):
        return None
    tool, keys = tool_of(document), document.value.keys()
    if tool is None and not ({"task", "batch"} & keys and len(_SECTIONS & keys) > 1):
        return None
    comment = re.match(r"(?:#\s*yaml-language-server:.*\n)*#\s*(.+)", text)
    title = comment[1].strip() if comment else path.stem
    task = tool or str(document.value.get("task", "language"))
    return {"task": task, "title": title[:160]}

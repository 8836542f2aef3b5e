"""Folders of pictures in other tools' configs, as `data` of task diffusion.

There each folder has all settings of its own, or takes them from the data set or the file that it
lies in. Here a folder has its path, its repeats, its weight and its trigger; all else is one
setting for all folders. So a setting is read where all folders agree, and refused where they
differ.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from samecurve_products.convert.converted_config import short_text
from samecurve_products.convert.foreign_config import SAME, ForeignConfig
from samecurve_products.convert.values import is_number

SOURCE = "data.source"
NO_FOLDER = "-d FOLDER, a folder of pictures with captions beside them (NAME.txt)"
UNLIKE = "is not the same for all folders"
_OFF: tuple[object, ...] = (None, False, 0, "", [], {})


@dataclass
class Folder:
    """A folder of the other tool.

    levels: beginnings of the names of its settings, the nearest first: "datasets.0.subsets.1.",
        "datasets.0.", ""
    item: what becomes an entry of data.source
    """

    levels: tuple[str, ...]
    item: dict[str, object] = field(default_factory=dict)
    number: int = 0

    def names(self, foreign: ForeignConfig, setting: str) -> list[str]:
        """The fields of the file that say this setting of the folder."""
        named = [level + setting for level in self.levels]
        return [name for name in named if foreign.value(name) is not None]

    def value(self, foreign: ForeignConfig, setting: str, default: object = None) -> object:
        """What the nearest of these fields says."""
        names = self.names(foreign, setting)
        return foreign.value(names[0]) if names else default

    def read(self, foreign: ForeignConfig, setting: str, key: str, value: object, why: str) -> None:
        """Make a setting a value of this folder's entry."""
        self.item[key] = value
        reason = f" ({why})" if why else ""
        for name in self.names(foreign, setting):
            shown = f" {short_text(value)}" if value != foreign.value(name) else ""
            foreign.note(name, f"{SOURCE}[{self.number}].{key}{shown}{reason}")


class Setting(NamedTuple):
    """A setting of folders that is one for all folders here.

    default: what it is there where no field says it; a line says so where `said` is a reason
    by: turns its value into ours
    """

    name: str
    key: str
    default: object = None
    by: Callable[[Any], object] | None = None
    why: str = ""
    said: str = ""
    remedy: str = ""


class Lacking(NamedTuple):
    """A setting of folders that this program does not have: refused where it is switched on."""

    name: str
    why: str
    remedy: str = "take it out of the file to train without"
    off: Sequence[object] = _OFF


def read_settings(
    foreign: ForeignConfig, folders: Sequence[Folder], settings: Iterable[Setting]
) -> None:
    """Read settings that are one for all folders here."""
    for setting in settings:
        given = [folder.value(foreign, setting.name, setting.default) for folder in folders]
        values = [setting.by(value) for value in given] if setting.by else given
        names = names_of(foreign, folders, setting.name)
        if any(value != values[0] for value in values):
            remedy = setting.remedy or f"--set {setting.key}=VALUE, for all folders"
            foreign.refuse_all(names, UNLIKE, remedy, setting.key)
            continue
        for name in names:
            foreign.convert(name, setting.key, values[0] if setting.by else SAME, setting.why)
        if not names and folders and setting.said and not foreign.is_set(setting.key):
            foreign.add_default(setting.key, values[0], setting.said)


def refuse_lacking(
    foreign: ForeignConfig, folders: Sequence[Folder], lacking: Iterable[Lacking]
) -> None:
    """Refuse what is switched on and not here; leave out what is switched off."""
    for row in lacking:
        on = [folder for folder in folders if folder.value(foreign, row.name) not in row.off]
        foreign.refuse_all(names_of(foreign, on, row.name), row.why, row.remedy, SOURCE)
        for name in names_of(foreign, folders, row.name):
            foreign.ignore(name, "switched off")


def leave_out(foreign: ForeignConfig, folders: Iterable[Folder], settings: str, why: str) -> None:
    """Leave out settings of folders, each with the reason."""
    for name in names_of(foreign, folders, *settings.split()):
        foreign.ignore(name, why)


def leave_out_whole(foreign: ForeignConfig, beginning: str, why: str) -> None:
    """Leave out every field whose name begins so."""
    for name in foreign.open_fields(beginning):
        foreign.ignore(name, why)


def read_repeats(
    foreign: ForeignConfig, folders: Iterable[Folder], setting: str, *, more: int = 0, why: str = ""
) -> None:
    """Read how often an epoch reads each folder.

    more: what the other tool's number lacks: 1 where 0 means once
    """
    for folder in folders:
        value = folder.value(foreign, setting)
        if value is None:
            continue
        if is_number(value) and value + more > 0 and value == int(value):
            folder.read(foreign, setting, "repeats", int(value) + more, why)
            continue
        cause = "is no number of whole passes over the folder in an epoch"
        names = folder.names(foreign, setting)
        foreign.refuse_all(names, cause, "a whole number, at least 1", SOURCE)


def write_sources(foreign: ForeignConfig, folders: Sequence[Folder]) -> None:
    """Write data.source: an entry for each folder, or its path where it has nothing else."""
    items = [
        folder.item["source"] if folder.item.keys() == {"source"} else folder.item
        for folder in folders
        if "source" in folder.item
    ]
    if not items:
        return
    place = foreign.place_of(folders[0].levels[0].removesuffix("."))
    foreign.document.set(SOURCE, items, place)
    for number, folder in enumerate(folders):
        where = foreign.place_of(folder.levels[0].removesuffix("."))
        foreign.document.origins["data", "source", number] = where


def number_folders(folders: Sequence[Folder]) -> None:
    """Give each folder its place in data.source."""
    for number, folder in enumerate(folders):
        folder.number = number


def names_of(foreign: ForeignConfig, folders: Iterable[Folder], *settings: str) -> list[str]:
    """The fields that say these settings of any of the folders, each once."""
    names = [
        name
        for folder in folders
        for setting in settings
        for name in folder.names(foreign, setting)
    ]
    return list(dict.fromkeys(names))

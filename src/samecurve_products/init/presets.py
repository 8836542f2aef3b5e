"""Presets: configs that come with the program, for the web page and for `samecurve init`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from samecurve.seam import parse_document


@dataclass(frozen=True)
class Preset:
    """A config that comes with the program."""

    id: str
    title: str
    about: str
    task: str
    text: str  # YAML
    needs: tuple[str, ...] = ()  # keys that the user has to give

    @property
    def row(self) -> dict[str, str]:
        return {"id": self.id, "title": self.title, "text": self.about, "task": self.task}


@cache
def all_presets() -> Mapping[str, Preset]:
    """The presets by id, in the order of their files.

    A file's comments on top are its title (the first line), the text of whom it is for, and the
    keys that it needs.
    """
    presets = {}
    folder = files("samecurve_products.init") / "presets"
    names = [file for file in folder.iterdir() if file.name.endswith(".yaml")]
    for file in sorted(names, key=lambda file: int(file.name.partition("-")[0])):
        text = file.read_text(encoding="utf-8")
        comments = re.match(r"(?:#.*\n)+", text)
        assert comments is not None
        title, *about = [line.lstrip("# ") for line in comments[0].splitlines()]
        needs: list[str] = []
        if about[-1].startswith("needs:"):
            needs = about.pop().removeprefix("needs:").replace(",", " ").split()
        name = re.sub(r"^\d+-", "", file.name.removesuffix(".yaml"))
        task = str(parse_document(text, file.name).value["task"])
        presets[name] = Preset(
            id=name,
            title=title,
            about=" ".join(about),
            task=task,
            text=text,
            needs=tuple(needs),
        )
    return presets

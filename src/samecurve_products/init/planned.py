"""Plans of what has been answered so far: the real ones, each with its task's facts."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from samecurve.processes import ForkServer, fork_server
from samecurve.run.warm_start import DESCRIBES
from samecurve.seam import (
    Document,
    Facts,
    LoadedConfig,
    Plan,
    SamecurveError,
    Tasks,
    UserError,
    arithmetic,
    entry_of,
    explain_os_error,
    load_document,
    make_plan,
    parse_document,
    show_bytes,
)
from samecurve_products.init.presets import Preset

Values = Mapping[str, tuple[Any, str]]  # key of the config -> its value, and the flag that sets it
_NEEDS = {  # what a preset lacks -> the cause and the remedy
    "data.source": ("it needs data of your own", "--data FILE: a file, a folder or a pattern"),
    "model.path": ("it needs a model", "--model FOLDER, with the model's files"),
}


@dataclass(frozen=True)
class Planned:
    """A config that was loaded, and its plan."""

    document: Document
    loaded: LoadedConfig
    plan: Plan
    facts: Facts

    def size(self) -> str:
        """The memory of a device, and how the devices share a step."""
        needed = show_bytes(sum(term.bytes for term in self.plan.memory))
        room = show_bytes(min(device.memory for device in self.plan.layout.devices))
        known = "" if self.plan.memory_estimate else ", without activations"
        return f"{needed} of {room} on each device{known}; {arithmetic(self.plan)}"


@dataclass(frozen=True)
class Candidate:
    """A preset on the chosen devices. planned: None: it can't be planned, and `refusal` says why"""

    preset: Preset
    planned: Planned | None
    refusal: SamecurveError | None = None


@dataclass(frozen=True)
class Settled:
    """All that was answered. torchrun: whether torchrun starts the ranks"""

    planned: Planned
    name: str
    title: str
    torchrun: bool


class Planner:
    """Makes plans. A process beside it keeps the libraries of tasks imported, until the block ends.

    Nothing is written but facts, into the cache, as `samecurve plan` does.
    """

    def __init__(self) -> None:
        self._server: ForkServer | None = None

    def __enter__(self) -> "Planner":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._server:
            self._server.close()

    def plan(self, document: Document, facts: Facts | None = None) -> Planned:
        """Load a document, and plan it. facts: those of an earlier plan of the same task and data

        SamecurveError: it can't be loaded or planned.
        """
        try:
            loaded = load_document(document, Tasks())
            libraries = (*entry_of(loaded.config.task).libraries, DESCRIBES)
            if self._server:
                self._server.preload(libraries)
            else:
                self._server = fork_server(libraries)
            plan, facts = make_plan(loaded, facts, server=self._server)
        except OSError as error:  # a path of an answer that can't be looked at
            path = Path(str(error.filename or "."))
            raise UserError(*explain_os_error(error, path, "give the answer again")) from None
        return Planned(document, loaded, plan, facts)

    def plan_with(self, planned: Planned, values: Values) -> Planned:
        """The plan with other values that don't change the task's facts."""
        return self.plan(with_values(planned.document, values), planned.facts)

    def plan_presets(self, presets: Iterable[Preset], values: Values) -> Iterable[Candidate]:
        """Plan each preset with the values."""
        for preset in presets:
            try:
                document = preset_document(preset, values)
                yield Candidate(preset, self.plan(document))
            except SamecurveError as error:
                yield Candidate(preset, None, error)


def preset_document(preset: Preset, values: Values) -> Document:
    """The preset's config with the values. UserError: the preset needs a value that is missing."""
    for key in preset.needs:
        if key not in values:
            raise UserError(*_NEEDS[key], key)
    return with_values(parse_document(preset.text, f"preset {preset.id}"), values)


def with_values(document: Document, values: Values) -> Document:
    """A copy of a document with other values."""
    copy = Document(deepcopy(document.value), dict(document.origins))
    for key, (value, flag) in values.items():
        copy.set(key, value, flag)
    return copy

"""The answers of the plan worker: bases, forms, plans and config files, as plain JSON values."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from samecurve.features.balance import balance_of
from samecurve.processes import ForkServer
from samecurve.run.warm_start import DESCRIBES
from samecurve.seam import (
    Facts,
    LoadedConfig,
    Plan,
    SamecurveError,
    UserError,
    choose_devices,
    entry_of,
    make_plan,
    probe,
    strategies_of,
)
from samecurve_products.init.detected import detected
from samecurve_products.page.form.bases import BaseName, Bases
from samecurve_products.page.form.draft import Draft, each, error_json, make_draft
from samecurve_products.page.form.fields import table
from samecurve_products.page.form.places import Roots
from samecurve_products.page.form.plan_blocks import plan_blocks
from samecurve_products.page.form.task_places import Stamps, stamps_of
from samecurve_products.page.form.values import shown_values
from samecurve_products.page.form.worlds import find_measured, world_blocks
from samecurve_products.page.form.written import (
    as_yaml,
    check_name,
    command_line,
    new_file,
    write,
)

Answer = dict[str, Any]


class RefusedError(Exception):
    """A draft with errors, where one without is needed."""

    def __init__(self, errors: list[dict[str, str]]) -> None:
        super().__init__("refused")
        self.errors = errors


@dataclass
class Answers:
    """Answers the requests of the page. Relative paths begin at the draft's own root."""

    roots: Roots
    server: ForkServer | None = None
    _bases: Bases = field(init=False)
    stamps: Stamps = ()  # of the user's files that were looked at last

    def __post_init__(self) -> None:
        self._bases = Bases(self.roots)

    def bases(self, _request: Mapping[str, Any]) -> Answer:
        return dict(self._bases.listed())

    def form(self, request: Mapping[str, Any]) -> Answer:
        draft = self._draft(request)
        fields, values = draft.fields, shown_values(draft.document, draft.loaded, draft.fields)
        places = draft.loaded.origins if draft.loaded else {}
        origins = {key: _origin(places.get(key, ""), key) for key in fields.by_key}
        return {
            "task": values.get("task"),
            "title": draft.base.title,
            "name": draft.base.name,
            "notes": list(draft.base.notes),
            "groups": [group.to_json() for group in fields.groups],
            "more": [group.to_json() for group in fields.more],
            "multi_gpu": self._multi_gpu(draft, values),
            "values": values,
            "from": {key: text for key, text in origins.items() if text},
        }

    def plan(self, request: Mapping[str, Any]) -> Answer:
        """The plan, or all that hinders it. Errors of the user's input are part of the answer.

        values: what each control shows where the config can be loaded: a default may follow from
        another value, such as the momentum from the optimizer
        """
        began = time.perf_counter()
        answer = self._plan(request)
        return {**answer, "seconds": round(time.perf_counter() - began, 4)}

    def _plan(self, request: Mapping[str, Any]) -> Answer:
        lists: Answer = {"notes": [], "blocks": [], "worlds": []}
        empty: Answer = {**lists, "values": {}, "command": "", "unsaved": False}
        try:
            draft = self._draft(request)
        except UserError as error:
            refused = [error_json(one, one.where) for one in each([error])]
            return {"ok": False, "errors": refused, **empty}
        errors = list(draft.errors)
        answer: Answer = {"ok": False, "errors": [], **empty, "notes": list(draft.base.notes)}
        if draft.loaded is not None:
            name = check_name(request.get("name"), draft.base.name)
            command = command_line(draft, name)
            answer |= {
                "command": str(command),
                "unsaved": command.text is not None,
                "values": shown_values(draft.document, draft.loaded, draft.fields),
            }
        if draft.loaded is not None and not errors:
            try:
                answer |= self._planned(draft, draft.loaded)
            except SamecurveError as error:
                errors += each([error])
        answer["errors"] = [error_json(error, draft.key_of(error)) for error in errors]
        answer["ok"] = not errors
        return answer

    def _planned(self, draft: Draft, loaded: LoadedConfig) -> Answer:
        loaded, notes = _without_measuring(loaded)
        machine = probe()
        plan, facts = self._make_plan(loaded)
        name = draft.base.name
        command = list(command_line(draft, name).arguments[1:])
        device = plan.layout.devices[0].name
        measured = find_measured(name, draft.base.home, command, device)
        return {
            "notes": [*draft.base.notes, *notes],
            "blocks": plan_blocks(plan, dict(facts.formulas)),
            "worlds": world_blocks(loaded.config, machine, facts, plan, measured=measured),
        }

    def _make_plan(self, loaded: LoadedConfig) -> tuple[Plan, Facts]:
        if self.server is not None:
            self.server.preload((*entry_of(loaded.config.task).libraries, DESCRIBES))
        return make_plan(loaded, server=self.server)

    def save(self, request: Mapping[str, Any]) -> Answer:
        """Write the draft as a config file of its own."""
        draft = self._accepted(request)
        command = new_file(draft, check_name(request.get("name"), draft.base.name))
        path = write(draft, command)
        return {"path": path.relative_to(draft.base.home).as_posix()}

    def start(self, request: Mapping[str, Any]) -> Answer:
        """Prepare all that starting the draft needs; its config file is written, if it has none.

        The answer has no path that the browser chose: its name becomes runs/NAME-TIME.
        """
        draft = self._accepted(request)
        assert draft.loaded is not None
        self._make_plan(_without_measuring(draft.loaded)[0])  # a refusal comes before a file
        name = check_name(request.get("name"), draft.base.name)
        command, home = command_line(draft, name), draft.base.home
        write(draft, command)
        config = draft.loaded.config
        devices = choose_devices(config.devices, config.engine, probe()).value
        return {
            "name": name,
            "home": str(home),
            "arguments": list(command.arguments),
            "devices": list(dict.fromkeys(device.place for device in devices)),
        }

    def config_text(self, request: Mapping[str, Any]) -> Answer:
        """The draft as YAML, and the folder in which its paths begin, for `samecurve data show`."""
        draft = self._accepted(request)
        return {"yaml": as_yaml(draft), "home": str(draft.base.home), "name": draft.base.name}

    def _draft(self, request: Mapping[str, Any]) -> Draft:
        name = BaseName.of(request.get("base"))
        values = request.get("values", {})
        return make_draft(self._bases, name, values, enter=os.chdir, look_at=self._look_at)

    def _look_at(self, task: object) -> None:
        """Note the user's files that are about to be read."""
        self.stamps = stamps_of(task)

    def _accepted(self, request: Mapping[str, Any]) -> Draft:
        draft = self._draft(request)
        if draft.errors:
            raise RefusedError([error_json(error, draft.key_of(error)) for error in draft.errors])
        return draft

    def _multi_gpu(self, draft: Draft, values: Mapping[str, Any]) -> Answer:
        machine = probe()
        engine = str(values.get("engine") or "torch")
        gpus = [
            {"index": gpu.index, "name": gpu.name, "memory": gpu.memory} for gpu in machine.devices
        ]
        use = str(values.get("devices.use") or "auto")
        return {
            "title": "Multi-GPU training",
            "detected": detected(machine),
            "devices": gpus,
            "cores": machine.cores,
            "cpu": machine.cpu,
            "enabled": _is_several(use, len(gpus)),
            "on": "all" if gpus else "cpu:2",
            "off": "0" if gpus else "cpu",
            "fields": [field.to_json() for field in draft.fields.multi_gpu],
            "statement": table()["statement"],
            "strategies": [
                {"value": row.name, "holds": row.holds, "sends": row.sends, "suits": row.suits}
                for row in strategies_of(engine)
            ],
        }


def _origin(place: str, key: str) -> str:
    return "this form" if place == key else place


def _without_measuring(loaded: LoadedConfig) -> tuple[LoadedConfig, list[str]]:
    """The config without a measurement of speeds, which only a start makes, and a note on it."""
    if balance_of(loaded.config) != "measured":
        return loaded, []
    config = loaded.config.with_values(devices={"balance": "even"})
    note = (
        "devices.balance measured: the speeds are measured when the run starts; shown evenly here"
    )
    return replace(loaded, config=config), [note]


def _is_several(use: str, gpus: int) -> bool:
    if use in {"auto", "all"}:
        return gpus > 1
    return "," in use or (use.startswith("cpu:") and use != "cpu:1")

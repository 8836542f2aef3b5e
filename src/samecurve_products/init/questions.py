"""The questions of `samecurve init` in their order, from the devices to the launcher."""

import os
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from samecurve.core.config.loading import DEFAULT_TASK
from samecurve.seam import (
    Device,
    Devices,
    Document,
    Machine,
    Tasks,
    UserError,
    arithmetic,
    banner,
    choose_devices,
    counted,
    echo,
    join_words,
    load_document,
    parse_setting,
    suggest,
)
from samecurve_products.init.answers import Answers, Question, tell
from samecurve_products.init.detected import detected
from samecurve_products.init.planned import (
    Candidate,
    Planned,
    Planner,
    Settled,
    Values,
    with_values,
)
from samecurve_products.init.presets import Preset, all_presets
from samecurve_products.init.skeleton import check_new_file

LAUNCHERS = ("samecurve", "torchrun")
EXAMPLE, NO_MODEL = "example", "none"  # answers
_BACK, _NO_SETTINGS = "back", "none"
_OWN_BATCH = 32  # samples, where no preset says it
_ASKED = {  # keys that a question of their own answers
    "task": "--task",
    "devices.use": "--devices",
    "data.source": "--data",
    "model.path": "--model",
    "batch.samples": "--batch",
    "schedule.scale_lr": "--scale-lr",
    "schedule.base_batch": "--base-batch",
}


class Questions:
    """Asks, and keeps what was answered."""

    def __init__(self, answers: Answers, planner: Planner, machine: Machine) -> None:
        self._answers, self._planner, self._machine = answers, planner, machine
        self._values: dict[str, tuple[object, str]] = {}

    @property
    def values(self) -> Values:
        """What was answered so far."""
        return self._values

    def ask_devices(self) -> None:
        echo(detected(self._machine))
        for device in self._machine.devices:
            echo(f"  {device.index}  {device.name}")
        question = Question(
            "--devices",
            "Devices: auto (all GPUs), indices such as 0,1, or cpu:N for N CPU ranks",
            _default_devices(self._machine),
        )
        use, devices = self._answers.ask(question, self._check_devices)
        self._values["devices.use"] = use, "--devices"
        echo(f"  {_named(devices)}")

    def ask_task(self) -> str:
        """A task's name, a class of the user's (FILE.py:CLASS), or a file that is to be made."""
        if preset := self._preset_by_flag():
            named = self._answers.by_flag("--task")
            if named not in {None, preset.task}:
                raise UserError(
                    f"preset {preset.id} is of task {preset.task}, and --task says {named}",
                    "leave one of them out",
                    "--task",
                )
            return preset.task
        names = Tasks().names()
        if self._answers.asks and self._answers.by_flag("--task") is None:
            for name in names:
                titles = [one.title for one in all_presets().values() if one.task == name]
                echo(f"  {name}: {'; '.join(titles)}" if titles else f"  {name}")
            echo("  FILE.py: a new file, with a small task in it that you then change")
            echo("  FILE.py:CLASS: a class of your own that is there already")
        return self._answers.ask(Question("--task", "Task", DEFAULT_TASK), _check_task)

    def ask_rest(self, task: str) -> Settled:
        """The questions that follow the task."""
        chosen = self._choose_preset(task) if _presets_of(task) else None
        if chosen is not None and chosen.planned is not None:
            planned, name, title = chosen.planned, chosen.preset.id, chosen.preset.title
        else:
            planned = self._plan_own(task)
            name = task.rpartition(":")[2].lower()
            title = f"a config for {task}"
        usual = planned.document.value["batch"]["samples"]
        planned = self._ask_batch(planned, usual, "the preset's" if chosen else "a usual one")
        planned = self._ask_scale(planned, usual if chosen else None)
        torchrun = self.ask_launcher()
        echo("\n".join(banner(planned.plan)))
        return Settled(planned, name, title, torchrun)

    def _check_devices(self, answer: str) -> tuple[str, tuple[Device, ...]]:
        document = Document({"task": DEFAULT_TASK, "batch": {"samples": 1}})
        document.set("devices.use", answer, "--devices")
        section = load_document(document, Tasks()).config.devices
        return section.use, choose_devices(section, "torch", self._machine).value

    def _preset_by_flag(self) -> Preset | None:
        name = self._answers.by_flag("--preset")
        return None if name is None else _preset_named(name, list(all_presets().values()))

    def _choose_preset(self, task: str) -> Candidate:
        """The preset that the user takes, planned with the user's data."""
        self._values |= _settings(self._answers.by_flag("--set") or _NO_SETTINGS)
        flagged = self._preset_by_flag()
        presets = [flagged] if flagged else _presets_of(task)
        while True:
            self._ask_data(presets)
            candidates = self._show_presets(presets)
            fitting = [candidate for candidate in candidates if candidate.planned]
            if not fitting:
                self._ask_data_again(task, candidates)
                continue
            names = "" if flagged else f": its number or name, or `{_BACK}` for other data"
            question = Question("--preset", f"Preset{names}", fitting[0].preset.id)
            choice = self._answers.ask(question, partial(_check_preset, candidates))
            if choice is not None:
                return choice
            self._answers.forget("--data", "--model")

    def _ask_data(self, presets: Sequence[Preset]) -> None:
        """Where the data is and, where presets of the task need one, the model."""
        has_example = any("data.source" not in preset.needs for preset in presets)
        text = "Data: a file, a folder or a pattern"
        if has_example:
            text += f"; or `{EXAMPLE}`, which needs no download"
        self._values.pop("data.source", None)
        data = self._answers.ask(Question("--data", text, EXAMPLE if has_example else None), str)
        if data != EXAMPLE:
            self._values["data.source"] = data, "--data"
        needing = [preset for preset in presets if "model.path" in preset.needs]
        self._values.pop("model.path", None)
        if not needing and self._answers.by_flag("--model") is None:
            return
        must = len(needing) == len(presets)
        text = "Model: the folder with its files"
        if not must:
            text += f"; or `{NO_MODEL}`, for a new model"
        question = Question("--model", text, None if must else NO_MODEL)
        model = self._answers.ask(question, _check_model)
        if model != NO_MODEL:
            self._values["model.path"] = model, "--model"

    def _show_presets(self, presets: Sequence[Preset]) -> list[Candidate]:
        """Plan the presets, and show each: what it is, and what it needs or why it is refused."""
        echo(f"Presets, planned on {self._values['devices.use'][0]}:")
        candidates = []
        for number, candidate in enumerate(
            self._planner.plan_presets(presets, self._values), start=1
        ):
            candidates.append(candidate)
            preset = candidate.preset
            echo(f"{number:3}  {preset.id}: {preset.title}\n     {preset.about}")
            if candidate.planned:
                echo(f"     fits: {candidate.planned.size()}")
            elif candidate.refusal:
                echo("     refused with these answers:")
                tell(candidate.refusal, indent=" " * 5)
        return candidates

    def _ask_data_again(self, task: str, candidates: Sequence[Candidate]) -> None:
        """UserError: no preset can be planned, and nobody is there to be asked."""
        refusals = [one.refusal for one in candidates if one.refusal]
        if not self._answers.asks:
            raise refusals[0]
        echo(f"No preset of task {task} can be planned with these answers. Give other data:")
        self._answers.forget("--data", "--model")

    def _plan_own(self, task: str) -> Planned:
        """The plan of a task that has no preset. UserError: it can't be planned."""
        document = Document()
        document.set("task", task, "--task")
        document.set("batch.samples", _OWN_BATCH, "--batch")
        for flag, key, nothing in (
            ("--data", "data.source", EXAMPLE),
            ("--model", "model.path", NO_MODEL),
        ):
            if (value := self._answers.by_flag(flag)) not in {None, nothing}:
                self._values[key] = value, flag
        question = Question(
            "--set",
            "Values that the class reads: KEY=VALUE, such as model.width=64 data.samples=1000",
            _NO_SETTINGS,
        )

        def check(answer: str) -> Planned:
            values = {**self._values, **_settings(answer)}
            return self._planner.plan(with_values(document, values))

        return self._answers.ask(question, check)

    def _ask_batch(self, planned: Planned, usual: int, why: str) -> Planned:
        question = Question(
            "--batch",
            f"Batch: samples of a step over all devices; {usual} is {why}",
            str(usual),
            remedy=f"a whole number, such as {usual}",
        )

        def check(answer: str) -> Planned:
            _, value = parse_setting(f"batch.samples={answer}")
            return self._planner.plan_with(planned, {"batch.samples": (value, "--batch")})

        planned = self._answers.ask(question, check)
        echo(f"  {arithmetic(planned.plan)}")
        return planned

    def _ask_scale(self, planned: Planned, base: int | None) -> Planned:
        """base: the batch that the learning rate was found for; None: the user knows it"""
        batch = planned.document.value["batch"]["samples"]
        if self._answers.asks and self._answers.by_flag("--scale-lr") is None:
            echo(_about_scaling(planned.loaded.config.optimizer.lr, batch, base))
        question = Question(
            "--scale-lr",
            "Scale the learning rate: none, linear or sqrt",
            "none",
            remedy="type none, linear or sqrt",
        )

        def check(answer: str) -> Planned:
            values: dict[str, tuple[object, str]] = {"schedule.scale_lr": (answer, "--scale-lr")}
            if answer.lower() != "none":
                values["schedule.base_batch"] = base or batch, "--base-batch"
            return self._planner.plan_with(planned, values)

        scaled = self._answers.ask(question, check)
        if scaled.loaded.config.schedule.scale_lr == "none":
            if self._answers.by_flag("--base-batch") is not None:
                raise UserError(
                    "--base-batch says nothing where the learning rate is not scaled",
                    "--scale-lr linear or sqrt, or leave it out",
                    "--base-batch",
                )
            return scaled
        if base is None or self._answers.by_flag("--base-batch") is not None:
            scaled = self._ask_base(scaled, base or batch)
        echo(f"  learning rate {scaled.plan.reasons['lr']}")
        return scaled

    def _ask_base(self, planned: Planned, usual: int) -> Planned:
        question = Question(
            "--base-batch",
            "Batch that the learning rate was found for",
            str(usual),
            remedy=f"a whole number, such as {usual}",
        )

        def check(answer: str) -> Planned:
            _, value = parse_setting(f"schedule.base_batch={answer}")
            values = {"schedule.base_batch": (value, "--base-batch")}
            return self._planner.plan_with(planned, values)

        return self._answers.ask(question, check)

    def ask_launcher(self) -> bool:
        """Whether torchrun starts the ranks."""
        text = "Launcher: samecurve starts the ranks itself, or torchrun"
        return self._answers.ask(Question("--launcher", text, LAUNCHERS[0]), _check_launcher)


def _about_scaling(rate: float, batch: int, base: int | None) -> str:
    """What scaling means here, in words."""
    words = (
        "The batch counts the samples of all devices together, so more devices change neither the"
        " batch nor the learning rate. Scaling is for a batch other than the one that the learning"
        " rate was found for"
    )
    if base is None:
        return f"{words}; yours is {batch}."
    return f"{words}: {rate:g} was found for {base}, and yours is {batch}."


def _settings(answer: str) -> dict[str, tuple[object, str]]:
    """The values of `KEY=VALUE KEY=VALUE`. UserError: another form, or the key of a question."""
    values: dict[str, tuple[object, str]] = {}
    try:
        words = [] if answer == _NO_SETTINGS else shlex.split(answer)
    except ValueError as error:
        raise UserError(f"{answer}: {error}", "close each quotation mark", "--set") from None
    for word in words:
        key, value = parse_setting(word)
        if key in _ASKED:
            raise UserError(f"--set {key}: {_ASKED[key]} says it", f"use {_ASKED[key]}", "--set")
        values[key] = value, f"--set {key}"
    return values


def _presets_of(task: str) -> list[Preset]:
    return [preset for preset in all_presets().values() if preset.task == task]


def _preset_named(name: str, presets: Sequence[Preset]) -> Preset:
    """UserError: there is none of this name."""
    names = [preset.id for preset in presets]
    if name not in names:
        remedy = suggest(name, names) or f"one of {', '.join(names)}"
        raise UserError(f"{name!r} is no preset here", remedy, "--preset")
    return presets[names.index(name)]


def _check_preset(candidates: Sequence[Candidate], answer: str) -> Candidate | None:
    """The candidate of this number or name. None: the user wants to give other data."""
    if answer == _BACK:
        return None
    numbers = {str(number): one for number, one in enumerate(candidates, start=1)}
    chosen = numbers.get(answer)
    if chosen is None:
        preset = _preset_named(answer, [one.preset for one in candidates])
        chosen = next(one for one in candidates if one.preset is preset)
    if chosen.refusal:
        raise chosen.refusal
    return chosen


def _check_task(answer: str) -> str:
    """UserError: it is no task, no class, and no file that can be made."""
    if answer.endswith(".py"):
        return str(check_new_file(Path(answer)))
    document = Document({"batch": {"samples": 1}})
    document.set("task", answer, "--task")
    if not Tasks().knows(answer):
        load_document(document, Tasks())  # says which tasks there are
    return answer


def _check_model(answer: str) -> str:
    if answer != NO_MODEL and not os.path.exists(Path(answer).expanduser()):
        raise UserError(
            f"there is no {answer}",
            "a folder of this machine that has the model's files; nothing is downloaded",
            "--model",
        )
    return answer


def _check_launcher(answer: str) -> bool:
    """Whether the launcher is torchrun."""
    if answer not in LAUNCHERS:
        raise UserError(
            f"{answer!r} is no launcher here",
            join_words([*LAUNCHERS]).replace(" and ", " or "),
            "--launcher",
        )
    return answer == "torchrun"


def _default_devices(machine: Machine) -> str:
    """All GPUs, if torch can use them, else CPU ranks."""
    try:
        kind = choose_devices(Devices(), "torch", machine).value[0].kind
    except UserError:  # torch can't use these GPUs; the line of detected() says why
        kind = "cpu"
    if kind == "cuda":
        return "auto"
    return "cpu:2" if machine.cores > 1 else "cpu"


def _named(devices: Sequence[Device]) -> str:
    """'2 devices: cuda:0 (NVIDIA H100), cuda:1 (NVIDIA H100)'."""
    names = [f"{device.place} ({device.name})" for device in devices]
    return f"{counted(len(devices), 'device')}: {', '.join(names)}"

"""`samecurve init` from its first question to the files: holds the interview, and writes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from samecurve.seam import Devices, choose_devices, echo, probe
from samecurve_products.init.answers import Answers
from samecurve_products.init.new_files import (
    Target,
    choose_file,
    program,
    train_command,
    write_config,
)
from samecurve_products.init.planned import Planner
from samecurve_products.init.presets import all_presets
from samecurve_products.init.questions import Questions
from samecurve_products.init.skeleton import make_skeleton

# the flags that have to be given where nobody can be asked, each with what it answers
NEEDED = {
    "--devices": "auto, indices such as 0,1, or cpu:2",
    "--task": "a task, FILE.py:CLASS, or FILE.py for a new file",
    "--preset": "the config to begin from",
    "--data": "a file, a folder or a pattern; or example",
    "--batch": "samples of a step over all devices",
    "--scale-lr": "none, linear or sqrt",
    "--launcher": "samecurve or torchrun",
}


@dataclass(frozen=True)
class Written:
    """What was written, and how to train with it.

    command: trains
    next_lines: other commands, each with what it does
    """

    files: Sequence[Path]
    command: Sequence[str]
    next_lines: Sequence[tuple[str, Sequence[str]]] = ()


def missing_flags(flags: Mapping[str, str]) -> list[str]:
    """The flags that are needed beside these, where nobody can be asked."""
    task, preset = flags.get("--task"), all_presets().get(flags.get("--preset", ""))
    needed = set(NEEDED)
    if preset:
        needed -= {"--task"}
        needed |= {"--model"} if "model.path" in preset.needs else set()
    if task is not None and task.endswith(".py"):
        needed = {"--task"}
    elif task is not None and not any(one.task == task for one in all_presets().values()):
        needed -= {"--preset", "--data"}
    return [flag for flag in (*NEEDED, "--model") if flag in needed - flags.keys()]


def interview(answers: Answers, *, schema: bool) -> Written:
    """Ask what is not given, and write the files.

    schema: with a line for editors

    UserError: an answer that can't be asked again is wrong; nothing is then written.
    """
    machine = probe()
    if answers.asks:
        echo("Enter takes the answer in brackets. Ctrl-C leaves, and writes nothing.")
    target = choose_file(answers, "") if answers.by_flag("FILE") is not None else None
    with Planner() as planner:
        questions = Questions(answers, planner, machine)
        is_new = (answers.by_flag("--task") or "").endswith(".py")
        if not is_new or answers.by_flag("--devices") is not None:
            questions.ask_devices()
        task = questions.ask_task()
        if task.endswith(".py"):
            return _write_skeleton(task, questions, answers, target, schema=schema)
        settled = questions.ask_rest(task)
    target = target or choose_file(answers, f"{settled.name}.yaml")
    files = write_config(answers, target, settled, schema=schema)
    ranks = settled.planned.plan.layout.num_devices if settled.torchrun else None
    return Written(files, train_command(files[0], ranks=ranks))


def _write_skeleton(
    task: str, questions: Questions, answers: Answers, target: Target | None, *, schema: bool
) -> Written:
    """A new task, its config and its test. Only flags change them: the files are there to edit."""
    use = str(questions.values.get("devices.use", ("auto", ""))[0])
    torchrun = answers.by_flag("--launcher") is not None and questions.ask_launcher()
    skeleton = make_skeleton(task, answers.without_asking(), use=use, target=target, schema=schema)
    skeleton.write()
    ranks = len(choose_devices(Devices(use=use), "torch", probe()).value) if torchrun else None
    config = skeleton.config.as_posix()
    verify = [*program("samecurve", "samecurve"), "verify", "-f", config, "--layouts", "ddp:2"]
    pytest = [*program("pytest", "pytest"), skeleton.test.as_posix()]
    return Written(
        list(skeleton.texts),
        train_command(skeleton.config, ranks=ranks),
        (("verify", verify), ("test", pytest)),
    )

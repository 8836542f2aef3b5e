"""From Python, in scripts and notebooks: plan, train, verify, and what a run left behind.

Training runs in fresh processes through the command line, so that it is the same run as on a
terminal. An interrupt stops it in order, and it ends with the process that began it.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import click

from samecurve.cli.config_flags import load_config
from samecurve.cli.main import cli, find_verb
from samecurve.cli.options import probe_facts, speed_measure
from samecurve.core.config.document import dump, read_file, suggest
from samecurve.core.events import Event
from samecurve.core.planning.plan import Plan
from samecurve.errors import RunError, SamecurveError, UserError
from samecurve.experiments.machine import predict, read_request
from samecurve.observe.console import PlainView
from samecurve.observe.journal import read_events
from samecurve.run.directory import Run as Files
from samecurve.run.prepare import make_plan
from samecurve.system import die_with
from samecurve.tasks.class_pickler import task_of
from samecurve.tasks.class_place import place_of
from samecurve.tasks.user_file import StartedWhileLoading, is_loading

Configured = str | os.PathLike[str] | Mapping[str, Any]
_BOOKKEEPING = {"seconds", "best_loss", "best_step"}  # what an evaluation's line has beside metrics
_ENDS = {"started", "finished", "stopped", "failed"}


class Run:
    """What a run directory holds, read when asked for.

    The run may be live, or was stopped, or failed.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """UserError: it is no run directory."""
        self.directory = Path(directory)
        if not Files(self.directory).exists():
            raise UserError(
                f"{self.directory} is no run directory",
                "one that training made: it has plan.json in it",
                "directory",
            )

    @property
    def events(self) -> list[Event]:
        """The lines of its journal that count."""
        return read_events(Files(self.directory).journal)

    @property
    def losses(self) -> list[float | None]:
        """The training loss of each step, from the first; None: not finite."""
        return [event.values.get("loss") for event in self.events if event.kind == "step"]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """{"step", "loss", ...the task's metrics} of each evaluation."""
        evaluations = []
        for event in self.events:
            if event.kind == "evaluated":
                metrics = {k: value for k, value in event.values.items() if k not in _BOOKKEEPING}
                evaluations.append({"step": event.step, **metrics})
        return evaluations

    @property
    def metrics(self) -> dict[str, Any]:
        """Of the last evaluation; empty if there was none."""
        evaluations = self.evaluations
        return evaluations[-1] if evaluations else {}

    @property
    def outcome(self) -> str:
        """finished, stopped, failed; live: it has not said."""
        ends = [event.kind for event in self.events if event.kind in _ENDS]
        if not ends or ends[-1] == "started":
            return "live"
        return ends[-1]

    @property
    def plan(self) -> Plan:
        return Files(self.directory).read_plan()

    def __repr__(self) -> str:
        losses = self.losses
        text = f"{self.directory}: {self.outcome}, {len(losses)} of {self.plan.steps} steps"
        if losses and losses[-1] is not None:
            text += f", loss {losses[-1]:.4f}"
        return f"<Run {text}>"


class Verified:
    """What verify() found. True in a condition if every layout gives one device's result."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """values: those of `samecurve verify --json`."""
        self.passed: bool = values["passed"]
        self.layouts: list[dict[str, Any]] = values["layouts"]
        self.left_out: list[str] = values["left_out"]
        self.values = values

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        verdicts = ", ".join(f"{layout['layout']} {layout['verdict']}" for layout in self.layouts)
        return f"<Verified {'PASS' if self.passed else 'FAIL'}: {verdicts}>"


def plan(
    task: type | Configured | None = None, config: Configured | None = None, **flags: Any
) -> Plan:
    """What train() would do.

    task, config: as train() has them
    flags: those of the command line, as names

    UserError: anything that can't be honoured.
    """
    with _configured("plan", task, config, flags) as arguments:
        options = _parse("plan", arguments)
        request = read_request(
            options["machine"], options["mfu"], options["bench"], options["chart"]
        )
        loaded = load_config(options, say=False)
        if request:
            return predict(loaded, request).plan_or_refuse
        facts = probe_facts(loaded) if options["probe_batch"] else None
        accepted_plan, _ = make_plan(loaded, facts, speed_measure(loaded))
        return accepted_plan


def train(
    task: type | Configured | None = None,
    config: Configured | None = None,
    *,
    quiet: bool = False,
    **flags: Any,
) -> Run:
    """Train as `samecurve train` does, showing how it goes, and return what it left.

    task: a class of one's own, wherever it stands; its config may name no other. Or the config
    config: a file, or its content as a mapping
    quiet: shows nothing but what the user's own code prints
    flags: as plan()

    UserError: something can't be honoured; RunError: it failed. KeyboardInterrupt: it was stopped
    in order, after saving, and the same call goes on.
    """
    with _configured("train", task, config, flags) as arguments:
        _parse("train", arguments)
        with _started("train", [*arguments, "--headless"]) as process:
            directory = _follow(process, quiet=quiet)
    return Run(directory or flags.get("save_dir") or flags["resume"])


def verify(
    task: type | Configured | None = None,
    config: Configured | None = None,
    *,
    quiet: bool = False,
    **flags: Any,
) -> Verified:
    """Whether the number of devices changes the result, as `samecurve verify` tells it.

    task, config: as train() has them
    quiet: does not show the table as it goes
    flags: as plan()

    UserError: something can't be honoured; RunError: it could not be tried.
    """
    with _configured("verify", task, config, flags) as arguments:
        _parse("verify", arguments)
        with _started("verify", [*arguments, "--headless"]) as process:
            answer, error_lines = _table(process, quiet=quiet)
            if process.returncode not in {0, 1} or not answer:
                raise _error_of(error_lines, process.returncode)
    return Verified(json.loads(answer))


@contextlib.contextmanager
def _started(verb: str, arguments: list[str]) -> Iterator["subprocess.Popen[str]"]:
    """The verb's process, which ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "samecurve.api", str(os.getpid()), verb, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # not of our terminal's group: a Ctrl-C reaches it through us, once
        start_new_session=True,
    )
    with process, contextlib.ExitStack() as cleaning:
        cleaning.callback(_kill, process)
        yield process


def _table(process: "subprocess.Popen[str]", *, quiet: bool) -> tuple[str, list[str]]:
    """What verify answers at its end, and what it wrote beside that, shown as it came."""
    assert process.stdout is not None
    assert process.stderr is not None
    lines: list[str] = []
    show = None if quiet else sys.stdout
    table = threading.Thread(target=_collect, args=(process.stderr, lines, show), name="table")
    table.start()
    try:
        answer = process.stdout.read()
        process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    finally:
        table.join()
    return answer, lines


def _follow(process: "subprocess.Popen[str]", *, quiet: bool) -> Path | None:
    """Show what it writes until it ends. Returns its run directory; None: it named none."""
    assert process.stdout is not None
    assert process.stderr is not None
    error_lines: list[str] = []
    arguments = (process.stderr, error_lines, sys.stderr)
    errors = threading.Thread(target=_collect, args=arguments, name="errors")
    errors.start()
    display = _Display(quiet=quiet)
    interrupted = False
    while True:
        try:
            for line in process.stdout:
                display.show(line)
            process.wait()
            break
        except KeyboardInterrupt:
            # the first lets it save, the second ends it: the launcher owns signals
            interrupted = True
            process.send_signal(signal.SIGINT)
    errors.join()
    if interrupted:
        if display.directory is None:
            raise KeyboardInterrupt("stopped before anything was trained")
        raise KeyboardInterrupt(
            f"stopped; {display.directory} holds what was trained, and the same call goes on"
        )
    if 0 < process.returncode < 128 or process.returncode < 0:
        raise _error_of(error_lines, process.returncode)
    return display.directory


class _Display:
    """Shows the lines of a headless run as a person reads them."""

    def __init__(self, *, quiet: bool) -> None:
        self.directory: Path | None = None
        self._quiet = quiet
        self._view: PlainView | None = None

    def show(self, line: str) -> None:
        event = Event.from_line(line.encode())
        if event is None:
            print(line, end="")  # what the user's own code prints
            return
        if event.kind == "planned":
            self.directory = Path(event.values["run"])
            self._view = PlainView(Plan.from_json(event.values["plan"]), self.directory)
        if self._view and not self._quiet:
            self._view.show(event)


def _collect(stream: IO[str], lines: list[str], show: IO[str] | None) -> None:
    """Every line of a stream; what is no error is shown as it comes."""
    for line in stream:
        lines.append(line)
        if show is not None and not line.startswith(("error: ", "  remedy: ")):
            print(line, end="", file=show)


def _error_of(lines: list[str], code: int) -> SamecurveError:
    """What the process wrote last, as the exception that it was there."""
    not_errors = itertools.takewhile(lambda line: not line.startswith("error: "), lines)
    first = len(list(not_errors))
    text = "".join(lines[first:]).strip().removeprefix("error: ")
    kind = UserError if code == UserError.exit_code else RunError
    if "\nerror: " in text or not text:
        return kind(text or f"the run left with exit code {code} and no word")
    cause, _, remedy = text.partition("\n  remedy: ")
    return kind(cause, remedy)


def _kill(process: "subprocess.Popen[str]") -> None:
    """Leave nothing of it, whatever ended us."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)


@contextlib.contextmanager
def _configured(
    verb: str,
    task: type | Configured | None,
    config: Configured | None,
    flags: Mapping[str, Any],
) -> Iterator[list[str]]:
    """The arguments of a command line that says the same, for as long as the block lasts.

    UserError: task or flags are none; those that the block raises name a mapping as `config`.
    """
    if is_loading():
        raise StartedWhileLoading
    task_class, config = _told_apart(verb, task, config)
    with tempfile.TemporaryDirectory(prefix="samecurve-") as home:
        file = None if config is None or isinstance(config, Mapping) else os.fspath(config)
        path = Path(home) / "run.yaml"
        if isinstance(config, Mapping):
            path.write_text(dump(json.loads(json.dumps(config))))
            file = str(path)
        arguments = _arguments(verb, file, flags)
        if task_class is not None:
            _refuse_other_task(task_class, file, flags)
            arguments += ["--set", f"task={json.dumps(task_of(task_class, Path(home)))}"]
        try:
            yield arguments
        except SamecurveError as error:
            if str(path) not in str(error):
                raise
            kind = UserError if error.exit_code == UserError.exit_code else RunError
            raise kind(str(error).replace(str(path), "config")) from None


def _told_apart(
    verb: str, task: object, config: Configured | None
) -> tuple[type | None, Configured | None]:
    """The class, if one is given, and the config."""
    if isinstance(task, type):
        return task, config
    if task is not None and not isinstance(task, str | os.PathLike | Mapping):
        name = type(task).__name__
        raise UserError(
            f"{verb}() is given an object of type {name}, where other processes need its class",
            f"samecurve.{verb}({name}, ...): the task's class itself, which has model(), loss() and"
            " train_data(); or a config",
            "task",
        )
    if task is not None and config is not None:
        raise UserError(
            f"{verb}() is given two configs",
            f"samecurve.{verb}(MyTask, config): a task's class first; or one config",
            "config",
        )
    return None, config if task is None else task


def _refuse_other_task(task_class: type, file: str | None, flags: Mapping[str, Any]) -> None:
    """UserError: the config or the flags name another task."""
    settings = flags.get("set")
    others = [settings["task"]] if isinstance(settings, Mapping) and "task" in settings else []
    if file is not None:
        others += [task for task in [read_file(Path(file)).value.get("task")] if task]
    for other in others:
        place = place_of(other)
        if place is None or place.name != task_class.__name__:
            raise UserError(
                f"task: {other} in the config, and the class {task_class.__name__} beside it",
                "leave `task:` out of the config: the class is the task",
                "task",
            )


def _arguments(verb: str, file: str | None, flags: Mapping[str, Any]) -> list[str]:
    """Flags as on a command line. UserError: one that the verb does not have."""
    known = {
        option.removeprefix("--").replace("-", "_")
        for parameter in _command(verb).params
        for option in parameter.opts
        if option.startswith("--")
    } - {"file", "headless", "json"}
    arguments = [] if file is None else ["-f", file]
    for name, value in flags.items():
        option = f"--{name.replace('_', '-')}"
        if name not in known:
            raise UserError(
                f"{verb}() has no {name}",
                suggest(name, sorted(known)) or f"the flags of `samecurve {verb} --help`, as names",
                name,
            )
        if name == "set":
            if not isinstance(value, Mapping):
                raise UserError(
                    f"set={value!r}", 'a mapping of config keys: set={"optimizer.clip": 0.5}', "set"
                )
            for key, setting in value.items():
                arguments += [option, f"{key}={json.dumps(setting)}"]
        elif value is True:
            arguments.append(option)
        elif isinstance(value, list | tuple):
            arguments += [option, ",".join(map(str, value))]
        elif value is not None and value is not False:
            arguments += [option, str(value)]
    return arguments


def _command(verb: str) -> click.Command:
    command = find_verb(verb)
    assert command is not None
    return command


def _parse(verb: str, arguments: list[str]) -> dict[str, Any]:
    """The flags' values by name. UserError: one is of another kind."""
    try:
        with cli.make_context("samecurve", [verb], resilient_parsing=True) as parent:
            return _command(verb).make_context(verb, list(arguments), parent=parent).params
    except click.ClickException as error:
        raise UserError(error.format_message(), f"`samecurve {verb} --help`") from None


def main(parent: str, *arguments: str) -> None:
    """The command line, for a process that is to be told to stop if its parent goes."""
    from samecurve.cli.main import main as command_line

    die_with(int(parent), signal.SIGTERM)
    sys.argv = ["samecurve", *arguments]
    command_line()


if __name__ == "__main__":
    main(*sys.argv[1:])

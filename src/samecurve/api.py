"""From Python, in scripts and notebooks: plan, train, and what a run left behind.

Training runs in fresh processes, behind the command line's own door, so that it is the same run as
on a terminal; an interrupt stops it in order, and it ends with the process that began it.
"""

import contextlib
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
from samecurve.core.config.document import dump, suggest
from samecurve.core.events import Event
from samecurve.core.planning.plan import Plan
from samecurve.errors import RunError, SamecurveError, UserError
from samecurve.experiments.machine import predict, read_request
from samecurve.observe.console import PlainView
from samecurve.observe.journal import read_events
from samecurve.run.directory import Run as Files
from samecurve.run.prepare import make_plan
from samecurve.system import die_with

Configured = str | os.PathLike[str] | Mapping[str, Any]
_BOOKKEEPING = {"seconds", "best_loss", "best_step"}


class Run:
    """What a run directory holds, read when asked for; also of a run that is live, was stopped or
    failed.
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
        return [
            {
                "step": event.step,
                **{name: value for name, value in event.values.items() if name not in _BOOKKEEPING},
            }
            for event in self.events
            if event.kind == "evaluated"
        ]

    @property
    def metrics(self) -> dict[str, Any]:
        """Of the last evaluation; empty if there was none."""
        return (self.evaluations or [{}])[-1]

    @property
    def outcome(self) -> str:
        """finished, stopped, failed; live: it has not said."""
        ends = [
            event.kind
            for event in self.events
            if event.kind in {"started", "finished", "stopped", "failed"}
        ]
        return ends[-1] if ends and ends[-1] != "started" else "live"

    @property
    def plan(self) -> Plan:
        return Files(self.directory).read_plan()

    def __repr__(self) -> str:
        losses = self.losses
        return (
            f"<Run {self.directory}: {self.outcome}, {len(losses)} of {self.plan.steps} steps"
            + (f", loss {losses[-1]:.4f}>" if losses and losses[-1] is not None else ">")
        )


def plan(config: Configured | None = None, **flags: Any) -> Plan:
    """What train() would do.

    config: a file, or its content as a mapping. flags: those of the command line, as names.
    UserError: anything that can't be honoured.
    """
    with _file(config) as file:
        given = _parsed("plan", _arguments("plan", file, flags))
        wanted = read_request(*(given[name] for name in ("machine", "mfu", "bench", "chart")))
        loaded = load_config(given, say=False)
        if wanted:
            return predict(loaded, wanted).plan_or_refuse
        return make_plan(
            loaded, probe_facts(loaded) if given["probe_batch"] else None, speed_measure(loaded)
        )[0]


def train(config: Configured | None = None, *, quiet: bool = False, **flags: Any) -> Run:
    """Train as `samecurve train` does, showing how it goes, and return what it left.

    config: a file, or its content as a mapping. flags: as plan().

    UserError: something can't be honoured; RunError: it failed. KeyboardInterrupt: it was stopped
    in order, after saving, and the same call goes on.
    """
    with _file(config) as file:
        arguments = _arguments("train", file, flags)
        _parsed("train", arguments)
        process = subprocess.Popen(
            [
                sys.executable,
                "-u",
                "-m",
                "samecurve.api",
                str(os.getpid()),
                "train",
                *arguments,
                "--headless",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )  # not of our terminal's group: a Ctrl-C reaches it through us, once
        with process, contextlib.ExitStack() as cleaning:
            cleaning.callback(_killed, process)
            directory = _followed(process, quiet)
    return Run(directory or flags.get("save_dir") or flags["resume"])


def _followed(process: "subprocess.Popen[str]", quiet: bool) -> Path | None:
    """Show what it writes until it ends. Returns its run directory; None: it said none."""
    assert process.stdout is not None
    assert process.stderr is not None
    said: list[str] = []
    errors = threading.Thread(target=_collect, args=(process.stderr, said), name="errors")
    errors.start()
    shown = _Shown(quiet)
    interrupted = False
    while True:
        try:
            for line in process.stdout:
                shown.line(line)
            process.wait()
            break
        except (
            KeyboardInterrupt
        ):  # the first lets it save, the second ends it: the launcher owns signals
            interrupted = True
            process.send_signal(signal.SIGINT)
    errors.join()
    if interrupted:
        raise KeyboardInterrupt(
            f"stopped; {shown.directory} holds what was trained, and the same call goes on"
            if shown.directory
            else "stopped before anything was trained"
        )
    if 0 < process.returncode < 128 or process.returncode < 0:
        raise _error(said, process.returncode)
    return shown.directory


class _Shown:
    """The lines of a headless run, as a person reads them."""

    def __init__(self, quiet: bool) -> None:
        self.directory: Path | None = None
        self._quiet = quiet
        self._view: PlainView | None = None

    def line(self, line: str) -> None:
        event = Event.from_line(line.encode())
        if event is None:
            print(line, end="")  # what the user's own code prints
            return
        if event.kind == "planned":
            self.directory = Path(event.values["run"])
            self._view = PlainView(Plan.from_json(event.values["plan"]), self.directory)
        if self._view and not self._quiet:
            self._view.show(event)


def _collect(stream: IO[str], said: list[str]) -> None:
    for line in stream:
        said.append(line)
        if not line.startswith(("error: ", "  remedy: ")):
            print(line, end="", file=sys.stderr)


def _error(said: list[str], code: int) -> SamecurveError:
    """What the process said last, as the exception that it was there."""
    first = next(
        (index for index, line in enumerate(said) if line.startswith("error: ")), len(said)
    )
    text = "".join(said[first:]).strip().removeprefix("error: ")
    kind = UserError if code == UserError.exit_code else RunError
    if "\nerror: " in text or not text:
        return kind(text or f"the run left with exit code {code} and no word")
    cause, _, remedy = text.partition("\n  remedy: ")
    return kind(cause, remedy)


def _killed(process: "subprocess.Popen[str]") -> None:
    """Nothing is left of it, whatever ended us."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)


@contextlib.contextmanager
def _file(config: Configured | None) -> Iterator[str | None]:
    """The config as a file; what is wrong in a mapping is told as its own."""
    if not isinstance(config, Mapping):
        yield None if config is None else os.fspath(config)
        return
    with tempfile.TemporaryDirectory(prefix="samecurve-") as home:
        path = Path(home) / "run.yaml"
        path.write_text(dump(json.loads(json.dumps(config))))
        try:
            yield str(path)
        except SamecurveError as error:
            if str(path) not in str(error):
                raise
            kind = UserError if error.exit_code == UserError.exit_code else RunError
            raise kind(str(error).replace(str(path), "config")) from None


def _arguments(verb: str, file: str | None, flags: Mapping[str, Any]) -> list[str]:
    """Flags as on a command line. UserError: one that the verb does not have."""
    known = {
        option.removeprefix("--").replace("-", "_")
        for parameter in _command(verb).params
        for option in parameter.opts
        if option.startswith("--")
    } - {"file", "headless"}
    made = [] if file is None else ["-f", file]
    for name, value in flags.items():
        option = f"--{name.replace('_', '-')}"
        if name not in known:
            raise UserError(
                f"{verb}() has no {name}",
                suggest(name, sorted(known)) or f"the flags of `samecurve {verb} --help`, as names",
                name,
            )
        if name == "set":
            for key, setting in (value if isinstance(value, Mapping) else {}).items():
                made += [option, f"{key}={json.dumps(setting)}"]
            if not isinstance(value, Mapping):
                raise UserError(
                    f"set={value!r}", 'a mapping of config keys: set={"optimizer.clip": 0.5}', "set"
                )
        elif value is True:
            made.append(option)
        elif value is not None and value is not False:
            made += [
                option,
                ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value),
            ]
    return made


def _command(verb: str) -> click.Command:
    command = find_verb(verb)
    assert command is not None
    return command


def _parsed(verb: str, arguments: list[str]) -> dict[str, Any]:
    """UserError: a flag's value is none."""
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

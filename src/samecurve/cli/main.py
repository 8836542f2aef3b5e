"""The command line: which verbs there are, and how every failure ends.

A verb parses, builds the config, calls one function and prints one thing. A verb's file is imported
when it is called or listed; torch, numpy and pydantic only inside its function, so that help and
usage errors stay fast.
"""

import errno
import io
import os
import re
import signal
import sys
import traceback
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from samecurve import __version__
from samecurve.cli.options import VerbGroup, dashes
from samecurve.errors import Interrupted, SamecurveError, UserError, message_of
from samecurve.launch import Signals, kill_children
from samecurve.terminal import echo, shorten, unbuffered

if TYPE_CHECKING:
    from collections.abc import Mapping
    from importlib.metadata import EntryPoint

_VERB = re.compile(r'"""`samecurve ([\w-]+)`\."""')  # the first line of a verb's file


# each verb and its file in cli/, in alphabetical order; the click command is named as the file
VERBS = {
    match[1]: path.stem
    for path in sorted(Path(__file__).parent.glob("*.py"))
    if (match := _VERB.match(path.read_text(encoding="utf-8")))
}


def all_verbs() -> list[str]:
    """The verbs of the kernel and those that installed packages bring, in alphabetical order."""
    return sorted({*VERBS, *product_verbs()})


def product_verbs() -> "Mapping[str, EntryPoint]":
    """The entry points of verbs that installed packages bring, by name. None replaces one of ours.

    They are looked for where a verb is none of the kernel's, or where all verbs are listed.
    """
    from samecurve.core.entry_points import installed

    return installed("verbs")


def product_verb(name: str) -> "EntryPoint | None":
    """The entry point of a verb that an installed package brings."""
    from samecurve.core.entry_points import find

    return find("verbs", name)


def find_verb(name: str) -> click.Command:
    """The command of a verb. KeyError: there is no such verb. UserError: it can't be loaded."""
    if name in VERBS:
        file = VERBS[name]
        command = getattr(import_module(f"samecurve.cli.{file}"), file)
    else:
        from samecurve.core.entry_points import load

        point = product_verb(name)
        if point is None:
            raise KeyError(name)
        command = load(point, "verb")
    assert isinstance(command, click.Command)
    return command


class Verbs(VerbGroup):
    """`samecurve -f FILE` is `samecurve train -f FILE`."""

    other_verbs = "More"

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return all_verbs()

    def get_command(self, _ctx: click.Context, name: str) -> click.Command | None:
        return find_verb(name) if name in VERBS or product_verb(name) else None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in {"-h", "--help", "--version"}:
            args = ["train", *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        verb = dashes(args[0]) if args and not ctx.resilient_parsing else ""
        if verb and verb not in VERBS and product_verb(verb) is None:
            from samecurve.cli.unknown_arguments import refuse_config

            refuse_config(args[0], args, "samecurve train")
            near = get_close_matches(verb, all_verbs(), 1)
            hint = f"did you mean {near[0]}?" if near else f"here: {', '.join(all_verbs())}"
            raise click.UsageError(f"there is no verb {args[0]}; {hint}")
        return super().resolve_command(ctx, args)


@click.group(
    cls=Verbs,
    invoke_without_command=True,
    context_settings={"token_normalize_func": dashes, "help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="samecurve")
@click.pass_context
def cli(context: click.Context) -> None:
    """Train one model on one device or on many, with the same loss curve.

    \b
    samecurve train -f models/tiny.yaml --devices cpu:2
    samecurve plan  -f models/tiny.yaml
    """
    if context.invoked_subcommand is None:
        from samecurve.cli.greeting import greeting

        echo(greeting())
    elif context.invoked_subcommand != "run":  # `run` starts scripts as torchrun starts them
        let_threads_wait()


def main() -> None:
    """Run the command line; every failure is printed here, once, as the last thing.

    A signal interrupts the verb, which then removes what is half done. A second signal ends it.
    """
    _mend_streams()

    def interrupt() -> None:
        raise Interrupted(signals.received or signal.SIGINT)

    with Signals(interrupt, _end_at_once) as signals:
        try:
            _run_verb()
        except Interrupted as stop:
            _leave_stopped(stop)


def _run_verb() -> None:
    """Run the verb. Interrupted: a signal came."""
    try:
        cli.main(standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as leaving:
        sys.exit(leaving.exit_code)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "samecurve"
        echo(f"error: {error.format_message()}\n  remedy: {command} --help", err=True)
        sys.exit(error.exit_code)
    except SamecurveError as error:
        echo(_error_text(error), err=True)
        sys.exit(error.exit_code)
    except click.Abort as error:  # click's form of Interrupted, or of what a user's code has raised
        raise error.__cause__ or error from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            path = shorten(str(error.filename), 200)
            echo(f"error: {path}: {error.strerror}\n  remedy: a shorter path", err=True)
            sys.exit(UserError.exit_code)
        _leave_without_output(error)
    except Exception as error:  # of our own: whatever a user's code raises has been explained
        traceback.print_exc()
        echo(_fault_text(error), err=True)
        sys.exit(1)


def _leave_without_output(error: OSError) -> NoReturn:
    """Leave because of an OSError: what is still buffered can't be written either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if not isinstance(error, BrokenPipeError):
        echo(_os_error_text(error), err=True)
    sys.exit(1)


def _leave_stopped(stop: Interrupted) -> NoReturn:
    """Say what was stopped and what is kept, and leave at once.

    An interpreter that has imported torch takes seconds to shut down.
    """
    from samecurve.launch.last_line import repeat_after_torchrun

    kill_children()
    kept = stop.kept or "nothing was kept; the same command begins anew"
    line = f"stopped by {stop.by}: {kept}"
    with suppress(OSError):  # nobody reads the output any more
        sys.stdout.flush()
        echo(line, err=True)
        repeat_after_torchrun(line)
    os._exit(128 + stop.number)


def _end_at_once() -> None:
    """Answer the second signal, while the verb still removes what is half done."""
    kill_children()
    with suppress(OSError):
        os.write(2, b"\nended at once\n")


def _mend_streams() -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and isinstance(stream.buffer, io.FileIO):
            number = stream.fileno()
            setattr(sys, name, unbuffered(number, "backslashreplace", stream.encoding))
        elif isinstance(stream, io.TextIOWrapper):  # a terminal's own encoding may lack a character
            stream.reconfigure(errors="backslashreplace")


def _os_error_text(error: OSError) -> str:
    """The message for an OSError that no lower layer has handled."""
    from samecurve.core.system import explain_os_error

    if not isinstance(error.filename, str | bytes):
        return f"error: {error}"
    cause, remedy = explain_os_error(
        error, Path(os.fsdecode(error.filename)), "run the same command again"
    )
    return f"error: {cause}\n  remedy: {remedy}"


def _fault_text(error: Exception) -> str:
    """The message for an error that no lower layer has handled."""
    from samecurve.diagnose.crash import remedy_of
    from samecurve.diagnose.tracebacks import last_traceback

    cause = f"{type(error).__name__}: {message_of(error)}".rstrip(": ")
    read = last_traceback("".join(traceback.format_exception(error)))
    remedy = remedy_of(read, "this text, and the config") if read else ""
    return f"error: {shorten(cause, 400)}" + (f"\n  remedy: {remedy}" if remedy else "")


def _error_text(error: SamecurveError) -> str:
    """The message of an error, with "error: " before each cause: a config may have several."""
    if not isinstance(error, UserError):
        return f"error: {error}"
    first, *rest = str(error).splitlines()
    lines = [line if line.startswith("  ") else f"error: {line}" for line in rest]
    return "\n".join([f"error: {first}", *lines])


def let_threads_wait() -> None:
    """Have a library's idle threads sleep soon, in this process and in the processes it starts.

    To be called before torch is imported. OMP_WAIT_POLICY and GOMP_SPINCOUNT stay as the user has
    set them. By default the threads spin 300,000 turns: a small model's step then took 76 ms beside
    other programs on the same cores, and 7 ms on a quiet machine. With threads that sleep at once
    it took 16 and 17 ms; as set here, 28 and 8 ms. libgomp, which torch's wheels bring, reads the
    turns; other libraries read the policy. docs/benchmarks.md has both cases.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}

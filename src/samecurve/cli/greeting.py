"""What `samecurve` alone prints: what the program is, this machine, and three commands to try.

It reads no config and imports neither an engine nor numpy, so that it is there at once.
"""

import shlex
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from samecurve import __version__
from samecurve.errors import UserError
from samecurve.probe import cpu_cores, cpu_name, host_memory, probe
from samecurve.units import counted, show_bytes
from samecurve.watch import live_ranks

_FIRST = Path("models/tiny.yaml")  # the config that is quick anywhere
_HELP = ("samecurve --help", "lists every command")
Lines = list[tuple[str, str]]  # a command, or a part of one, and what it does


def greeting() -> str:
    """The lines for the working directory."""
    lines = _commands()
    width = max(len(command) for command, does in lines if does)
    tried = [f"       {command.ljust(width)}  {does}".rstrip() for command, does in lines]
    tried[0] = f"try{tried[0][3:]}"
    title = f"Samecurve {__version__}: train on one device or on many, with the same loss curve."
    return "\n".join([title, "", *_machine(), "", *tried])


def _machine() -> list[str]:
    """The CPU and the GPUs, and why GPUs can't be used."""
    cores, memory = counted(cpu_cores(), "core"), show_bytes(host_memory())
    lines = [f"here   {cpu_name()}: {cores}, {memory} of memory"]
    try:
        machine = probe()
    except UserError as error:  # a variable names a GPU that isn't there
        return [*lines, f"warn   {error.cause}. Remedy: {error.remedy}"]
    kinds = Counter((gpu.name, show_bytes(gpu.memory)) for gpu in machine.devices)
    lines += [f"       {count} x {name}, {size} each" for (name, size), count in kinds.items()]
    if not kinds:
        lines.append("       no GPU: models train on the CPU, on one rank or several")
    if "torch" in machine.unfit:
        unfit = machine.unfit["torch"]
        lines.append(f"warn   {unfit.cause}. Remedy: {unfit.remedy}")
    return lines


def _commands() -> Lines:
    """Three commands, by what the directory holds: a run, the config to begin with, or neither."""
    plans = [plan for plan in Path("runs").glob("*/plan.json") if plan.is_file()]
    if plans:
        return _commands_for(max(plans, key=lambda plan: plan.stat().st_mtime).parent)
    if _FIRST.is_file():
        look = (f"samecurve plan -f {_FIRST}", "shows what that would do, and why")
        return [(f"samecurve train -f {_FIRST}", "trains a small model on text"), look, _HELP]
    return [
        ("samecurve examples", "writes example configs and tasks here"),
        (f"samecurve train -f {_FIRST}", "trains the smallest of them"),
        _HELP,
    ]


def _commands_for(run: Path) -> Lines:
    """What to do with a run: go on with it if it has stopped, and look at it."""
    name = shlex.quote(str(run))
    report = (f"samecurve report {name}", "makes a page of this run")
    if not (run / "results.json").is_file() and not live_ranks(run / "logs"):
        config = shlex.quote(str(run / "config.yaml"))
        begin = (f"samecurve train -f {config} \\", "")  # one line would be wider than a terminal
        return [begin, (f"    --resume {name}", "goes on with this run"), report, _HELP]
    if find_spec("fastapi") and find_spec("uvicorn"):
        return [report, ("samecurve ui", "shows all runs in a browser"), _HELP]
    return [report, ("samecurve check", "says whether this machine is fit to train"), _HELP]

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


def greeting() -> str:
    """The lines for the working directory."""
    lines = [*_commands(), ("samecurve --help", "lists every command")]
    width = max(len(command) for command, does in lines if does)
    tried = [f"       {command.ljust(width)}  {does}".rstrip() for command, does in lines]
    title = f"Samecurve {__version__}: train on one device or on many, with the same loss curve."
    return "\n".join([title, "", *_machine(), "", f"try{tried[0][3:]}", *tried[1:]])


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


def _commands() -> list[tuple[str, str]]:
    """Two commands and what they do, by what is here: a run, the config to begin with, or neither.

    A command that is wider than a terminal stands on two lines, the first with '' beside it.
    """
    train = f"samecurve train -f {_FIRST}"
    plans = [plan for plan in Path("runs").glob("*/plan.json") if plan.is_file()]
    if not plans and _FIRST.is_file():
        look = (f"samecurve plan -f {_FIRST}", "shows what that would do, and why")
        return [(train, "trains a small model on text"), look]
    if not plans:
        write = ("samecurve examples", "writes example configs and tasks here")
        return [write, (train, "trains the smallest of them")]
    run = max(plans, key=lambda plan: plan.stat().st_mtime).parent
    name, config = (shlex.quote(str(path)) for path in (run, run / "config.yaml"))
    report = (f"samecurve report {name}", "makes a page of this run")
    if not (run / "results.json").is_file() and not live_ranks(run / "logs"):
        resume = (f"    --resume {name}", "goes on with this run")
        return [(f"samecurve train -f {config} \\", ""), resume, report]
    if find_spec("fastapi") and find_spec("uvicorn"):
        return [report, ("samecurve ui", "shows all runs in a browser")]
    return [report, ("samecurve check", "says whether this machine is fit to train")]

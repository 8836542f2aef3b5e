"""The flags, the turns and the results file that benchmarks/gpu.py and hf_gpu.py share."""

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from benchmarks.common import RESULTS, file_name
from benchmarks.gpu_profile import Watch, ceiling
from benchmarks.gpu_result import about_of, result_of, shown
from benchmarks.gpu_turns import (
    ABOUT,
    GOLDEN,
    Found,
    StoppedError,
    Turns,
    answered,
    signals_raise,
    take_turns,
)
from benchmarks.sides import Setting

Run = Callable[[Setting], object]
Add = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Race:
    """A benchmark. case: names its result file. setting_of: takes the folder for its files.

    compare: compares this machine's losses with golden ones, in a turn before the sides'; it takes
    the function that adds to the turn's answer. None: the benchmark compares none
    """

    module: str
    kind: str
    case: str
    words: Sequence[str]
    arguments: argparse.Namespace
    setting_of: Callable[[Path], Setting]
    runs: Mapping[str, Run]
    skipped: dict[str, str]
    compare: Callable[[Add], None] | None = None

    @property
    def sides(self) -> list[str]:
        names: list[str] = self.arguments.sides.split(",")
        return names


def parser_of(description: str | None, sides: Mapping[str, object]) -> argparse.ArgumentParser:
    """A parser with the flags that both benchmarks share."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--warm", type=int, default=5, help="first steps of each turn, not timed")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300, help="seconds that a turn may take")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of two layers of 64")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--sides",
        default=",".join(name for name in sides if name != "samecurve-fp8"),
        help=f"of {', '.join(sides)}; or MODULE:FUNCTION, a side of your own (benchmarks/sides.py)",
    )
    for flag in ("--turn", "--answer"):  # how a turn is started
        parser.add_argument(flag, help=argparse.SUPPRESS)
    parser.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)
    return parser


def check(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, known: Collection[str]
) -> None:
    """Leave with exit 2 where a side is unknown, or there is no GPU."""
    names = arguments.sides.split(",")
    unknown = [name for name in names if name not in known and ":" not in name]
    if unknown:
        parser.error(f"--sides: {', '.join(unknown)}: not among {', '.join(known)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here; --device cpu --tiny tries the same paths without one")


def run_of(runs: Mapping[str, Run], name: str) -> Run:
    """The function of a side. MODULE:FUNCTION is imported."""
    if ":" not in name:
        return runs[name]
    module, _, function = name.partition(":")
    run: Run = getattr(importlib.import_module(module), function)
    return run


def race(it: Race) -> None:
    """Run the benchmark, or, in the process of a turn, that turn."""
    if it.arguments.turn:
        _turn(it)
    with tempfile.TemporaryDirectory() as scratch, signals_raise():
        home = Path(scratch)
        try:
            code = _race(it, home)
        except StoppedError as stopped:  # before the first side
            print(stopped.words)
            code = 128 + stopped.number
    sys.exit(code)


def _turn(it: Race) -> NoReturn:
    arguments = it.arguments
    answer = Path(arguments.answer)

    def turn(add: Add) -> None:
        if arguments.turn == GOLDEN and it.compare:
            it.compare(add)
            return
        setting = it.setting_of(answer.parent)
        if arguments.turn == ABOUT:
            add(about_of(setting))
            add({"ceiling_flops": ceiling(setting.device)})
            return
        watch = Watch(setting.device, add, is_profiled=arguments.profile)
        run_of(it.runs, arguments.turn)(replace(setting, watch=watch))

    answered(answer, turn)


def _race(it: Race, home: Path) -> int:
    arguments, skipped = it.arguments, dict(it.skipped)
    turns = Turns(it.module, tuple(it.words), home, arguments.limit)
    about = _first_turns(it, turns, skipped)
    if not about:
        return 1
    place = _place_of(it, about)
    code, found = 0, dict[str, Found]()

    def write() -> None:
        if place:
            result = result_of(about, found, skipped)
            place.write_text(json.dumps(result, indent=1) + "\n")

    write()
    try:
        take_turns(
            turns,
            it.sides,
            arguments.turns,
            flags=("--micro", str(about["micro"])),  # the plan's, for every side
            found=found,
            skipped=skipped,
            keep=write,
        )
    except StoppedError as stopped:
        code = 128 + stopped.number
        for name, one in found.items():
            if len(one.seconds) < arguments.turns:
                skipped.setdefault(name, f"turn {len(one.seconds) + 1}: {stopped.words}")
        write()
    result = result_of(about, found, skipped)
    print(shown(result))
    if place:
        print(f"written to {place}")
    is_far = any(row["verdict"] == "FAIL" for row in about.get("golden", ()))
    return code or int(is_far or not result["sides"])


def _first_turns(it: Race, turns: Turns, skipped: dict[str, str]) -> dict[str, Any]:
    """What is measured, and how far this machine's losses are from the golden ones."""
    about, reason = turns.take(ABOUT)
    if not about:
        print(f"nothing was measured: {reason}")
        return about
    if reason:
        skipped["the fastest products"] = reason
    if it.compare:
        losses, reason = turns.take(GOLDEN)
        about |= losses
        if reason:
            skipped["golden losses"] = reason
    return about


def _place_of(it: Race, about: Mapping[str, Any]) -> Path | None:
    """The file of the result; None: the result is not kept."""
    if it.arguments.out or about["device"] != "cuda" or it.arguments.tiny:
        out: Path | None = it.arguments.out
        return out
    where = file_name(f"{about['machine']} {it.case}")
    return RESULTS / f"{it.kind}-{where}.json"

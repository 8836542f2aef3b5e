"""Finds the lines of the user's code that draw random numbers, or change an attribute or a buffer:
a forward pass is repeated with a look at all of them after each line.
"""

import inspect
import linecache
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from samecurve.features.guard.blamed_calls import function_name
from samecurve.features.guard.split_errors import Place
from samecurve.torch_engine.users_code import Site, caller, equal, kind_of, shown_path, site_of
from samecurve.torch_engine.users_code.side_effects import GeneratorStates

_GENERATORS = ""  # among what is read: no attribute or buffer has this name
# the call of a generator in a line of code
_RANDOM_CALL = re.compile(r"[\w.]*\b(?:random|rng|generator|gen)\b[\w.]*(?=\()")


class Watched(NamedTuple):
    """Draws and changes of a forward pass.

    draws: calls that moved a random generator of torch, numpy or Python
    changes: file:line that first changed an attribute or buffer, by its name
    """

    draws: list[Place]
    changes: dict[str, str]


def watch(
    run: Callable[[], object],
    generators: GeneratorStates,
    reads: Mapping[str, Callable[[], object]],
) -> Watched:
    """Call run(), and look at the generators and at what `reads` returns after each line.

    reads: functions that read what else is watched, by name
    """
    base = inspect.currentframe()
    torch_draws = _TorchDraws(generators.held, base)
    lines = _Lines({_GENERATORS: generators.read_host, **reads}, base)
    before = sys.gettrace()
    with torch_draws:
        sys.settrace(lines.trace)
        try:
            run()
        finally:
            sys.settrace(before)
    draws = dict.fromkeys([*torch_draws.draws, *lines.draws])
    return Watched(list(draws), lines.changes)


class _TorchDraws(TorchFunctionMode):
    """Notes each call of torch that draws.

    held: generators that attributes hold
    base: as in site_of()
    """

    def __init__(self, held: Sequence[object], base: FrameType | None) -> None:
        super().__init__()
        self._held, self._base = held, base
        self.draws: list[Place] = []

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = _torch_states()
        result = func(*args, **(kwargs or {}))
        generator = (kwargs or {}).get("generator")
        has_own = any(generator is held for held in self._held)
        now = _torch_states()
        if has_own or any(not torch.equal(a, b) for a, b in zip(before, now, strict=True)):
            self.draws.append(_draw(function_name(func), site_of(caller(), self._base)))
        return result


def _torch_states() -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if started:  # a run on the CPU must not start CUDA
        states.append(torch.cuda.get_rng_state())
    return states


class _Lines:
    """A trace function that reads what is watched after each line.

    reads: functions that read it, by name
    base: as in site_of(). What changes while no line of the task runs is this program's doing.
    """

    def __init__(self, reads: Mapping[str, Callable[[], object]], base: FrameType | None) -> None:
        self.draws: list[Place] = []
        self.changes: dict[str, str] = {}
        self._reads, self._base = reads, base
        self._before: dict[str, object] = {}
        self._at: tuple[FrameType | None, int] = (None, 0)  # the line that has just run

    def trace(self, frame: FrameType, event: str, _argument: object) -> Any:
        if event == "call":
            return self.trace if kind_of(frame.f_code.co_filename) != "ours" else None
        now = {name: read() for name, read in self._reads.items()}
        changed = [name for name in self._before if not equal(self._before[name], now[name])]
        if changed:
            self._note(changed)
        self._before = now
        self._at = frame, frame.f_lineno
        if event == "return" and frame.f_back:
            self._at = frame.f_back, frame.f_back.f_lineno
        return self.trace

    def _note(self, changed: Sequence[str]) -> None:
        site = site_of(self._at[0], self._base, self._at[1])
        if not site.deepest:
            return
        for name in changed:
            if name != _GENERATORS:
                self.changes.setdefault(name, site.where)
                continue
            text = linecache.getline(*site.deepest)
            call = _RANDOM_CALL.search(text)
            self.draws.append(_draw(call[0] if call else text.strip(), site))


def _draw(function: str, site: Site) -> Place:
    """Where the user calls a library that draws, the library's line is named too."""
    if site.users and site.deepest and site.users != site.deepest:
        function += f" in {shown_path(site.deepest[0])}:{site.deepest[1]}"
    return Place(function, site.where)

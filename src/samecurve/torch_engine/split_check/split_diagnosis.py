"""Where in the user's code samples begin to see each other, or numbers are drawn: a forward pass
repeated with every call of torch in view, after the split check has failed.
"""

import inspect
import linecache
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Literal, NamedTuple, Self

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from samecurve.core.split_check.split_errors import Draw, Place
from samecurve.torch_engine.split_check.call_sites import Site, caller, kind_of, shown_path, site_of
from samecurve.torch_engine.split_check.split_state import GeneratorStates

Label = Literal["rows", "added up", "constant", "reduced", "pairs", "mixed", "unknown"]
_HOW: Mapping[Label, Literal["reduced", "pairs", "rows"]] = {
    "reduced": "reduced",
    "pairs": "pairs",
    "mixed": "rows",
}
_DISPATCHING = frozenset({torch._tensor.__file__, torch.overrides.__file__})  # noqa: SLF001
_ADDITIONS = frozenset({"add", "__add__", "__radd__", "add_", "__iadd__", "sub", "__sub__"})
_RANDOM_CALL = re.compile(r"[\w.]*\b(?:random|rng|generator|gen)\b[\w.]*(?=\()")


class _Call(NamedTuple):
    """One call of a torch function in a forward pass."""

    function: str  # as people write it
    where: str
    outputs: tuple[torch.Tensor, ...]  # copies
    inputs: tuple[tuple[int, int], ...]  # (call, output) that made each tensor given


class Recording(TorchFunctionMode):
    """Every call of torch while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.hooks: list[str] = []  # where tensors were given one, file:line
        self._made_by: dict[int, tuple[int, int]] = {}
        self._alive: list[torch.Tensor] = []  # so that no id comes twice
        self._base: FrameType | None = None  # that entered it: no line outside of it is the task's

    def __enter__(self) -> Self:
        self._base = caller()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *of_error: object) -> None:
        self._base = None
        super().__exit__(*of_error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        inputs = [
            self._made_by[id(tensor)]
            for tensor in _tensors((args, kwargs))
            if id(tensor) in self._made_by
        ]
        result = func(*args, **kwargs)
        if func is torch.Tensor.register_hook and _calls_itself(caller()):
            self.hooks.append(site_of(caller(), self._base).where)
        outputs = list(_tensors(result))
        if outputs:
            for number, tensor in enumerate(outputs):
                self._made_by[id(tensor)] = len(self.calls), number
            self._alive += outputs
            copies = tuple(tensor.detach().clone() for tensor in outputs)
            where = site_of(caller(), self._base).where
            self.calls.append(_Call(_name(func), where, copies, tuple(inputs)))
        return result

    def maker(self, tensor: object) -> tuple[int, int] | None:
        """(call, output) that made it; None: no call of torch did."""
        return self._made_by.get(id(tensor))


class Recorded(NamedTuple):
    """A recorded forward pass of some samples."""

    recording: Recording
    rows: Sequence[int]  # which of the samples tried
    result: tuple[object, ...]  # the loss's sum and weight


def find_place(
    whole: Recorded, parts: Sequence[Recorded], tolerance: float, *, of_weight: bool = False
) -> Place | None:
    """The call by which the loss begins not to add up; None: no call of torch is found."""
    labels = _Labels(whole, parts, tolerance)
    at = whole.recording.maker(whole.result[1 if of_weight else 0])
    if at is None:
        return None
    seen = set()
    while at not in seen:
        seen.add(at)
        call = whole.recording.calls[at[0]]
        bad = [source for source in call.inputs if source not in seen and labels[source] in _HOW]
        floating = [source for source in bad if labels.is_floating(source)]
        if not bad:
            break
        at = (floating or bad)[0]
    call, label = whole.recording.calls[at[0]], labels[at]
    if label not in _HOW:
        return Place(call.function, call.where)
    inputs = {labels[source] for source in call.inputs}
    if (
        call.function.rpartition(".")[2] in _ADDITIONS
        and "constant" in inputs
        and inputs & {"rows", "added up"}
    ):
        return Place(call.function, call.where, "added")
    return Place(call.function, call.where, _HOW[label], is_number=call.outputs[at[1]].numel() == 1)


def first_mixing(whole: Recorded, parts: Sequence[Recorded], tolerance: float) -> Place | None:
    """The first call in which samples see each other, whatever becomes of it."""
    labels = _Labels(whole, parts, tolerance)
    for number, call in enumerate(whole.recording.calls):
        for output, tensor in enumerate(call.outputs):
            how = _HOW.get(labels[number, output])
            if how and tensor.is_floating_point():
                return Place(call.function, call.where, how, is_number=tensor.numel() == 1)
    return None


def first_difference(one: Recorded, other: Recorded) -> Place | None:
    """The first call that gave something else for the same samples."""
    for call, again in zip(one.recording.calls, other.recording.calls, strict=False):
        same = len(call.outputs) == len(again.outputs) and all(
            a.shape == b.shape and bool(torch.equal(a.nan_to_num(), b.nan_to_num()))
            for a, b in zip(call.outputs, again.outputs, strict=True)
        )
        if call.function != again.function or not same:
            return Place(call.function, call.where)
    return None


class _Labels:
    """What the output of each call is to the samples."""

    def __init__(self, whole: Recorded, parts: Sequence[Recorded], tolerance: float) -> None:
        self._whole, self._parts, self._tolerance = whole, parts, tolerance
        self._known: dict[tuple[int, int], Label] = {}

    def __getitem__(self, at: tuple[int, int]) -> Label:
        if at not in self._known:
            self._known[at] = self._label(*at)
        return self._known[at]

    def is_floating(self, at: tuple[int, int]) -> bool:
        return self._whole.recording.calls[at[0]].outputs[at[1]].is_floating_point()

    def _label(self, number: int, output: int) -> Label:
        call = self._whole.recording.calls[number]
        of_parts = []
        for part in self._parts:
            calls = part.recording.calls
            if number >= len(calls) or calls[number].function != call.function:
                return "unknown"  # another way through the code
            if output >= len(calls[number].outputs):
                return "unknown"
            of_parts.append(calls[number].outputs[output])
        whole = call.outputs[output]
        if any(part.dim() != whole.dim() for part in of_parts):
            return "unknown"
        grown = [
            dim
            for dim in range(whole.dim())
            if any(part.shape[dim] != whole.shape[dim] for part in of_parts)
        ]
        if not grown:
            return self._label_of_one_shape(whole, of_parts)
        samples = len(self._whole.rows)
        for dim in grown:
            for part, tensor in zip(self._parts, of_parts, strict=True):
                if tensor.shape[dim] * samples != whole.shape[dim] * len(part.rows):
                    return "unknown"
        if len(grown) > 1:
            return "pairs"
        layouts = [self._rows_agree(whole, of_parts, grown[0], neighbours) for neighbours in (1, 0)]
        return "rows" if any(layouts) else "mixed"

    def _label_of_one_shape(self, whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> Label:
        if all(self._close(whole, part) for part in parts):
            return "constant"
        total = torch.stack([_wide(part) for part in parts]).sum(0)
        return "added up" if self._close(whole, total) else "reduced"

    def _rows_agree(
        self, whole: torch.Tensor, parts: Sequence[torch.Tensor], dim: int, neighbours: int
    ) -> bool:
        """neighbours: whether a sample's rows stand side by side."""
        table = _by_sample(whole, dim, len(self._whole.rows), neighbours)
        return all(
            self._close(table[list(part.rows)], _by_sample(tensor, dim, len(part.rows), neighbours))
            for part, tensor in zip(self._parts, parts, strict=True)
        )

    def _close(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        one, other = _wide(one), _wide(other)
        if one.numel() == 0:
            return True
        differing = ~((one == other) | (one.isnan() & other.isnan()))
        if not differing.any():
            return True
        one, other = one[differing], other[differing]
        largest = torch.maximum(one.abs().max(), other.abs().max())
        return bool((one - other).abs().max() <= self._tolerance * largest)


def _by_sample(tensor: torch.Tensor, dim: int, samples: int, neighbours: int) -> torch.Tensor:
    """[samples, rows of each, ...]."""
    rows = tensor.movedim(dim, 0)
    rest = rows.shape[1:]
    if neighbours:
        return rows.reshape(samples, -1, *rest)
    return rows.reshape(-1, samples, *rest).transpose(0, 1)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor).double() if tensor.is_complex() else tensor.double()


class Watched(NamedTuple):
    """What a forward pass did, and where."""

    draws: list[Draw]  # calls that moved a generator of torch, numpy or Python
    changes: dict[str, str]  # file:line at which what was read first became another


def watch(
    run: Callable[[], object],
    generators: GeneratorStates,
    reads: Mapping[str, Callable[[], object]],
) -> Watched:
    """Run it with an eye on each line.

    reads: what is to be watched beside generators, by name; its values are compared.
    """
    base = inspect.currentframe()
    torch_draws = _TorchDraws(generators.owned, base)
    lines = _Lines(generators.of_host, reads, base)
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
    """owned: generators that attributes hold. base: as in site_of."""

    def __init__(self, owned: Sequence[object], base: FrameType | None) -> None:
        super().__init__()
        self._owned, self._base = owned, base
        self.draws: list[Draw] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        before = _torch_states()
        result = func(*args, **(kwargs or {}))
        generator = (kwargs or {}).get("generator")
        has_own = any(generator is own for own in self._owned)
        now = _torch_states()
        if has_own or any(not torch.equal(a, b) for a, b in zip(before, now, strict=True)):
            self.draws.append(_draw(_name(func), site_of(caller(), self._base)))
        return result


def _torch_states() -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if started:  # a run on the CPU starts CUDA on no GPU
        states.append(torch.cuda.get_rng_state())
    return states


class _Lines:
    """Looks at generators, and at what else is watched, after each line.

    base: as in site_of. What changes between the task's calls is of the trial's own making.
    """

    def __init__(
        self,
        generators: Callable[[], object],
        reads: Mapping[str, Callable[[], object]],
        base: FrameType | None,
    ) -> None:
        self.draws: list[Draw] = []
        self.changes: dict[str, str] = {}
        self._read_generators, self._reads, self._base = generators, reads, base
        self._before: tuple[object, dict[str, object]] | None = None
        self._at: tuple[FrameType | None, int] = (None, 0)  # the line that has just been run

    def _read(self) -> tuple[object, dict[str, object]]:
        return self._read_generators(), {name: read() for name, read in self._reads.items()}

    def trace(self, frame: FrameType, event: str, _argument: object) -> Any:
        if event == "call":
            return self.trace if kind_of(frame.f_code.co_filename) != "ours" else None
        now = self._read()
        if self._before is not None:
            self._compare(self._before, now)
        self._before = now
        self._at = frame, frame.f_lineno
        if event == "return" and frame.f_back:
            self._at = frame.f_back, frame.f_back.f_lineno
        return self.trace

    def _compare(
        self,
        before: tuple[object, dict[str, object]],
        now: tuple[object, dict[str, object]],
    ) -> None:
        site = site_of(self._at[0], self._base, self._at[1])
        if not site.deepest:
            return
        if now[0] != before[0]:
            text = linecache.getline(*site.deepest)
            call = _RANDOM_CALL.search(text)
            self.draws.append(_draw(call[0] if call else text.strip(), site))
        for name, value in now[1].items():
            if value != before[1][name]:
                self.changes.setdefault(name, site.where)


def _draw(function: str, site: Site) -> Draw:
    """It names the line of a library too that draws where the user calls it."""
    if site.users and site.deepest and site.users != site.deepest:
        function += f" in {shown_path(site.deepest[0])}:{site.deepest[1]}"
    return Draw(function, site.where)


def _calls_itself(frame: FrameType | None) -> bool:
    """Whether the user's code calls a tensor's method, not torch or a library for it."""
    while frame and frame.f_code.co_filename in _DISPATCHING:
        frame = frame.f_back
    return frame is not None and kind_of(frame.f_code.co_filename) == "users"


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    for item in inner:
        yield from _tensors(item)


def _name(function: Any) -> str:
    """As people write it."""
    name: str = resolve_name(function) or getattr(function, "__name__", str(function))
    name = name.replace("torch.nn.functional.", "F.").replace("torch.Tensor.", "Tensor.")
    name = name.removeprefix("torch.functional.").removeprefix("torch._C._nn.")
    return f"torch.{name}" if hasattr(torch, name) else name

"""Finds the call of torch by which samples begin to see each other, from forward passes that are
recorded call by call: of all samples, and of parts of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, resolve_name

from samecurve.features.guard.split_errors import Place
from samecurve.torch_engine.optimizers import local_view
from samecurve.torch_engine.users_code import caller, kind_of, site_of

# what the result of a call is to the samples
Label = Literal["rows", "added up", "constant", "reduced", "pairs", "mixed", "unknown"]
_HOW: Mapping[Label, Literal["reduced", "pairs", "rows"]] = {
    "reduced": "reduced",
    "pairs": "pairs",
    "mixed": "rows",
}
_DISPATCHING = frozenset({torch._tensor.__file__, torch.overrides.__file__})  # noqa: SLF001
_ADDITIONS = frozenset({"add", "__add__", "__radd__", "add_", "__iadd__", "sub", "__sub__"})


class _Call(NamedTuple):
    """A call of a torch function in a forward pass.

    function: the function's name as people write it
    where: file:line
    outputs: copies of the tensors that it returned
    inputs: for each tensor that it was given, (call, output) that made the tensor
    """

    function: str
    where: str
    outputs: tuple[torch.Tensor, ...]
    inputs: tuple[tuple[int, int], ...]


class Recording(TorchFunctionMode):
    """Records every call of torch inside of it.

    calls: in their order
    hooks: file:line at which the user's code gave a tensor a hook
    made_by: (call, output) that made a tensor, by its id; a tensor that no call made is not there
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.hooks: list[str] = []
        self.made_by: dict[int, tuple[int, int]] = {}
        self._alive: list[torch.Tensor] = []  # so that no two tensors have one id
        self._base: FrameType | None = None  # the frame that entered it: the task is called within

    def __enter__(self) -> Self:
        self._base = caller()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *of_error: object) -> None:
        self._base = None
        super().__exit__(*of_error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [
            self.made_by[id(tensor)]
            for tensor in _tensors((args, kwargs))
            if id(tensor) in self.made_by
        ]
        result = func(*args, **kwargs)
        if func is torch.Tensor.register_hook and _calls_itself(caller()):
            self.hooks.append(site_of(caller(), self._base).where)
        outputs = list(_tensors(result))
        if outputs:
            for number, tensor in enumerate(outputs):
                self.made_by[id(tensor)] = len(self.calls), number
            self._alive += outputs
            copies = tuple(tensor.detach().clone() for tensor in outputs)
            where = site_of(caller(), self._base).where
            self.calls.append(_Call(function_name(func), where, copies, tuple(inputs)))
        return result


class Recorded(NamedTuple):
    """A recorded forward pass.

    rows: the samples, by their positions among those tried
    result: the loss's sum and weight
    """

    recording: Recording
    rows: Sequence[int]
    result: tuple[object, ...]


def find_place(
    whole: Recorded, parts: Sequence[Recorded], tolerance: float, *, of_weight: bool = False
) -> Place | None:
    """The first call whose result does not add up, searched from the loss backwards; None: no call
    of torch made the loss.

    of_weight: whether it is the loss's weight that does not add up
    """
    labels = _Labels(whole, parts, tolerance)
    at = whole.recording.made_by.get(id(whole.result[1 if of_weight else 0]))
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
    """The first call in which samples see each other, whether the loss depends on it or not."""
    labels = _Labels(whole, parts, tolerance)
    for number, call in enumerate(whole.recording.calls):
        for output, tensor in enumerate(call.outputs):
            how = _HOW.get(labels[number, output])
            if how and tensor.is_floating_point():
                return Place(call.function, call.where, how, is_number=tensor.numel() == 1)
    return None


def first_difference(one: Recorded, other: Recorded) -> Place | None:
    """The first call that returned something else for the same samples."""
    for call, again in zip(one.recording.calls, other.recording.calls, strict=False):
        same = len(call.outputs) == len(again.outputs) and all(
            a.shape == b.shape and _are_equal(a, b)
            for a, b in zip(call.outputs, again.outputs, strict=True)
        )
        if call.function != again.function or not same:
            return Place(call.function, call.where)
    return None


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    mine, again = local_view(one), local_view(other)
    return mine.shape == again.shape and torch.equal(mine.nan_to_num(), again.nan_to_num())


class _Labels:
    """Labels each result of a call with what it is to the samples, by (call, output)."""

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
                return "unknown"  # another branch of the code
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
        """Whether each sample has the same rows alone in a part as among all samples.

        neighbours: 1: a sample's rows stand side by side
        """
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
    """A tensor as [samples, rows of each sample, ...]."""
    rows = tensor.movedim(dim, 0)
    rest = rows.shape[1:]
    if neighbours:
        return rows.reshape(samples, -1, *rest)
    return rows.reshape(-1, samples, *rest).transpose(0, 1)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor).double() if tensor.is_complex() else tensor.double()


def _calls_itself(frame: FrameType | None) -> bool:
    """Whether it is the user's code that calls a tensor's method, not torch or a library."""
    while frame and frame.f_code.co_filename in _DISPATCHING:
        frame = frame.f_back
    return frame is not None and kind_of(frame.f_code.co_filename) == "users"


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        items = value.values() if isinstance(value, dict) else value
        for item in items:
            yield from _tensors(item)


def function_name(function: Any) -> str:
    """The name of a function of torch as people write it."""
    name: str | None = resolve_name(function)
    if name is None:  # torch does not know the functions that stand in the place of its own
        name = getattr(function, "__name__", str(function))
        if getattr(function, "__module__", "") == F.__name__:
            name = f"F.{name}"
    name = name.replace("torch.nn.functional.", "F.").replace("torch.Tensor.", "Tensor.")
    name = name.removeprefix("torch.functional.").removeprefix("torch._C._nn.")
    return f"torch.{name}" if hasattr(torch, name) else name

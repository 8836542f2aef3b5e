"""torch's random functions replaced while an engine lives: where a microbatch is in work on the
thread that calls one, it is served by that (functions.py); elsewhere the original answers.

Replaced, not seen by a mode: a mode is not there when a block is computed again in backward, nor
when compiled code runs. Whoever has imported a function by its name gets that name replaced;
torch.nn calls through torch._VF, so its own functions need no replacing.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import _VF, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.utils.rnn import PackedSequence

from samecurve.torch_engine.randomness.keyed_attention import attention
from samecurve.torch_engine.randomness.microbatch_context import context_in_work
from samecurve.torch_engine.randomness.random_functions import (
    Serve,
    inner_functions,
    tensor_methods,
    torch_functions,
)

# Any: torch's functions, in each of their forms.
Function = Callable[..., Any]
_MARK = "samecurve_mark"  # what a generator's state carries
_ATTENTION = "scaled_dot_product_attention"
_ATTENTION_OPTIONS = ("attn_mask", "dropout_p", "is_causal")  # that may be given by place
_DRAWING_IN_TRAINING = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
    "rrelu",
    "multi_head_attention_forward",
)


class _Replacement(NamedTuple):
    owner: Any  # a module or a class
    name: str
    original: Function
    function: Function
    is_own: bool  # the owner's, not inherited by it

    @classmethod
    def of(cls, owner: Any, name: str, function: Function) -> "_Replacement":
        return cls(owner, name, getattr(owner, name), function, name in vars(owner))


class _Replaced:
    """Of this process: what is replaced, for as many engines as live."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines = 0
        self._replacements: list[_Replacement] = []

    def acquire(self) -> None:
        with self._lock:
            self._engines += 1
            if self._engines == 1:
                self._install(list(_replacements(break_graphs="torch._dynamo" in sys.modules)))

    def break_graphs(self) -> None:
        """Keep compiled code out of what is served; once torch.compile is there."""
        with self._lock:
            if "torch._dynamo" in sys.modules and self._replacements:
                self._take_back()
                self._install(list(_replacements(break_graphs=True)))

    def release(self) -> None:
        with self._lock:
            self._engines -= 1
            if self._engines == 0:
                self._take_back()

    def _install(self, replacements: list[_Replacement]) -> None:
        self._replacements = replacements
        for one in replacements:
            setattr(one.owner, one.name, one.function)
        _rename({id(one.original): one.function for one in replacements})

    def _take_back(self) -> None:
        for one in self._replacements:
            if one.is_own:
                setattr(one.owner, one.name, one.original)
            else:
                delattr(one.owner, one.name)
        _rename({id(one.function): one.original for one in self._replacements})
        self._replacements = []


_REPLACED = _Replaced()  # of the process, as torch's functions are


class KeyedFunctions:
    """One engine's hold on them, until close()."""

    def __init__(self) -> None:
        self._is_open = True
        _REPLACED.acquire()

    def break_graphs(self) -> None:
        """Call it when the model is built: it may have brought torch.compile."""
        _REPLACED.break_graphs()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            _REPLACED.release()


def _rename(functions: dict[int, Function]) -> None:
    """Names that other modules hold of these functions. functions: by id of what they replace."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in {"torch", "samecurve"} or not isinstance(module, ModuleType):
            continue
        names = dict(vars(module))
        if functions.keys().isdisjoint(map(id, names.values())):  # most hold none: a quick look
            continue
        for held, value in names.items():
            if id(value) in functions:
                setattr(module, held, functions[id(value)])


def _replacements(*, break_graphs: bool) -> Iterator[_Replacement]:
    wrapped = _uncompiled if break_graphs else _as_it_is
    tables: list[tuple[Any, dict[str, Serve]]] = [
        (torch, torch_functions()),
        (_VF, inner_functions()),
        (torch.Tensor, tensor_methods()),
    ]
    for owner, functions in tables:
        for name, serve in functions.items():
            function = wrapped(_served(getattr(owner, name), serve))
            if break_graphs and owner is torch.Tensor:
                function = _broken_where_it_is_traced(function)
            yield _Replacement.of(owner, name, function)
    states = {"get_rng_state": _marked_state, "set_rng_state": _resume_at_state}
    for name, function in states.items():
        yield _Replacement.of(torch, name, wrapped(function(getattr(torch, name))))
    for kind in (nn.RNN, nn.LSTM, nn.GRU):
        yield _Replacement.of(kind, "forward", _noting_order(kind.forward))
    yield _Replacement.of(F, _ATTENTION, _with_dropout_p(getattr(F, _ATTENTION), wrapped))
    if break_graphs:
        yield from _drawing_through_others()


def _served(original: Function, serve: Serve) -> Function:
    @functools.wraps(original)
    def function(*arguments: Any, **options: Any) -> Any:
        context = context_in_work()
        if context is None or not context.rows or _is_traced():
            return original(*arguments, **options)
        return serve(original, context, *arguments, **options)

    return function


def _is_traced() -> bool:
    """Whether a compiler records what is called, its own patterns among it, on tensors without
    values: nothing of the microbatch is drawn.
    """
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)  # noqa: SLF001
    return fake is not None or get_proxy_mode() is not None


def _as_it_is(function: Function) -> Function:
    return function


def _uncompiled(function: Function) -> Function:
    """Compiled code ends before it: what it gives is no constant."""
    import torch._dynamo as dynamo

    disabled: Function = dynamo.disable(function)  # type: ignore[no-untyped-call]
    return disabled


def _broken_where_it_is_traced(method: Function) -> Function:
    """The compiler asks a tensor's method with tensors without values, whatever its marks."""
    from torch._dynamo.exc import unimplemented
    from torch._subclasses.fake_tensor import FakeTensor

    @functools.wraps(method)
    def function(self: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if isinstance(self, FakeTensor) and context_in_work() and get_proxy_mode() is None:
            unimplemented(
                gb_type="samecurve: a tensor's random method",
                context=method.__name__,
                explanation="its numbers follow the sample",
                hints=[],
            )
        return method(self, *arguments, **options)

    return function


def _with_dropout_p(original: Function, wrapped: Callable[[Function], Function]) -> Function:
    """scaled_dot_product_attention, whose kernels stay where nothing is dropped."""
    served = wrapped(_served(original, attention))

    @functools.wraps(original)
    def function(
        query: Any,
        key: Any,
        value: Any,
        *more: Any,
        **named: Any,
    ) -> Any:
        options = {**dict(zip(_ATTENTION_OPTIONS, more, strict=False)), **named}
        if not options.get("dropout_p"):
            return original(query, key, value, *more, **named)
        return served(query, key, value, **{"attn_mask": None, "is_causal": False, **options})

    return function


def _marked_state(original: Function) -> Function:
    """get_rng_state: a checkpoint asks for it where it begins, and before it computes again."""

    @functools.wraps(original)
    def get_rng_state() -> torch.Tensor:
        state: torch.Tensor = original()
        context = context_in_work()
        if context:
            setattr(state, _MARK, context.mark())
        return state

    return get_rng_state


def _resume_at_state(original: Function) -> Function:
    @functools.wraps(original)
    def set_rng_state(new_state: torch.Tensor) -> None:
        original(new_state)
        context, mark = context_in_work(), getattr(new_state, _MARK, None)
        if context and mark:
            context.resume_at(mark)

    return set_rng_state


def _noting_order(original: Function) -> Function:
    """The forward pass of a recurrent layer, whose kernel is not told in which order the sequences
    of a PackedSequence are.
    """

    @functools.wraps(original)
    def forward(self: nn.Module, input: Any, hx: Any = None) -> Any:  # noqa: A002 - torch's name
        context = context_in_work()
        if context:
            packed = isinstance(input, PackedSequence)
            context.packed_order = input.sorted_indices if packed else None
        return original(self, input, hx)

    return forward


def _drawing_through_others() -> Iterator[_Replacement]:
    """Functions of torch.nn that torch.compile would take whole into its graph."""
    for name in _DRAWING_IN_TRAINING:
        original = getattr(F, name)
        yield _Replacement.of(F, name, _broken_where_it_draws(original))
    for name in ("gumbel_softmax", "fractional_max_pool2d", "fractional_max_pool3d"):
        yield _Replacement.of(F, name, _uncompiled(getattr(F, name)))


def _broken_where_it_draws(original: Function) -> Function:
    """Compiled as ever where nothing is dropped."""
    parameters = inspect.signature(original).parameters
    names = list(parameters)
    rate = "dropout_p" if "dropout_p" in parameters else "p"
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    uncompiled = _uncompiled(original)

    @functools.wraps(original)
    def function(*arguments: Any, **options: Any) -> Any:
        values = {**defaults, **dict(zip(names, arguments, strict=False)), **options}
        if not values["training"] or values.get(rate) == 0:
            return original(*arguments, **options)
        return uncompiled(*arguments, **options)

    return function

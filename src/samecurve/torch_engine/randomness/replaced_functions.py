"""Replaces torch's random functions while an engine lives. On a thread that computes a microbatch,
served_functions.py draws the numbers; elsewhere the original function does.

A TorchFunctionMode would not do: it is not in force where a block is computed again in backward,
nor where compiled code runs. Names under which other modules have imported a function are replaced
too. torch.nn calls its functions through torch._VF, so torch.nn itself needs no replacing.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import _VF, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.utils.rnn import PackedSequence

from samecurve.core.determinism.sample_keys import RowKeys
from samecurve.core.sample_numbers import serving
from samecurve.torch_engine.randomness import (
    MicroBatchContext,
    StagedKeys,
    context_in_work,
    numbers_in_work,
)

# Any: a function of torch takes its arguments in several forms.
Function = Callable[..., Any]
# (original, microbatch, *arguments, **options); None: the original is to draw, from a generator
Serve = Callable[..., Any]
_MARK = "samecurve_mark"  # the attribute of a generator's state that holds a DrawMark
_ATTENTION = "scaled_dot_product_attention"
# the names that are replaced; served_functions.py has what stands in their place
_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
_INNER = (
    *_DROPOUTS,
    *(f"{name}_" for name in _DROPOUTS),
    *("rrelu", "rrelu_", "lstm", "gru", "rnn_tanh", "rnn_relu"),
)
_TORCH = (
    *("rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "normal"),
    *("bernoulli", "multinomial", "randperm", "poisson", "binomial"),
    *("_standard_gamma", "_sample_dirichlet"),
    *_INNER,
)
_METHODS = (
    *("uniform_", "normal_", "exponential_", "bernoulli_"),
    *("random_", "log_normal_", "cauchy_", "geometric_", "bernoulli", "multinomial"),
)
_ATTENTION_OPTIONS = ("attn_mask", "dropout_p", "is_causal")  # those that may come by position
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


class Replacement(NamedTuple):
    owner: Any  # a module or a class
    name: str
    original: Function
    function: Function
    is_own: bool  # whether the owner has it itself, and does not inherit it

    @classmethod
    def of(cls, owner: Any, name: str, function: Function) -> "Replacement":
        return cls(owner, name, getattr(owner, name), function, name in vars(owner))


class ReplacedFunctions:
    """Functions that are replaced in this process while any engine needs it."""

    def __init__(self, make: Callable[[bool], Iterator[Replacement]]) -> None:
        """make: takes whether compiled code is to end before a replaced function."""
        self._make = make
        self._lock = threading.Lock()
        self._engines = 0
        self._break_graphs = False  # of the functions as they are replaced now
        self._replacements: list[Replacement] = []
        self._renamed: list[tuple[ModuleType, str]] = []  # names in other modules
        # how many names each module had when it was looked at, since the functions are replaced
        self._sizes: dict[str, int] = {}
        # the same of installed modules that have imported none of the functions, for good
        self._without: dict[str, int] = {}

    def acquire(self) -> None:
        """Keep the functions replaced for one more engine, until it calls release()."""
        with self._lock:
            self._engines += 1
            if self._engines == 1:
                self._install("torch._dynamo" in sys.modules)

    def break_graphs(self) -> None:
        """Let compiled code end before each replaced function, once torch.compile is imported."""
        with self._lock:
            if "torch._dynamo" in sys.modules and self._replacements and not self._break_graphs:
                self._take_back()
                self._install(break_graphs=True)

    def release(self) -> None:
        with self._lock:
            self._engines -= 1
            if self._engines == 0:
                self._take_back()

    def _install(self, break_graphs: bool) -> None:  # noqa: FBT001
        self._break_graphs = break_graphs
        self._replacements = list(self._make(break_graphs))
        for one in self._replacements:
            setattr(one.owner, one.name, one.function)
        self._sizes = dict(self._without)
        functions = {id(one.original): one.function for one in self._replacements}
        self._renamed = _rename(functions, self._sizes, self._without)

    def _take_back(self) -> None:
        for one in self._replacements:
            if one.is_own:
                setattr(one.owner, one.name, one.original)
            else:
                delattr(one.owner, one.name)
        originals = {id(one.function): one.original for one in self._replacements}
        for module, name in self._renamed:
            if (original := originals.get(id(vars(module).get(name)))) is not None:
                setattr(module, name, original)
        _rename(originals, self._sizes)  # in modules that were imported meanwhile
        self._replacements = []


@contextmanager
def keyed_trial(rows: int | RowKeys) -> Iterator[None]:
    """Let a loss or metrics draw on the CPU, outside of an engine, as in a run.

    rows: of the microbatch that is tried: how many; or their keys, whose numbers are then drawn
    """
    KEYED_FUNCTIONS.acquire()
    row_keys = rows
    if not isinstance(row_keys, RowKeys):
        row_keys = RowKeys(seed=0, epoch=0, step=0, ids=np.arange(row_keys))
    keys = StagedKeys(row_keys)
    try:
        with serving(numbers_in_work), MicroBatchContext(torch.device("cpu")).within(keys):
            yield
    finally:
        KEYED_FUNCTIONS.release()


def _rename(
    functions: Mapping[int, Function], sizes: dict[str, int], without: dict[str, int] | None = None
) -> list[tuple[ModuleType, str]]:
    """Replace functions under the names that other modules have imported them by, and give these.

    functions: the new function, by the id of the old one
    sizes: how many names a module had when it was looked at; one that has no more is left out
    without: takes the same of installed modules that hold none. A user's own modules are looked at
        again: a notebook may set one name several times
    """
    renamed = []
    for name, module in list(sys.modules.items()):
        is_skipped = name.partition(".")[0] in {"torch", "samecurve", "samecurve_products"}
        if is_skipped or not isinstance(module, ModuleType):
            continue
        names = vars(module)
        if sizes.get(name) == len(names):
            continue
        sizes[name] = len(names)
        if functions.keys().isdisjoint(map(id, list(names.values()))):  # most modules hold none
            if without is not None and "/site-packages/" in str(names.get("__file__")):
                without[name] = sizes[name]
            continue
        for held, value in list(names.items()):
            if id(value) in functions:
                setattr(module, held, functions[id(value)])
                renamed.append((module, held))
    return renamed


def _replacements(break_graphs: bool) -> Iterator[Replacement]:  # noqa: FBT001 - see make
    wrapped = _uncompiled if break_graphs else _as_it_is
    for owner, names in ((torch, _TORCH), (_VF, _INNER), (torch.Tensor, _METHODS)):
        for name in names:
            function = wrapped(_served(owner, name))
            if break_graphs and owner is torch.Tensor:
                function = _broken_where_it_is_traced(function)
            yield Replacement.of(owner, name, function)
    states = {"get_rng_state": _marked_state, "set_rng_state": _resume_at_state}
    for name, function in states.items():
        yield Replacement.of(torch, name, wrapped(function(getattr(torch, name))))
    for kind in (nn.RNN, nn.LSTM, nn.GRU):
        yield Replacement.of(kind, "forward", _noting_order(kind.forward))
    yield Replacement.of(F, _ATTENTION, _with_dropout_p(getattr(F, _ATTENTION), wrapped))
    if break_graphs:  # functions of torch.nn that torch.compile takes into its graph as a whole
        for name in _DRAWING_IN_TRAINING:
            yield Replacement.of(F, name, _broken_where_it_draws(getattr(F, name)))
        for name in ("gumbel_softmax", "fractional_max_pool2d", "fractional_max_pool3d"):
            yield Replacement.of(F, name, _uncompiled(getattr(F, name)))


# torch's random functions; of the process, as torch's functions are
KEYED_FUNCTIONS = ReplacedFunctions(_replacements)


def _served(owner: Any, name: str) -> Function:
    """The function of this name, which follows the samples while a microbatch is computed.

    The functions that draw are imported by the first draw: most models draw nothing.
    """
    original: Function = getattr(owner, name)
    serve: Serve | None = None

    @functools.wraps(original)
    def function(*arguments: Any, **options: Any) -> Any:
        nonlocal serve
        context = context_in_work()
        if context is None or not context.rows or _is_traced():
            return original(*arguments, **options)
        if serve is None:
            from samecurve.torch_engine.randomness.served_functions import served_functions

            serve = served_functions(owner)[name]
        served = serve(original, context, *arguments, **options)
        return original(*arguments, **options) if served is None else served

    return function


def _is_traced() -> bool:
    """Whether a compiler records calls on tensors without values, so that nothing is drawn."""
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)  # noqa: SLF001
    return fake is not None or get_proxy_mode() is not None


def _as_it_is(function: Function) -> Function:
    return function


def _uncompiled(function: Function) -> Function:
    """Let compiled code end before a function, whose result is not a constant."""
    import torch._dynamo as dynamo

    disabled: Function = dynamo.disable(function)  # type: ignore[no-untyped-call]
    return disabled


def _broken_where_it_is_traced(method: Function) -> Function:
    """Let compiled code end before a tensor's method, which the compiler calls despite its mark."""
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
    """scaled_dot_product_attention, with torch's own kernels where nothing is dropped."""
    served = wrapped(_served(F, _ATTENTION))

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
    """get_rng_state(), which an activation checkpoint calls where it begins and before it computes
    again: the state carries how many numbers the microbatch has drawn.
    """

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
    """The forward pass of a recurrent layer. It notes the order of the sequences in a
    PackedSequence, which the layer's kernel is not given.
    """

    @functools.wraps(original)
    def forward(self: nn.Module, input: Any, hx: Any = None) -> Any:  # noqa: A002 - torch's name
        context = context_in_work()
        if context:
            packed = isinstance(input, PackedSequence)
            context.packed_order = input.sorted_indices if packed else None
        return original(self, input, hx)

    return forward


def _broken_where_it_draws(original: Function) -> Function:
    """Let compiled code end before a function only where something is dropped."""
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

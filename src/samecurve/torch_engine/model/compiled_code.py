"""Code that torch.compile compiles, for the features or for the model's author.

Imported late: torch._dynamo takes a second or two.
"""

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from samecurve.torch_engine.model.cross_entropy import Head
from samecurve.torch_engine.randomness.dropout_layers import KeyedDropout

if TYPE_CHECKING:
    from samecurve.torch_engine.model.same_programs import SamePrograms

_PROGRAMS = 16  # at most, of one function: shapes, training and evaluation
_ALL_PROGRAMS = 256  # of one function, for all models together


def keep_uncompiled(model: nn.Module) -> None:
    """Keep keyed dropout and the head out of compiled code, whoever compiles the model."""
    uncompiled: Any = torch.compiler.disable
    for module in model.modules():
        if isinstance(module, KeyedDropout | Head):
            module.__dict__["forward"] = uncompiled(module.forward)


def compile_own_parts(model: nn.Module, backend: "str | SamePrograms", *, num_threads: int) -> None:
    """Let this backend compile the parts that the model's author compiles, in place of his own,
    whose programs may follow the shapes that a device happens to see first.

    num_threads: of this process that compute, each with a model like this one
    """
    parts: list[Any] = [part for part in model.modules() if part._compiled_call_impl is not None]  # noqa: SLF001
    prepare_compiler(len(parts), num_threads)
    for part in parts:
        part._compiled_call_impl = compiled(part._call_impl, backend)  # noqa: SLF001 - as compile()


def prepare_compiler(num_parts: int, num_threads: int) -> None:
    """Make too many programs an error, and forget those of other models.

    Threads that meet a shape at once compile it each for itself. The settings are this thread's,
    and those of the threads that have its context (strategies/threads.py).

    num_parts: of a model that are compiled
    """
    import torch._dynamo as dynamo

    # the compiler, which this imports, has to be told
    torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled())
    dynamo.reset()  # a warm process has compiled other models
    # torch shows progress by tqdm, whose default lock is shared by all processes: a rank that is
    # killed would leave that lock behind.
    with suppress(ImportError):
        tqdm: Any = import_module("tqdm").tqdm
        tqdm.set_lock(RLock())
    dynamo.config.fail_on_recompile_limit_hit = True
    limit = num_threads * max(_PROGRAMS, 4 * num_parts)
    dynamo.config.recompile_limit = limit
    dynamo.config.accumulated_recompile_limit = max(limit, _ALL_PROGRAMS)


def compiled(function: Callable[..., Any], backend: "str | SamePrograms") -> Callable[..., Any]:
    """The function, with a program for each shape that it meets."""
    program: Callable[..., Any] = torch.compile(function, dynamic=False, backend=backend)
    if isinstance(backend, str):
        return program
    from samecurve.torch_engine.model.same_programs import with_own_errors

    return with_own_errors(program)

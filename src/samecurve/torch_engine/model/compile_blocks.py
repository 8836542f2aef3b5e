"""train.compile: torch.compile of a model's blocks, one program for all that are alike.

Imported late: torch._dynamo takes a second or two.
"""

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from samecurve.core.config.section import Recompute
from samecurve.torch_engine.model.cross_entropy import Head, Kernel, compilable_loss
from samecurve.torch_engine.model.model_setup import recompute, repeated_blocks
from samecurve.torch_engine.randomness.dropout_layers import KeyedDropout

if TYPE_CHECKING:
    from samecurve.torch_engine.model.same_programs import SamePrograms

_PROGRAMS = 16  # at most, of one function: shapes, training and evaluation
_ALL_PROGRAMS = 256  # of one function, for all models together


def compile_model(
    model: nn.Module,
    how: Recompute,
    backend: "str | SamePrograms" = "inductor",
    *,
    num_threads: int = 1,
) -> None:
    """Compile each repeated block, or the whole model where it has no blocks. Names stay.

    Blocks that are alike share one program. A block's forward() is compiled and not its call, so
    that the hooks of strategies stay outside. Keyed dropout and the head are not compiled: they
    depend on the module's name, or change tensors in place. One program is made for each shape;
    too many programs are an error, so that a model does not silently run uncompiled.

    how: which blocks are computed again in backward (train.recompute)
    backend: what makes the programs; its name in torch, or ours
    num_threads: of this process that compute, each with a model like this one
    """
    parts = repeated_blocks(model) or [model]
    _prepare_compiler(len(parts), num_threads)
    keep_uncompiled(model)
    for module in model.modules():
        if isinstance(module, Head):
            module.kernel = _kernel(backend)
    if how != "block":
        recompute(model, how)  # the compiler sees what selective keeps
    for part in parts:
        part.forward = _compiled(part.forward, backend)
    if how == "block":
        recompute(model, how)


def keep_uncompiled(model: nn.Module) -> None:
    """Keep keyed dropout and the head out of compiled code, whoever compiles the model."""
    uncompiled: Any = torch.compiler.disable
    for module in model.modules():
        if isinstance(module, KeyedDropout | Head):
            module.__dict__["forward"] = uncompiled(module.forward)


def compile_own_parts(model: nn.Module, backend: "SamePrograms", *, num_threads: int) -> None:
    """Let our backend compile the parts that the model's author compiles, in place of his own,
    whose programs may follow the shapes that a device happens to see first.

    num_threads: as compile_model()
    """
    parts: list[Any] = [part for part in model.modules() if part._compiled_call_impl is not None]  # noqa: SLF001
    _prepare_compiler(len(parts), num_threads)
    for part in parts:
        part._compiled_call_impl = _compiled(part._call_impl, backend)  # noqa: SLF001 - as compile()


def _prepare_compiler(num_parts: int, num_threads: int) -> None:
    """Make too many programs an error, and forget those of other models.

    Threads that meet a shape at once compile it each for itself. The settings are this thread's,
    and those of the threads that have its context (strategies/threads.py).
    """
    import torch._dynamo as dynamo

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


def _compiled(function: Callable[..., Any], backend: "str | SamePrograms") -> Callable[..., Any]:
    """The function, with a program for each shape that it meets."""
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False, backend=backend)
    if isinstance(backend, str):
        return compiled
    from samecurve.torch_engine.model.same_programs import with_own_errors

    return with_own_errors(compiled)


def _kernel(backend: "str | SamePrograms") -> Kernel:
    """The head's kernel, compiled once for any number of rows: the last chunk has fewer rows.

    Our backend compiles it for each number of rows: a program for any number would follow the
    number that a rank happens to see first.
    """
    if not isinstance(backend, str):
        return _compiled(compilable_loss, backend)
    from torch._dynamo import maybe_mark_dynamic

    compiled: Kernel = torch.compile(compilable_loss, backend=backend)

    def kernel(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for tensor in (logits, labels):
            maybe_mark_dynamic(tensor, 0)
        return compiled(logits, labels)

    return kernel

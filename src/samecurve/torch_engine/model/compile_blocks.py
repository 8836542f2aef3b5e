"""train.compile: torch.compile of a model's blocks, one program for all that are alike.

Imported late: torch._dynamo takes a second or two.
"""

from contextlib import suppress
from importlib import import_module
from threading import RLock
from typing import Any

import torch
from torch import nn

from samecurve.core.config.section import Recompute
from samecurve.torch_engine.model.cross_entropy import Head, Kernel, compilable_loss
from samecurve.torch_engine.model.model_setup import recompute, repeated_blocks
from samecurve.torch_engine.randomness.dropout_layers import KeyedDropout

_PROGRAMS = 16  # at most, of one function: shapes, training and evaluation


def compile_model(model: nn.Module, how: Recompute, backend: str = "inductor") -> None:
    """Compile each repeated block, or the whole model where it has no blocks. Names stay.

    Blocks that are alike share one program. A block's forward() is compiled and not its call, so
    that the hooks of strategies stay outside. Keyed dropout and the head are not compiled: they
    depend on the module's name, or change tensors in place. One program is made for each shape;
    too many programs are an error, so that a model does not silently run uncompiled.

    how: which blocks are computed again in backward (train.recompute)
    """
    import torch._dynamo as dynamo

    dynamo.reset()  # a warm process has compiled other models
    # torch shows progress by tqdm, whose default lock is shared by all processes: a rank that is
    # killed would leave that lock behind.
    with suppress(ImportError):
        tqdm: Any = import_module("tqdm").tqdm
        tqdm.set_lock(RLock())
    parts = repeated_blocks(model) or [model]
    dynamo.config.fail_on_recompile_limit_hit = True
    dynamo.config.optimize_ddp = False  # it would cut blocks where ddp's buckets end
    dynamo.config.recompile_limit = max(_PROGRAMS, 4 * len(parts))
    keep_uncompiled(model)
    for module in model.modules():
        if isinstance(module, Head):
            module.kernel = _kernel(backend)
    if how != "block":
        recompute(model, how)  # the compiler sees what selective keeps
    for part in parts:
        part.forward = torch.compile(part.forward, dynamic=False, backend=backend)
    if how == "block":
        recompute(model, how)


def keep_uncompiled(model: nn.Module) -> None:
    """Keep keyed dropout and the head out of compiled code, whoever compiles the model."""
    uncompiled: Any = torch.compiler.disable
    for module in model.modules():
        if isinstance(module, KeyedDropout | Head):
            module.__dict__["forward"] = uncompiled(module.forward)


def _kernel(backend: str) -> Kernel:
    """The head's kernel, compiled once for any number of rows: the last chunk has fewer rows."""
    from torch._dynamo import maybe_mark_dynamic

    compiled: Kernel = torch.compile(compilable_loss, backend=backend)

    def kernel(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for tensor in (logits, labels):
            maybe_mark_dynamic(tensor, 0)
        return compiled(logits, labels)

    return kernel

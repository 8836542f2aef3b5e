"""torch.compile of a model's blocks, one program for all that are alike.

Imported late: torch._dynamo takes a second or two.
"""

from typing import TYPE_CHECKING

import torch
from torch import nn

from samecurve.torch_engine.model.compiled_code import compiled, keep_uncompiled, prepare_compiler
from samecurve.torch_engine.model.cross_entropy import Head, Kernel, compilable_loss
from samecurve.torch_engine.model.model_setup import repeated_blocks

if TYPE_CHECKING:
    from samecurve.torch_engine.model.same_programs import SamePrograms


def compile_model(
    model: nn.Module, backend: "str | SamePrograms" = "inductor", *, num_threads: int = 1
) -> None:
    """Compile each repeated block, or the whole model where it has no blocks. Names stay.

    Blocks that are alike share one program. A block's forward() is compiled and not its call, so
    that the hooks of strategies stay outside. Keyed dropout and the head are not compiled: they
    depend on the module's name, or change tensors in place. One program is made for each shape;
    too many programs are an error, so that a model does not silently run uncompiled.

    backend: what makes the programs; its name in torch, or ours
    num_threads: of this process that compute, each with a model like this one
    """
    parts = repeated_blocks(model) or [model]
    prepare_compiler(len(parts), num_threads)
    keep_uncompiled(model)
    for module in model.modules():
        if isinstance(module, Head):
            module.kernel = _kernel(backend)
    for part in parts:
        part.forward = compiled(part.forward, backend)


def _kernel(backend: "str | SamePrograms") -> Kernel:
    """The head's kernel, compiled once for any number of rows: the last chunk has fewer rows.

    Our backend compiles it for each number of rows: a program for any number would follow the
    number that a rank happens to see first.
    """
    if not isinstance(backend, str):
        return compiled(compilable_loss, backend)
    from torch._dynamo import maybe_mark_dynamic

    of_any_size: Kernel = torch.compile(compilable_loss, backend=backend)

    def kernel(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for tensor in (logits, labels):
            maybe_mark_dynamic(tensor, 0)
        return of_any_size(logits, labels)

    return kernel

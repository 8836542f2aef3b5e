"""Views of weights that a model or a task has kept since model() made them.

A view shows a weight while both lie in one memory. Shards, or another number format, give a weight
other memory: then the view keeps the first values, and a loss that reads it is wrong from the first
update on. What a forward pass makes anew is no such view: torch's old spectral norm keeps one until
its layer is first used.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from samecurve.core.planning.plan import Plan
from samecurve.errors import UserError
from samecurve.torch_engine.model.model_builder import FirstMemory
from samecurve.torch_engine.step import EngineSetup
from samecurve.torch_engine.users_code import place_of_method
from samecurve.torch_engine.users_code.holders import holders, names_in, tensors_within

_DEPTH = 2  # of lists and dicts within an attribute


def refuse_stale_views(first: Sequence[FirstMemory], setup: EngineSetup) -> None:
    """Call it once forward passes of a step have run.

    UserError: an attribute or a buffer is a view of memory that a weight no longer has.
    """
    strategy, task = setup.strategy, setup.task
    left = {each.memory.cdata: each.name for each in first if each.is_held}
    if not strategy.gathers_weights:  # there all weights have other memory
        for weight in (weight for model in strategy.models for weight in model.parameters()):
            if type(weight) is nn.Parameter:
                left.pop(_storage_of(weight), None)
    if not left:
        return
    for path, tensor in _kept_tensors(strategy.models, getattr(task, "task", task)):
        if name := left.get(_storage_of(tensor)):
            where = place_of_method(task, "model")
            raise UserError(*_cause_and_remedy(path, name, setup.plan), where)


def _storage_of(tensor: torch.Tensor) -> int:
    """The identity of a tensor's memory."""
    cdata: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - torch has no other name for it
    return cdata


def _kept_tensors(models: Sequence[nn.Module], task: object) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors with memory of their own in attributes and buffers, by path; without those that
    a hook of the module makes anew before its forward pass.
    """
    for model in models:
        named = [(f"buffer {name}", buffer) for name, buffer in model.named_buffers()]
        for path, holder in holders(model, task).items():
            hooks = holder.get("_forward_pre_hooks", {}).values()
            made_anew = {getattr(hook, "name", None) for hook in hooks}
            for name in names_in(holder):
                if name not in made_anew:
                    named += tensors_within(f"{path}.{name}", holder[name], _DEPTH)
        for path, tensor in named:
            if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
                yield path, tensor


def _cause_and_remedy(path: str, name: str, plan: Plan) -> tuple[str, str]:
    where = f"under {plan.layout.strategy}, in {plan.compute.precision},"
    other = "; or --strategy ddp" if plan.layout.shards > 1 else ""
    return (
        f"{path} is a view of the weight {name}, kept since model() made it; {where} the weight"
        " lies in other memory, and the view keeps the first values",
        f"make the view where it is used: in forward(), or in the loss{other}",
    )

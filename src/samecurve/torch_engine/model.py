"""From a task's model to one that is ready to be laid out: number format, blocks, recompute, and
real values for what was made on the meta device.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from samecurve.core.config.param_groups import ParamRules
from samecurve.core.config.sections import Precision, Recompute
from samecurve.core.planning.plan import Plan
from samecurve.torch_engine.precision import weight_dtype

Initialize = Callable[
    [str, torch.Tensor], None
]  # fills a parameter, given by its name in the whole model

# What recompute "selective" keeps: the products that cost most to run again.
_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}
_ROUNDED = {nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d}


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """torch's own random numbers from `seed`, and afterwards as they were."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def cast_weights(model: nn.Module, precision: Precision) -> nn.Module:
    """Floating values in the precision's weight format, complex ones in pairs of it (Module.to
    would drop their imaginary parts).
    """
    real = weight_dtype(precision)
    pair = torch.complex128 if real == torch.float64 else torch.complex64

    def fitting(tensor: torch.Tensor) -> torch.Tensor:
        return (
            tensor.to(pair)
            if tensor.is_complex()
            else tensor.to(real)
            if tensor.is_floating_point()
            else tensor
        )

    model._apply(fitting)  # type: ignore[no-untyped-call]
    return model


def freeze(model: nn.Module, rules: ParamRules) -> None:
    """What a group of the config freezes is no more trained than what the model froze itself.

    UserError: a group rules nothing.
    """
    rules.check_names(name for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        if rules.is_frozen(name):
            parameter.requires_grad_(False)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated parts: the elements of the outermost ModuleLists and Sequentials of at least two
    parts with parameters.
    """
    found: list[nn.Module] = []

    def look(module: nn.Module) -> None:
        parts = [part for part in module.children() if any(True for _ in part.parameters())]
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(parts) > 1:
            found.extend(parts)
        else:
            for child in module.children():
                look(child)

    look(model)
    return found


def recompute(model: nn.Module, how: Recompute) -> None:
    """Let each block run again in backward instead of keeping its activations; names and results
    stay.
    """
    if how == "none":
        return
    extra: dict[str, Any] = (
        {"context_fn": partial(create_selective_checkpoint_contexts, _policy)}
        if how == "selective"
        else {}
    )
    for block in repeated_blocks(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **extra)


def apply_speed_options(model: nn.Module, plan: Plan, device: torch.device) -> None:
    """As the plan has it: eight bits, recompute, compiled blocks."""
    if plan.float8:
        from samecurve.torch_engine.float8 import convert

        convert(model, device)
    if plan.compile:
        from samecurve.torch_engine.compile import compile_model

        compile_model(model, plan.recompute)
    else:
        recompute(model, plan.recompute)


def run_uncompiled(plan: Plan) -> AbstractContextManager[Any]:
    """Meanwhile nothing is compiled: for inputs of ever other lengths."""
    return torch.compiler.set_stance("force_eager") if plan.compile else nullcontext()


def _policy(context: Any, operation: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def autocast_rounded(part: nn.Module, among: Iterable[nn.Module]) -> list[nn.Module]:
    """Of the modules of a part those whose own weights autocast rounds before every use, and nobody
    else uses.
    """
    uses = Counter(
        id(parameter) for module in part.modules() for parameter in module.parameters(recurse=False)
    )
    return [
        module
        for module in among
        if type(module) in _ROUNDED
        and module is not part
        and all(uses[id(parameter)] == 1 for parameter in module.parameters(recurse=False))
    ]


def sharding_facts(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Facts' inside and rounded of a model, which may be on the meta device."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parts = repeated_blocks(model)
    within = {id(module) for block in parts for module in block.modules()}
    narrow = [
        module for block in parts for module in autocast_rounded(block, block.modules())
    ] + autocast_rounded(model, [module for module in model.modules() if id(module) not in within])

    def of(modules: Iterable[nn.Module]) -> tuple[str, ...]:
        return tuple(
            dict.fromkeys(
                names[id(parameter)]
                for module in modules
                for parameter in module.parameters(recurse=False)
            )
        )

    return {
        "block_arrays": of(module for block in parts for module in block.modules()),
        "rounded": of(narrow),
    }


class Materializer:
    """Makes a model's meta parameters real, part by part, so that a model larger than the device
    can be shared out as it comes to be. Shared parameters stay shared.
    """

    def __init__(self, model: nn.Module, device: torch.device, value: Initialize) -> None:
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        uses = Counter(
            id(parameter)
            for module in model.modules()
            for parameter in module._parameters.values()
            if parameter is not None
        )
        self._shared = {key for key, count in uses.items() if count > 1}
        self._device, self._value = device, value
        self._made: dict[
            int, nn.Parameter
            # shared ones only: the others are let go of as soon as a strategy has taken its part of
            # them
        ] = {}

    @torch.no_grad()
    def __call__(self, part: nn.Module) -> None:
        for module in part.modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in self._names and parameter.is_meta:
                    module._parameters[attribute] = self._real(parameter)

    def _real(self, parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) in self._made:
            return self._made[id(parameter)]
        made = nn.Parameter(
            torch.empty_like(parameter, device=self._device), parameter.requires_grad
        )
        self._value(self._names[id(parameter)], made)
        if id(parameter) in self._shared:
            self._made[id(parameter)] = made
        return made

"""A user's model as model() gives it, made one that strategies can lay out.

plain_model() takes off what lays a model out by itself, and the wrappers of torch.compile, whose
names would be in checkpoints.

TrainingMode keeps what "in training" means for the model. A module that model() returned in eval
mode stays in eval mode while the rest is in training (a frozen norm), unless the whole model came
in eval mode. A train() that the model overrides is called as always. A model of from_pretrained()
comes in eval mode although nobody asked for that: it is put into training where anything in it is
trained.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from samecurve.errors import UserError

_LAYS_OUT = ("torch.nn.parallel.", "torch.distributed.fsdp.", "accelerate.", "deepspeed.")


def plain_model(model: nn.Module, what: str) -> nn.Module:
    """The model without wrappers, on the host. Parts that torch.compile had wrapped are compiled in
    place.

    what: the call that gave the model, for errors

    UserError: the model is laid out on devices already, or has parameters without a shape.
    """
    for name, module in model.named_modules():
        if any(map(is_lazy, module.parameters(recurse=False))):
            raise UserError(
                f"{what}: {name} is a {type(module).__name__}, whose parameters get a shape from"
                " the first batch; nothing can be planned, drawn or laid out before",
                "the layer with its sizes (nn.Linear(in, out) for nn.LazyLinear(out))",
                "task",
            )
        for kind in type(module).__mro__:
            if f"{kind.__module__}.".startswith(_LAYS_OUT):
                place = f" has {name} as" if name else " returns"
                raise UserError(
                    f"{what}{place} {kind.__name__}, which lays a model out on devices itself",
                    "the module within it, as for one device: --strategy (ddp, fsdp, ...) lays it"
                    " out",
                    "task",
                )
    if "torch._dynamo" in sys.modules:  # the task's file compiles
        import torch._dynamo as dynamo  # waits, where another thread is importing it

        model = _without_wrappers(model, dynamo.OptimizedModule, {})
    if any(tensor.is_cuda for tensor in [*model.parameters(), *model.buffers()]):
        model = model.to("cpu")  # the strategy chooses the device
    return model


def compiled_in_place(model: nn.Module) -> bool:
    """Whether the user compiles parts of the model."""
    return any(module._compiled_call_impl is not None for module in model.modules())  # noqa: SLF001


def _without_wrappers(module: Any, wrapper: Any, inner: dict[int, nn.Module]) -> nn.Module:
    """The module with every wrapper inside it replaced by what the wrapper holds.

    inner: by a wrapper's id, what it holds: a wrapper may stand in several places
    """
    if isinstance(module, wrapper):
        within = module._orig_mod  # noqa: SLF001 - torch.compile's name, also in state dicts
        if id(module) not in inner:
            inner[id(module)] = _without_wrappers(within, wrapper, inner)
            # As Module.compile() does:
            within._compiled_call_impl = module.dynamo_ctx(within._call_impl)  # noqa: SLF001
        return inner[id(module)]
    for name, child in module._modules.items():  # noqa: SLF001 - named_children() gives each once
        if child is not None:
            module._modules[name] = _without_wrappers(child, wrapper, inner)  # noqa: SLF001
    result: nn.Module = module
    return result


class TrainingMode:
    """Puts a model into training and into eval mode. It begins in training.

    model: the model as model() returned it

    from_pretrained: names of modules that from_pretrained() had left in eval mode
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.from_pretrained = tuple(_train_pretrained(model))
        self._kept: list[nn.Module] = []
        if model.training:
            self._kept = [module for module in model.modules() if not module.training]
        self.set(train=True)

    def set(self, *, train: bool) -> None:
        self._model.train(train)
        if train:
            for module in self._kept:
                module.training = False


def kept_in_eval(model: nn.Module) -> tuple[str, ...]:
    """Names of the outermost modules in eval mode of a model in training."""
    return tuple(name for name, _ in _outermost(model, lambda module: not module.training))


def _train_pretrained(model: nn.Module) -> Iterator[str]:
    """Put trained modules that from_pretrained() left in eval mode into training; their names."""

    def is_left(module: nn.Module) -> bool:
        is_trained = any(parameter.requires_grad for parameter in module.parameters())
        return hasattr(type(module), "from_pretrained") and not module.training and is_trained

    for name, module in _outermost(model, is_left):
        module.train()
        yield name


def _outermost(
    module: nn.Module, is_wanted: Callable[[nn.Module], bool], name: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """The wanted modules that lie in no other wanted one, with their names."""
    if is_wanted(module):
        yield name or type(module).__name__, module
        return
    for child_name, child in module.named_children():
        yield from _outermost(child, is_wanted, f"{name}.{child_name}".lstrip("."))


def coupling_layers(model: nn.Module) -> tuple[str, ...]:
    """The layers that mix the samples of a batch in training: "BatchNorm2d net.1" for each
    normalisation over the batch, in order.
    """
    return tuple(
        f"{type(module).__name__} {name}".strip()
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and is_coupling(module)
    )


def is_coupling(norm: _BatchNorm) -> bool:
    """Whether a normalisation uses the batch's statistics: in eval mode it has running ones."""
    return norm.training or norm.running_mean is None

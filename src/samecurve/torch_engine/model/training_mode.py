"""The meaning of "in training" for a model: as its author has it.

A module that model() returned in eval mode stays in it while the rest is in training (a frozen
norm), unless the whole model came so; an overridden train() is called as always. Models of
from_pretrained() come in eval mode without anybody having said so: they go into training, where
anything in them is trained.
"""

from collections.abc import Iterator

from torch import nn


class TrainingMode:
    """model: as model() returned it; it is put into training.

    from_pretrained: names of what came in eval mode from there
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
    return tuple(_in_eval(model, ""))


def _in_eval(module: nn.Module, name: str) -> Iterator[str]:
    if not module.training:
        yield name or type(module).__name__
        return
    for child_name, child in module.named_children():
        yield from _in_eval(child, f"{name}.{child_name}".lstrip("."))


def _train_pretrained(module: nn.Module, name: str = "") -> Iterator[str]:
    """Put into training what from_pretrained() left in eval mode, and is trained."""
    is_trained = any(parameter.requires_grad for parameter in module.parameters())
    if hasattr(type(module), "from_pretrained") and not module.training and is_trained:
        module.train()
        yield name or type(module).__name__
        return
    for child_name, child in module.named_children():
        yield from _train_pretrained(child, f"{name}.{child_name}".lstrip("."))

"""A model's weights by the groups in which they are gathered, and their shards."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from samecurve.errors import UserError
from samecurve.torch_engine.model.model_setup import autocast_rounded, repeated_blocks
from samecurve.torch_engine.model.sharded_parameter import ShardedParameter
from samecurve.torch_engine.strategies import Materialize
from samecurve.torch_engine.strategies.sharded.group import WeightGroup
from samecurve.torch_engine.strategies.sharded.link import ShardLink
from samecurve.torch_engine.strategies.sharded.weight import Places, Weight

Read = Callable[[WeightGroup, Weight], torch.Tensor | None]


@dataclass(frozen=True)
class Partition:
    """The groups of a model, in its order; those outside of blocks come last.

    blocks: each repeated block that has groups, with these
    """

    groups: Sequence[WeightGroup]
    blocks: Sequence[tuple[nn.Module, Sequence[WeightGroup]]]


class Cutter:
    """Cuts a model into shards, block by block, so that few whole weights are there at a time.

    narrow: the format of two bytes in which weights are gathered that autocast rounds; None: all
        are gathered as they are
    read: gives whole weights to code that reads a weight outside of its block
    """

    def __init__(
        self, model: nn.Module, link: ShardLink, narrow: torch.dtype | None, read: Read
    ) -> None:
        """UserError: a parameter has a hook, which would not be called."""
        _check_hooks(model)
        self._model, self._link, self._narrow, self._read = model, link, narrow, read
        self._module_names = {id(module): name for name, module in model.named_modules()}
        self._blocks = repeated_blocks(model)
        # names in the model, and places of parameters that must be whole outside of their block
        self._names = _names(model)
        self._shared = self._shared_places()
        self._groups: list[WeightGroup] = []

    def cut(self, materialize: Materialize) -> Partition:
        """materialize: makes the parameters of a part real"""
        blocks = []
        for block in self._blocks:
            materialize(block)
            if groups := self._cut_part(block, is_root=False):
                blocks.append((block, groups))
        materialize(self._model)
        self._cut_part(self._model, is_root=True)
        return Partition(self._groups, blocks)

    def _cut_part(self, part: nn.Module, *, is_root: bool) -> list[WeightGroup]:
        """Cut the weights of a part that are whole, but for those that others share."""
        modules = list(part.modules())
        narrow = {id(module) for module in autocast_rounded(part, modules)}
        places: dict[int, Places] = defaultdict(list)
        found: dict[int, nn.Parameter] = {}
        for module in modules:
            for name, parameter in module._parameters.items():  # noqa: SLF001 - with duplicates
                is_due = is_root or (id(module), name) not in self._shared
                if parameter is None or isinstance(parameter, ShardedParameter) or not is_due:
                    continue
                found[id(parameter)] = parameter
                places[id(parameter)].append((module, name))
        by_format: dict[torch.dtype, list[Weight]] = {}
        for key, parameter in found.items():
            own_places = places[key]
            is_rounded = all(id(module) in narrow for module, _ in own_places)
            module, name = own_places[0]
            weight = Weight.of(
                self._names[id(module), name],
                parameter,
                own_places,
                self._narrow if is_rounded else None,
            )
            by_format.setdefault(weight.real_dtype, []).append(weight)
        found.clear()
        title = "the model" if is_root else self._module_names[id(part)]
        groups = []
        for weights in by_format.values():
            group = WeightGroup(len(self._groups), title, weights, self._link, is_root=is_root)
            group.take_values(self._read)
            self._groups.append(group)
            groups.append(group)
        return groups

    def _shared_places(self) -> set[tuple[int, str]]:
        """Places of the parameters that several blocks share, or a block and the rest."""
        owner: dict[int, int] = {}  # the number of its block, by a module's id
        for number, block in enumerate(self._blocks):
            for module in block.modules():
                owner.setdefault(id(module), number)
        owners: dict[int, set[int | None]] = defaultdict(set)
        places: dict[int, list[tuple[int, str]]] = defaultdict(list)
        for module in self._model.modules():
            for name, parameter in module._parameters.items():  # noqa: SLF001 - as above
                if parameter is not None:
                    owners[id(parameter)].add(owner.get(id(module)))
                    places[id(parameter)].append((id(module), name))
        return {place for key, of in owners.items() if len(of) > 1 for place in places[key]}


def _names(model: nn.Module) -> dict[tuple[int, str], str]:
    """The name of each parameter in the model, by its module's id and its name there. One that
    several modules share has its first name.
    """
    first: dict[int, str] = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        (id(module), name): first[id(parameter)]
        for module in model.modules()
        for name, parameter in module._parameters.items()  # noqa: SLF001 - with duplicates
        if parameter is not None
    }


def _check_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:  # noqa: SLF001
            raise UserError(
                f"fsdp: {name} has a hook, which would not be called: weights are gathered into"
                " other tensors, and only their shards stay",
                "--strategy ddp; or what the hook does in forward (a mask, a factor), or"
                " optimizer.groups",
                "model",
            )

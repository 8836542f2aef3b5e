"""fsdp and hsdp: weights, gradients and optimizer state are sharded over devices. The weights of a
block are gathered while the block runs.

Under bf16 and f16 the weights that autocast would round anyway (those of linear and convolution
layers) are gathered in two bytes, and embeddings as they are. So the arithmetic is that of the
other strategies. Some small parameters are not sharded: every rank has them whole (see _shard).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import MicroBatch
from samecurve.errors import UserError
from samecurve.torch_engine.model.model_call import ModelCall
from samecurve.torch_engine.model.model_setup import autocast_rounded, repeated_blocks
from samecurve.torch_engine.optimizers.optimizer import OptimizerParam, local_view
from samecurve.torch_engine.process_group import Comm, ComplexAsPairs, end_group
from samecurve.torch_engine.strategies.base import Materialize, Strategy
from samecurve.torch_engine.strategies.fsdp_groups import all_groups
from samecurve.torch_engine.strategies.gather_order import GatherOrder
from samecurve.torch_engine.strategies.whole_matrices import (
    MatrixFunction,
    Shard,
    gathered_whole,
    map_shards,
    meeting_place,
)

T = TypeVar("T")
_NARROW = {"bf16": torch.bfloat16, "f16": torch.float16}


class FSDP(Strategy):
    """The sharded strategies, fsdp and hsdp.

    fsdp has as many shards as ranks. hsdp has fewer: several copies of the model, each sharded, and
    gradients are summed over the copies in the last round only. A step gathers weights and sums
    gradients in each round or, where memory is there, once.
    """

    gathers_weights = True

    def __init__(self, plan: Plan, comm: Comm, devices: Sequence[torch.device]) -> None:
        assert comm.group is not None
        super().__init__(plan, comm, devices)
        self._device = devices[0]
        self._own_groups: list[dist.ProcessGroup] = []  # made here, and so ended here
        self._mesh = self._make_mesh(comm.group)
        self._shards = Comm(self._mesh.get_group("shard"))
        # the format in which weights are gathered that autocast rounds; None: as they are
        self._narrow = _NARROW.get(plan.compute.precision)

    def _make_mesh(self, group: dist.ProcessGroup) -> DeviceMesh:
        kind, shards = self._device.type, self._plan.layout.shards
        if shards == self._comm.world_size:
            return DeviceMesh.from_group(group, kind, mesh_dim_names=("shard",))
        copies = torch.tensor(dist.get_process_group_ranks(group)).view(-1, shards)
        # every process makes all groups, in the same order
        for ranks in (*copies.T.tolist(), *copies.tolist()):
            new_group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                self._own_groups.append(new_group)
        return DeviceMesh.from_group(
            self._own_groups, kind, mesh=copies, mesh_dim_names=("copy", "shard")
        )

    def close(self) -> None:
        super().close()
        for group in self._own_groups:
            end_group(group)

    def distribute(self, models: list[nn.Module], materialize: Materialize) -> None:
        model = models[0]
        _check_can_be_sharded(model)
        for block in repeated_blocks(model):
            materialize(block)
            self._shard(block, reshard_after_forward=self._plan.layout.reshards_by_block)
        materialize(model)
        # the root's group has the weights outside of blocks; they are whole in every call
        self._root = ModelCall(model)
        self._shard(self._root, reshard_after_forward=False)
        self._set_reduction()
        for module in self._root.modules():
            # transformers would compute layers that LayerDrop skips on one device
            setattr(module, "_is_fsdp_managed_module", False)  # noqa: B010 - private to torch
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self._device)
        for parameter in _unsharded(model.modules()):
            parameter.data = parameter.data.to(self._device)
        self.models = [model]
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._order = GatherOrder(self._root, self._names, self._comm, self._device)

    def _set_reduction(self) -> None:
        """Let all groups add gradients, where FSDP2 would average them."""
        for module in self._sharded_modules(self._root):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def train(self, _device_index: int, function: Callable[..., T], *arguments: object) -> T:
        self._order.begin(function, *arguments, backward_follows=True)
        result: T = self._root(function, *arguments)
        self._order.end_forward()
        return result

    def call(self, _device_index: int, function: Callable[..., T], *arguments: object) -> T:
        self._order.begin(function, *arguments, backward_follows=False)
        result: T = self._root(function, *arguments)
        self._order.end_call()
        return result

    def _shard(self, part: nn.Module, *, reshard_after_forward: bool) -> None:
        """Shard the modules of a part that are not sharded yet.

        A group has one number format: complex weights, those gathered in two bytes, the rest. Where
        the rest are vectors alone, every rank keeps them whole, so that a block is one group: its
        hooks lie outside of what is compiled, and all its weights are gathered ahead together.
        Modules come before those that they lie in.
        """
        offload: OffloadPolicy = OffloadPolicy()
        if self._plan.keeps_state_on_host:
            offload = CPUOffloadPolicy(pin_memory=self._device.type == "cuda")
        whole = set(_kept_whole(part))
        options: dict[str, Any] = {
            "mesh": self._mesh,
            "reshard_after_forward": reshard_after_forward,
            "offload_policy": offload,
            "ignored_params": whole,
        }
        for module in reversed(_unsharded_modules(part)):
            if module is not part and _is_complex(module):
                fully_shard(module, **options)
        modules = _unsharded_modules(part)
        narrow = self._narrow
        two_bytes = autocast_rounded(part, modules) if narrow else []
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        if two_bytes:
            narrow_policy = MixedPrecisionPolicy(narrow, torch.float32, cast_forward_inputs=False)
            rest = _unsharded(modules) - whole - _unsharded(two_bytes)
            if all(one.ndim == 1 and one.is_floating_point() for one in rest):
                whole |= rest
                policy = narrow_policy
            else:
                fully_shard(two_bytes, mp_policy=narrow_policy, **options)
        fully_shard(part, mp_policy=policy, **options)
        for module in self._sharded_modules(part):
            if _is_complex(module):
                module.set_custom_all_gather(ComplexAsPairs(dist.all_gather_into_tensor))
                module.set_custom_reduce_scatter(ComplexAsPairs(dist.reduce_scatter_tensor))

    @staticmethod
    def _sharded_modules(model: nn.Module) -> list[Any]:
        return [module for module in model.modules() if isinstance(module, FSDPModule)]

    def begin_step(self, parameters: Sequence[nn.Parameter], num_microbatches: int) -> None:
        self._order.gradients.begin_step()
        super().begin_step(parameters, num_microbatches)

    def begin_microbatch(self, _index: int, _microbatch: MicroBatch, *, is_last: bool) -> None:
        if self._plan.layout.gathers_once:
            self._order.gradients.begin_round(is_last=is_last, sums=is_last)
        if self._plan.layout.shards < self._plan.layout.num_devices:
            root: Any = self._root  # fully_shard() has given it this method
            root.set_requires_all_reduce(is_last)

    def end_microbatch(self, _device_index: int, _microbatch: MicroBatch) -> None:
        self._order.finish()

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        return self._names[id(parameter)] in self._order.gradients.used

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum the gradients of parameters that are not sharded.

        The gradients of sharded parameters were reduced in each round.
        """
        whole = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
        if not whole:
            return
        views = []
        for parameter in whole:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                self._order.gradients.used.add(self._names[id(parameter)])
            views.append(local_view(parameter.grad).view(-1))
        summed = self._comm.all_reduce(torch.cat([view.double() for view in views]))()
        for view, values in zip(views, torch.split(summed, list(map(len, views))), strict=True):
            view.copy_(values)

    def norm(
        self, trained: Sequence[OptimizerParam], gradients: list[torch.Tensor]
    ) -> torch.Tensor:
        """The norm of the whole gradient.

        Shards are summed over the ranks; gradients that every rank has whole are added once.
        """
        cut: list[torch.Tensor] = []
        whole: list[torch.Tensor] = []
        for param, gradient in zip(trained, gradients, strict=True):
            (cut if isinstance(param.parameter, DTensor) else whole).append(gradient)
        squared = self._shards.all_reduce(self._squared(cut))()
        return (squared + self._squared(whole)).sqrt()

    def _squared(self, gradients: list[Any]) -> torch.Tensor:
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        norms = torch._foreach_norm(gradients)  # noqa: SLF001 - public nowhere
        return torch.stack(norms).double().square().sum().to(self._device)

    def sum_over_parts(
        self, params: Sequence[OptimizerParam], values: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Sum over the shards, in one reduction. A parameter that is not sharded is whole here."""
        cut = [
            number for number, param in enumerate(params) if isinstance(param.parameter, DTensor)
        ]
        sums = list(values)
        if cut:
            flat = torch.cat([values[number] for number in cut])
            summed = self._shards.all_reduce(flat.to(self._device))().to(flat.device)
            parts = torch.split(summed, [len(values[number]) for number in cut])
            for number, part in zip(cut, parts, strict=True):
                sums[number] = part
        return sums

    def map_whole(
        self,
        params: Sequence[OptimizerParam],
        matrices: Sequence[torch.Tensor],
        function: MatrixFunction,
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Gather the matrices, compute and cut the results, within each copy of the model."""
        shards = [
            Shard(rows, tuple(param.parameter.shape))
            for param, rows in zip(params, matrices, strict=True)
        ]
        meet = meeting_place(self._plan, self._device)
        return map_shards(self._shards, shards, function, device=self._device, meet=meet)

    def put_together(
        self, shards: Sequence[tuple[torch.Tensor, tuple[int, ...]]]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        meet = meeting_place(self._plan, self._device)
        return gathered_whole(self._shards, shards, meet=meet)

    def change(self, function: Callable[..., None], *arguments: object) -> None:
        """Call the function with whole weights, then cut the changed weights into shards again."""
        wholes: dict[int, nn.Parameter] = {}
        places = [
            (module, name, parameter)
            for module in self.models[0].modules()
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if isinstance(parameter, DTensor)
        ]
        for module, name, parameter in places:
            if id(parameter) not in wholes:
                wholes[id(parameter)] = nn.Parameter(
                    self._gathered(parameter), requires_grad=parameter.requires_grad
                )
            setattr(module, name, wholes[id(parameter)])
        function(self.models[0], *arguments)
        for module, name, parameter in places:
            parameter.to_local().copy_(self.own_part(parameter, getattr(module, name)))
            setattr(module, name, parameter)

    def leaves(self, device_index: int) -> dict[str, nn.Parameter]:
        leaves = {
            name: parameter
            for name, parameter in super().leaves(device_index).items()
            if not isinstance(parameter, DTensor)
        }
        for param in (param for group in all_groups(self._root) for param in group.fsdp_params):
            whole: nn.Parameter | None = getattr(param, "_unsharded_param", None)
            if whole is not None and whole.requires_grad:
                leaves[self._names[id(param.sharded_param)]] = whole
        return leaves

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.models[0].named_parameters():
            weights: torch.Tensor = parameter
            if isinstance(weights, DTensor):
                yield name, self._gathered(weights)
            else:
                yield name, weights.detach().clone()

    def _gathered(self, parameter: DTensor) -> torch.Tensor:
        """The whole parameter, as a copy: a sum in which each process adds its part to zeros."""
        whole = torch.zeros(parameter.shape, dtype=parameter.dtype, device=self._device)
        self.own_part(parameter, whole).copy_(parameter.to_local())
        self._shards.all_reduce(torch.view_as_real(whole) if whole.is_complex() else whole)()
        return whole

    def own_part(self, parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        if not isinstance(parameter, DTensor):
            return whole
        _, offsets = self.local_shard(parameter)
        sizes = parameter.to_local().shape
        box = (slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
        return whole[tuple(box)]

    def reset(self) -> None:
        super().reset()
        self._order.reset()

    def local_shard(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if not isinstance(tensor, DTensor):
            return super().local_shard(tensor)
        _, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        return tuple(tensor.shape), tuple(offsets)

    def replica_index(self, tensor: torch.Tensor) -> tuple[int, int]:
        if not isinstance(tensor, DTensor):
            return super().replica_index(tensor)
        return (
            self._comm.rank // self._plan.layout.shards,
            self._plan.layout.num_devices // self._plan.layout.shards,
        )


def _unsharded_modules(part: nn.Module) -> list[nn.Module]:
    """A part's modules that lie in no module that is sharded yet."""
    inner = (child for child in part.children() if not isinstance(child, FSDPModule))
    return list(
        dict.fromkeys([part, *(one for child in inner for one in _unsharded_modules(child))])
    )


def _unsharded(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    """The own parameters of modules that are whole on this rank."""
    own = (one for module in modules for one in module.parameters(recurse=False))
    return {parameter for parameter in own if not isinstance(parameter, DTensor)}


def _is_complex(module: nn.Module) -> bool:
    """Whether a module has complex parameters of its own, and none that are real in it."""
    own = any(_is_complex_array(parameter) for parameter in module.parameters(recurse=False))
    return own and all(_is_complex_array(one) for one in module.parameters() if one.ndim)


def _is_complex_array(parameter: nn.Parameter) -> bool:
    return parameter.is_complex() and parameter.ndim > 0


def _kept_whole(part: nn.Module) -> list[nn.Parameter]:
    """Parameters that every rank keeps whole: those of one number or none, which can't be cut, and
    the complex ones of a module with real ones: a group that is cut has one number format.
    """
    whole = [one for one in part.parameters() if not (one.ndim and one.numel())]
    for module in part.modules():
        if not _is_complex(module):
            whole += filter(_is_complex_array, module.parameters(recurse=False))
    return whole


def _check_can_be_sharded(model: nn.Module) -> None:
    """UserError: fully_shard() can't group the model's parameters."""
    owner: dict[int, int] = {}
    for number, block in enumerate(repeated_blocks(model)):
        for name, parameter in block.named_parameters():
            if owner.setdefault(id(parameter), number) != number:
                raise UserError(
                    f"fsdp: two blocks share {name}, and each block is gathered by itself",
                    "--strategy ddp, or share the whole block",
                    "model",
                )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:  # noqa: SLF001
            raise UserError(
                f"fsdp: {name} has a hook, which would not be called: weights are gathered into"
                " other tensors, and only their shards stay",
                "--strategy ddp; or what the hook does in forward (a mask, a factor), or"
                " optimizer.groups",
                "model",
            )
    for name, module in model.named_modules():
        if _is_complex(module) and not hasattr(FSDPModule, "set_custom_all_gather"):
            raise UserError(
                f"fsdp: {name or 'the model'} holds complex parameters, which torch"
                f" {torch.__version__} can't gather",
                "a newer torch (2.11 does it), or --strategy ddp",
                "model",
            )

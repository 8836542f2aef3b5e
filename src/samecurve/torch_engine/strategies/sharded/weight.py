"""A weight that is cut into shards by rows, and how it lies in memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import nn

from samecurve.errors import UserError
from samecurve.torch_engine.model.sharded_parameter import ShardedParameter

Places = list[tuple[nn.Module, str]]  # modules that have a parameter, and its name there


@dataclass(kw_only=True)
class Weight:
    """One parameter of the model, which several modules may share.

    A shard is some neighbouring rows (indexes of the first dimension): as many for each rank, the
    last ranks fewer or none. A weight of one number or none is not cut: every rank has it.

    sent_as: the number format in which it is gathered
    own, standing, whole: this rank's rows; the parameter that stands in the modules between calls;
        the whole weight, whose memory comes and goes
    """

    name: str
    places: Places
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    sent_as: torch.dtype
    is_trained: bool
    _values: list[torch.Tensor]  # of the parameter, until the group takes them
    own: nn.Parameter = field(init=False)
    standing: ShardedParameter = field(init=False)
    whole: nn.Parameter = field(init=False)

    @classmethod
    def of(
        cls, name: str, parameter: nn.Parameter, places: Places, narrow: torch.dtype | None
    ) -> "Weight":
        """narrow: the format of two bytes in which it may be gathered; None: as it is"""
        return cls(
            name=name,
            places=places,
            shape=parameter.shape,
            stride=_stride_by_rows(name, parameter),
            dtype=parameter.dtype,
            sent_as=narrow if narrow and parameter.dtype == torch.float32 else parameter.dtype,
            is_trained=parameter.requires_grad,
            _values=[parameter.detach()],
        )

    def take_values(self) -> torch.Tensor:
        """The whole parameter's values, which are kept here no longer."""
        return self._values.pop()

    @property
    def real_dtype(self) -> torch.dtype:
        return self.dtype.to_real() if self.dtype.is_complex else self.dtype

    @property
    def is_cut(self) -> bool:
        return bool(self.shape) and bool(prod(self.shape))

    @property
    def rows(self) -> int:
        return self.shape[0] if self.is_cut else 1

    @property
    def row_size(self) -> int:
        return prod(self.shape) // self.rows

    def rows_of(self, place: int, shards: int) -> range:
        """The rows of one shard."""
        piece = -(-self.rows // shards)
        return range(min(place * piece, self.rows), min((place + 1) * piece, self.rows))

    def shard_size(self, shards: int) -> int:
        """The numbers of the largest shard, to which the others are padded."""
        return -(-self.rows // shards) * self.row_size

    def own_shape(self, place: int, shards: int) -> tuple[int, ...]:
        if not self.is_cut:
            return tuple(self.shape)
        return (len(self.rows_of(place, shards)), *self.shape[1:])

    @property
    def is_replaced(self) -> bool:
        """Whether a tensor of somebody else's stands in the module."""
        module, name = self.places[0]
        now = module._parameters.get(name)  # noqa: SLF001 - getattr() takes ten times as long
        return now is not self.standing and now is not self.whole

    def put(self, parameter: nn.Parameter) -> None:
        """Let a parameter stand in the modules that have this weight."""
        for module, name in self.places:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = parameter  # noqa: SLF001 - setattr() takes ten times as long
            else:  # a module that keeps a list of its parameters (nn.LSTM) notices
                setattr(module, name, parameter)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor without gaps, in the order in which they lie in memory."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def shaped(numbers: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Some numbers of a flat tensor, from its beginning, as rows of a weight with this stride."""
    size = prod(shape)
    if not size:
        return numbers[:0].view(shape)
    return numbers.as_strided(shape, stride, numbers.storage_offset())


def _stride_by_rows(name: str, parameter: nn.Parameter) -> tuple[int, ...]:
    """The stride of a weight whose rows lie one after another.

    UserError: they do not.
    """
    if parameter.is_contiguous():
        return torch.empty(parameter.shape, device="meta").stride()
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if parameter.ndim in formats and parameter.is_contiguous(memory_format=formats[parameter.ndim]):
        return parameter.stride()
    raise UserError(
        f"fsdp: the rows of {name} do not lie one after another in memory, and each rank is given"
        " some of them",
        "make it contiguous where model() makes it: nn.Parameter(weight.contiguous()); or"
        " --strategy ddp",
        "model",
    )

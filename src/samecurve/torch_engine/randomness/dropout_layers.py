"""Dropout layers whose masks follow the sample: the same on any device, however a batch is divided,
and under either engine.

A mask is a pure function of (row key, seed, module name, call, element), in integers;
keyed_numbers.py has the lanes of a row. An element is kept if its lane >= t - 32768, where t =
round(65536 p), within 1..65535. Kept elements are multiplied by 65536 / (65536 - t). The call is 0
unless the forward pass calls the module again. In a module that drops channels, an element is a
channel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from samecurve.errors import UserError
from samecurve.torch_engine.randomness import MicroBatchContext
from samecurve.torch_engine.randomness.draw_sites import STEP, Draw, Place, in_shape, row_shape
from samecurve.torch_engine.randomness.keyed_numbers import keyed_lanes, mixed, salt

_CHANNELS: dict[type[nn.Module], tuple[int, ...]] = {
    nn.Dropout1d: (3,),
    nn.Dropout2d: (3, 4),
    nn.Dropout3d: (5,),
}  # dimensions of the input


def key_dropout(model: nn.Module, context: MicroBatchContext, seed: int) -> tuple[str, ...]:
    """Let each Dropout, Dropout1d, 2d and 3d with p > 0 draw its masks from the context's row keys.

    Returns their names.

    Call it on the bare model, since masks depend on the modules' names, and after copying it. In
    training, the input of a module has the samples in its first dimension, each with equally many
    neighbouring rows ([samples * T, C]), or in another dimension that was learnt (draw_sites.py).
    """
    # Any: a module's class and attributes are changed below.
    dropouts: list[tuple[str, Any]] = [
        (name, module)
        for name, module in model.named_modules()
        if _keyable(module) and module.p > 0
    ]
    masks = _Masks(context, seed, tuple(name for name, _ in dropouts))
    for index, (name, module) in enumerate(dropouts):
        title = f"{type(module).__name__} {name}".strip()
        if not isinstance(module, KeyedDropout):
            module.__class__ = _keyed(module.__class__)
        channel_dims = (dims for kind, dims in _CHANNELS.items() if isinstance(module, kind))
        module.samecurve_site = _Site(title, index, masks, next(channel_dims, None))
    return masks.names


def dropout_layers(model: nn.Module) -> tuple[str, ...]:
    """Names of the layers that drop something: those of key_dropout(), recurrent layers and
    attention. Functions called in a forward pass (F.dropout) are not seen.
    """
    return tuple(name for name, module in model.named_modules() if _draws(module))


def _draws(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    return isinstance(module, nn.MultiheadAttention) and module.dropout > 0


def _keyable(module: nn.Module) -> bool:
    """Whether a module is a Dropout whose forward pass is torch's own, which key_dropout()
    replaces.
    """
    return type(module).forward in (
        nn.Dropout.forward,
        nn.Dropout1d.forward,
        nn.Dropout2d.forward,
        nn.Dropout3d.forward,
        KeyedDropout.forward,
    )


class _Masks:
    """The masks of one replica's modules. Their common part is computed once a microbatch."""

    def __init__(self, context: MicroBatchContext, seed: int, names: tuple[str, ...]) -> None:
        self.names = names
        self.context, self._seed = context, seed
        self._salts = torch.tensor(
            [[salt(seed, name, 0)] for name in names], dtype=torch.int64, device="cpu"
        )
        self._keys: torch.Tensor | None = None  # the keys of the table
        self._table = self._salts

    @property
    def samples(self) -> int:
        if self.context.rows is None:
            raise RuntimeError(
                "MicroBatchContext.begin(keys) comes before a forward pass in training"
            )
        return self.context.rows

    def lanes(self, index: int, call: int, shape: Sequence[int], *, of_step: bool) -> torch.Tensor:
        """Uniform random int16 [samples, *shape] for a call of the module `index`.

        of_step: int16 [1, *shape] instead, the same in every microbatch
        """
        words = self._words(index, call, of_step=of_step).view(torch.int32)
        return keyed_lanes(words, shape, self.context.tables)

    def _words(self, index: int, call: int, *, of_step: bool) -> torch.Tensor:
        """int64 [samples, 1]: a and b of each row (keyed_numbers.py) in one number."""
        keys = self.context.step_numbers.keys if of_step else self.context.keys
        assert keys is not None
        if call or of_step:
            return mixed(keys ^ salt(self._seed, self.names[index], call))[:, None]
        if self._keys is not keys:
            self._salts = self._salts.to(keys.device)
            self._keys, self._table = keys, mixed(keys ^ self._salts)[:, :, None]
        return self._table[index]


@dataclass(frozen=True)
class _Site:
    """The place of a keyed module in its model.

    channels: the dimensions that the input of a module that drops channels may have; None: it
        drops elements
    """

    name: str
    index: int
    masks: _Masks
    channels: tuple[int, ...] | None

    @property
    def place(self) -> Place:
        return ((self.name, 0),)

    def __deepcopy__(self, memo: object) -> "_Site":
        """A copied model draws the same; key_dropout() gives the model of another device its own
        context.
        """
        return self

    def mask(self, values: torch.Tensor, threshold: int) -> torch.Tensor:
        """1 where kept, else 0, in the shape of the values or of their channels."""
        samples, context = self.masks.samples, self.masks.context
        if self.channels is not None and values.dim() not in self.channels:
            raise UserError(
                f"{self.name} drops whole channels and is given {_shape_text(values)}",
                "samples first, then channels, then the rest; or nn.Dropout",
                "model",
            )
        shape = values.shape
        if self.channels is not None:
            shape = torch.Size([*shape[:2], *[1] * (values.dim() - 2)])
        call = context.call_number(self.masks.names[self.index])
        rule = context.sites.rule(self.place, call, shape, samples)
        is_known = rule >= 0 or context.sites.learnt(self.place, call) == STEP
        if context.sites.recorded is not None:
            context.sites.recorded.append(Draw(self.place, shape, samples, call))
        elif not is_known:
            raise UserError(
                f"{self.name} is given {_shape_text(values)} for {samples} samples, so its mask"
                " can't follow the samples",
                "samples first, each with equally many neighbouring rows; or leave it out: p = 0",
                "model",
            )
        rows = samples if rule >= 0 else 1
        row = row_shape(shape, rule, rows)
        lanes = self.masks.lanes(self.index, call, row, of_step=rule < 0)
        views = context.sites.views_of(shape, rule, rows)
        return in_shape(mask_of(lanes, threshold, values), shape, rule, views)


class KeyedDropout(_DropoutNd):
    """A Dropout whose masks follow the sample."""

    samecurve_site: _Site

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        if not self.training or self.p == 0:
            return input
        mask = self.samecurve_site.mask(input, lane_threshold(self.p))
        return masked(input, mask, self.p, inplace=self.inplace)


def lane_threshold(p: float) -> int:
    """The number below which a lane is dropped, with probability p."""
    return _dropped(p) - 32768


def mask_of(lanes: torch.Tensor, threshold: int, values: torch.Tensor) -> torch.Tensor:
    """1 where an element is kept, else 0, to be multiplied with values.

    Floating-point numbers on a CPU, where bool is three times slower; bool, a byte each, elsewhere.
    """
    if values.device.type == "cpu":
        numbers = torch.empty(lanes.shape, dtype=values.real.dtype, device="cpu")
        return torch.ge(lanes, threshold, out=numbers)
    return lanes >= threshold


def masked(values: torch.Tensor, mask: torch.Tensor, p: float, *, inplace: bool) -> torch.Tensor:
    """The values after dropout. mask: changed in place."""
    dropped = _dropped(p)
    scale = 65536 / (65536 - dropped) if p < 1 else 0.0
    # The scale goes into the mask where that is wide enough: the same bits in one pass less.
    scaled = mask.dtype in (torch.float32, torch.float64)
    if scaled:
        mask.mul_(scale)
    output = values.mul_(mask) if inplace else values * mask
    return output if scaled else output.mul_(scale)


def _dropped(p: float) -> int:
    """The count of dropped lanes in 65536."""
    return min(max(round(65536 * p), 1), 65535)


@cache
def _keyed(kind: Any) -> Any:
    """A subclass of a module's class, so that isinstance() gives what it gave before."""
    return type(f"Keyed{kind.__name__}", (KeyedDropout, kind), {"__module__": __name__})


def _shape_text(values: torch.Tensor) -> str:
    return f"[{', '.join(map(str, values.shape))}]"

"""Dropout whose masks follow the sample: the same on whatever device, in whatever split of a batch,
under either engine.

A mask is a pure function of (row key, seed, module name, call, element), in integers that wrap
around, so that CPU, GPU, numpy and JAX agree. For the j-th pair of a row's elements, in C order
(int32 where not said; shifts keep the sign):

salt   the first 8 bytes, little endian, of sha256(f"{seed}/{name}/{call}")
call   0 unless the forward pass calls the module again
a, b   the low and the high half of core.determinism.sample_keys.mix(key ^ salt), a made odd
x      hash(j) * a + b, then x ^= x >> 15, then x *= 0x2C1B3C6D
lanes  the low and the high 16 bits of x, signed: of elements 2j and 2j+1
keep   lane >= t - 32768, where t = round(65536 p), within 1..65535;
       what is kept is multiplied by 65536 / (65536 - t)

hash is lowbias32 (github.com/skeeto/hash-prospector): x ^= x >> 16, x *= 0x7FEB352D, x ^= x >> 15,
x *= 0x846CA68B, x ^= x >> 16, unsigned. Of a module that drops channels, an element is a channel.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from samecurve.errors import UserError
from samecurve.torch_engine.compile_marks import constant
from samecurve.torch_engine.layers.context import MicroBatchContext

_CHANNELS: dict[type[nn.Module], tuple[int, ...]] = {
    nn.Dropout1d: (3,),
    nn.Dropout2d: (3, 4),
    nn.Dropout3d: (5,),
}  # dimensions of the input
# Factors of core.determinism.sample_keys.mix, as signed numbers:
_MIX = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_LAST_FACTOR = 0x2C1B3C6D


def key_dropout(model: nn.Module, context: MicroBatchContext, seed: int) -> tuple[str, ...]:
    """Let each Dropout, Dropout1d, 2d and 3d with p > 0 draw its masks by the context's row keys.

    Returns their names.

    Call it on the bare model (masks depend on the modules' names), after copying it. In training, a
    module's input has the samples first: a row for each, or equally many neighbouring rows for each
    ([samples * T, C]).
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


def unkeyed_dropout(model: nn.Module) -> tuple[str, ...]:
    """Dropout that key_dropout can't reach: "LSTM net.1" for each, in order.

    Functions called in a forward pass (F.dropout) are not seen.
    """
    return tuple(
        f"{type(module).__name__} {name}".strip()
        for name, module in model.named_modules()
        if _draws(module) and not _keyable(module)
    )


def disable_dropout(model: nn.Module) -> None:
    """No dropout in any module, keyed or not."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            module.dropout = 0.0


def _draws(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    return isinstance(module, nn.MultiheadAttention) and module.dropout > 0


def _keyable(module: nn.Module) -> bool:
    """Not where a subclass has a forward pass of its own, which would be lost."""
    return type(module).forward in (
        nn.Dropout.forward,
        nn.Dropout1d.forward,
        nn.Dropout2d.forward,
        nn.Dropout3d.forward,
        KeyedDropout.forward,
    )


class _Masks:
    """The masks of one replica's modules; what they share is computed once a microbatch."""

    def __init__(self, context: MicroBatchContext, seed: int, names: tuple[str, ...]) -> None:
        self.names = names
        self._context, self._seed = context, seed
        self._salts = torch.tensor(
            [[_salt(seed, name, 0)] for name in names], dtype=torch.int64, device="cpu"
        )
        self._keys: torch.Tensor | None = None  # those that the table is of
        self._table = self._salts
        self._hashes = torch.empty(0, dtype=torch.int32, device="cpu")

    @property
    def samples(self) -> int:
        if self._context.keys is None:
            raise RuntimeError(
                "MicroBatchContext.begin(keys) comes before a forward pass in training"
            )
        return len(self._context.keys)

    def lanes(self, index: int, elements: int) -> torch.Tensor:
        """int16 [samples, elements] of module `index`: uniform random numbers, those of its next
        call.
        """
        words = self._words(index).view(torch.int32)
        mixed = self._hash(-(-elements // 2), words.device) * words[:, :1]
        mixed.add_(words[:, 1:])
        mixed.bitwise_xor_(mixed >> 15).mul_(_LAST_FACTOR)
        return mixed.view(torch.int16)[:, :elements]

    def _words(self, index: int) -> torch.Tensor:
        """int64 [samples, 1]: a and b of each row, in one."""
        keys = self._context.keys
        assert keys is not None
        call = self._context.call_number(self.names[index])
        if call:
            return _mixed(keys ^ _salt(self._seed, self.names[index], call))[:, None]
        if self._keys is not keys:
            self._salts = self._salts.to(keys.device)
            self._keys, self._table = keys, _mixed(keys ^ self._salts)[:, :, None]
        return self._table[index]

    def _hash(self, count: int, device: torch.device) -> torch.Tensor:
        """hash(0..count-1), made once on the device."""
        if len(self._hashes) < count or self._hashes.device != device:
            self._hashes = torch.from_numpy(_lowbias32(1 << (count - 1).bit_length())).to(device)
        return self._hashes[:count]


@dataclass(frozen=True)
class _Site:
    """Where a keyed module is."""

    name: str
    index: int
    masks: _Masks
    channels: tuple[int, ...] | None  # how many dimensions its input may have, if it drops channels

    def __deepcopy__(self, memo: object) -> "_Site":
        """A copied model draws what this one does; one for another device is given a context of its
        own by key_dropout.
        """
        return self

    def mask(self, values: torch.Tensor, threshold: int) -> torch.Tensor:
        """1 where kept, else 0, in the shape of the values or of their channels.

        As numbers on a CPU, where bool is three times slower; as bool, a byte each, elsewhere.
        """
        samples = self.masks.samples
        if self.channels is not None and values.dim() not in self.channels:
            raise UserError(
                f"{self.name} drops whole channels and is given {_shape_text(values)}",
                "samples first, then channels, then the rest; or nn.Dropout",
                "model",
            )
        if values.dim() == 0 or len(values) % samples or not len(values):
            raise UserError(
                f"{self.name} is given {_shape_text(values)} for {samples} samples, so its mask"
                " can't follow the samples",
                "samples first, each with equally many neighbouring rows; or leave it out: p = 0",
                "model",
            )
        shape = values.shape
        if self.channels is not None:
            shape = torch.Size([*shape[:2], *[1] * (values.dim() - 2)])
        lanes = self.masks.lanes(self.index, shape.numel() // samples)
        if values.device.type == "cpu":
            numbers = torch.empty(lanes.shape, dtype=values.real.dtype)
            return torch.ge(lanes, threshold, out=numbers).view(shape)
        return (lanes >= threshold).view(shape)


class KeyedDropout(_DropoutNd):
    """A Dropout whose masks follow the sample."""

    samecurve_site: _Site

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        if not self.training or self.p == 0:
            return input
        dropped = min(max(round(65536 * self.p), 1), 65535)
        scale = 65536 / (65536 - dropped) if self.p < 1 else 0.0
        mask = self.samecurve_site.mask(input, dropped - 32768)
        # The scale goes into the mask where that is wide enough: the same bits in one pass less.
        scaled = mask.dtype in (torch.float32, torch.float64)
        if scaled:
            mask.mul_(scale)
        output = input.mul_(mask) if self.inplace else input * mask
        return output if scaled else output.mul_(scale)


@cache
def _keyed(kind: Any) -> Any:
    """A subclass, so that the module stays what it was to everything that asks."""
    return type(f"Keyed{kind.__name__}", (KeyedDropout, kind), {"__module__": __name__})


@constant
def _salt(seed: int, name: str, call: int) -> int:
    return int.from_bytes(
        hashlib.sha256(f"{seed}/{name}/{call}".encode()).digest()[:8], "little", signed=True
    )


def _mixed(values: torch.Tensor) -> torch.Tensor:
    """core.determinism.sample_keys.mix on int64, the lowest bit set."""
    values = (values ^ _shifted(values, 30)) * _MIX[0]
    values = (values ^ _shifted(values, 27)) * _MIX[1]
    return (values ^ _shifted(values, 31)) | 1


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifted right as unsigned numbers are."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _lowbias32(count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    values = np.arange(count, dtype=np.uint32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        values = (values ^ (values >> np.uint32(shift))) * np.uint32(factor)
    return (values ^ (values >> np.uint32(16))).view(np.int32)


def _shape_text(values: torch.Tensor) -> str:
    return f"[{', '.join(map(str, values.shape))}]"

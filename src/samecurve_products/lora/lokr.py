"""LoKr layers: a layer's weight is changed by a Kronecker product of two small matrices.

w1 is [a, m] and w2 is [k, n], or a product of two of them with the adapter's rank; the weight of a
linear layer is [a*k, m*n]. Yeh et al. 2023, arXiv:2309.14859.

peft's own layers draw a random number in every forward pass while they train, once for a whole
batch, and build the change in the weight's size. These layers have the same arrays under the same
names, draw nothing, and multiply an input by w2 and by w1, one after the other.

This page imports peft, which takes seconds: import it late, after the page `quantized` has imported
its own library.
"""

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners import lokr
from torch import nn

from samecurve_products.lora.names import NAME


class _Kronecker(lokr.LoKrLayer):
    """A layer with one adapter. The methods of peft, its merging among them, go on working."""

    base_layer: Any

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.disable_adapters or self.merged:
            alone: torch.Tensor = super().forward(x, *args, **kwargs)
            return alone
        result: torch.Tensor = self.base_layer(x, *args, **kwargs)
        x = self._cast_input_dtype(x, self.lokr_w1[NAME].dtype)
        factor: float = self.scaling[NAME]
        return (result + self.change(x) * factor).to(result.dtype)

    def change(self, x: torch.Tensor) -> torch.Tensor:
        """The change of the layer's product with x, without its factor."""
        raise NotImplementedError


class KroneckerLinear(_Kronecker, lokr.Linear):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        w1: torch.Tensor = self.lokr_w1[NAME]
        x = x.reshape(*x.shape[:-1], w1.shape[1], -1)  # [..., m, n]
        if NAME in self.lokr_w2:
            x = F.linear(x, self.lokr_w2[NAME])
        else:
            x = F.linear(F.linear(x, self.lokr_w2_b[NAME]), self.lokr_w2_a[NAME])
        return torch.matmul(w1, x).flatten(-2)  # [..., a, k]


class KroneckerConv2d(_Kronecker, lokr.Conv2d):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        w1: torch.Tensor = self.lokr_w1[NAME]
        base, rows = self.base_layer, len(x)
        x = x.reshape(rows * w1.shape[1], -1, *x.shape[2:])  # [rows * m, n, height, width]
        if NAME in self.lokr_w2:
            x = F.conv2d(x, self.lokr_w2[NAME], None, base.stride, base.padding)
        else:
            first: torch.Tensor = self.lokr_w2_b[NAME]
            first = first.view(len(first), -1, *base.kernel_size)
            x = F.conv2d(x, first, None, base.stride, base.padding)
            x = F.conv2d(x, self.lokr_w2_a[NAME][:, :, None, None])
        x = x.reshape(rows, w1.shape[1], *x.shape[1:])  # [rows, m, k, height, width]
        return torch.einsum("am,rmkhw->rakhw", w1, x).flatten(1, 2)


class KroneckerModel(lokr.LoKrModel):
    """peft's injection of a LoKr adapter, with the layers above."""

    layers_mapping: dict[type[nn.Module], type[lokr.LoKrLayer]] = {
        nn.Conv2d: KroneckerConv2d,
        nn.Linear: KroneckerLinear,
    }

"""Frozen matrices in 4, 8 or 16 bits: packed when they are read, unpacked in every product.

4bit: one of 16 levels of a normal distribution, times a scale for each 64 numbers (Dettmers et al.
2023, arXiv:2305.14314). 8bit: a whole number, times a scale for each row (Dettmers et al. 2022,
arXiv:2208.07339); activations are not rounded. The bitsandbytes library does both, as in its own
layers. bf16: each number rounded, as products under bf16 round it anyway; its codes are the bytes,
so that every strategy treats them as it treats the others' codes. Packing happens on a CPU, so that
all devices have the same values.
"""

import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from samecurve.seam import UserError, install_command, show_bytes
from samecurve_products.lora import StoredArray
from samecurve_products.lora.sections import Quantize

CODES, SCALES = "codes", "scales"  # the two parts of a packed weight
_BLOCK = 64  # 4 bits: numbers that share a scale
_KINDS = {
    "4bit": "NF4, a scale for each 64 numbers",
    "8bit": "a scale for each row",
    "bf16": "each rounded once, as products in bf16 round it",
}
_WIDTHS = {"4bit": "0.5 B", "8bit": "1 B", "bf16": "2 B"}


def check_installed(quantize: Quantize) -> None:
    """UserError: bitsandbytes is not installed."""
    if quantize in {"4bit", "8bit"} and not is_installed():
        raise UserError(
            f"model.quantize {quantize} needs bitsandbytes: not installed",
            f"{install_command('quantize')}, or model.quantize: none",
            "model.quantize",
        )


@contextmanager
def _nothing_fetched() -> Iterator[None]:
    """Hide the package `kernels` for a while, and silence the warning about its absence.

    With it bitsandbytes would download code from a hub on some CPUs.
    """
    logger = logging.getLogger("bitsandbytes")
    level, package = logger.level, sys.modules.get("kernels")
    logger.setLevel(logging.ERROR)
    sys.modules["kernels"] = None  # type: ignore[assignment]  # an import of it fails
    try:
        yield
    finally:
        logger.setLevel(level)
        del sys.modules["kernels"]
        if package is not None:
            sys.modules["kernels"] = package


def import_library() -> Any:
    """Import bitsandbytes, late, because it takes a second.

    Called before peft is imported, since peft imports bitsandbytes where it is installed.
    UserError: bitsandbytes is installed, and can't be imported.
    """
    if "bitsandbytes" in sys.modules:
        return sys.modules["bitsandbytes"]
    try:
        with _nothing_fetched():
            import bitsandbytes
    except ImportError as error:
        raise UserError(
            f"bitsandbytes can't be imported: {error}",
            install_command("quantize"),
            "model.quantize",
        ) from None
    return bitsandbytes


def is_installed() -> bool:
    return find_spec("bitsandbytes") is not None


@dataclass(frozen=True)
class Packing:
    """How a matrix of [rows, columns] is packed."""

    quantize: Quantize  # 4bit, 8bit, bf16
    rows: int
    columns: int
    is_transposed: bool = False  # the layer has its weight as [columns, rows]

    @classmethod
    def of(cls, layer: Any, quantize: Quantize) -> "Packing":
        """The packing of a linear layer, whose weight is [in, out] unless it is a Linear."""
        is_transposed = not isinstance(layer, nn.Linear)
        rows, columns = layer.weight.T.shape if is_transposed else layer.weight.shape
        return cls(quantize, rows, columns, is_transposed)

    def turned(self, matrix: torch.Tensor) -> torch.Tensor:
        """The matrix of a layer's weight, or the weight of a matrix."""
        return matrix.T if self.is_transposed else matrix

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the codes and scales, by name."""
        size = self.rows * self.columns
        if self.quantize == "4bit":
            return {CODES: (-(-size // 2),), SCALES: (-(-size // _BLOCK),)}
        width = 2 if self.quantize == "bf16" else 1
        return {CODES: (self.rows, width * self.columns), SCALES: (self.rows,)}

    @property
    def code_dtype(self) -> torch.dtype:
        return torch.int8 if self.quantize == "8bit" else torch.uint8

    def pack(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        """Codes and scales of a matrix. matrix: floating, on a CPU"""
        if self.quantize == "bf16":  # no scale is used
            codes = matrix.to(torch.bfloat16).contiguous().view(torch.uint8)
            return {CODES: codes, SCALES: torch.ones(self.rows)}
        functions = import_library().functional
        if self.quantize == "4bit":
            codes, state = functions.quantize_4bit(
                matrix.float().contiguous(), blocksize=_BLOCK, quant_type="nf4"
            )
            scales = state.absmax
        else:
            codes, scales, _ = functions.int8_vectorwise_quant(matrix.half())
        shapes = self.shapes
        return {CODES: codes.view(shapes[CODES]), SCALES: scales.float().view(shapes[SCALES])}

    def unpack(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The matrix [rows, columns]. float64 gets the values of float32."""
        if self.quantize == "bf16":
            return codes.view(torch.bfloat16).to(dtype)
        import_library()
        operations: Any = torch.ops.bitsandbytes
        scales = scales.to(torch.float32)
        if self.quantize == "8bit":
            unpacked: torch.Tensor = operations.int8_vectorwise_dequant(codes, scales)
            return unpacked.to(dtype)
        narrow = torch.float32 if dtype == torch.float64 else dtype
        # as one row: for rows shorter than a block the CPU kernel takes wrong scales
        one = [1, 2 * len(codes)]
        row = operations.dequantize_4bit(
            codes, scales, _BLOCK, quant_type="nf4", shape=one, dtype=narrow
        )
        size = self.rows * self.columns
        matrix: torch.Tensor = row.view(-1)[:size].view(self.rows, self.columns)
        return matrix.to(dtype)


class QuantizedLinear(nn.Module):
    """A frozen linear layer whose weight is packed. bias: the layer's own"""

    codes: torch.Tensor
    scales: torch.Tensor
    bias: nn.Parameter | None

    def __init__(self, layer: Any, quantize: Quantize) -> None:
        super().__init__()
        self.packing = Packing.of(layer, quantize)
        self.in_features, self.out_features = self.packing.columns, self.packing.rows
        self._kind = type(layer)
        device = layer.weight.device
        dtypes = {CODES: self.packing.code_dtype, SCALES: torch.float32}
        for name, shape in self.packing.shapes.items():
            empty = torch.empty(shape, dtype=dtypes[name], device=device)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.register_parameter("bias", layer.bias)
        if not layer.weight.is_meta:
            self.take(layer.weight)

    @torch.no_grad()
    def take(self, weight: torch.Tensor) -> None:
        """Pack a weight that has the layer's original shape."""
        rows = self.packing.turned(weight)
        for name, values in self.packing.pack(rows.detach().cpu()).items():
            self.get_parameter(name).copy_(values)

    @torch.no_grad()
    def begin(self, fill: Callable[[Any], object]) -> None:
        """Set the first values of a plain layer. fill: sets them in a plain layer"""
        plain: Any
        with torch.device("cpu"):
            if self.packing.is_transposed:
                plain = self._kind(self.out_features, self.in_features)
            else:
                plain = nn.Linear(self.in_features, self.out_features, self.bias is not None)
        fill(plain)
        self.take(plain.weight)
        if self.bias is not None:
            self.bias.copy_(plain.bias)

    @property
    def weight(self) -> torch.Tensor:
        """The layer's weight, unpacked."""
        rows = _unpacked(self.packing, self.codes, self.scales, self.scales.dtype)
        return self.packing.turned(rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        multiply: Any = _Product.apply
        product: torch.Tensor = multiply(x, self.codes, self.scales, self.packing)
        return product if self.bias is None else product + self.bias.to(product.dtype)


class _Product(torch.autograd.Function):
    """The product x W^T. Backward unpacks W again, so no unpacked copy is kept."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, packing: Packing
    ) -> torch.Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.packing = packing
        return x @ _unpacked(packing, codes, scales, x.dtype).T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        codes, scales = ctx.saved_tensors
        matrix = _unpacked(ctx.packing, codes, scales, gradients[0].dtype)
        return gradients[0] @ matrix, None, None, None


def _unpacked(
    packing: Packing, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Unpack outside the mode of float64.py: the kernels need float32."""
    with torch._C.DisableTorchFunction():  # noqa: SLF001 - public nowhere
        return packing.unpack(codes, scales, dtype)


def quantize_layers(model: Any, names: Sequence[str], quantize: Quantize) -> None:
    """Replace linear layers by packed ones. names: of the layers"""
    for name in names:
        parent, _, leaf = name.rpartition(".")
        layer = model.get_submodule(name)
        setattr(model.get_submodule(parent), leaf, QuantizedLinear(layer, quantize))


def layer_packings(layers: Mapping[str, Any], quantize: Quantize) -> dict[str, Packing]:
    """The packing of each layer, by name. layers: the linear layers of a plain model."""
    return {name: Packing.of(layer, quantize) for name, layer in layers.items()}


class PackedArrays:
    """A plain model's weights, packed or rounded when they are read.

    packings: of layers by name

    An array is packed when it is first read. The parts of the last array are kept, since codes and
    scales are read one after the other.
    """

    def __init__(self, packings: Mapping[str, Packing]) -> None:
        self._packings = packings
        self._last: tuple[str, dict[str, torch.Tensor]] | None = None

    def rounded(self, arrays: Mapping[str, StoredArray]) -> dict[str, StoredArray]:
        """Arrays of the same names and shapes, rounded as packing rounds them."""
        return {
            name: replace(array, read=partial(self._read_rounded, name, array))
            if self._layer(name)
            else array
            for name, array in arrays.items()
        }

    def packed(self, arrays: Mapping[str, StoredArray], base: str = "") -> dict[str, StoredArray]:
        """Packed arrays. base: the text that an adapter puts between a layer's name and `weight`"""
        result: dict[str, StoredArray] = {}
        for name, array in arrays.items():
            plain = name.replace(base, ".") if base else name
            layer = self._layer(plain)
            if not layer:
                result[name] = array
                continue
            for part, shape in self._packings[layer].shapes.items():
                read = partial(self._read_part, plain, array, part)
                result[f"{name.removesuffix('weight')}{part}"] = replace(
                    array, shape=shape, read=read
                )
        return result

    def _layer(self, name: str) -> str:
        """The packed layer whose weight has this name; '': none."""
        layer, _, leaf = name.rpartition(".")
        return layer if leaf == "weight" and layer in self._packings else ""

    def _parts(self, name: str, array: StoredArray) -> dict[str, torch.Tensor]:
        if self._last is None or self._last[0] != name:
            packing = self._packings[self._layer(name)]
            weight = torch.from_numpy(np.require(array.read(), requirements="W"))
            self._last = name, packing.pack(packing.turned(weight))
        return self._last[1]

    def _read_part(self, name: str, array: StoredArray, part: str) -> NDArray[Any]:
        values: NDArray[Any] = self._parts(name, array)[part].numpy()
        return values

    def _read_rounded(self, name: str, array: StoredArray) -> NDArray[Any]:
        parts, packing = self._parts(name, array), self._packings[self._layer(name)]
        rows = packing.unpack(parts[CODES], parts[SCALES], torch.float32)
        values: NDArray[Any] = packing.turned(rows).numpy()
        return values


def unpacked(
    tensors: Mapping[str, torch.Tensor], packings: Mapping[str, Packing], base: str
) -> dict[str, torch.Tensor]:
    """A model's weights, with packed weights unpacked.

    base: the text that an adapter puts between a layer's name and its arrays' names
    """
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        layer, _, leaf = name.replace(base, ".").rpartition(".")
        if layer not in packings or leaf not in {CODES, SCALES}:
            result[name] = tensor
        elif leaf == CODES:
            scales = tensors[f"{name.removesuffix(CODES)}{SCALES}"]
            rows = packings[layer].unpack(tensor, scales, scales.dtype)
            result[f"{name.removesuffix(CODES)}weight"] = packings[layer].turned(rows)
    return result


def describe_quantized(packings: Mapping[str, Packing], quantize: Quantize) -> str:
    """A line about the packed weights for the user."""
    sizes = [packing.rows * packing.columns for packing in packings.values()]
    packed = sum(
        math.prod(packing.shapes[CODES]) + 4 * math.prod(packing.shapes[SCALES])
        for packing in packings.values()
    )
    how = _KINDS[quantize]
    if quantize != "bf16":
        how += f"; bitsandbytes {version('bitsandbytes')}"
    return (
        f"{quantize} base: {len(sizes)} matrices of {sum(sizes)} weights packed as they are read"
        f" ({how}), {show_bytes(packed)} in place of {show_bytes(4 * sum(sizes))}"
    )


def packed_formula(packings: Mapping[str, Packing], quantize: Quantize) -> str:
    """The formula of the memory that codes and scales take."""
    size = sum(packing.rows * packing.columns for packing in packings.values())
    scales = sum(math.prod(packing.shapes[SCALES]) for packing in packings.values())
    return f"{size} weights x {_WIDTHS[quantize]}; their {scales} scales are among the weights"

"""Features of samples as one table of bytes, a row a sample, and how devices put one together.

Rows travel as whole numbers of which all but one device add zeros: every value arrives with the
bits it had, whatever its type, and no device's place matters, only the sample's.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from samecurve.errors import UserError
from samecurve.torch_engine.process_group import Peers, texts_of_all

Features = Mapping[str, torch.Tensor]  # by name, each with one row a sample
Part = tuple[int, Features]  # of neighbouring samples: the first one's number, and theirs
_WORD = 8  # bytes of the numbers that rows are sent as


class Column(NamedTuple):
    """The place of one feature in a row."""

    name: str
    dtype: str  # as torch names it
    shape: tuple[int, ...]  # of a sample's

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """How a sample's features lie in a row: side by side."""

    columns: tuple[Column, ...]

    @classmethod
    def of(cls, features: Features) -> "Layout":
        columns = [
            Column(name, str(feature.dtype).removeprefix("torch."), tuple(feature.shape[1:]))
            for name, feature in sorted(features.items())
        ]
        return cls(tuple(columns))

    @classmethod
    def from_bytes(cls, encoded: bytes) -> "Layout":
        columns = json.loads(encoded)
        return cls(tuple(Column(name, dtype, tuple(shape)) for name, dtype, shape in columns))

    def to_bytes(self) -> bytes:
        return json.dumps(self.columns).encode()

    @property
    def width(self) -> int:
        """Bytes of a row: whole words."""
        size = sum(column.size for column in self.columns)
        return -(-size // _WORD) * _WORD

    def pack(self, features: Features) -> torch.Tensor:
        """uint8 [rows, bytes], without the last word's rest. UserError: laid out otherwise."""
        layout = Layout.of(features)
        if layout != self:
            raise _unlike(layout, self)
        return torch.cat([_bytes_of(features[column.name]) for column in self.columns], dim=1)

    def unpack(self, table: torch.Tensor) -> dict[str, torch.Tensor]:
        """uint8 [rows, width] -> features in memory of their own."""
        features, begin = {}, 0
        for column in self.columns:
            shape, dtype = (len(table), *column.shape), column.torch_dtype
            values = torch.empty(shape, dtype=dtype, device=table.device)
            if column.size:
                part = table[:, begin : begin + column.size]
                values = part.clone(memory_format=torch.contiguous_format).view(dtype).view(shape)
            features[column.name] = values
            begin += column.size
        return features


class FeatureTable:
    """The features of a step, or of an evaluation, that devices put together.

    peers: what adds up over all devices; they make the same calls
    """

    def __init__(self, peers: Peers, device: torch.device) -> None:
        self._peers, self._device = peers, device
        self._layout: Layout | None = None

    def put_together(self, parts: Sequence[Part], num_samples: int) -> dict[str, torch.Tensor]:
        """All samples' features, in the samples' order, in memory of their own.

        parts: those of this device; some may have none, the first sample is some one's.

        UserError: a microbatch's features are laid out in another way than the others'.
        """
        if self._layout is None:
            self._layout = self._agreed_layout(parts)
        layout = self._layout
        size = (num_samples, layout.width)
        table = torch.zeros(size, dtype=torch.uint8, device=self._device)
        for first, features in parts:
            packed = layout.pack(features)
            table[first : first + len(packed), : packed.shape[1]] = packed
        if layout.width:
            table = self._peers.all_reduced(table.view(torch.int64)).view(torch.uint8)
        return layout.unpack(table)

    def _agreed_layout(self, parts: Iterable[Part]) -> Layout:
        """The layout of the first sample, which devices without any sample don't know."""
        of_first = (Layout.of(features).to_bytes() for first, features in parts if first == 0)
        encoded = next(of_first, b"")
        texts = texts_of_all(self._peers, encoded, self._device)
        return Layout.from_bytes(next(filter(None, texts)))


def check_rows(features: Features, count: int) -> None:
    """UserError: a feature has not one row for each of so many samples."""
    for name, feature in features.items():
        if len(feature) != count:
            raise UserError(
                f'features() gives "{name}" of shape {tuple(feature.shape)} for {count} samples',
                "one row a sample, in the samples' order: sums over a sample's tokens as one row"
                " each, a number of the model as model.scale.expand(len(x))",
                "task",
            )


def _bytes_of(feature: torch.Tensor) -> torch.Tensor:
    """[rows, bytes of a row]."""
    rows = feature.detach().resolve_conj().resolve_neg()
    rows = rows.reshape(len(rows), math.prod(rows.shape[1:]))
    # not contiguous(): a single row that was expanded counts as such, and has strides of 0
    return rows.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _unlike(layout: Layout, other: Layout) -> UserError:
    """The error that two microbatches lay out their features differently: it names the first
    difference.
    """
    here, there = ({column.name: column for column in one.columns} for one in (layout, other))
    if here.keys() != there.keys():
        cause = f"gives {', '.join(here)} for one microbatch and {', '.join(there)} for another"
    else:
        name = next(name for name in here if here[name] != there[name])
        one, two = here[name], there[name]
        cause = (
            f'gives "{name}" with rows of {one.dtype} {one.shape} for one microbatch and of'
            f" {two.dtype} {two.shape} for another"
        )
    return UserError(
        f"features() {cause}",
        "the same names, types and row shapes for every microbatch: rows of unlike length are"
        " padded to one width, or summed",
        "task",
    )

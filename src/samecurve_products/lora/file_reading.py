"""Reading an adapter that this or another tool has written, by the names of a model's arrays.

Both layouts of layouts.py, with the names that other tools have for the same layers. Everything in
the file must fit: an array that is of no layer, another kind or rank, or a layer that the adapter
has not, is refused, since what is left out would change the pictures without a word.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from samecurve.seam import UserError, some
from samecurve.units import first_and_count
from samecurve_products.lora import StoredArray
from samecurve_products.lora.file_factors import StatedFactors, check_config
from samecurve_products.lora.file_names import FileNames, is_of_text_encoder
from samecurve_products.lora.layouts import ALPHA
from samecurve_products.lora.names import MAGNITUDE, OWN, W1, W2, W2_A, W2_B, A, B
from samecurve_products.lora.sections import AdapterSection, Kind
from samecurve_products.lora.targets import short_name

_WHERE = "--init-from"
# the ends of names in files: ours
_ENDS = {
    **dict.fromkeys((".lora_A.weight", ".lora_A.default.weight", ".lora_down.weight"), A),
    **dict.fromkeys((".lora_B.weight", ".lora_B.default.weight", ".lora_up.weight"), B),
    **dict.fromkeys((".lora.down.weight", "_lora.down.weight"), A),
    **dict.fromkeys((".lora.up.weight", "_lora.up.weight"), B),
    **dict.fromkeys((".lora_magnitude_vector", ".lora_magnitude_vector.weight"), MAGNITUDE),
    ".dora_scale": MAGNITUDE,
    ".lokr_w1": W1,
    ".lokr_w2": W2,
    ".lokr_w2_a": W2_A,
    ".lokr_w2_b": W2_B,
    ALPHA: ALPHA,
}


@dataclass(frozen=True)
class AdapterFile:
    """An adapter's arrays by a model's names, and what the user should know."""

    arrays: Mapping[str, StoredArray]
    notes: list[str]


def read_adapter(
    arrays: Mapping[str, StoredArray],
    adapter: AdapterSection,
    shapes: Mapping[str, tuple[int, ...]],
    names: FileNames,
    metadata: Mapping[str, str] | None = None,
) -> AdapterFile:
    """The arrays of a file by the names of the model that has the adapter. No value is read.

    Where the file's factors are none that the config could have, lora_B, or lokr_w1, is multiplied
    so that the change is the same.

    shapes: of the model's arrays, by name
    metadata: of the file, if it has any; or peft's config beside it, by its file's name

    UserError: an array fits no layer of this model, or none that the adapter is for; or the file
    has another kind, rank or alpha.
    """
    of_text: list[str] = []
    if not names.component.startswith("text_encoder"):
        of_text = [name for name in arrays if is_of_text_encoder(name)]
    by_layer = _by_layer(sorted(arrays.keys() - set(of_text)), names)
    targets = {_layer_of(name) for name in shapes if name.endswith(OWN)}
    _check_layers(by_layer, adapter, targets)
    of_rank = [parts[own] for parts in by_layer.values() for own in (A, W2_B) if own in parts]
    ranks = [arrays[part.name].shape[0] for part in of_rank]
    rank = ranks[0] if ranks else adapter.rank
    of_metadata = StatedFactors.of(metadata or {}, names.component, rank)
    layers = [
        _Layer(layer, by_layer, arrays, shapes, of_metadata.factor(layer))
        for layer in sorted(by_layer)
    ]
    # where w1 and w2 are whole, no reader looks at a factor
    stated = [each.stated(rank) for each in layers if W2 not in by_layer[each.layer]]
    note = check_config(adapter, ranks, stated)
    result: dict[str, StoredArray] = {}
    for each in layers:
        result |= each.read(adapter)
    notes = [note] if note else []
    if of_text:
        notes.append(f"left out, since no text encoder is trained: {first_and_count(of_text)}")
    if fresh := sorted(targets - set(by_layer)):
        notes.append(f"not in the file, so with their first values: {first_and_count(fresh)}")
    return AdapterFile(result, notes)


@dataclass(frozen=True)
class _Part:
    """An array in the file."""

    name: str
    layers: tuple[str, ...]  # those that it is of: their rows follow each other


_PartsByLayer = dict[str, dict[str, _Part]]  # by layer, and by our name of the array in it


def _by_layer(file_names: Sequence[str], names: FileNames) -> _PartsByLayer:
    """UserError: an array is of no layer, or two are of the same."""
    by_layer: _PartsByLayer = {}
    unknown = []
    for name in file_names:
        end = max((end for end in _ENDS if name.endswith(end)), key=len, default="")
        stem = name.removesuffix(end).replace(".processor", "")
        layers = names.known.get(stem, ()) if end else ()
        if not layers:
            unknown.append(name)
        for layer in layers:
            parts = by_layer.setdefault(layer, {})
            if _ENDS[end] in parts:
                raise UserError(
                    f"{name} and {parts[_ENDS[end]].name} are both of {layer}",
                    "a file with one adapter",
                    _WHERE,
                )
            parts[_ENDS[end]] = _Part(name, layers)
    if unknown:
        raise UserError(
            f"{len(unknown)} of {len(file_names)} arrays in the file are of no layer of"
            f" {names.model}, or of no adapter of kind {', '.join(get_args(Kind))}:"
            f" {some(unknown, 3)}",
            "an adapter that was trained on this model's family",
            _WHERE,
        )
    return by_layer


def _check_layers(by_layer: _PartsByLayer, adapter: AdapterSection, targets: set[str]) -> None:
    """UserError: the file has other layers than the adapter, or another kind of it."""
    beyond = [layer for layer in by_layer if layer not in targets]
    if beyond:
        short = sorted({short_name(layer) for layer in {*by_layer, *targets}})
        raise UserError(
            f"the file changes {len(beyond)} layers that model.adapter.target leaves out:"
            f" {some(beyond, 3)}",
            f"model.adapter.target: [{', '.join(short)}]",
            _WHERE,
        )
    for layer, parts in by_layer.items():
        kind = _kind(parts)
        if kind != adapter.kind:
            raise UserError(
                f"the file's adapter of {layer} is of kind {kind}, not {adapter.kind}",
                f"model.adapter.kind: {kind}",
                _WHERE,
            )


def _kind(parts: Mapping[str, _Part]) -> Kind:
    if any(own in parts for own in (W1, W2, W2_A, W2_B)):
        return "lokr"
    return "dora" if MAGNITUDE in parts else "lora"


@dataclass(frozen=True)
class _Layer:
    """The adapter of one layer in the file."""

    layer: str
    by_layer: _PartsByLayer
    arrays: Mapping[str, StoredArray]  # of the file
    shapes: Mapping[str, tuple[int, ...]]  # of the model
    of_metadata: float | None  # factor of the change, by the file's metadata

    def read(self, adapter: AdapterSection) -> dict[str, StoredArray]:
        """UserError: it has another rank or other shapes than the model's adapter."""
        parts = self.by_layer[self.layer]
        expected = {own: self.shapes[self.layer + own] for own in OWN if self._has(own)}
        if set(expected) != set(parts) - {ALPHA}:
            there = ", ".join(sorted(part.name for part in parts.values()))
            needed = ", ".join(own.removeprefix(".") for own in expected)
            raise UserError(
                f"the file has {there} of {self.layer}, where this adapter has {needed}",
                "a file of this rank, with all arrays of its layers",
                _WHERE,
            )
        result: dict[str, StoredArray] = {}
        for own, shape in expected.items():
            array, rows = self.arrays[parts[own].name], self._rows(own)
            self._check(own, adapter, rows)
            factor = partial(self._factor, adapter) if own in (B, W1) else None
            read = partial(_read, array, rows, shape, factor)
            result[self.layer + own] = replace(array, shape=shape, read=read)
        return result

    def _has(self, own: str) -> bool:
        return self.layer + own in self.shapes

    def _rows(self, own: str) -> slice | None:
        """The rows of a file's array that are this layer's; None: all."""
        layers = self.by_layer[self.layer][own].layers
        if len(layers) == 1 or own == A:
            return None
        if own not in (B, MAGNITUDE):
            raise UserError(
                f"the file has one product w1 x w2 for {', '.join(layers)}, which can't be divided",
                "an adapter of kind lora",
                _WHERE,
            )
        outputs = [self.shapes[layer + B][0] for layer in layers]
        start = sum(outputs[: layers.index(self.layer)])
        return slice(start, start + self.shapes[self.layer + B][0])

    def _check(self, own: str, adapter: AdapterSection, rows: slice | None) -> None:
        """UserError: an array of the file has another shape."""
        part = self.by_layer[self.layer][own]
        there, here = tuple(self.arrays[part.name].shape), self.shapes[self.layer + own]
        if own == A and there[0] != adapter.rank:
            raise UserError(
                f"{part.name} has rank {there[0]}, model.adapter.rank is {adapter.rank}",
                f"model.adapter.rank: {there[0]}",
                _WHERE,
            )
        if rows is not None:
            whole = sum(self.shapes[layer + B][0] for layer in part.layers)
            there = (there[0] - whole + rows.stop - rows.start, *there[1:])
        alike = _essential(there) == _essential(here)
        if own == MAGNITUDE:  # one for each output, however it lies
            outputs = self.shapes[self.layer + B][0]
            alike = there in {(outputs,), (outputs, 1), (outputs, 1, 1, 1), (1, outputs, 1, 1)}
        if not alike:
            raise UserError(
                f"{part.name} has the shape {there}, this adapter {here}",
                "an adapter that was trained on this model's family, with the same factors",
                _WHERE,
            )

    def stated(self, rank: int) -> float | None:
        """The factor of the change, as the file states it; None: the file states none.

        rank: of the file's adapter
        """
        parts = self.by_layer[self.layer]
        if ALPHA not in parts:
            return self.of_metadata
        if W2 in parts:  # then readers look at no alpha
            return None
        return float(self.arrays[parts[ALPHA].name].read()) / rank

    def _factor(self, adapter: AdapterSection) -> float:
        """The factor of the change in the file, over the factor of this adapter."""
        stated = self.stated(adapter.rank)
        return (1.0 if stated is None else stated) / adapter.scaling


def _essential(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without the sides of a 1x1 kernel."""
    return shape[:2] if shape[2:] == (1, 1) else shape


def _read(
    array: StoredArray,
    rows: slice | None,
    shape: tuple[int, ...],
    factor: Callable[[], float] | None,
) -> NDArray[Any]:
    values: NDArray[Any] = array.read()
    if rows is not None:
        values = values[rows]
    values = np.ascontiguousarray(values).reshape(shape)
    by = 1.0 if factor is None else factor()
    return values if by == 1 else values * by


def _layer_of(name: str) -> str:
    """The layer of an adapter's array."""
    return name.removesuffix(next(own for own in OWN if name.endswith(own)))

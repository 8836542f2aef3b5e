"""An adapter's arrays as files hold them, for diffusers and for front ends.

diffusers: whole names of layers, and peft's names of arrays (lora_A, lora_B). Such a file has no
place for alpha that every reader looks at, so that alpha / rank is multiplied into lora_B, or into
lokr_w1: readers that know no alpha have the same pictures. diffusers loads it, and ComfyUI where
the model is a transformer.

kohya: layers' names of one word (file_names.py), lora_down, lora_up and alpha, as ComfyUI, A1111,
Forge and others load it. DoRA's magnitudes are dora_scale, one for each output, as LyCORIS writes
them with wd_on_output. Readers of it differ, and no file serves them all:

    LyCORIS            m (W + D) / norms of the rows of W + D: what was trained, as in the paper
    ComfyUI, Forge neo m (W + D) / norms of the rows of W
    older ComfyUI, Forge, A1111 take m for one number for each input
    diffusers          leaves dora_scale out, with a warning

LoKr: where w1 and w2 are both whole, readers of the second layout look at no alpha, and alpha /
rank is multiplied into lokr_w1 there too.
"""

from collections.abc import Mapping
from typing import Literal

import torch

from samecurve_products.lora.file_names import FileNames
from samecurve_products.lora.names import MAGNITUDE, OWN, W1, W2, A, B, name_in_files
from samecurve_products.lora.sections import AdapterSection

Layout = Literal["diffusers", "kohya"]

ALPHA = ".alpha"
_KOHYA = {A: ".lora_down.weight", B: ".lora_up.weight", MAGNITUDE: ".dora_scale"}
# by their classes in diffusers 0.42, the models whose adapters load_lora_weights() applies: in the
# second layout (others it leaves as they are, with a warning, or refuses), and LoKr in the first
_KOHYA_IN_DIFFUSERS = ("UNet2DConditionModel", "FluxTransformer2DModel")
_LOKR_IN_DIFFUSERS = ("Flux2Transformer2DModel", "ZImageTransformer2DModel")
# what readers of the first layout look for in a directory
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"


def file_tensors(
    tensors: Mapping[str, torch.Tensor], adapter: AdapterSection, names: FileNames, layout: Layout
) -> dict[str, torch.Tensor]:
    """An adapter's tensors under the names of a layout.

    tensors: those of a model, by its own names; others than the adapter's are left out
    """
    layers = _by_layer(tensors)
    if layout == "diffusers":
        return _diffusers(layers, adapter, names)
    return _kohya(layers, adapter, names)


def reader_notes(adapter: AdapterSection, layout: Layout, names: FileNames) -> list[str]:
    """What the user should know of the programs that read a file."""
    if layout == "diffusers":
        if _loads_by_pipeline(adapter, names):
            return []
        return [
            "load_lora_weights() of diffusers does not apply LoKr of this model; the line in the"
            " README.md beside it does, where all layers of the adapter are linear. A whole"
            " pipeline (--format diffusers) is right everywhere"
        ]
    notes = []
    if names.model not in _KOHYA_IN_DIFFUSERS or adapter.kind == "lokr":
        notes.append(
            "load_lora_weights() of diffusers does not apply this file: it leaves the model as it"
            " was, or refuses the file. This file is for ComfyUI and other front ends; in"
            " diffusers: --format lora-diffusers, or a whole pipeline (--format diffusers)"
        )
    if adapter.kind != "dora":
        return notes
    return [
        *notes,
        "readers of this layout take DoRA's magnitudes differently: ComfyUI divides by the norms of"
        " the weights without the adapter's change, so its pictures differ a little; A1111 and"
        " older programs take them wrongly, diffusers leaves them out. A whole pipeline (--format"
        " diffusers) is right everywhere, and --format lora-diffusers in diffusers",
    ]


def loading_line(adapter: AdapterSection, names: FileNames) -> str:
    """The line of Python by which a pipeline of diffusers takes the file, in a directory DIR."""
    if _loads_by_pipeline(adapter, names):
        return 'pipeline.load_lora_weights("DIR")'
    part = names.component
    return (
        f'pipeline.{part}.load_lora_adapter("DIR", weight_name="{DIFFUSERS_FILE}", prefix="{part}")'
    )


def _loads_by_pipeline(adapter: AdapterSection, names: FileNames) -> bool:
    return adapter.kind != "lokr" or names.model in _LOKR_IN_DIFFUSERS


def _by_layer(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """The adapter's tensors by layer, and by the name that they have in it."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        own = next((own for own in OWN if name.endswith(own)), None)
        if own is not None:
            layers.setdefault(name.removesuffix(own), {})[own] = tensor
    return layers


def _diffusers(
    layers: Mapping[str, dict[str, torch.Tensor]], adapter: AdapterSection, names: FileNames
) -> dict[str, torch.Tensor]:
    return {
        name_in_files(f"{names.component}.{layer}{own}"): tensor
        for layer, parts in layers.items()
        for own, tensor in _with_factor(parts, adapter.scaling).items()
    }


def _kohya(
    layers: Mapping[str, dict[str, torch.Tensor]], adapter: AdapterSection, names: FileNames
) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = {}
    for layer, parts in layers.items():
        word, alpha, own_tensors = names.words[layer], adapter.alpha, parts
        if W2 in parts:
            own_tensors = _with_factor(parts, adapter.scaling)
            alpha = float(adapter.rank)
        for own, tensor in own_tensors.items():
            result[word + _KOHYA.get(own, name_in_files(own))] = tensor
        if MAGNITUDE in parts:  # [outputs, 1], or [outputs, 1, 1, 1] of a convolution
            sides = (1,) * (parts[A].ndim - 1)
            result[word + _KOHYA[MAGNITUDE]] = parts[MAGNITUDE].reshape(-1, *sides)
        result[word + ALPHA] = torch.tensor(alpha)
    return result


def _with_factor(parts: Mapping[str, torch.Tensor], factor: float) -> dict[str, torch.Tensor]:
    """A layer's tensors, with a factor multiplied into the one that is zero at first."""
    if factor == 1:
        return dict(parts)
    zero = W1 if W1 in parts else B
    return {**parts, zero: parts[zero] * factor}

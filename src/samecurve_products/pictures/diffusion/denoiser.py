"""The trained part of a pipeline: whole, or frozen beneath an adapter; and its files.

The rooms of adapters are imported late: a denoiser that is trained whole needs none of them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from samecurve.tasks.protocol import ExportedFile
from samecurve_products.pictures.diffusion.families.export import DENOISER_FILE, write_surroundings
from samecurve_products.pictures.diffusion.families.loading import build_denoiser
from samecurve_products.pictures.diffusion.families.opened import OpenedPipeline
from samecurve_products.pictures.diffusion.families.original_layout import convert_denoiser
from samecurve_products.pictures.diffusion.sections import DiffusionData, DiffusionModel

if TYPE_CHECKING:
    from samecurve_products.lora.layouts import Layout

_PIPELINE_CODE = """from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("DIR")
picture = pipeline("a prompt").images[0]"""


_LORA_FILE = "lora.safetensors"
_LORA_CODE = """from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("BASE")  # the pipeline that was trained
LOAD
picture = pipeline("a prompt").images[0]"""
_FRONT_END = "# copy lora.safetensors to where the front end looks: ComfyUI/models/loras"


class Denoiser:
    """The part that is trained, as the config asks for it."""

    def __init__(self, opened: OpenedPipeline, fields: DiffusionModel, data: DiffusionData) -> None:
        self._opened, self._data = opened, data
        self._fields, self._adapter = fields, fields.adapter

    def model(self) -> nn.Module:
        """The denoiser without its weights; an adapter has its first values."""
        model = build_denoiser(self._opened)
        if self._adapter is not None:
            from samecurve_products.lora.image_models import add_adapter

            add_adapter(model, self._adapter, self._fields.quantize)
        return model

    def first_values(self, module: nn.Module) -> None:
        """Set a module's first values, by the adapter's rules if there is one."""
        if self._adapter is None:
            _own_values(module)
            return
        from samecurve_products.lora.adapter import first_values

        first_values(module, _own_values)

    def convert_weights(self, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """A pipeline's arrays as the model holds them; each has dtype, shape and read()."""
        converted = convert_denoiser(self._opened, arrays)
        if self._adapter is None:
            return converted
        from samecurve_products.lora.adapter import with_adapter_names
        from samecurve_products.lora.image_models import adapted_layers
        from samecurve_products.lora.names import BASE
        from samecurve_products.lora.quantized import PackedArrays

        outline = self._outline()
        packer = PackedArrays(self._packings(outline))
        rounded = packer.rounded(converted)
        layers = adapted_layers(outline, self._adapter)
        named = with_adapter_names(layers, self._adapter, converted, rounded)
        packed: Mapping[str, Any] = packer.packed(named, BASE)
        return packed

    def read_adapter(
        self,
        arrays: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        metadata: Mapping[str, str],
    ) -> tuple[Mapping[str, Any], list[str]]:
        """An adapter's file by the names of the model's arrays, and lines for the user.

        shapes: of the model's arrays; metadata: of the file
        """
        from samecurve_products.lora.file_names import find_file_names
        from samecurve_products.lora.file_reading import read_adapter

        assert self._adapter is not None
        names = find_file_names(self._outline(), self._opened.kind.component)
        file = read_adapter(arrays, self._adapter, shapes, names, metadata)
        return file.arrays, file.notes

    def describe(self) -> list[str]:
        """Lines about what is trained, for the user."""
        if self._adapter is None:
            return []
        from samecurve_products.lora.adapter import describe_adapter
        from samecurve_products.lora.image_models import adapted_layers
        from samecurve_products.lora.quantized import describe_quantized

        outline = self._outline()
        lines = [describe_adapter(list(adapted_layers(outline, self._adapter)), self._adapter)]
        packings = self._packings(outline)
        if packings:
            lines.append(describe_quantized(packings, self._fields.quantize))
        return lines

    @property
    def exports(self) -> dict[str, str]:
        """The formats of `samecurve export`, the usual one first."""
        whole = {"diffusers": "a whole pipeline, as diffusers reads it"}
        if self._adapter is None:
            return whole
        return {
            "lora": "the adapter alone, in one file as ComfyUI and other front ends read it",
            "lora-diffusers": "the adapter alone, as load_lora_weights() of diffusers reads it",
            **whole,
        }

    def export_as(self, form: str, tensors: Mapping[str, Tensor], directory: Path) -> ExportedFile:
        """The weights in one of `exports`. form: its name"""
        if form == "diffusers":
            write_surroundings(self._opened, directory)
            file = f"{self._opened.kind.component}/{DENOISER_FILE}"
            return ExportedFile(file, self._merged(tensors), _PIPELINE_CODE)
        return self._lora_file(form, tensors)

    def _lora_file(self, form: str, tensors: Mapping[str, Tensor]) -> ExportedFile:
        """The adapter alone. form: lora or lora-diffusers"""
        from samecurve_products.lora.file_metadata import AboutFile, file_metadata
        from samecurve_products.lora.file_names import find_file_names
        from samecurve_products.lora.layouts import (
            DIFFUSERS_FILE,
            file_tensors,
            loading_line,
            reader_notes,
        )

        assert self._adapter is not None
        outline = self._outline()
        names = find_file_names(outline, self._opened.kind.component)
        layout: Layout = "diffusers" if form == "lora-diffusers" else "kohya"
        side = self._data.resolution
        about = AboutFile(
            resolution=(side, side),
            trigger=self._data.captions.trigger or "",
            base=self._opened.place.stem,
            prediction=self._opened.prediction,
        )
        is_of_diffusers = layout == "diffusers"
        code = _LORA_CODE.replace("LOAD", loading_line(self._adapter, names))
        return ExportedFile(
            DIFFUSERS_FILE if is_of_diffusers else _LORA_FILE,
            file_tensors(tensors, self._adapter, names, layout),
            code if is_of_diffusers else _FRONT_END,
            lines=reader_notes(self._adapter, layout, names),
            metadata=file_metadata(outline, self._adapter, layout, about),
            whole=True,
        )

    def _merged(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The plain denoiser's arrays, with the adapter's change added."""
        if self._adapter is None:
            return tensors
        from samecurve_products.lora.adapter import merged
        from samecurve_products.lora.names import BASE
        from samecurve_products.lora.quantized import unpacked

        packings = self._packings(self._outline())
        if packings:
            tensors = unpacked(tensors, packings, BASE)
        return merged(tensors, self._adapter)

    def _packings(self, outline: nn.Module) -> Mapping[str, Any]:
        """The packing of each packed layer, by name. outline: the plain model"""
        from samecurve_products.lora.image_models import packings

        by_layer: Mapping[str, Any] = packings(outline, self._fields.quantize)
        return by_layer

    def _outline(self) -> nn.Module:
        """The plain denoiser without values."""
        with torch.device("meta"):
            return build_denoiser(self._opened)


@torch.no_grad()
def _own_values(module: Any) -> None:
    """The first values that a plain module gives itself.

    Some modules of diffusers have no method for it: their scales begin at 1, and all else is
    small. Only tries see these values (verify, --probe-batch): a run reads the pipeline's own.
    """
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
        return
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.ndim == 1 and name == "weight":
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(parameter, std=0.02)

"""Weights of a single file as the model's authors name them, converted to the library's names.

The library's own conversions do it. Where one splits or joins arrays, its operations are recorded
on arrays without values, and repeated on the sources of an array when that array is read.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from samecurve_products.pictures.diffusion.families.library import check_loaded, class_of, library
from samecurve_products.pictures.diffusion.families.opened import OpenedPipeline

# an array that is read late: a dataclass with dtype, shape, read()
StoredArray = Any
_VAE = ("first_stage_model.", "vae.")
_CLIPS = ("cond_stage_model.transformer.", "conditioner.embedders.0.transformer.")
_OPEN_CLIPS = ("cond_stage_model.model.", "conditioner.embedders.1.model.")


def convert_denoiser(
    opened: OpenedPipeline, arrays: Mapping[str, StoredArray]
) -> dict[str, StoredArray]:
    """The denoiser's arrays by the library's names. Names that are the library's own stay.

    arrays: of the single file, or of any source of the same model; no value is read
    """
    if opened.layout != "original" or _has_own_names(opened, arrays):
        return dict(arrays)
    record = Recorded()
    stand_ins = {name: torch.empty(array.shape, device="meta") for name, array in arrays.items()}
    names = {id(tensor): name for name, tensor in stand_ins.items()}
    with record:
        converted = _converted_denoiser(opened, stand_ins)
    result = {}
    for name, tensor in converted.items():
        if id(tensor) in names:
            result[name] = arrays[names[id(tensor)]]
            continue
        sources = record.sources(tensor)
        read = partial(_read_made, record, tensor, names, arrays)
        first = arrays[names[id(sources[0])]]
        result[name] = replace(first, shape=tuple(tensor.shape), read=read)
    return result


def load_from_file(opened: OpenedPipeline, name: str) -> nn.Module:
    """A component of a single file, with its weights. UserError: the file lacks some."""
    component = opened.components[name]
    model_class = class_of(opened, component)
    tensors = _tensors(opened)
    is_text = component.library == "transformers"
    if is_text:
        config = model_class.config_class(**component.config)
        state = _text_encoder(tensors, component.config)
    else:
        state = _diffusers_state(opened, name, tensors)
    with torch.device("meta"):
        outline = model_class(config) if is_text else model_class.from_config(component.config)
    own = outline.state_dict()
    if is_text:  # files have a prefix that newer versions of the library have not
        state = {key.removeprefix("text_model."): tensor for key, tensor in state.items()}
        names = {key: key.removeprefix("text_model.") for key in own}
        state = {key: state[inner] for key, inner in names.items() if inner in state}
    mismatched = [key for key in own if key in state and own[key].shape != state[key].shape]
    check_loaded(opened, name, own.keys() - state.keys(), mismatched)
    if is_text:  # with values that no file has: those that follow from the config
        model: nn.Module = model_class.from_pretrained(None, config=config, state_dict=state)
        return model
    outline.load_state_dict({key: state[key] for key in own}, assign=True)
    result: nn.Module = outline
    return result


class Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations of a block on tensors without values, so that they can be repeated."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # an operation's result by its id: the result itself, function, arguments, position
        self._made: dict[int, tuple[Tensor, Any, Any, Any, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        for position, tensor in enumerate(tree_flatten(result)[0]):
            self._made[id(tensor)] = (tensor, func, args, kwargs or {}, position)
        return result

    def sources(self, tensor: Tensor) -> list[Tensor]:
        """The tensors from outside the block that a tensor was made of."""
        if id(tensor) not in self._made:
            return [tensor]
        _, _, args, kwargs, _ = self._made[id(tensor)]
        used = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        return [source for value in used for source in self.sources(value)]

    def repeat(self, tensor: Tensor, value: Callable[[Tensor], Tensor]) -> Tensor:
        """Make a tensor again, with values. value: gives those of a tensor from outside."""
        if id(tensor) not in self._made:
            return value(tensor)
        _, func, args, kwargs, position = self._made[id(tensor)]
        again = partial(self.repeat, value=value)
        args, kwargs = tree_map_only(Tensor, again, (args, kwargs))
        made: Tensor = tree_flatten(func(*args, **kwargs))[0][position]
        return made


def _read_made(
    record: Recorded, tensor: Tensor, names: Mapping[int, str], arrays: Mapping[str, StoredArray]
) -> Any:
    def value(source: Tensor) -> Tensor:
        return torch.from_numpy(arrays[names[id(source)]].read())

    return record.repeat(tensor, value).contiguous().numpy()


def _has_own_names(opened: OpenedPipeline, arrays: Mapping[str, StoredArray]) -> bool:
    """Whether the arrays have the library's names already: those of a run, for example."""
    with torch.device("meta"):
        known = class_of(opened, opened.denoiser).from_config(dict(opened.denoiser.config))
    return set(known.state_dict()) <= set(arrays)


# class of the denoiser -> the library's function
_CONVERSIONS: Mapping[str, str] = {
    "UNet2DConditionModel": "convert_ldm_unet_checkpoint",
    "ZImageTransformer2DModel": "convert_z_image_transformer_checkpoint_to_diffusers",
    "SD3Transformer2DModel": "convert_sd3_transformer_checkpoint_to_diffusers",
    "FluxTransformer2DModel": "convert_flux_transformer_checkpoint_to_diffusers",
    "Flux2Transformer2DModel": "convert_flux2_transformer_checkpoint_to_diffusers",
}
_PREFIX = "model.diffusion_model."  # of a denoiser's arrays; UNets are known by it


def _library_conversion(name: str) -> Any:
    library("diffusers")
    from diffusers.loaders import single_file_utils

    return getattr(single_file_utils, name)


def _tensors(opened: OpenedPipeline) -> dict[str, Tensor]:
    """The arrays of the single file, mapped into memory."""
    opened_file: Any = safe_open(str(opened.place), "pt")
    return {name: opened_file.get_tensor(name) for name in opened_file.keys()}  # noqa: SIM118


def _text_encoder(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Arrays of a CLIP text encoder. The file may hold two, which have different widths."""
    width = config["hidden_size"]
    for prefix in _CLIPS:
        embedding = tensors.get(f"{prefix}text_model.embeddings.position_embedding.weight")
        if embedding is not None and embedding.shape[-1] == width:
            return {
                name.removeprefix(prefix): tensor
                for name, tensor in tensors.items()
                if name.startswith(prefix) and not name.endswith("position_ids")
            }
    for prefix in _OPEN_CLIPS:
        embedding = tensors.get(f"{prefix}positional_embedding")
        if embedding is not None and embedding.shape[-1] == width:
            converted: dict[str, Tensor] = _library_conversion("convert_open_clip_checkpoint")(
                None, dict(tensors), prefix=prefix
            )
            return converted
    return {}


def _converted_denoiser(opened: OpenedPipeline, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if opened.kind.component != "unet":
        tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    function = _library_conversion(_CONVERSIONS[opened.kind.denoiser])
    converted: dict[str, Tensor] = function(dict(tensors), config=opened.denoiser.config)
    return converted


def _diffusers_state(
    opened: OpenedPipeline, name: str, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    if name == opened.kind.component:
        is_original = opened.layout == "original"
        return _converted_denoiser(opened, tensors) if is_original else dict(tensors)
    own = {key: tensor for key, tensor in tensors.items() if key.startswith(_VAE)}
    state: dict[str, Tensor] = _library_conversion("convert_ldm_vae_checkpoint")(
        own, config=opened.components[name].config
    )
    return state

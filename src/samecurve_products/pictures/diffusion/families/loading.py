"""Components of a pipeline, loaded from its directory or from a single file. Nothing is downloaded.

Every component is loaded whole: an array that its files lack is an error, and no random values.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from samecurve.seam import UserError
from samecurve_products.pictures.diffusion.families.library import check_loaded, class_of
from samecurve_products.pictures.diffusion.families.opened import WHERE, Component, OpenedPipeline
from samecurve_products.pictures.diffusion.families.original_layout import load_from_file


def build_denoiser(opened: OpenedPipeline) -> nn.Module:
    """The denoiser as its config says, with values that mean nothing."""
    component = opened.denoiser
    model: nn.Module = _built(
        opened, lambda: class_of(opened, component).from_config(dict(component.config))
    )
    return model


def load_scheduler(opened: OpenedPipeline) -> Any:
    """The pipeline's scheduler, as it is before the first step."""
    component = opened.components["scheduler"]
    scheduler_class = class_of(opened, component, "SchedulerMixin")
    return _built(opened, lambda: scheduler_class.from_config(dict(component.config)))


def load_tokenizer(opened: OpenedPipeline, name: str) -> Any:
    component = opened.components[name]
    tokenizer_class = class_of(opened, component, "PreTrainedTokenizerBase")
    return _built(
        opened,
        lambda: tokenizer_class.from_pretrained(
            component.directory, local_files_only=True, **component.config
        ),
    )


def load_model(opened: OpenedPipeline, name: str, dtype: torch.dtype) -> nn.Module:
    """A text encoder, a VAE or a denoiser with its weights, frozen.

    UserError: an array is missing, or does not fit.
    """
    component = opened.components[name]
    model: nn.Module
    if component.in_file:
        model = _built(opened, lambda: load_from_file(opened, name))
    else:
        model = _load_from_directory(opened, component)
    model = model.to(dtype).eval().requires_grad_(requires_grad=False)
    # arrays lie in a mapped file as they come; kernels round otherwise where they are not aligned
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
    return model


def _load_from_directory(opened: OpenedPipeline, component: Component) -> nn.Module:
    assert component.directory is not None
    assert component.weights is not None
    parts = component.weights.name.split(".")
    variant = next((part for part in parts if part in {"fp16", "bf16"}), None)
    model_class = class_of(opened, component)
    options: dict[str, Any] = {
        "local_files_only": True,
        "use_safetensors": True,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # they are refused below, in our words
        "variant": variant,
    }
    if component.library == "transformers":
        options["dtype"] = "auto"
    model, loaded = _built(
        opened, lambda: model_class.from_pretrained(component.directory, **options)
    )
    mismatched = [entry[0] for entry in loaded["mismatched_keys"]]
    check_loaded(opened, component.directory.name, loaded["missing_keys"], mismatched)
    result: nn.Module = model
    return result


def _built(opened: OpenedPipeline, build: Callable[[], Any]) -> Any:
    """UserError: the library refuses the config or the files."""
    try:
        return build()
    except UserError:
        raise
    except Exception as error:  # the library raises many kinds
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[0] if lines else type(error).__name__
        raise UserError(
            f"{opened.place}: {reason}",
            "the files as the library's save_pretrained() wrote them; get them again",
            WHERE,
        ) from None


class Parts(Mapping[str, Any]):
    """The components of a pipeline beside its denoiser, each loaded when it is first asked for.

    The VAE computes in float32 at least: some overflow in 16 bits, and latents are made once.

    dtype: the number format of the text encoders
    """

    def __init__(
        self,
        opened: OpenedPipeline,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.opened, self.device, self.dtype = opened, torch.device(device), dtype
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self.opened.components:
            raise KeyError(name)
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def __iter__(self) -> Any:
        return iter(self.opened.components)

    def __len__(self) -> int:
        return len(self.opened.components)

    def release(self, *names: str) -> None:
        """Forget components, so that their memory is free. They are loaded again when asked for."""
        for name in names or tuple(self._loaded):
            self._loaded.pop(name, None)

    def _load(self, name: str) -> Any:
        if name == "scheduler":
            return load_scheduler(self.opened)
        if name in self.opened.kind.encoders.values():
            return load_tokenizer(self.opened, name)
        dtype = self.dtype
        if name == "vae" and dtype != torch.float64:
            dtype = torch.float32
        return load_model(self.opened, name, dtype).to(self.device)


class OutlineParts(Parts):
    """The components of a pipeline without values, on the meta device: shapes can be found."""

    def __init__(self, opened: OpenedPipeline) -> None:
        super().__init__(opened, "meta")

    def _load(self, name: str) -> Any:
        component = self.opened.components[name]
        if name == "scheduler" or name in self.opened.kind.encoders.values():
            return super()._load(name)
        model_class = class_of(self.opened, component)
        with torch.device("meta"):
            if component.library == "diffusers":
                return model_class.from_config(dict(component.config))
            return model_class(model_class.config_class(**component.config))

"""A pipeline whose configs have been read, and none of its weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from samecurve.seam import UserError
from samecurve_products.pictures.diffusion.families.kinds import Kind

WHERE = "model.path"
_PREDICTIONS: Mapping[str, Literal["epsilon", "v"]] = {
    "epsilon": "epsilon",
    "v_prediction": "v",
}


@dataclass(frozen=True, kw_only=True)
class Component:
    """A part of a pipeline: its class, its config, and where its files are."""

    library: str = ""  # transformers or diffusers
    class_name: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)  # empty for a tokenizer
    directory: Path | None = None  # None: the config is from our own table
    weights: Path | None = None  # a file of weights, or the index of several; None: there are none
    in_file: bool = False  # whether its weights are those of the single file


@dataclass(frozen=True, kw_only=True)
class OpenedPipeline:
    """A pipeline in a directory, or in a single file of weights.

    settings: what model_index.json says beside the components
    layout: of a single file: original (as the model's authors wrote it) or diffusers
    notes: what the user should know
    """

    kind: Kind
    place: Path
    components: Mapping[str, Component]
    settings: Mapping[str, Any]
    layout: Literal["directory", "original", "diffusers"] = "directory"
    notes: tuple[str, ...] = ()

    @property
    def denoiser(self) -> Component:
        return self.components[self.kind.component]

    @property
    def denoiser_place(self) -> Path:
        """The denoiser's weights, as --init-from names them: a directory, or the single file."""
        if self.layout != "directory":
            return self.place
        assert self.denoiser.directory is not None
        return self.denoiser.directory

    @property
    def encoders(self) -> tuple[str, ...]:
        """The text encoders that this pipeline has."""
        return tuple(name for name in self.kind.encoders if name in self.components)

    @property
    def factor(self) -> int:
        """The pixels, across and down, that become one place of the latents."""
        scale: int = 2 ** (len(self.components["vae"].config["block_out_channels"]) - 1)
        return scale * self.kind.packed

    @property
    def patch(self) -> int:
        """The places of the latents, across and down, that become one token of the denoiser."""
        size = self.denoiser.config.get("patch_size") if self.kind.patch is None else None
        return int(size or self.kind.patch or 1)

    @property
    def multiple(self) -> int:
        """The sides of a picture are multiples of it, in pixels."""
        return self.factor * self.patch

    @property
    def latent_channels(self) -> int:
        channels: int = self.components["vae"].config["latent_channels"]
        return channels * self.kind.packed**2

    @property
    def longest_side(self) -> int | None:
        """The longest side that a picture may have, in pixels; None: any."""
        config = self.denoiser.config
        tokens = config.get("pos_embed_max_size")  # SD3
        if tokens is None and "axes_lens" in config:  # Z-Image
            tokens = min(config["axes_lens"][1:])
        return None if tokens is None else int(tokens) * self.multiple

    @property
    def prediction(self) -> Literal["epsilon", "v", "flow"]:
        """What the denoiser predicts, by its scheduler. UserError: it is none of these."""
        scheduler = self.components["scheduler"]
        if self.kind.is_flow:
            return "flow"
        kind = str(scheduler.config.get("prediction_type", "epsilon"))
        if kind not in _PREDICTIONS:
            raise UserError(
                f"{self.place}: its scheduler's prediction_type is {kind}",
                f"a model that predicts {' or '.join(_PREDICTIONS)}",
                WHERE,
            )
        return _PREDICTIONS[kind]

"""The diffusion task without its model: pictures, captions, and the files that a run keeps.

No engine is imported here; the model is in torch_task.py.
"""

from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.core.system.cache import keep_texts
from samecurve.seam import stamp_file
from samecurve_products.pictures.diffusion.data.picture_set import (
    PictureSet,
    open_pictures,
    stamp_pictures,
)
from samecurve_products.pictures.diffusion.sections import DiffusionData, DiffusionModel
from samecurve_products.pictures.diffusion.words import Words

if TYPE_CHECKING:  # a run does not show its data
    from samecurve_products.preview.about import AboutData

WORDS = "words.json"  # among a run's assets


class DiffusionTask:
    """All of the diffusion task but its model.

    model, data: the config's sections
    cache: where drawn shapes, facts of pictures, latents and embeddings are kept
    assets: the files that a run has kept, where its model is only used and needs no data
    """

    def __init__(
        self,
        model: DiffusionModel,
        data: DiffusionData,
        cache: Path,
        assets: Path | None = None,
    ) -> None:
        self.fields, self.data = model, data
        self.cache, self._kept = cache, assets

    @staticmethod
    def data_stamp(data: DiffusionData, model: DiffusionModel) -> object:
        """A stamp of the pictures' files, of the model's files and of the library's version."""
        try:
            installed = version("diffusers")
        except PackageNotFoundError:
            installed = ""
        return [installed, stamp_pictures(data), _stamp_model(model)]

    @cached_property
    def pictures(self) -> PictureSet:
        return open_pictures(self.data, self.cache)

    @cached_property
    def words(self) -> Words:
        """The vocabulary of a new model: of the captions that are trained on."""
        if self._kept is not None:
            return Words.from_json((self._kept / WORDS).read_text())
        pictures = self.pictures.train.pictures
        texts = [
            f"{picture.trigger} {text}" for picture, _ in pictures for text in picture.captions
        ]
        return Words.of([*texts, *(picture.trigger for picture, _ in pictures)])

    def about_data(self) -> "AboutData":
        """The facts of the pictures that `samecurve data show` prints."""
        from samecurve_products.pictures.diffusion.data.about import about_pictures

        variants = None if self.fields.place is None else self.data.variants
        return about_pictures(self.pictures, self.data, variants=variants)

    @property
    def guidance(self) -> float:
        """How strongly a prompt is followed: none where no sample is trained without a caption."""
        if self.data.guidance is not None:
            return self.data.guidance
        return _GUIDANCE if self.data.captions.dropout else 1.0

    @staticmethod
    def first_weights(model: DiffusionModel) -> Path | None:
        """The denoiser's weights; None: the model is new."""
        if model.place is None:
            return None
        from samecurve_products.pictures.diffusion.families.pipeline import open_pipeline

        return open_pipeline(model.place, model.base_place).denoiser_place

    @property
    def frozen_base(self) -> bool:
        """Whether the denoiser's own weights are frozen, beneath an adapter."""
        return self.fields.adapter is not None

    def assets(self) -> Mapping[str, Path]:
        """The vocabulary of a new model."""
        if self.fields.architecture is None:
            return {}
        texts = {WORDS: self.words.to_json()}
        return keep_texts(self.cache / "diffusion" / "words", texts)


_GUIDANCE = 3.0  # of a new model


def _stamp_model(model: DiffusionModel) -> object:
    """Names, sizes and times of a pipeline's files; None: the model is new."""
    if model.place is None:
        return None
    files = sorted(model.place.rglob("*")) if model.place.is_dir() else [model.place]
    return [stamp_file(file) for file in files if file.is_file()]

"""The vision task without its model: images, their classes, what a run keeps.

No engine is imported here; the models are in torch_task.py and jax_task.py.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samecurve.core.evaluation import CLASS_WEIGHT
from samecurve.core.system.cache import keep_texts
from samecurve.seam import Initial, Mean, Part, Source, UserError
from samecurve_products.pictures.vision.data.augmentation import with_recipe
from samecurve_products.pictures.vision.data.image_sets import ImageSets, JoinedRows
from samecurve_products.pictures.vision.data.pathfinder import CLASSES
from samecurve_products.pictures.vision.data.sources import evaluated, open_images, stamp_images
from samecurve_products.pictures.vision.layout import Grid, first_values, for_clips, grid_of
from samecurve_products.pictures.vision.sections import (
    DIGITS,
    PATHFINDER,
    TORCH_BLOCKS,
    VisionData,
    VisionModel,
    engines_of,
)
from samecurve_products.task_parts.classification import summarize_classes
from samecurve_products.task_parts.made_files import make_files

if TYPE_CHECKING:  # a run does not show its data
    from samecurve_products.preview.about import AboutData

FORMAT = "images.json"  # among a run's assets
TOP = 5  # an answer is near if the label is among so many of the likeliest classes


@dataclass(frozen=True, kw_only=True)
class ImageFormat:
    """Properties of the images that a model is given."""

    classes: Sequence[str]  # by number
    shape: tuple[int, int, int]  # height, width, channels
    mean: Sequence[float]
    std: Sequence[float]
    frames: int | None = None  # of a clip; None: the model is given single images

    @classmethod
    def read(cls, file: Path) -> "ImageFormat":
        """Read a run's file. UserError: the file is not one that a run keeps."""
        try:
            values = dict(json.loads(file.read_text()))
            height, width, channels = values.pop("shape")
            return cls(shape=(height, width, channels), **values)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{file} can't be read as the images of a run: {error}",
                f"the file assets/{FORMAT} of a run of task vision",
                "data.like_run",
            ) from None

    def to_json(self) -> str:
        values = asdict(self)
        if self.frames is None:  # as before there were clips: the text is part of a fingerprint
            del values["frames"]
        return json.dumps(values)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of a row's pixels."""
        return self.shape if self.frames is None else (self.frames, *self.shape)


class VisionTask:
    """All of the vision task but its model.

    model, data: the config's sections
    cache: where images that are made are kept
    engine: the one that trains the model, torch or jax
    assets: the files that a run has kept, where its model is only used and needs no images
    seed: of the run, by which images are augmented

    UserError: the engine has no such blocks.
    """

    data_stamp = staticmethod(stamp_images)

    @staticmethod
    def other_data(source: str, assets: Path, reference: Mapping[str, float]) -> Mapping[str, Any]:
        """Config values that make `eval -d SOURCE` read all of a source like the run's images."""
        del reference
        return {"data.source": source, "data.like_run": str((assets / FORMAT).resolve())}

    @staticmethod
    def plain_data() -> Mapping[str, Any]:
        """Config values by which the images to train on are read without a recipe."""
        return {"data.augment": {}}

    def __init__(
        self,
        model: VisionModel,
        data: VisionData,
        cache: Path,
        *,
        engine: str = "torch",
        assets: Path | None = None,
        seed: int = 0,
    ) -> None:
        if engine != "torch" and model.backbone is not None:
            raise UserError(
                f"model.backbone {model.backbone} is a PyTorch model",
                "--engine torch; or without it a model of Samecurve: model.arch, model.cssm",
                "model.backbone",
            )
        if engine not in engines_of(model):
            raise UserError(
                f"model.cssm {model.cssm} has no PyTorch model, only a JAX one",
                f"--engine jax; or --cssm {' or '.join(TORCH_BLOCKS)}",
                "model.cssm",
            )
        self._model, self.data = model, data
        self._cache, self._kept, self._seed = cache, assets, seed
        if data.source == PATHFINDER and data.cached:
            self.prepare, self.metric_names = self._draw, self._metric_shapes()
            self.prepared_files = " of drawn images"  # in the lines about them

    @staticmethod
    def first_weights(model: VisionModel) -> Path | None:
        """The weights that a backbone begins from. UserError: there are none."""
        return weights_path(model)

    @cached_property
    def fields(self) -> VisionModel:
        """The model's fields, for the samples that there are. UserError: they don't fit those."""
        frames = self.format.frames
        return self._model if frames is None else for_clips(self._model, frames)

    @cached_property
    def images(self) -> ImageSets:
        return open_images(self.data, self._cache)

    def _draw(self, device: Any, part: Part) -> Iterator[tuple[int, int]]:
        """Draw a part of the images that the cache lacks."""
        del device
        yield from make_files(self.images.to_make, part)

    def _metric_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """What metrics() gives of drawn images, none of which is drawn to learn it."""
        is_another_runs = self._kept is not None or self.data.like_run is not None
        count = self.num_classes if is_another_runs else len(CLASSES)
        return {"loss": (), "confusion": (count, count), "top5": ()}

    @cached_property
    def format(self) -> ImageFormat:
        """The images' format. UserError: an unfit file, or data.mean of other channels."""
        if self._kept is not None:
            return ImageFormat.read(self._kept / FORMAT)
        if self.data.like_run is not None:
            return ImageFormat.read(Path(self.data.like_run))
        images, data = self.images, self.data
        mean = images.mean if data.mean is None else data.mean
        std = images.std if data.std is None else data.std
        if len(mean) not in {1, images.shape[2]}:
            raise _other_channels(data.source, len(mean), images.shape[2])
        return ImageFormat(
            classes=list(images.classes),
            shape=images.shape,
            mean=list(mean),
            std=list(std),
            frames=images.frames,
        )

    @cached_property
    def grid(self) -> Grid:
        return grid_of(self.fields, self.format.shape)

    @property
    def num_classes(self) -> int:
        return len(self.format.classes)

    def train_data(self) -> Source:
        if self.data.like_run is not None:  # to be measured, not trained on
            return self._all_images
        return with_recipe(self.images.train, self.data.augment, self._seed)

    @cached_property
    def _all_images(self) -> Source:
        """Images of all parts of the source, with the run's numbers for their classes.

        UserError: the images differ from the run's in shape or classes.
        """
        images, kept = self.images, self.format
        if (images.frames, images.shape) != (kept.frames, kept.shape):
            here, there = (_shown(of.frames, of.shape) for of in (images, kept))
            raise UserError(
                f"{here} (height, width, channels); the run's are {there}",
                "images like those that the run was trained on",
                "data.source",
            )
        unknown = [name for name in images.classes if name not in kept.classes]
        if unknown:
            raise UserError(
                f"class {unknown[0]} is none of the run's: {', '.join(kept.classes)}",
                "labels of the same names",
                "data.source",
            )
        numbers = [list(kept.classes).index(name) for name in images.classes]
        parts = (images.train, images.validation, images.test)
        return JoinedRows([part for part in parts if part is not None], numbers)

    def eval_data(self) -> Source | None:
        if self.data.like_run is not None:
            return None
        return evaluated(self.images.validation, self.data)

    def test_data(self) -> Source | None:
        """Images that influence no choice in training; None: the source has none."""
        return self.images.test if self.data.like_run is None else None

    def fingerprint(self) -> str:
        return f"{self.images.sha256}/{self.format.to_json()}"

    def initial(self, name: str, shape: tuple[int, ...]) -> Initial | None:
        if self.fields.backbone is not None:
            return None  # timm's own
        return first_values(name, shape, self.fields)

    def summarize(self, totals: Mapping[str, Mean]) -> dict[str, Any]:
        """Loss, accuracy, top-5 accuracy, macro F1 and the confusion matrix."""
        near = totals["top5"]
        return {**summarize_classes(totals), "top5": float(near.sum / near.weight)}

    def assets(self) -> Mapping[str, Path]:
        """Files that a run keeps: the properties of the model's images."""
        return keep_texts(self._cache / "vision" / "formats", {FORMAT: self.format.to_json()})

    def about_images(self) -> dict[str, Any]:
        """Facts that follow from the images alone, by the names of Facts."""
        return {
            "reference": {f"{CLASS_WEIGHT}{name}": 1.0 for name in self.format.classes},
            "notes": tuple(self.notes()),
        }

    def notes(self) -> list[str]:
        """Lines for the user about the images that are trained on."""
        images, (height, width, channels) = self.images, self.format.shape
        if self.data.like_run is not None:
            return [f"data {len(self._all_images)} images, read as {self.data.like_run}"]
        kind = "images" if images.frames is None else f"clips of {images.frames} frames"
        parts = [f"{len(images.train)} to train on"]
        if images.validation is not None:
            parts.append(f"{len(images.validation)} held out")
        if images.test is not None:
            parts.append(f"{len(images.test)} to test on")
        return [
            *(f"data {line}" for line in images.lines),
            f"data {kind} of {height} x {width} pixels, {channels} channels,"
            f" {self.num_classes} classes; {'; '.join(parts)}",
        ]

    def about_data(self) -> "AboutData":
        """The facts of the images that `samecurve data show` prints."""
        from samecurve_products.preview.about import AboutData

        return AboutData(
            classes=self.format.classes,
            class_counts=list(map(int, self.images.counts)),
            lines=[line.removeprefix("data ") for line in self.notes()],
            left_out=(),
        )


def _shown(frames: int | None, shape: Sequence[int]) -> str:
    kind = "images" if frames is None else f"clips of {frames} frames"
    return f"{kind} of {' x '.join(map(str, shape))}"


def weights_path(model: VisionModel) -> Path | None:
    """Where a backbone's weights are. UserError: there is nothing."""
    if model.path is None:
        return None
    path = Path(model.path).expanduser()
    if path.exists():
        return path
    raise UserError(
        f"there is no {path}; a backbone's weights are never downloaded",
        "the path of a .safetensors or .pt file, of a directory with one, or of a run",
        "model.path",
    )


def _other_channels(source: str, given: int, there: int) -> UserError:
    """The error for data.mean of other channels than the images have."""
    if source == DIGITS:  # the default: most likely -d was left out
        return UserError(
            f"the data are {DIGITS}, of {there} channel, where no -d names a folder of pictures;"
            f" data.mean has {given} channels",
            f"-d DIR names your pictures; models/{DIGITS}.yaml trains on the {DIGITS}",
            "data.source",
        )
    return UserError(
        f"data.mean has {given} channels, and the images have {there}",
        "a number for each channel, or one for all; or leave data.mean and data.std out",
        "data.mean",
    )

"""Pipelines of latents: cached encodings, what the denoiser learns, and the pictures it makes."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from samecurve.core.determinism.data_order import Ids
from samecurve.core.protocols import Arrays, Part
from samecurve.core.sample_numbers import SampleNumbers
from samecurve.core.system.cache import stamp_file
from samecurve.errors import UserError
from samecurve.tasks.diffusion.data.pictures import read_mask, read_pixels, sizes_of
from samecurve.tasks.diffusion.data.samples import Samples
from samecurve.tasks.diffusion.data.views import Encoding, Views
from samecurve.tasks.diffusion.encodings import Encodings, Work, encode_all, text_key
from samecurve.tasks.diffusion.families.denoising import sample
from samecurve.tasks.diffusion.families.loading import OutlineParts, Parts, build_denoiser
from samecurve.tasks.diffusion.families.model_files import weight_files
from samecurve.tasks.diffusion.families.original_layout import convert_denoiser
from samecurve.tasks.diffusion.families.pipeline import family_of, open_pipeline
from samecurve.tasks.diffusion.families.schedule import Schedule
from samecurve.tasks.diffusion.objective import Denoising, Flow, Objective, Predict

if TYPE_CHECKING:
    from samecurve.tasks.diffusion.families.base import Family
    from samecurve.tasks.diffusion.task import DiffusionTask

_FORMATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_TEXT, _SIZE = "text.", "size."  # prefixes of a batch's conditions


class LatentRows:
    """Rows of cached encodings. Ids that are read at once are of one bucket.

    Rows: latents float [2, channels, height, width], their means and deviations; text.NAME, what
    the encoders made of the caption; size.NAME, what the denoiser is told of sizes; weight; mask.
    """

    def __init__(self, training: "LatentTraining", samples: Samples, *, augmented: bool) -> None:
        self._training, self._samples = training, samples
        self.views = training.views(samples, augmented=augmented)
        self.bucket_sizes = samples.bucket_sizes

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, ids: Ids, epoch: int = 0) -> dict[str, NDArray[Any]]:
        self._samples.shape(ids)
        training = self._training
        encodings = [self.views.encoding_of(sample, epoch) for sample in ids.tolist()]
        captions = self.views.captions(ids, epoch)
        dropped = self.views.dropped(ids, epoch).tolist()
        texts = ["" if drop else text for text, drop in zip(captions, dropped, strict=True)]
        rows = [
            {
                "latents": training.pictures_kept.read(encoding.key)["latents"],
                **training.text_of(text),
                **training.sizes_of(encoding),
            }
            for encoding, text in zip(encodings, texts, strict=True)
        ]
        columns = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        columns["weight"] = self._samples.weights(ids)
        if training.data.masks:
            masks = [training.mask_of(encoding) for encoding in encodings]
            columns["mask"] = np.stack(masks)
        return columns

    def fingerprint(self) -> str:
        """A digest of what the rows are made from, the encoders included."""
        return f"{self._samples.fingerprint()}/{self._training.encoders}"


class LatentTraining:
    """How a pipeline's denoiser is trained and used."""

    def __init__(self, task: "DiffusionTask") -> None:
        self.data, self.fields = task.data, task.fields
        assert self.fields.place is not None
        self.opened = open_pipeline(self.fields.place, self.fields.base_place)
        self.family: Family = family_of(self.opened)
        home = task.cache / "diffusion"
        self.pictures_kept = Encodings(home / "latents" / self._digest("vae"))
        self._texts_kept = Encodings(home / "captions" / self._digest(*self.opened.encoders))
        self._texts: dict[str, dict[str, NDArray[np.float32]]] = {}

    @property
    def description(self) -> str:
        return f"{self.opened.kind.name}, its {self.opened.kind.component} is trained"

    @property
    def multiple(self) -> int:
        """The sides of pictures are multiples of it."""
        return self.opened.multiple

    @property
    def frozen_base(self) -> bool:
        """Whether the denoiser's own weights are frozen, beneath an adapter."""
        return self.fields.adapter is not None

    @property
    def guidance(self) -> float:
        return self.family.guidance if self.data.guidance is None else self.data.guidance

    # what frozen encoders make, and where it is kept

    @property
    def encoders(self) -> str:
        """A digest of the encoders, and of the number format of the text encoders."""
        return self._digest("vae", *self.opened.encoders)

    def _digest(self, *names: str) -> str:
        """A digest of components: configs, and names, sizes and times of their weights."""
        made_from: list[object] = [self.fields.encoder_precision]
        for name in names:
            component = self.opened.components[name]
            weights = self.opened.place if component.in_file else component.weights
            files = weight_files(weights) if weights else ()
            made_from.append([name, dict(component.config), [stamp_file(file) for file in files]])
        text = json.dumps(made_from, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def views(self, samples: Samples, *, augmented: bool) -> Views:
        """The cuts and captions of samples, as many as are encoded."""
        variants = self.data.variants if augmented else 1
        return Views(samples=samples, data=self.data, augmented=augmented, variants=variants)

    def rows(self, samples: Samples, *, augmented: bool) -> LatentRows:
        return LatentRows(self, samples, augmented=augmented)

    def work(self, views: Sequence[Views], parts: Mapping[str, Any]) -> tuple[list[Work], ...]:
        """The files that are to be there: of captions and prompts, and of pictures."""
        texts = {text: None for view in views for text in view.all_captions()}
        texts.update(dict.fromkeys(self.data.prompts))
        captions = [
            Work(self._texts_kept, text_key(text), partial(self._encode_text, parts, text))
            for text in texts
        ]
        negative = self.data.negative_prompt
        captions.append(
            Work(
                self._texts_kept,
                text_key(f"negative/{negative}"),
                partial(self._encode_negative, parts, negative),
            )
        )
        encodings = {each.key: each for view in views for each in view.encodings()}
        pictures = [
            Work(self.pictures_kept, each.key, partial(self._encode_picture, parts, each))
            for each in encodings.values()
        ]
        return captions, pictures

    def prepare(
        self, views: Sequence[Views], device: torch.device, part: Part
    ) -> Iterator[tuple[int, int]]:
        """Encode this part's captions, then its pictures, and wait for the other parts."""
        parts = Parts(self.opened, device, _FORMATS[self.fields.encoder_precision])
        captions, pictures = self.work(views, parts)
        total = len(captions) + len(pictures)
        for done, _ in encode_all(captions, part, between=parts.release):
            yield done, total
        for done, _ in encode_all(pictures, part, between=parts.release):
            yield len(captions) + done, total

    def _encode_text(self, parts: Mapping[str, Any], text: str) -> dict[str, Tensor]:
        return {
            name: array[0] for name, array in self.family.encode_captions(parts, [text]).items()
        }

    def _encode_negative(self, parts: Mapping[str, Any], text: str) -> dict[str, Tensor]:
        return {name: array[0] for name, array in self.family.encode_negative(parts, text).items()}

    def _encode_picture(self, parts: Mapping[str, Any], encoding: Encoding) -> dict[str, Tensor]:
        pixels = torch.from_numpy(read_pixels(encoding.picture, encoding.cut))[None]
        moments = self.family.encode_pictures(parts, pixels.float() / 127.5 - 1)
        return {"latents": moments[0].float()}

    # rows

    def text_of(self, text: str) -> dict[str, NDArray[np.float32]]:
        """What the encoders made of a caption, by a batch's names."""
        return self._kept_text(text_key(text))

    def _kept_text(self, key: str) -> dict[str, NDArray[np.float32]]:
        if key not in self._texts:
            arrays = self._texts_kept.read(key)
            self._texts[key] = {f"{_TEXT}{name}": array for name, array in arrays.items()}
        return self._texts[key]

    def sizes_of(self, encoding: Encoding) -> dict[str, NDArray[np.float32]]:
        """What the denoiser is told of a picture's sizes, by a batch's names."""
        told = self.family.size_conditions(**sizes_of(encoding.picture, encoding.cut))
        return {f"{_SIZE}{name}": np.array(row, np.float32) for name, row in told.items()}

    def mask_of(self, encoding: Encoding) -> NDArray[np.float32]:
        """What each place of the latents counts: the mean over its pixels."""
        mask = read_mask(encoding.picture, encoding.cut, self.data.unmasked_weight)
        factor = self.opened.factor
        height, width = (side // factor for side in mask.shape)
        return mask.reshape(height, factor, width, factor).mean((1, 3))

    # training

    @cached_property
    def _schedule(self) -> Schedule:
        return self.family.schedule

    @property
    def _prediction(self) -> str:
        own = self._schedule.prediction
        wanted = self.fields.prediction
        if wanted not in {"auto", own}:
            raise UserError(
                f"model.prediction {wanted}: {self.opened.place} predicts {own}, by its scheduler",
                "leave model.prediction out: another one would begin from weights that mean"
                " something else",
                "model.prediction",
            )
        return own

    def objective(self, latents: Tensor) -> Objective:
        """What is learnt of latents of this shape: larger pictures may see more noise."""
        if self._prediction == "flow":
            factor = self.opened.factor
            height, width = (side * factor for side in latents.shape[-2:])
            return Flow(
                self.fields.time_steps, self._schedule.shift(self.family.tokens(height, width))
            )
        assert self._schedule.alphas_cumprod is not None
        alphas = self._schedule.alphas_cumprod.tolist()
        return Denoising(
            alphas, "epsilon" if self._prediction == "epsilon" else "v", self.fields.min_snr
        )

    def pictures(self, batch: Arrays, numbers: SampleNumbers) -> Tensor:
        """Latents that are drawn from their means and deviations: [rows, channels, h, w]."""
        moments: Tensor = batch["latents"]
        mean, deviation = moments[:, 0], moments[:, 1]
        dtype = "float64" if moments.dtype == torch.float64 else "float32"
        return mean + deviation * numbers.normal(*mean.shape[1:], dtype=dtype)

    def mask(self, batch: Arrays) -> Tensor | None:
        mask: Tensor | None = batch.get("mask")
        return None if mask is None else mask[:, None]

    def predict(self, model: Any, batch: Mapping[str, Tensor]) -> Predict:
        conditions = self.family.with_guidance(_conditions(batch), 1.0)
        return lambda noisy, time: self.family.predict(model, noisy, time, conditions)

    def row_runner(self, width: int, height: int) -> Callable[[nn.Module], None]:
        """A function that calls the denoiser on one picture of these sides, without values."""
        size = (height, width)
        told = self.family.size_conditions(original=size, corner=(0, 0), size=size)
        with torch.device("meta"):  # shapes are found without values
            texts = self.family.encode_captions(OutlineParts(self.opened), [""])
        shapes = {
            **{name: tuple(array.shape) for name, array in texts.items()},
            **{name: (1, len(row)) for name, row in told.items()},
        }
        time_type = torch.float32 if self._prediction == "flow" else torch.long

        def run(model: nn.Module) -> None:
            made = {name: torch.zeros(shape) for name, shape in shapes.items()}
            conditions = self.family.with_guidance(made, 1.0)
            latents = torch.zeros(1, *self.family.latent_shape(height, width))
            self.family.predict(model, latents, torch.zeros(1, dtype=time_type), conditions)

        return run

    def model(self) -> nn.Module:
        """The denoiser as its config says, with an adapter if there is one."""
        model = build_denoiser(self.opened)
        if self.fields.adapter is not None:
            from samecurve.tasks.lora.image_models import add_adapter

            add_adapter(model, self.fields.adapter, self.fields.quantize)
        return model

    def convert_weights(self, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """A pipeline's arrays as the model holds them."""
        converted = convert_denoiser(self.opened, arrays)
        adapter = self.fields.adapter
        if adapter is None:
            return converted
        from samecurve.tasks.lora.adapter import with_adapter_names
        from samecurve.tasks.lora.image_models import adapted_layers, packings
        from samecurve.tasks.lora.names import BASE
        from samecurve.tasks.lora.quantized import PackedArrays

        outline = self._outline()
        packer = PackedArrays(packings(outline, self.fields.quantize))
        rounded = packer.rounded(converted)
        layers = adapted_layers(outline, adapter)
        return packer.packed(with_adapter_names(layers, adapter, converted, rounded), BASE)

    def _outline(self) -> nn.Module:
        """The plain denoiser without values."""
        with torch.device("meta"):
            return build_denoiser(self.opened)

    # pictures that are shown

    def noise_shape(self) -> tuple[int, int, int]:
        """The shape of the latents of a picture that is shown."""
        return self.family.latent_shape(self.data.resolution, self.data.resolution)

    @torch.no_grad()
    def draw(self, model: Any, prompt: str, noise: Tensor) -> Tensor:
        """Pixels [3, height, width] of one prompt. noise: [1, channels, h, w]"""
        parameter = next(p for p in model.parameters() if p.is_floating_point())
        device = parameter.device
        parts = Parts(self.opened, device, _FORMATS[self.fields.encoder_precision])
        told = self._shown_text(parts, prompt, device)
        negative = self._shown_negative(parts, device)
        parts.release(*self.opened.encoders)
        return sample(
            self.family,
            parts,
            model,
            noise.to(device, torch.float32 if parameter.dtype != torch.float64 else torch.float64),
            conditions=told,
            negative=negative,
            steps=self.data.sample_steps,
            guidance=self.guidance,
        )[0]

    def _shown_text(
        self, parts: Mapping[str, Any], prompt: str, device: torch.device
    ) -> dict[str, Tensor]:
        """A prompt's conditions, from the cache; a prompt that is new is encoded now."""
        work = Work(self._texts_kept, text_key(prompt), partial(self._encode_text, parts, prompt))
        return self._shown(work, device)

    def _shown_negative(self, parts: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
        negative = self.data.negative_prompt
        key = text_key(f"negative/{negative}")
        work = Work(self._texts_kept, key, partial(self._encode_negative, parts, negative))
        return self._shown(work, device)

    def _shown(self, work: Work, device: torch.device) -> dict[str, Tensor]:
        if not work.is_done:
            work.store.keep(work.key, work.make())
        arrays = work.store.read(work.key)
        return {name: torch.from_numpy(array)[None].to(device) for name, array in arrays.items()}


def _conditions(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a batch has for the denoiser, by the family's own names."""
    return {
        name.removeprefix(prefix): array
        for prefix in (_TEXT, _SIZE)
        for name, array in batch.items()
        if name.startswith(prefix)
    }

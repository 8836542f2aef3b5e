"""The frozen parts of a pipeline: what they make of pictures and captions, kept in the cache.

Each picture and each caption is encoded once, alone, by one rank.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samecurve.seam import Ids, Part, stamp_file
from samecurve_products.pictures.diffusion.data.pictures import read_mask, read_pixels, sizes_of
from samecurve_products.pictures.diffusion.data.samples import Samples
from samecurve_products.pictures.diffusion.data.views import Encoding, Views
from samecurve_products.pictures.diffusion.encodings import Encodings, Work, text_key
from samecurve_products.pictures.diffusion.families.loading import Parts
from samecurve_products.pictures.diffusion.families.model_files import weight_files
from samecurve_products.pictures.diffusion.sections import DiffusionData, DiffusionModel
from samecurve_products.task_parts.made_files import make_files

if TYPE_CHECKING:
    from samecurve_products.pictures.diffusion.families.base import Family

TEXT, SIZE = "text.", "size."  # prefixes of a batch's conditions
_FORMATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_NEGATIVE = "negative/"  # before a text that pictures are led away from, in its key

Arrays = Mapping[str, NDArray[np.float32]]


class FrozenEncoders:
    """A pipeline's VAE and text encoders, and the files of what they make.

    cache: the directory of all tasks
    """

    def __init__(
        self, family: "Family", model: DiffusionModel, data: DiffusionData, cache: Path
    ) -> None:
        self.family, self.data = family, data
        self._opened, self._precision = family.opened, model.encoder_precision
        home = cache / "diffusion"
        encoders = self._opened.encoders
        self._pictures = Encodings(home / "latents" / self._digest("vae"))
        self._texts = Encodings(home / "captions" / self._digest(*encoders))
        self.digest = self._digest("vae", *encoders)
        self._read: dict[str, Arrays] = {}

    def _digest(self, *names: str) -> str:
        """A digest of components: configs, and names, sizes and times of their weights."""
        made_from: list[object] = [self._precision]
        for name in names:
            component = self._opened.components[name]
            weights = self._opened.place if component.in_file else component.weights
            files = weight_files(weights) if weights else ()
            made_from.append([name, dict(component.config), [stamp_file(file) for file in files]])
        text = json.dumps(made_from, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def parts(self, device: Any) -> Parts:
        """The pipeline's components, each loaded when it is first asked for."""
        return Parts(self._opened, device, _FORMATS[self._precision])

    def views(self, samples: Samples, *, augmented: bool) -> Views:
        """The cuts and captions of samples, as many as are encoded."""
        variants = self.data.variants if augmented else 1
        return Views(samples=samples, data=self.data, augmented=augmented, variants=variants)

    def prepare(self, views: Sequence[Views], device: Any, part: Part) -> Iterator[tuple[int, int]]:
        """Encode this part's captions, then its pictures, and wait for the other parts.

        Yields how many files are there, of how many.
        """
        parts = self.parts(device)
        texts = dict.fromkeys(text for view in views for text in view.all_captions())
        texts.update(dict.fromkeys(self.data.prompts))
        captions = [self._text_work(parts, text) for text in texts]
        captions.append(self._negative_work(parts))
        encodings = {each.key: each for view in views for each in view.encodings()}
        pictures = [
            Work(self._pictures, each.key, partial(self._encode_picture, parts, each))
            for each in encodings.values()
        ]
        total = len(captions) + len(pictures)
        for done, _ in make_files(captions, part, between=parts.release):
            yield done, total
        for done, _ in make_files(pictures, part, between=parts.release):
            yield len(captions) + done, total

    def _text_work(self, parts: Mapping[str, Any], text: str) -> Work:
        def make() -> dict[str, Tensor]:
            return _first_row(self.family.encode_captions(parts, [text]))

        return Work(self._texts, text_key(text), make)

    def _negative_work(self, parts: Mapping[str, Any]) -> Work:
        text = self.data.negative_prompt

        def make() -> dict[str, Tensor]:
            return _first_row(self.family.encode_negative(parts, text))

        return Work(self._texts, text_key(f"{_NEGATIVE}{text}"), make)

    def _encode_picture(self, parts: Mapping[str, Any], encoding: Encoding) -> dict[str, Tensor]:
        pixels = torch.from_numpy(read_pixels(encoding.picture, encoding.cut))[None]
        moments = self.family.encode_pictures(parts, pixels.float() / 127.5 - 1)
        return {"latents": moments[0].float()}

    def shown(self, prompt: str, parts: Parts, device: Any) -> tuple[dict[str, Tensor], ...]:
        """Conditions of a prompt, and of what its picture is led away from, one row each.

        A prompt that is not in the cache is encoded now.
        """
        return tuple(
            _one_row(work, device)
            for work in (self._text_work(parts, prompt), self._negative_work(parts))
        )

    # rows

    def latents(self, encoding: Encoding) -> NDArray[np.float32]:
        """Means and deviations, [2, channels, height, width]."""
        return self._pictures.read(encoding.key)["latents"]

    def text(self, text: str) -> Arrays:
        """What the text encoders made of a caption, by a batch's names."""
        key = text_key(text)
        if key not in self._read:
            arrays = self._texts.read(key)
            self._read[key] = {f"{TEXT}{name}": array for name, array in arrays.items()}
        return self._read[key]

    def sizes(self, encoding: Encoding) -> Arrays:
        """What the denoiser is told of a picture's sizes, by a batch's names."""
        sizes = self.family.size_conditions(**sizes_of(encoding.picture, encoding.cut))
        return {f"{SIZE}{name}": np.array(row, np.float32) for name, row in sizes.items()}

    def mask(self, encoding: Encoding) -> NDArray[np.float32]:
        """What each place of the latents counts: the mean over its pixels."""
        mask = read_mask(encoding.picture, encoding.cut, self.data.unmasked_weight)
        factor = self._opened.factor
        height, width = (side // factor for side in mask.shape)
        shares: NDArray[np.float32] = mask.reshape(height, factor, width, factor).mean((1, 3))
        return shares


class LatentRows:
    """Rows of encodings from the cache. Ids that are read at once are of one bucket.

    Rows: latents [2, channels, height, width], means and deviations; text.NAME, what the encoders
    made of the caption; size.NAME, what the denoiser is told of sizes; weight; mask.
    """

    def __init__(self, encoders: FrozenEncoders, samples: Samples, *, augmented: bool) -> None:
        self._encoders, self._samples = encoders, samples
        self._views = encoders.views(samples, augmented=augmented)
        self.bucket_sizes = samples.bucket_sizes

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, ids: Ids, epoch: int = 0) -> dict[str, NDArray[Any]]:
        self._samples.shape(ids)
        encoders = self._encoders
        encodings = [self._views.encoding_of(sample, epoch) for sample in ids.tolist()]
        captions = self._views.captions(ids, epoch)
        dropped = self._views.dropped(ids, epoch).tolist()
        texts = ["" if drop else text for text, drop in zip(captions, dropped, strict=True)]
        rows: list[Arrays] = [
            {
                "latents": encoders.latents(encoding),
                **encoders.text(text),
                **encoders.sizes(encoding),
            }
            for encoding, text in zip(encodings, texts, strict=True)
        ]
        columns = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        columns["weight"] = self._samples.weights(ids)
        if encoders.data.masks:
            columns["mask"] = np.stack([encoders.mask(encoding) for encoding in encodings])
        return columns

    def fingerprint(self) -> str:
        """A digest of what the rows are made from, the encoders included."""
        return f"{self._samples.fingerprint()}/{self._encoders.digest}"


def _first_row(encoded: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: array[0] for name, array in encoded.items()}


def _one_row(work: Work, device: Any) -> dict[str, Tensor]:
    """The arrays of a file as one row; the file is made if it is absent."""
    work.do()
    arrays = work.store.read(work.key)
    return {name: torch.from_numpy(array)[None].to(device) for name, array in arrays.items()}

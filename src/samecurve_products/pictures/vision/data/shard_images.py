"""Pictures in shards as the images of a run: tar in webdataset's naming, or parquet.

A row has one picture and its class: in a tar the members `.jpg` (`.png`, `.webp`, ...) and `.cls`,
in a parquet file the columns `image` and `label`. Classes are whole numbers from 0, or names. With
`data.frames` a row is a clip: in a tar the members `.000.jpg`, `.001.jpg`, ..., in the order of
their numbers, in a parquet file a list of pictures in the column `frames` or `images`.
Labels are read once and kept in the cache; a picture is read when it is needed.
"""

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.system import one_at_a_time
from samecurve.data.shards.source import Shards
from samecurve.seam import Ids, UserError, cache_key, counted, show_progress, some, write_whole
from samecurve_products.pictures.files.picture_files import (
    SUFFIXES,
    BrokenPictureError,
    decode,
    upright_size,
)
from samecurve_products.pictures.vision.data.clip_folders import in_order, spread_frames
from samecurve_products.pictures.vision.data.folder_images import FOLDER_SIZE, image_sets_of
from samecurve_products.pictures.vision.data.image_sets import ImageSets, split_ids
from samecurve_products.pictures.vision.data.views import MiddleRows, Opened, OpenImage
from samecurve_products.pictures.vision.sections import VisionData

if TYPE_CHECKING:
    from PIL import Image as Pillow

_CLIPS = ("frames", "images")
_LABELS = ("cls", "label", "labels", "class")
_PICTURES = ("image", "img", *(suffix.removeprefix(".") for suffix in SUFFIXES))
_AT_ONCE = 4096  # labels that are read together
_MOST_CLASSES = 1_000_000
_SHOWN = 8


def is_shards(source: str) -> bool:
    """Whether a source names shards."""
    return source.endswith((".tar", ".parquet"))


class ShardViews:
    """Pictures of shards by number.

    pictures: names that a row's picture may have. ids: the rows that these are
    frames: of a clip; None: a row has one picture
    """

    def __init__(
        self,
        shards: Shards,
        pictures: Sequence[str],
        labels: NDArray[np.int64],
        ids: Ids,
        frames: int | None = None,
    ) -> None:
        self._shards, self._pictures, self._ids = shards, pictures, ids
        self._frames = frames
        self.labels = labels[ids]

    def __len__(self) -> int:
        return len(self._ids)

    def open(self, number: int) -> Opened:
        row = int(self._ids[number])
        values = self._shards[row]
        place = f"row {row} ({values['__key__']})" if "__key__" in values else f"row {row}"
        if self._frames is not None:
            return self._open_clip(values, place)
        content = _content(values, self._pictures)
        if content is None:
            raise UserError(
                f"{place} of the shards has no picture: it has {some(sorted(values), _SHOWN)}",
                f"a picture under one of the names {', '.join(self._pictures)}",
                "data.source",
            )
        return _opened(content, place)

    def _open_clip(self, values: Mapping[str, Any], place: str) -> tuple[OpenImage, ...]:
        assert self._frames is not None
        contents = clip_contents(values)
        if len(contents) < self._frames:
            raise UserError(
                f"{place} of the shards has {counted(len(contents), 'picture')}, and data.frames"
                f" is {self._frames}",
                f"--set data.frames={max(2, len(contents))}; or make the shards again without it",
                "data.frames",
            )
        frames = tuple(
            _opened(contents[frame], f"frame {frame} of {place}")
            for frame in spread_frames(len(contents), self._frames)
        )
        if len({frame.size for frame in frames}) > 1:
            raise UserError(
                f"{place} of the shards has frames of several sizes",
                "frames of one size in a clip",
                "data.source",
            )
        return frames

    def digest(self) -> str:
        """A digest of what the shards' index has read, of the labels, and of the rows' numbers."""
        sha256 = hashlib.sha256(self._shards.fingerprint().encode())
        sha256.update(b"" if self._frames is None else str(self._frames).encode())
        sha256.update(np.ascontiguousarray(self._ids).tobytes())
        sha256.update(np.ascontiguousarray(self.labels).tobytes())
        return sha256.hexdigest()


def read_shards(
    data: VisionData,
    cache: Path,
    known: Sequence[str] | None = None,
    say: Callable[[str], None] = show_progress,
) -> ImageSets:
    """The images of shards.

    known: classes of a run: all rows are then of one split, which nothing is held out of

    UserError: the shards can't be read, or have no pictures or no classes.
    """
    shards = Shards(data.source)
    first = shards[0]
    picture = _picture_name(first, data)
    label = next((name for name in _LABELS if name in first), None)
    if picture is None or label is None:
        lacks = "no picture" if picture is None else "no class"
        raise UserError(
            f"{data.source}: the first row has {lacks}; it has {some(sorted(first), _SHOWN)}",
            f"{_wanted(data)} and a class called {' or '.join(_LABELS)}",
            "data.source",
        )
    raw = _all_labels(shards, data.source, label, cache / "vision" / "labels", say)
    classes, labels = _numbered(raw, data.source, known)
    parts: dict[str, Ids] = {"train": np.arange(len(shards))}
    if known is None and data.validation:
        train, held_out = split_ids(len(shards), data.validation)
        parts = {"train": train, **({"validation": held_out} if len(held_out) else {})}
    columns = Shards(data.source, columns=[picture]) if _is_parquet(data.source) else shards
    side = data.resolution or FOLDER_SIZE
    names = [picture] if _is_parquet(data.source) else _PICTURES
    rows = {
        split: MiddleRows(
            ShardViews(columns, names, labels, ids, data.frames), (side, side), data.shown
        )
        for split, ids in parts.items()
    }
    kind = "picture" if data.frames is None else "clip"
    lines = [f"{data.source}: {counted(len(shards), kind)} of {len(classes)} classes"]
    trained_on = np.bincount(rows["train"].views.labels, minlength=len(classes))
    without = [name for name, count in zip(classes, trained_on, strict=True) if not count]
    if without:
        lines.append(f"no picture to train on of {some(without, _SHOWN)}")
    return image_sets_of(rows, classes=classes, shown=data.shown, lines=lines, frames=data.frames)


def stamp_shards(data: VisionData) -> object:
    """What the shards are made from: their index's digest. UserError: they can't be read."""
    return Shards(data.source).fingerprint()


def _is_parquet(source: str) -> bool:
    return source.endswith(".parquet")


def clip_contents(row: Mapping[str, Any]) -> list[bytes]:
    """The bytes of a row's pictures, in their order; none if the row has none."""
    for name in _CLIPS:
        if isinstance(row.get(name), Sequence) and not isinstance(row[name], bytes | str):
            pictures = [_content({name: each}, [name]) for each in row[name]]
            return [picture for picture in pictures if picture is not None]
    names = [name for name in row if name.rpartition(".")[2] in _PICTURES]
    return [row[name] for name in sorted(names, key=in_order)]


def _picture_name(row: Mapping[str, Any], data: VisionData) -> str | None:
    """What holds a row's picture, or its clip; None: nothing does."""
    if data.frames is None:
        return next((name for name in _PICTURES if _content(row, [name]) is not None), None)
    if not clip_contents(row):
        return None
    return next((name for name in _CLIPS if name in row), "frames")


def _wanted(data: VisionData) -> str:
    if data.frames is None:
        return f"a picture called {', '.join(_PICTURES[:4])}, ..."
    return "pictures called 000.jpg, 001.jpg, ... (parquet: a list of them called frames)"


def _opened(content: bytes, place: str) -> OpenImage:
    """A picture, opened. UserError: it is broken."""
    try:
        size, orientation = upright_size(content)
    except BrokenPictureError as error:
        raise _broken(place, error) from None

    def read(least: tuple[int, int]) -> "Pillow.Image":
        try:
            return decode(content, orientation, least)
        except BrokenPictureError as error:
            raise _broken(place, error) from None

    return OpenImage(size, read)


def _content(row: Mapping[str, Any], names: Sequence[str]) -> bytes | None:
    """The bytes of a row's picture. A column of Hugging Face has them in a dict."""
    for name in names:
        value = row.get(name)
        if isinstance(value, Mapping):
            value = value.get("bytes")
        if isinstance(value, bytes):
            return value
    return None


def _all_labels(
    shards: Shards, source: str, name: str, home: Path, say: Callable[[str], None]
) -> list[str]:
    """The label of each row as text, from the cache, or read now."""
    kept = home / f"{cache_key([shards.fingerprint(), name])}.npy"
    with one_at_a_time(kept.with_suffix(".lock")):  # ranks of one machine start together
        if kept.is_file():
            texts: list[str] = np.load(kept).tolist()
            return texts
        reader = Shards(source, columns=[name])
        texts = []
        for first in range(0, len(reader), _AT_ONCE):
            ids = np.arange(first, min(first + _AT_ONCE, len(reader)))
            texts += [_text(row[name]) for row in reader[ids]]
            say(f"data   {len(texts):,} of {len(reader):,} labels read")
        file = io.BytesIO()
        np.save(file, np.array(texts))
        write_whole(kept, file.getvalue())
    return texts


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace").strip() if isinstance(value, bytes) else str(value)


def _numbered(
    texts: Sequence[str], source: str, known: Sequence[str] | None
) -> tuple[list[str], NDArray[np.int64]]:
    """The classes, and each row's number. UserError: a number is no class."""
    if known is None and all(text.lstrip("-").isdecimal() for text in texts):
        numbers = np.array([int(text) for text in texts], np.int64)
        row = int(numbers.argmin() if numbers.min() < 0 else numbers.argmax())
        if numbers.min() < 0 or numbers.max() >= _MOST_CLASSES:
            raise UserError(
                f"{source}: row {row} has class {numbers[row]}",
                f"whole numbers from 0 to {_MOST_CLASSES - 1}, or names",
                "data.source",
            )
        return [str(number) for number in range(int(numbers.max()) + 1)], numbers
    classes = sorted(set(texts)) if known is None else list(known)
    number_of = {name: number for number, name in enumerate(classes)}
    for row, text in enumerate(texts):
        if text not in number_of:
            raise UserError(
                f"{source}: row {row} is of class {text}, which is none of the run's:"
                f" {some(classes, _SHOWN)}",
                "labels of the same names",
                "data.source",
            )
    return classes, np.array([number_of[text] for text in texts], np.int64)


def _broken(place: str, error: BrokenPictureError) -> UserError:
    return UserError(
        f"{place} of the shards can't be read as a picture: {error}",
        "make the shard again without this row, or with a whole picture",
        "data.source",
    )

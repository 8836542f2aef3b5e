"""Captions as they lie beside pictures: NAME.txt, or lines of a metadata.jsonl.

Each line of a caption file is one caption; so is each text of a list in a metadata.jsonl. Blank
lines count nothing, so a blank file is a missing caption.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import Any

from samecurve.data.shards.json_lines import MARK, no_object
from samecurve.seam import UserError, some
from samecurve_products.pictures.diffusion.data.folders import METADATA, FolderFiles
from samecurve_products.pictures.diffusion.sections import Captions

_KEYS = ("text", "caption", "prompt")  # of a line, the first that is there
_UTF16 = (b"\xff\xfe", b"\xfe\xff")  # marks with which such a file begins
_SHOWN = 8  # names in a line
_EXAMPLE = '{"file_name": "a.jpg", "text": "a red bird"}'

Texts = tuple[str, ...]


def read_captions(
    files: FolderFiles, fields: Captions, usual: str | None = None
) -> tuple[dict[str, Texts], set[str]]:
    """The captions of each picture by its name, and the names of pictures that have none.

    usual: the caption of pictures without a file or a line for one
    Where captions are missing all the same, fields.missing says what takes their place.
    UserError: a file is no UTF-8, or a line is wrong; or captions are missing and are refused.
    """
    listed = _listed(files)
    captions: dict[str, Texts] = {}
    for picture in files.pictures:
        texts = _read_text(picture.caption) if picture.caption is not None else ()
        of_list = listed.get(picture.name, ())
        if texts and of_list and texts != of_list:
            assert picture.caption is not None
            raise UserError(
                f"{picture.name} has one caption in {picture.caption.name} and another in"
                f" {METADATA}",
                "remove one of them, the file or the line",
                "data.source",
            )
        captions[picture.name] = texts or of_list
        if usual and picture.caption is None and picture.name not in listed:
            captions[picture.name] = (usual,)
    missing = [name for name, texts in captions.items() if not texts]
    if missing and fields.missing == "refuse":
        raise _missing(files, missing, fields)
    if fields.missing == "name":
        captions.update({name: (_readable(PurePosixPath(name).stem),) for name in missing})
    return captions, set(missing)


def _missing(files: FolderFiles, missing: list[str], fields: Captions) -> UserError:
    (first,) = (picture for picture in files.pictures if picture.name == missing[0])
    beside = PurePosixPath(first.name).with_suffix(fields.extension).name
    blank = f"{beside} is blank" if first.caption is not None else f"there is no {beside}"
    where = f", and {METADATA} has none" if files.metadata else f", and no {METADATA}"
    count = f" ({len(missing):,} of {len(files.pictures):,} pictures of {files.root} have none)"
    return UserError(
        f"{first.path} has no caption: {blank}{where}{count}",
        "write a caption for each; or --set data.captions.missing=empty trains them without one,"
        " and =name takes the file's name",
        "data.captions.missing",
    )


def _read_text(file: Path) -> Texts:
    """The captions of a text file. UserError: its text is no UTF-8."""
    return _captions(_decoded(file.read_bytes(), file))


def _captions(text: str) -> Texts:
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return tuple(line.strip() for line in lines if line.strip())


def _decoded(content: bytes, file: Path) -> str:
    try:
        return content.removeprefix(MARK).decode()
    except UnicodeDecodeError as error:
        encoding = "utf-16" if content.startswith(_UTF16) else "latin1"
        line = content[: error.start].count(b"\n") + 1
        raise UserError(
            f"{file}: the byte {content[error.start]:#04x} of line {line} is no UTF-8: the file has"
            " another encoding",
            f"iconv -f {encoding} -t utf-8 {quote(file.name)} > new ({encoding}, or the encoding"
            " that it has), and put the new file in its place",
            "data.source",
        ) from None


def _readable(text: str) -> str:
    """The text with halves of characters replaced, which no encoding can hold."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _listed(files: FolderFiles) -> dict[str, Texts]:
    """The captions in the metadata files of a folder, by the names of the pictures.

    UserError: a line is no object, names no picture or one that another line names, or has no text.
    """
    known = {picture.name for picture in files.pictures}
    captions: dict[str, Texts] = {}
    places: dict[str, str] = {}
    for file in files.metadata:
        folder = file.parent.relative_to(files.root).as_posix()
        for place, row in _rows(file):
            name = _picture_name(row, folder, known, place)
            if name in places:
                raise UserError(
                    f"{name} has a caption in this line and in {places[name]}",
                    'remove one of them; several captions are a list: "text": ["one", "two"]',
                    place,
                )
            places[name] = place
            captions[name] = _texts_of(row, place)
    return captions


def _rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each line's place and object. UserError: a line is none."""
    for number, line in enumerate(_decoded(file.read_bytes(), file).split("\n"), 1):
        place = f"{file}:{number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise no_object(line.strip().encode("utf-8", "replace"), place)
        yield place, row


def _picture_name(row: Mapping[str, Any], folder: str, known: set[str], place: str) -> str:
    """The picture that a line describes. UserError: it names none that is there."""
    given = row.get("file_name")
    if not isinstance(given, str) or not given:
        has = some(list(row), _SHOWN) or "nothing"
        raise UserError(f"the line has no file_name; it has {has}", _EXAMPLE, place)
    for written in (given, given.replace("\\", "/")):  # of Windows
        name = (PurePosixPath(folder) / written).as_posix()
        if name in known:
            return name
    raise UserError(
        f"there is no picture {given} beside {METADATA}",
        "the name of a picture below the folder of this file, with slashes; remove the line if the"
        " picture is gone",
        place,
    )


def _texts_of(row: Mapping[str, Any], place: str) -> Texts:
    """The captions of a line; none where it is blank. UserError: they are no text."""
    key = next((key for key in _KEYS if key in row), None)
    value = row[key] if key is not None else None
    if value is None:
        return ()
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(
            f'"{key}" is {json.dumps(value)[:60]}, and no text',
            f"{_EXAMPLE}; several captions are a list of texts",
            place,
        )
    return tuple(caption for text in texts for caption in _captions(_readable(text)))

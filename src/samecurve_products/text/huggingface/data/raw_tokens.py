"""Files of raw token ids: mapped as they are, and read once for their documents and largest id.

A document ends with the end token, where one is known, and at the end of its file.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.seam import UserError, cache_entry, cache_key, show_progress, write_json
from samecurve_products.text.huggingface.data.document_columns import KINDS, Learns, no_column
from samecurve_products.text.huggingface.data.sources import InputFile
from samecurve_products.text.huggingface.data.tokenized_source import SourceNotes, TokenizedSource
from samecurve_products.text_files import check_whole_tokens, id_blocks

_FORMAT = 1
_HEADER = 20240520  # the first number in the header of llm.c's token files, of 1024 bytes
_LEAST_ALIKE = 64  # in so many tokens every second one is not 0 by chance


class RawSource(TokenizedSource):
    """Files of ids, one after another. home: the directory with their properties."""

    def __init__(self, home: Path, files: Sequence[InputFile]) -> None:
        super().__init__(home)
        self._files = [file.path for file in files]

    @cached_property
    def tokens(self) -> Any:
        return MappedFiles(self._files, self.notes.dtype)

    @property
    def largest_at(self) -> str:
        """Where the largest id stands, for the user."""
        return f"{self._files[self.notes.largest_file]}: token {self.notes.largest_place}"


class MappedFiles:
    """The arrays of several files as one array."""

    def __init__(self, paths: Sequence[Path], dtype: str) -> None:
        self._arrays = [np.memmap(path, dtype, "r") for path in paths if path.stat().st_size]
        self._ends = np.cumsum([len(array) for array in self._arrays])

    def __getitem__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        values = np.empty(len(places), np.int64)
        file = np.searchsorted(self._ends, places, side="right")
        for number in np.unique(file):
            array, here = self._arrays[number], file == number
            values[here] = array[places[here] - (self._ends[number] - len(array))]
        return values


def is_raw(files: Sequence[InputFile], name: str) -> bool:
    """Whether a source's files hold raw tokens. UserError: some do, and others do not."""
    raw = {file.form == "tokens" for file in files}
    if len(raw) > 1:
        raise UserError(
            f"data source {name} has files of raw tokens (.bin) beside others",
            "each of them as a source of its own: data.source is a list",
            "data.source",
        )
    return raw == {True}


def open_raw(
    files: Sequence[InputFile],
    cache: Path,
    *,
    dtype: str,
    end: int | None,
    content: str,
    learns: Learns = "tokens",
) -> RawSource:
    """A source of raw tokens, with its properties from the cache if they are there.

    dtype: of the ids. end: the id that ends a document, if one is known. content: a hash of what
    the files hold.
    UserError: the files hold no such ids, or the model learns something else than tokens.
    """
    if learns != "tokens":
        raise no_column([], files[0].path, learns)
    home = cache / "tokens" / cache_key(["raw", _FORMAT, content, dtype, end])

    def make(scratch: Path) -> None:
        for file in files:
            _check_file(file.path, dtype)
        _look_through([file.path for file in files], dtype, end, scratch)

    return RawSource(cache_entry(home, make, say=show_progress), files)


def _look_through(paths: Sequence[Path], dtype: str, end: int | None, scratch: Path) -> None:
    """Find documents and the largest id, and write them into a directory."""
    lengths, digest = [np.zeros(0, np.int64)], hashlib.sha256(dtype.encode())
    largest, largest_file, largest_place = -1, 0, 0
    for number, path in enumerate(paths):
        bounds, size = [np.zeros(1, np.int64)], 0
        for block in id_blocks(path, dtype):
            digest.update(block.tobytes())
            place = int(block.argmax())
            if int(block[place]) > largest:
                largest, largest_file, largest_place = int(block[place]), number, size + place
            if end is not None:
                bounds.append(np.flatnonzero(block == end) + size + 1)
            size += len(block)
        places = np.unique(np.concatenate([*bounds, [size]]))
        lengths.append(np.diff(places))
    of_documents = np.concatenate(lengths)
    digest.update(of_documents.tobytes())
    if largest < 0:
        raise UserError(
            f"{', '.join(map(str, paths[:3]))}: no tokens, 0 bytes",
            "a file with token ids in it",
            "data.source",
        )
    of_documents.tofile(scratch / "lengths.bin")
    np.full(len(of_documents), KINDS.index("text"), np.uint8).tofile(scratch / "kinds.bin")
    notes = SourceNotes(
        dtype=dtype,
        num_tokens=int(of_documents.sum()),
        vocab_size=0,
        largest_id=largest,
        sha256=digest.hexdigest(),
        largest_file=largest_file,
        largest_place=largest_place,
    )
    write_json(scratch / "corpus.json", asdict(notes))


def _check_file(path: Path, dtype: str) -> None:
    """UserError: the file can't hold ids of this type."""
    check_whole_tokens(path, dtype)
    size = path.stat().st_size
    head = np.fromfile(path, "uint32", min(1, size // 4))
    if head.tolist() == [_HEADER]:
        raise UserError(
            f"{path} begins with a header of 1024 bytes, as llm.c writes it, which is no tokens",
            "take it off: tail -c +1025 OLD > NEW; --set data.token_dtype=uint16",
            "data.source",
        )
    if dtype != "uint16" or size < 2 * _LEAST_ALIKE:
        return
    if not any(block[1::2].any() for block in id_blocks(path, "uint16")):
        raise UserError(
            f"{path}: every second id is 0, as if its ids were uint32",
            "--set data.token_dtype=uint32",
            "data.token_dtype",
        )

"""Parts that every task on text needs: tokenizers, and the files of text and of token ids.

Files of text are those that a source names (a file, a glob, a directory, the standard library).
Files of token ids hold one number after another: a user's `.bin`, and the cache's.
"""

import codecs
import glob
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from samecurve.errors import UserError
from samecurve.units import counted, some

STANDARD_LIBRARY = "python-stdlib"
_SHOWN = 8  # files named in a line
PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip", ".tar", ".tgz")  # ends of compressed files' names


def files_of_source(source: str) -> list[Path]:
    """Files of the standard library, below a directory, or that a path or a glob names.

    Empty where there are none. Of objects in a store (s3://) the files are copies in the cache.
    """
    if source == STANDARD_LIBRARY:
        return standard_library()
    if source.startswith("s3://"):
        from samecurve.storage.object_cache import Listing, bring

        return [bring(file) for file in Listing("data.source").find(source)]
    path = Path(source).expanduser()
    if path.is_dir():
        return files_below(path)
    if path.is_file():
        return [path]
    matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
    return sorted(match for match in matches if match.is_file())


def no_files(source: str, remedy: str) -> UserError:
    """The error for a source that names no file."""
    nothing = "no such file, directory or match"
    if Path(source).expanduser().is_dir():
        nothing = "an empty directory"
    return UserError(f"data source {source}: {nothing}", remedy, "data.source")


def standard_library() -> list[Path]:
    """The sorted .py files of this Python's standard library: real text without a download.

    Tests of the standard library are left out.
    """
    skipped = {"test", "tests", "idle_test", "lib2to3", "__pycache__"}
    skipped |= {"site-packages", "dist-packages"}
    files: list[Path] = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = [name for name in subfolders if name not in skipped]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


def files_below(root: Path) -> list[Path]:
    """A directory's files, without hidden ones and run directories.

    A run that reads what it writes could never be resumed.
    """
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name
            for name in subfolders
            if not name.startswith(".") and not is_run_directory(Path(folder, name))
        ]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(files)


def is_run_directory(folder: Path) -> bool:
    """Whether a run is kept in the folder; what it writes is no data."""
    return all((folder / part).exists() for part in ("plan.json", "checkpoints"))


def passed_over(sources: Sequence[str], read: Sequence[Path]) -> list[str]:
    """Lines for the user: the files below directories that a config names and that are not read.

    Hidden files and run directories are never looked at.
    """
    known = {file.resolve() for file in read}
    lines = []
    for source in sources:
        root = Path(source).expanduser()
        if source == STANDARD_LIBRARY or not root.is_dir():
            continue
        others = [
            str(file.relative_to(root)) for file in files_below(root) if file.resolve() not in known
        ]
        if others:
            lines.append(
                f"{source}: {counted(len(others), 'file')} not read: {some(others, _SHOWN)}"
            )
    return lines


_BLOCK = 1 << 22  # ids that are read at once
_DECODED = 1 << 22  # bytes decoded at once: a whole file's text would take several times its size
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
Item = TypeVar("Item")


def batches_of(
    items: Iterable[Item], size: Callable[[Item], int], *, least: int, most: int = sys.maxsize
) -> Iterator[list[Item]]:
    """Neighbouring items, several at a time.

    least: size of a batch at which it ends, though the last may be smaller. most: items of a batch
    """
    batch: list[Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= least or len(batch) >= most:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def check_is_text(content: bytes, path: Path, begin: int = 0) -> None:
    """UserError: the content has a zero byte, or is no UTF-8.

    content: whole lines of the file, from the byte `begin` on
    """
    if content.startswith(_UTF16) and begin == 0:
        raise UserError(
            f"{path} is no UTF-8: it is UTF-16", _convert("utf-16", path), "data.source"
        )
    if b"\0" in content:
        raise UserError(
            f"{path} is no text: it has zero bytes",
            "name the text files, or a glob that leaves it out; raw token ids are in .bin files",
            "data.source",
        )
    decoder, view = codecs.getincrementaldecoder("utf-8")(), memoryview(content)
    try:
        for first in range(0, len(content), _DECODED):
            decoder.decode(view[first : first + _DECODED])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise _no_utf8(content, path, begin) from None


def _no_utf8(content: bytes, path: Path, begin: int) -> UserError:
    start = len(content)
    try:
        content.decode()
    except UnicodeDecodeError as error:
        start = error.start
    from samecurve.data.shards.json_lines import line_number  # of use to few

    line = line_number(path, begin + start)
    return UserError(
        f"{path} is no text: the byte {content[start]:#04x} of line {line} is no UTF-8",
        f"{_convert('latin1', path)} (latin1, or the encoding that it has); or a glob that leaves"
        " it out",
        "data.source",
    )


def _convert(encoding: str, path: Path) -> str:
    return f"iconv -f {encoding} -t utf-8 {quote(str(path))} > new.txt"


def check_whole_tokens(path: Path, dtype: str) -> None:
    """UserError: the file's size is no multiple of a token's size."""
    size = path.stat().st_size
    if size % np.dtype(dtype).itemsize == 0:
        return
    remedy = "was it copied whole?"
    if size % 2 == 0:
        remedy = "--set data.token_dtype=uint16, if that is what it holds"
    raise UserError(
        f"{path} has {size} bytes, which are no whole number of {dtype} tokens",
        remedy,
        "data.token_dtype",
    )


def id_blocks(path: Path, dtype: str) -> Iterator[NDArray[Any]]:
    """The ids of a file, several at a time."""
    if not path.stat().st_size:  # an empty file can't be mapped
        return
    ids = np.memmap(path, dtype, "r")
    for first in range(0, len(ids), _BLOCK):
        yield np.asarray(ids[first : first + _BLOCK])

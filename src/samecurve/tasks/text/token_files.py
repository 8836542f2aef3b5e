"""Files of token ids, one number after another: the `.bin` files of a user, and the cache's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.errors import UserError

_BLOCK = 1 << 22  # ids that are read at once


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


def check_cached_tokens(path: Path, dtype: str, num_tokens: int) -> None:
    """UserError: a token file of the cache has another size than when it was made."""
    if path.stat().st_size != num_tokens * np.dtype(dtype).itemsize:
        raise UserError(
            f"the token file {path} has been cut off",
            f"remove {path.parent}: it is made anew",
            "data",
        )

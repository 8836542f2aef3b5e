"""What frozen encoders make of pictures and captions, kept in files that are named by content.

Each picture and each caption is encoded alone, by one rank. So a file has the same bits whoever
made it, and a later run with the same encoders, on any devices, finds it.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file, save
from torch import Tensor

from samecurve.seam import UserError, write_whole
from samecurve.torch_engine.model.model_setup import one_thread

Make = Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Encodings:
    """The files of one frozen encoder. home: a directory for this encoder alone"""

    home: Path

    def path(self, key: str) -> Path:
        return self.home / key[:2] / f"{key}.safetensors"

    def has(self, key: str) -> bool:
        return self.path(key).is_file()

    def keep(self, key: str, arrays: Mapping[str, Tensor]) -> None:
        """Write a file whole or not at all."""
        whole = {name: array.detach().cpu().contiguous() for name, array in arrays.items()}
        self.path(key).parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path(key), save(whole))

    def read(self, key: str) -> dict[str, NDArray[np.float32]]:
        """The arrays of a file. UserError: it has gone, or is damaged."""
        path = self.path(key)
        try:
            return {name: array.float().numpy() for name, array in load_file(path).items()}
        except Exception as error:  # the library raises many kinds
            raise UserError(
                f"{path} can't be read: {error}",
                f"remove {path}: the next start encodes it again",
                "data.source",
            ) from None


def text_key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Work:
    """A file that is to be there. make: its arrays"""

    store: Encodings
    key: str
    make: Make

    @property
    def is_done(self) -> bool:
        return self.store.has(self.key)

    def do(self) -> None:
        """Make the file if it is absent, in one thread, so that its bits are those of any rank."""
        if not self.is_done:
            with one_thread():
                self.store.keep(self.key, self.make())

"""Text to token ids and back: bytes, or a tokenizer of the `tokenizers` library."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from samecurve.errors import UserError


class Tokenizer(Protocol):
    size: int

    def encode(self, texts: Sequence[bytes]) -> NDArray[Any]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """A token is a byte."""

    size = 256

    def encode(self, texts: Sequence[bytes]) -> NDArray[Any]:
        return np.frombuffer(b"".join(texts), dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


class LibraryTokenizer:
    """A tokenizer.json, whoever made it."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as FileTokenizer

        if not path.is_file():
            raise UserError(
                f"there is no tokenizer file {path}",
                "give data.tokenizer as bytes, bpe:8000, or the path of a tokenizer.json",
                "data.tokenizer",
            )
        try:
            self._inner = FileTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            raise UserError(
                f"{path} is no tokenizer.json: {error}",
                "a file written by the `tokenizers` library",
                "data.tokenizer",
            ) from None
        self._path = path
        # a file may ask for these, and would then cut or stretch the corpus
        self._inner.no_truncation()
        self._inner.no_padding()
        self.size: int = 1 + max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, texts: Sequence[bytes]) -> NDArray[Any]:
        strings = [text.decode("utf-8", "replace") for text in texts]
        try:
            encodings = self._inner.encode_batch_fast(strings, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exceptions
            raise UserError(
                f"{self._path} can't encode this text: {error}",
                "a tokenizer that knows every byte (bpe:N makes one)",
                "data.tokenizer",
            ) from None
        ids = [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]
        return np.concatenate([np.zeros(0, np.uint32), *ids])

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._inner.decode(list(ids)))

    def coverage(self, text: str) -> float:
        """Share of a text's printing characters that lie in some token.

        What a tokenizer does not know it may leave out without a word.
        """
        spans = self._inner.encode(text, add_special_tokens=False).offsets
        covered = np.zeros(len(text) + 1, dtype=np.int64)
        for first, last in spans:
            covered[first] += 1
            covered[last] -= 1
        printing = np.array([not character.isspace() for character in text], dtype=bool)
        if not printing.any():
            return 1.0
        in_token = np.cumsum(covered)[:-1] > 0
        return float(in_token[printing].mean())


def train_bpe(
    size: int, texts: Iterable[str], path: Path, special_tokens: Sequence[str] = ()
) -> None:
    """A byte-level BPE of at most `size` tokens, written to path. special_tokens: the first ids."""
    from tokenizers import Tokenizer as TrainedTokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = TrainedTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special_tokens),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))

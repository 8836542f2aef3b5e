"""Text to token ids and back: bytes, or a tokenizer of the `tokenizers` library."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.seam import UserError

TokenIds = NDArray[np.uint32]

PROBED = 1 << 18  # bytes or characters of text on which a foreign tokenizer is tried
_KNOWS_BYTES = "a tokenizer that knows every byte (bpe:N makes one)"  # a remedy
_LEAST_KNOWN = 0.99  # share of the characters that a tokenizer must know


class ByteTokenizer:
    """A token is a byte. size: all ids are below it."""

    size = 256

    def encode_bytes(self, texts: Sequence[bytes]) -> NDArray[Any]:
        """The ids of all texts, one text after another."""
        return np.frombuffer(b"".join(texts), dtype=np.uint8)

    def encode(self, texts: Sequence[str]) -> list[TokenIds]:
        """The ids of each text by itself."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text. special: tokens that stand for no text are written out too; a byte is text."""
        del special
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


@contextmanager
def library_errors(cause: str, remedy: str) -> Iterator[None]:
    """Turn what the tokenizers library raises into a UserError.

    It raises bare Exceptions; where its own code fails, a PanicException, which is none.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{cause}: {error}", remedy, "data.tokenizer") from None


class LibraryTokenizer:
    """A tokenizer.json, whoever made it, with the methods of ByteTokenizer.

    name: of the tokenizer in errors; the path if not given. inner: the library's own object.
    """

    def __init__(self, path: Path, name: str = "") -> None:
        from tokenizers import Tokenizer as FileTokenizer

        if not path.is_file():
            raise UserError(
                f"there is no tokenizer file {path}",
                "give data.tokenizer as bytes, bpe:8000, or the path of a tokenizer.json",
                "data.tokenizer",
            )
        with library_errors(
            f"{path} is no tokenizer.json", "a file written by the `tokenizers` library"
        ):
            self.inner = FileTokenizer.from_file(str(path))
        self._name = name or str(path)
        self._check_stretching()
        # a file may ask for these, and would then cut or stretch the texts
        self.inner.no_truncation()
        self.inner.no_padding()
        self.size: int = 1 + max(self.inner.get_vocab(with_added_tokens=True).values(), default=-1)

    def _check_stretching(self) -> None:
        """UserError: rules of the tokenizer make texts so long that no memory holds them."""
        from samecurve_products.text_files.stretching import MOST, stretching

        for what, part in (("normalizer", self.inner.normalizer), ("decoder", self.inner.decoder)):
            factor = stretching(part)
            if factor > MOST:
                raise UserError(
                    f"{self._name}: the rules of its {what} can make a text {factor:.3g} times as"
                    f" long; {MOST:g} times is the most",
                    f"a tokenizer whose {what} has no such Replace or Prepend rules: is the file"
                    " from somebody whom you trust?",
                    "data.tokenizer",
                )

    def encode_bytes(self, texts: Sequence[bytes]) -> NDArray[Any]:
        ids = self.encode([text.decode() for text in texts])
        return np.concatenate([np.zeros(0, np.uint32), *ids])

    def encode(self, texts: Sequence[str]) -> list[TokenIds]:
        with library_errors(f"{self._name} can't encode this text", _KNOWS_BYTES):
            encodings = self.inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return str(self.inner.decode(list(ids), skip_special_tokens=not special))

    def check_coverage(self, sample: str) -> None:
        """UserError: the tokenizer would silently leave out some of the text."""
        known = self._coverage(sample)
        if known < _LEAST_KNOWN:
            raise UserError(
                f"{self._name} knows {known:.1%} of the text's characters and would leave the rest"
                " out",
                "a tokenizer made for such text (bpe:N makes one)",
                "data.tokenizer",
            )

    def _coverage(self, text: str) -> float:
        """The share of a text's printing characters that lie in some token."""
        with library_errors(f"{self._name} can't encode the text", _KNOWS_BYTES):
            spans = self.inner.encode(text, add_special_tokens=False).offsets
        covered = np.zeros(len(text) + 1, dtype=np.int64)
        for first, last in spans:
            covered[first] += 1
            covered[last] -= 1
        printing = np.array([not character.isspace() for character in text], dtype=bool)
        if not printing.any():
            return 1.0
        in_token = np.cumsum(covered)[:-1] > 0
        return float(in_token[printing].mean())


Tokenizer = ByteTokenizer | LibraryTokenizer


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

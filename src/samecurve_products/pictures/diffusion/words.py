"""The vocabulary of a new model: the words of its captions, as numbers."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

PADDING, UNKNOWN, EMPTY = 0, 1, 2  # EMPTY: a caption without words, as an unguided sample has it
_SPECIAL = 3
_WORD = re.compile(r"\w+|[^\w\s]")
_MOST_WORDS = 1 << 16


@dataclass(frozen=True)
class Words:
    """The words that a new model knows, and how many of them a caption may have."""

    words: tuple[str, ...]  # sorted; number i + 3 stands for words[i]
    length: int  # words of the longest caption

    @classmethod
    def of(cls, captions: Iterable[str]) -> "Words":
        """The words of these captions. A later caption's other words are all one unknown word."""
        known: set[str] = set()
        length = 1
        for caption in captions:
            parts = split_words(caption)
            known.update(parts)
            length = max(length, len(parts))
        return cls(tuple(sorted(known)[:_MOST_WORDS]), length)

    @classmethod
    def from_json(cls, text: str) -> "Words":
        values = json.loads(text)
        return cls(tuple(values["words"]), int(values["length"]))

    def to_json(self) -> str:
        return json.dumps({"length": self.length, "words": self.words}, ensure_ascii=False)

    def __len__(self) -> int:
        return len(self.words) + _SPECIAL

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words, _SPECIAL)}

    def encode(self, captions: Sequence[str]) -> NDArray[np.int64]:
        """Numbers of the words, [captions, length]; the rest of a row is padding.

        Words beyond `length` are left out.
        """
        rows = np.full((len(captions), self.length), PADDING, np.int64)
        for row, caption in zip(rows, captions, strict=True):
            numbers = [self._numbers.get(word, UNKNOWN) for word in split_words(caption)]
            numbers = numbers[: self.length] or [EMPTY]
            row[: len(numbers)] = numbers
        return rows


def split_words(caption: str) -> list[str]:
    """The words and marks of a caption, in lower case."""
    return _WORD.findall(caption.lower())

"""Texts with labels as samples, by id: a row has one text, or two, and the number of its class.

input_ids is int64, documents (1; 0 is padding) int32, both as long as the text; label is int64.
Where the tokenizer gives types to two texts: types, int64, 0 in the first text, 1 in the second.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.seam import IGNORED, Ids, UserError
from samecurve_products.text.huggingface.data.text_tokenizer import PairLayout, TextTokenizer
from samecurve_products.text.huggingface.data.token_rows import TokenRows
from samecurve_products.text.huggingface.data.tokenized_source import (
    TokenizedSource,
    has_column,
    sort_classes,
)

Numbers = NDArray[np.int64]

_SHOWN = 20  # classes named in a line


def choose_classes(corpora: Sequence[TokenizedSource], wanted: Sequence[str]) -> list[str]:
    """The classes in the order of their numbers: the wanted classes, else those of the data.

    UserError: there are fewer than two, or a label is none of the wanted classes.
    """
    there = sort_classes({name for corpus in corpora for name in corpus.notes.classes})
    unknown = [name for name in there if name not in wanted]
    if wanted and unknown:
        raise UserError(
            f"the label {unknown[0]} is none of the model's classes: {', '.join(wanted[:_SHOWN])}",
            "add it to model.classes, or leave such rows out of the data",
            "data.source",
        )
    classes = list(wanted) or there
    if len(classes) < 2:
        raise UserError(
            f"all labels are {classes[0]}: there is nothing to tell apart",
            "texts of two classes or more; model.classes names those that the data lacks",
            "data.source",
        )
    return classes


def are_pairs(corpora: Sequence[TokenizedSource]) -> bool:
    """Whether rows have two texts. UserError: some rows have two, and others one."""
    return has_column(
        corpora,
        "text_pair",
        having="classified_pair",
        lacking="classified",
        reason="a model reads one or two texts",
    )


class LabelledRows:
    """Rows of one text or two, with the class.

    rows: without padding. classes: the names, by number. pairs: the layout of two texts in a row;
    None: there is one. longest: tokens of a row at most. suffix: tokens that end a text, also one
    that is cut.
    """

    def __init__(
        self,
        rows: TokenRows,
        corpora: Sequence[TokenizedSource],
        classes: Sequence[str],
        *,
        pairs: PairLayout | None = None,
        longest: int,
        suffix: NDArray[Any],
    ) -> None:
        self._rows, self._classes = rows, list(classes)
        self._pairs, self._longest, self._suffix = pairs, longest, suffix
        number = {name: index for index, name in enumerate(classes)}
        labels, starts, base = [], [], 0
        for corpus in corpora:
            here = np.array([number[name] for name in corpus.notes.classes], np.int64)
            labels.append(here[corpus.labels])
            starts.append(base + np.cumsum(corpus.lengths) - corpus.lengths)
            base += corpus.notes.num_tokens
        self._labels, self._starts = np.concatenate(labels), np.concatenate(starts)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def row_lengths(self) -> Numbers:
        return np.minimum(self._rows.row_lengths, self._longest)

    def fingerprint(self) -> str:
        return f"{self._rows.fingerprint()}/{'/'.join(self._classes)}"

    def labels(self, ids: Ids) -> Numbers:
        """The class of each row."""
        addresses = self._rows.first_addresses(ids)
        documents = np.searchsorted(self._starts, addresses, side="right") - 1
        return self._labels[documents]

    def count_classes(self) -> Numbers:
        """How many rows each class has."""
        every = np.arange(len(self))
        return np.bincount(self.labels(every), minlength=len(self._classes)).astype(np.int64)

    def __getitem__(self, ids: Ids) -> Mapping[str, Any]:
        columns = self._rows[ids]
        labels = {"label": self.labels(ids)}
        if self._pairs is None:
            tokens = [cut_text(ids, self._suffix, self._longest) for ids in columns["input_ids"]]
            documents = [np.ones(len(row), np.int32) for row in tokens]
            return {"input_ids": tokens, "documents": documents, **labels}
        rows = [
            cut_pair(tokens, self._mark(tokens, labels), self._pairs, self._longest)
            for tokens, labels in zip(columns["input_ids"], columns["labels"], strict=True)
        ]
        return {**{name: [row[name] for row in rows] for name in rows[0]}, **labels}

    def _mark(self, tokens: Numbers, labels: Numbers) -> int:
        """The first token after the first text. A text without a token may have left no mark."""
        marks = np.flatnonzero(labels != IGNORED)
        if len(marks):
            return int(marks[0])
        assert self._pairs is not None
        if not len(self._pairs.before):
            return 0
        return len(tokens) - len(self._pairs.between) - len(self._pairs.after)


def cut_text(tokens: NDArray[Any], suffix: NDArray[Any], longest: int) -> NDArray[Any]:
    """A text of `longest` tokens at most: it keeps its beginning, and the tokens that end it."""
    if len(tokens) <= longest:
        return tokens
    kept = max(0, longest - len(suffix))
    return np.concatenate([tokens[:kept], suffix.astype(np.int64)])[:longest]


def cut_pair(
    tokens: NDArray[Any], mark: int, pairs: PairLayout, longest: int
) -> dict[str, NDArray[Any]]:
    """Two texts as a row of `longest` tokens at most: the longer one is cut first, at its end.

    mark: the first token after the first text.
    """
    first = tokens[len(pairs.before) : mark]
    second = tokens[mark + len(pairs.between) : len(tokens) - len(pairs.after)]
    room = max(0, longest - (len(tokens) - len(first) - len(second)))
    keep = _kept(len(first), len(second), room)
    whole = pairs.join(first[: keep[0]], second[: keep[1]]).astype(np.int64)[:longest]
    row: dict[str, NDArray[Any]] = {
        "input_ids": whole,
        "documents": np.ones(len(whole), np.int32),
    }
    if pairs.types is not None:
        begins = len(pairs.before) + keep[0] + pairs.types
        row["types"] = (np.arange(len(whole)) >= begins).astype(np.int64)
    return row


def _kept(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of each text are kept, by the tokenizers library's rule longest_first."""
    if first + second <= room:
        return first, second
    short = min(first, second, room // 2)
    kept = short, room - short
    return kept if first <= second else (kept[1], kept[0])


def describe_classes(classes: Sequence[str], counts: Numbers) -> str:
    """A line about the classes for the user."""
    pairs = [f"{name} {count}" for name, count in zip(classes, counts, strict=True)]
    more = f", and {len(pairs) - _SHOWN} more" if len(pairs) > _SHOWN else ""
    return f"{len(classes)} classes, rows of each: {', '.join(pairs[:_SHOWN])}{more}"


def prompted(text: str, tokenizer: TextTokenizer, longest: int) -> dict[str, NDArray[Any]]:
    """The row of a prompt: one text, or two with a tab between them."""
    first, tab, second = text.partition("\t")
    if tab:
        of_first, of_second = tokenizer.encode([first, second])
        joined = tokenizer.pairs.join(of_first, of_second)
        mark = len(tokenizer.pairs.before) + len(of_first)
        return cut_pair(joined, mark, tokenizer.pairs, longest)
    parts = [tokenizer.prefix, tokenizer.encode([text])[0], tokenizer.suffix]
    whole = cut_text(np.concatenate(parts).astype(np.int64), tokenizer.suffix, longest)
    return {"input_ids": whole, "documents": np.ones(len(whole), np.int32)}

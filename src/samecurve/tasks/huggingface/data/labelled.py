"""Texts with labels as samples, by id: a text a row, and the number of its class.

input_ids is int64, documents (1; 0 is padding) int32, both as long as the text; label is int64.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.determinism.data_order import Ids
from samecurve.errors import UserError
from samecurve.tasks.huggingface.data.corpus import Corpus, sort_classes
from samecurve.tasks.huggingface.data.rows import TokenRows, padded

Numbers = NDArray[np.int64]

_SHOWN = 20  # classes named in a line
_COLUMNS = ("input_ids", "documents")


def choose_classes(corpora: Sequence[Corpus], wanted: Sequence[str]) -> list[str]:
    """The classes in the order of their numbers: those wanted, else those of the data.

    UserError: there is one at most, or a label is none of those wanted.
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


class LabelledRows:
    """Rows of one text each, with its class.

    rows: without padding. classes: the names, by number.
    """

    def __init__(self, rows: TokenRows, corpora: Sequence[Corpus], classes: Sequence[str]) -> None:
        self._rows, self._classes = rows, list(classes)
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
        return self._rows.row_lengths

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
        return {**{name: columns[name] for name in _COLUMNS}, "label": self.labels(ids)}


def collate_labelled(samples: Sequence[Mapping[str, Any]], pad: int = 0) -> dict[str, NDArray[Any]]:
    """Texts padded to the longest of them, and their classes."""
    sizes = np.array([len(sample["input_ids"]) for sample in samples])
    flat = {name: np.concatenate([sample[name] for sample in samples]) for name in _COLUMNS}
    labels = np.array([sample["label"] for sample in samples], np.int64)
    return {**padded(flat, sizes, int(sizes.max()), pad), "label": labels}


def describe_classes(classes: Sequence[str], counts: Numbers) -> str:
    """A line for the user."""
    pairs = [f"{name} {count}" for name, count in zip(classes, counts, strict=True)]
    more = f", and {len(pairs) - _SHOWN} more" if len(pairs) > _SHOWN else ""
    return f"{len(classes)} classes, rows of each: {', '.join(pairs[:_SHOWN])}{more}"

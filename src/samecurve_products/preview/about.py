"""The knowledge that a task has of its data beside the rows: words for them, counts, and what was
left out.

Our own tasks tell it with a method about_data(). Of a user's task open_data.py finds it in members
that every task may have: the notes and the reference of facts(), and a tokenizer among assets().
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.seam import Arrays, Ids, Source

Decode = Callable[[Sequence[int]], str]  # token ids -> text, with tokens that stand for no text
BesideRows = Callable[[Ids], Mapping[str, Sequence[str]]]


@dataclass(frozen=True)
class LeftOut:
    """Rows of a source that are left out, or are cut.

    reason: why, as it stands behind the rows. rows: how many. places: of the first ones
    """

    reason: str
    rows: int
    places: Sequence[str] = ()


@dataclass(frozen=True)
class BucketCount:
    """A bucket of training samples of one shape. samples: those that an epoch reads"""

    name: str
    pictures: int
    samples: int


@dataclass(frozen=True, kw_only=True)
class AboutData:
    """The facts that a task gives of its data.

    decode: None: whole numbers are shown as numbers
    classes: names by number; empty: not known. class_counts: of the training samples
    channels: names of the rows of a window
    tokens, loss_tokens: in an epoch, and how many of them count in the loss; None: not known
    lengths: of all documents, or samples, in tokens; `lengths_of` names them
    lines: what was read, and what became of it. left_out: None: not known
    labels_of: the labels that the loss itself makes of a batch; None: it makes none
    beside_rows: by split, what a reader looks at beside the arrays of samples: ids -> by name, a
        text for each id
    sources: by split, what is read in place of the task's own data, whose rows need files that
        only a run makes
    buckets: of the training samples, where they lie in buckets
    """

    decode: Decode | None = None
    classes: Sequence[str] = ()
    class_counts: Sequence[int] = ()
    channels: Sequence[str] = ()
    tokens: int | None = None
    loss_tokens: int | None = None
    lengths: NDArray[np.int64] | None = None
    lengths_of: str = "sample"
    lines: Sequence[str] = ()
    left_out: Sequence[LeftOut] | None = None
    labels_of: Callable[[Arrays], Any] | None = None
    beside_rows: Mapping[str, BesideRows] = field(default_factory=dict)
    sources: Mapping[str, Source] = field(default_factory=dict)
    buckets: Sequence[BucketCount] = ()

"""How the documents of all sources become rows: held out, repeated, cut and packed.

The rows follow from the documents' lengths and the config alone; they are computed once and kept
in the cache. A piece is a document, or the part of a document in a row. Its address counts the
tokens of all sources, one after another.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.determinism.data_order import permute
from samecurve.errors import UserError
from samecurve.tasks.huggingface.data.packing import pack
from samecurve.tasks.huggingface.data.tokenized_source import TokenizedSource
from samecurve.tasks.huggingface.sections import HFData

Numbers = NDArray[np.int64]

_HELD_OUT, _REPEATED = 1, 2  # seeds of two random orders of documents


@dataclass(frozen=True)
class Pieces:
    """Pieces of documents.

    start: address of the first token. document: number in the source. loss_tokens: how many tokens
    are predicted.
    """

    start: Numbers
    length: Numbers
    document: Numbers
    loss_tokens: Numbers

    def __len__(self) -> int:
        return len(self.start)

    def at(self, numbers: NDArray[np.int64] | NDArray[np.bool_]) -> "Pieces":
        return Pieces(**{field.name: getattr(self, field.name)[numbers] for field in fields(self)})


@dataclass(frozen=True)
class Rows:
    """Rows of pieces.

    start, length: of each piece. row: the index of each row's first piece, and the end of the last.
    """

    start: Numbers
    length: Numbers
    row: Numbers

    def save(self, directory: Path, name: str) -> None:
        for field in fields(self):
            getattr(self, field.name).tofile(directory / f"{name}.{field.name}.bin")

    @classmethod
    def load(cls, directory: Path, name: str) -> "Rows":
        return cls(
            **{field.name: _mapped(directory / f"{name}.{field.name}.bin") for field in fields(cls)}
        )


@dataclass(frozen=True)
class SourceStatistics:
    """Counts of one source in an epoch."""

    source: str
    weight: float
    documents: int  # in the source
    tokens: int  # in an epoch, with repetitions


@dataclass(frozen=True)
class LayoutStatistics:
    """Counts of documents that are used, cut or left out."""

    sources: tuple[SourceStatistics, ...]
    rows: int
    held_out_rows: int
    tokens: int  # in an epoch
    loss_tokens: int  # in an epoch, that count in the loss
    cut: int  # documents longer than a row
    tokens_left_out: int  # of documents that were cut off
    empty: int  # documents without a character
    without_loss: int  # documents without a token that counts in the loss

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "LayoutStatistics":
        sources = value.pop("sources")
        return cls(sources=tuple(SourceStatistics(**each) for each in sources), **value)

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class _SourcePieces:
    """Pieces of one source, and counts of what it leaves out (named as in LayoutStatistics)."""

    train: Pieces
    held_out: Pieces
    cut: int
    tokens_left_out: int
    without_loss: int


def lay_out(
    data: HFData, corpora: Sequence[TokenizedSource]
) -> tuple[Rows, Rows, LayoutStatistics]:
    """Lay documents out as rows: rows to train on, rows held out, and statistics.

    UserError: nothing is left to train on.
    """
    bases = np.cumsum([0, *(corpus.notes.num_tokens for corpus in corpora)]).tolist()
    parts = [
        _of_source(data, source.weight, corpus, base)
        for source, corpus, base in zip(data.sources, corpora, bases[:-1], strict=True)
    ]
    train = _joined([part.train for part in parts])
    without_loss = sum(part.without_loss for part in parts)
    if not len(train):
        raise _nothing_left(data, sum(len(corpus.lengths) for corpus in corpora), without_loss)
    rows = _rows(train, data)
    held_out = _rows(_joined([part.held_out for part in parts]), data)
    statistics = LayoutStatistics(
        sources=tuple(
            SourceStatistics(
                source=source.source,
                weight=source.weight,
                documents=len(corpus.lengths),
                tokens=int(part.train.length.sum()),
            )
            for source, corpus, part in zip(data.sources, corpora, parts, strict=True)
        ),
        rows=len(rows.row) - 1,
        held_out_rows=len(held_out.row) - 1,
        tokens=int(train.length.sum()),
        loss_tokens=int(train.loss_tokens.sum()),
        cut=sum(part.cut for part in parts),
        tokens_left_out=sum(part.tokens_left_out for part in parts),
        empty=sum(corpus.notes.empty for corpus in corpora),
        without_loss=without_loss,
    )
    return rows, held_out, statistics


def _nothing_left(data: HFData, documents: int, without_loss: int) -> UserError:
    cause = f"nothing is left to train on: {documents} documents"
    if without_loss == documents:
        return UserError(
            f"{cause}, none with a token to be learnt in its first {data.seq_len}",
            "more text, or a larger data.seq_len",
            "data.source",
        )
    weights = ", ".join(f"{source.weight:g}" for source in data.sources)
    return UserError(
        f"{cause}, of which {without_loss} have no token to be learnt in their first"
        f" {data.seq_len}; of the rest an epoch reads the weight's share ({weights})",
        "more text, or a larger weight",
        "data.source",
    )


def _of_source(data: HFData, weight: float, corpus: TokenizedSource, base: int) -> _SourcePieces:
    pieces, cut, tokens_left_out = _cut(corpus, data.seq_len, base)
    kept, held_out = _split(pieces, data.validation)
    return _SourcePieces(
        train=_repeat(kept, weight),
        held_out=held_out,
        cut=cut,
        tokens_left_out=tokens_left_out,
        without_loss=len(corpus.lengths) - len(np.unique(pieces.document)),
    )


def _cut(corpus: TokenizedSource, width: int, base: int) -> tuple[Pieces, int, int]:
    """A source's pieces that count in the loss, and how many documents and tokens were cut off.

    A long text becomes several pieces. A long conversation, or a prompt with its completion, keeps
    only its beginning, because the rest would lack its context.
    """
    lengths = corpus.lengths
    starts = np.cumsum(lengths) - lengths
    is_text = corpus.of_kind("text")
    is_pair = corpus.of_kind("classified_pair")
    of_texts = is_pair | corpus.of_kind("pair") | corpus.of_kind("triple")
    widths = np.where(of_texts, lengths, width)  # each text is cut by itself, later
    number = np.where(is_text, -(-lengths // width), np.minimum(lengths, 1))
    document = np.repeat(np.arange(len(lengths)), number)
    index = np.arange(len(document)) - np.repeat(np.cumsum(number) - number, number)
    start = starts[document] + index * width
    length = np.minimum(lengths[document] - index * width, widths[document])
    loss_tokens = _count_loss_tokens(corpus, start, length)
    is_classified = (is_pair | corpus.of_kind("classified"))[document]
    loss_tokens = np.where(is_classified, np.minimum(length, 1), loss_tokens)  # its label
    pieces = Pieces(start + base, length, document, loss_tokens)
    pieces = pieces.at(loss_tokens > 0)
    long = lengths > widths
    left_out = np.where(long & ~is_text, lengths - width, 0).sum()
    return pieces, int(long.sum()), int(left_out)


def _count_loss_tokens(corpus: TokenizedSource, start: Numbers, length: Numbers) -> Numbers:
    """How many tokens are predicted in each piece: not the first, which has nothing before it."""
    if corpus.loss_mask is None or not len(start):
        return np.maximum(length - 1, 0)
    bounds = np.stack([start, start + length], 1).reshape(-1)
    flags = corpus.loss_mask
    if bounds[-1] == len(flags):  # reduceat accepts only indices inside the array
        bounds = bounds[:-1]
    sums = np.add.reduceat(flags, bounds, dtype=np.int64)[::2]
    return np.where(length > 0, sums - flags[start], 0)


def _split(pieces: Pieces, share: float) -> tuple[Pieces, Pieces]:
    """Split pieces into those trained on and those held out.

    Whole documents are held out, in a random order, until the share of tokens is reached. Of the
    last document only the end is held out.
    """
    if not share or len(pieces) < 2:
        return pieces, pieces.at(np.zeros(0, np.int64))
    documents = np.unique(pieces.document)
    turn = permute(np.arange(len(documents)), len(documents), _HELD_OUT, 0)
    rank = turn[np.searchsorted(documents, pieces.document)]
    order = np.lexsort((-pieces.start, rank))
    before = np.cumsum(pieces.length[order]) - pieces.length[order]
    held = order[before < share * pieces.length.sum()][: len(pieces) - 1]
    chosen = np.zeros(len(pieces), bool)
    chosen[held] = True
    return pieces.at(~chosen), pieces.at(chosen)


def _repeat(pieces: Pieces, weight: float) -> Pieces:
    """Repeat pieces by the weight. Its fraction repeats that share of the documents once more."""
    whole, rest = divmod(weight, 1.0)
    documents = np.unique(pieces.document)
    count = round(rest * len(documents))
    turn = permute(np.arange(len(documents)), len(documents), _REPEATED, 0)
    partly = turn[np.searchsorted(documents, pieces.document)] < count
    every = np.arange(len(pieces))
    return pieces.at(np.concatenate([np.tile(every, int(whole)), every[partly]]))


def _joined(parts: Sequence[Pieces]) -> Pieces:
    return Pieces(
        **{
            field.name: np.concatenate([getattr(part, field.name) for part in parts])
            for field in fields(Pieces)
        }
    )


def _rows(pieces: Pieces, data: HFData) -> Rows:
    """Rows of packed pieces; without packing a row for each piece, by length."""
    if data.packing:
        order, row = pack(pieces.length, data.seq_len)
    else:
        order = np.argsort(pieces.length, kind="stable")
        row = np.arange(len(pieces) + 1)
    return Rows(pieces.start[order], pieces.length[order], row)


def _mapped(path: Path) -> Numbers:
    if not path.stat().st_size:  # an empty file can't be mapped
        return np.zeros(0, np.int64)
    return np.memmap(path, np.int64, "r")

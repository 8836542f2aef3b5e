"""How the documents of all sources become rows: held out, repeated, cut and packed.

The rows follow from the documents' lengths and the config alone; they are computed once and kept
in the cache. A piece is a document, or the part of a document in a row. Its address counts the
tokens of all sources, one after another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from samecurve.core.determinism.data_order import permute
from samecurve.seam import UserError
from samecurve_products.text.huggingface.data.packing import pack
from samecurve_products.text.huggingface.data.tokenized_source import TokenizedSource
from samecurve_products.text.huggingface.sections import HFData, WeightedSource
from samecurve_products.text_files import Role

Numbers = NDArray[np.int64]

USES = ("train", "held_out", "test")  # what rows are for; these name their files in the cache
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
class SourcePart:
    """A split of a source. role: what its rows are used for."""

    source: WeightedSource
    role: Role
    corpus: TokenizedSource


@dataclass(frozen=True)
class LaidOut:
    """Rows by their use, and counts."""

    rows: Mapping[str, Rows]
    statistics: "LayoutStatistics"


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
    too_long: int = 0  # documents that are left out since they are longer than a row


@dataclass(frozen=True)
class _SourcePieces:
    """Pieces of one source by use, and counts of what is left out (as in LayoutStatistics)."""

    by_use: Mapping[str, Pieces]
    cut: int
    tokens_left_out: int
    without_loss: int
    too_long: int


def lay_out(data: HFData, parts: Sequence[SourcePart]) -> LaidOut:
    """Lay documents out as rows. Addresses count the tokens of all parts, one after another.

    UserError: nothing is left to train on.
    """
    bases = np.cumsum([0, *(part.corpus.notes.num_tokens for part in parts)]).tolist()
    evaluated = {part.source.source for part in parts if part.role == "validation"}
    pieces = [
        _of_part(part, base, data, hold_out=part.source.source not in evaluated)
        for part, base in zip(parts, bases[:-1], strict=True)
    ]
    joined = {use: _joined([each.by_use[use] for each in pieces]) for use in USES}
    train = joined["train"]
    trained = [(p, each) for p, each in zip(parts, pieces, strict=True) if p.role == "train"]
    without_loss = sum(each.without_loss for _, each in trained)
    too_long = sum(each.too_long for _, each in trained)
    if not len(train):
        documents = sum(_documents(part.corpus, data) for part, _ in trained)
        raise _nothing_left(data, documents, without_loss, too_long)
    rows = {use: _rows(joined[use], data) for use in USES}
    statistics = LayoutStatistics(
        sources=tuple(
            SourceStatistics(
                source=part.source.source,
                weight=part.source.weight,
                documents=_documents(part.corpus, data),
                tokens=int(each.by_use["train"].length.sum()),
            )
            for part, each in trained
        ),
        rows=len(rows["train"].row) - 1,
        held_out_rows=len(rows["held_out"].row) - 1,
        tokens=int(train.length.sum()),
        loss_tokens=int(train.loss_tokens.sum()),
        cut=sum(each.cut for _, each in trained),
        tokens_left_out=sum(each.tokens_left_out for _, each in trained),
        empty=sum(part.corpus.notes.empty for part, _ in trained),
        without_loss=without_loss,
        too_long=too_long,
    )
    return LaidOut(rows, statistics)


def _nothing_left(data: HFData, documents: int, without_loss: int, too_long: int) -> UserError:
    cause = f"nothing is left to train on: {documents} documents"
    if too_long:
        return UserError(
            f"{cause}, of which {too_long} are longer than data.seq_len {data.seq_len} and left out"
            f" (data.too_long: drop), and {without_loss} have no token to be learnt",
            "a larger data.seq_len, or --set data.too_long=cut: their beginnings are trained on",
            "data.too_long",
        )
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


def _of_part(part: SourcePart, base: int, data: HFData, *, hold_out: bool) -> _SourcePieces:
    """The pieces of one split. hold_out: a share of what is trained on, for evaluation."""
    corpus = part.corpus
    pieces, cut, tokens_left_out = _cut(corpus, data, base)
    too_long = int(dropped_documents(corpus, data).sum())
    by_use = dict.fromkeys(USES, pieces.at(np.zeros(0, np.int64)))
    if part.role == "train":
        kept, by_use["held_out"] = _split(pieces, data.validation if hold_out else 0.0)
        by_use["train"] = _repeat(kept, part.source.weight)
    else:
        by_use["held_out" if part.role == "validation" else "test"] = pieces
    return _SourcePieces(
        by_use=by_use,
        cut=cut,
        tokens_left_out=tokens_left_out,
        without_loss=_documents(corpus, data) - len(np.unique(pieces.document)) - too_long,
        too_long=too_long,
    )


@dataclass(frozen=True)
class Shortened:
    """Documents of a source that are not trained on as a whole, by their numbers.

    nothing_learnt: those without a token that could be learnt. learnt_too_late: those whose tokens
    to be learnt all stand behind the end of a row. cut: those whose end is left out. dropped: those
    that are left out since they are longer than a row
    """

    nothing_learnt: Numbers
    learnt_too_late: Numbers
    cut: Numbers
    dropped: Numbers


def shortened_documents(corpus: TokenizedSource, data: HFData) -> Shortened:
    """The documents that lay_out() leaves out or cuts."""
    pieces, _, _ = _cut(corpus, data, 0)
    count, dropped = _documents(corpus, data), dropped_documents(corpus, data)
    is_used = np.zeros(count, bool)
    is_used[pieces.document] = True
    lasts_longer = corpus.lengths[:count] > data.seq_len
    is_text = corpus.of_kind("text")[:count]
    starts = np.cumsum(corpus.lengths) - corpus.lengths
    learns = _count_loss_tokens(corpus, starts, corpus.lengths)[:count] > 0
    return Shortened(
        nothing_learnt=np.flatnonzero(~is_used & ~learns & ~dropped),
        learnt_too_late=np.flatnonzero(~is_used & learns & ~dropped),
        cut=np.flatnonzero(is_used & lasts_longer & ~is_text),
        dropped=np.flatnonzero(dropped),
    )


def _documents(corpus: TokenizedSource, data: HFData) -> int:
    """How many documents of a source are read."""
    return min(len(corpus.lengths), data.max_documents or len(corpus.lengths))


def dropped_documents(corpus: TokenizedSource, data: HFData) -> NDArray[np.bool_]:
    """For each document that is read, whether it is left out since it is longer than a row."""
    lengths = _lengths_in_a_row(corpus)[: _documents(corpus, data)]
    return (lengths > data.seq_len) & (data.too_long == "drop")


def check_lengths(parts: Sequence[SourcePart], data: HFData) -> None:
    """UserError: data.too_long is refuse, and rows are longer than data.seq_len."""
    if data.too_long != "refuse":
        return
    for part in parts:
        lengths = _lengths_in_a_row(part.corpus)[: _documents(part.corpus, data)]
        long = int((lengths > data.seq_len).sum())
        if long:
            raise UserError(
                f"{part.source.source}: rows longer than data.seq_len {data.seq_len}: {long} of"
                f" {len(lengths)}; the longest has {lengths.max()} tokens",
                f"--seq-len {lengths.max()}; --set data.too_long=drop leaves such rows out, cut"
                " trains on their beginnings",
                "data.too_long",
            )


def _lengths_in_a_row(corpus: TokenizedSource) -> Numbers:
    """The tokens that each document needs to lie in one row without a cut.

    0 for texts: a long one becomes several documents, and loses nothing. Texts that belong together
    (a query and what answers it) are measured one by one.
    """
    lengths = np.where(corpus.of_kind("text"), 0, corpus.lengths)
    of_texts = corpus.of_kind("pair") | corpus.of_kind("triple")
    if not of_texts.any() or corpus.loss_mask is None:
        return lengths
    starts = np.cumsum(corpus.lengths) - corpus.lengths
    bounds = np.union1d(starts, np.flatnonzero(corpus.loss_mask))  # where a text begins
    document = np.searchsorted(starts, bounds, side="right") - 1
    longest = np.zeros_like(lengths)
    np.maximum.at(longest, document, np.diff(bounds, append=corpus.lengths.sum()))
    return np.where(of_texts, longest, lengths)


def _cut(corpus: TokenizedSource, data: HFData, base: int) -> tuple[Pieces, int, int]:
    """A source's pieces that count in the loss, and how many documents and tokens were cut off.

    A long text becomes several pieces. A long conversation, or a prompt with its completion, keeps
    only its beginning, because the rest would lack its context; or it is left out.
    """
    width, dropped = data.seq_len, dropped_documents(corpus, data)
    lengths = corpus.lengths
    starts = np.cumsum(lengths) - lengths
    is_text = corpus.of_kind("text")
    is_pair = corpus.of_kind("classified_pair")
    is_classified = is_pair | corpus.of_kind("classified")
    of_texts = is_classified | corpus.of_kind("pair") | corpus.of_kind("triple")
    widths = np.where(of_texts, lengths, width)  # each text is cut by itself, later
    number = np.where(is_text, -(-lengths // width), np.minimum(lengths, 1))
    number[len(dropped) :] = 0  # data.max_documents are read
    number[: len(dropped)][dropped] = 0
    document = np.repeat(np.arange(len(lengths)), number)
    index = np.arange(len(document)) - np.repeat(np.cumsum(number) - number, number)
    start = starts[document] + index * width
    length = np.minimum(lengths[document] - index * width, widths[document])
    loss_tokens = _count_loss_tokens(corpus, start, length)
    loss_tokens = np.where(is_classified[document], np.minimum(length, 1), loss_tokens)  # its label
    pieces = Pieces(start + base, length, document, loss_tokens)
    pieces = pieces.at(loss_tokens > 0)
    long = (lengths > widths) & (number > 0)
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

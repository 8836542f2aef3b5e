"""Token ids as text whose pieces say what is trained on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.seam import IGNORED
from samecurve_products.preview.about import Decode
from samecurve_products.text_files.tokenizer import ByteTokenizer

_TOKENS = ("input_ids", "tokens", "token_ids", "ids", "text")  # names of token arrays
_LABELS = ("labels", "label", "targets", "target", "y")
_MASKS = ("loss_mask", "loss_weight", "loss_weights")  # 0: not trained on
PADDING_MASK = "padding_mask"
_REAL = ("documents", "attention_mask", PADDING_MASK)  # 0: padding
_OTHERS = ("positions", "position_ids", "types", "token_type_ids")  # that say nothing to a reader
_LEAST = 8  # whole numbers of an array that is taken for tokens, whatever its name
_MOST_TOKENS, _MOST_CHARACTERS = 1024, 4000  # shown of a text

Row = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Piece:
    """A piece of a text. trained: whether its tokens count in the loss; None: not known."""

    text: str
    trained: bool | None


@dataclass(frozen=True)
class Text:
    """A text of a sample.

    tokens: of the sample, without padding. trained: how many tokens count in the loss; None where
    no array says it. follows: whether the pieces end with a token behind the sample, its last
    label. documents: that are packed into it. padding: tokens behind the text. more: tokens that
    are not shown
    """

    name: str
    pieces: Sequence[Piece]
    tokens: int
    trained: int | None
    follows: bool
    documents: int
    padding: int
    more: int


@dataclass(frozen=True)
class TokenColumns:
    """The names of the arrays that are shown as text.

    tokens: [rows, width], or [rows, texts, width]. labels: the labels of each token; None: there
    are none. shifted: a label is of the token behind its own
    """

    tokens: str
    labels: str | None = None
    mask: str | None = None
    real: str | None = None
    shifted: bool = False
    others: tuple[str, ...] = ()

    @property
    def names(self) -> set[str]:
        """All arrays that need not be shown beside the text."""
        own = {self.tokens, self.labels, self.mask, self.real, *self.others}
        return {name for name in own if name}


def token_columns(rows: Row, decode: Decode | None) -> TokenColumns | None:
    """Find the arrays that are tokens, and what belongs to them; None: none is.

    rows: arrays with one row a sample
    """
    tokens = next((name for name in _TOKENS if _may_be_tokens(rows.get(name))), None)
    if tokens is None:
        taken = {*_LABELS, *_MASKS, *_REAL, *_OTHERS}
        wide = [
            name
            for name, array in rows.items()
            if name not in taken
            and _may_be_tokens(array)
            and (decode is not None or array.shape[1] >= _LEAST)
        ]
        if not wide or rows[wide[0]].ndim != 2:
            return None
        tokens = wide[0]
    ids = rows[tokens]

    def of_tokens(names: Sequence[str]) -> str | None:
        alike = (name for name in names if name in rows and rows[name].shape == ids.shape)
        return next((name for name in alike if rows[name].dtype.kind in "iubf"), None)

    labels = of_tokens(_LABELS)
    return TokenColumns(
        tokens=tokens,
        labels=labels,
        mask=of_tokens(_MASKS),
        real=of_tokens(_REAL),
        shifted=labels is not None and _are_shifted(ids, rows[labels]),
        others=tuple(
            name for name in (*_OTHERS, *_REAL) if name in rows and rows[name].shape == ids.shape
        ),
    )


def _may_be_tokens(array: NDArray[Any] | None) -> bool:
    if array is None or array.dtype.kind not in "iu" or array.dtype == np.uint8:
        return False
    return array.ndim in {2, 3} and array.shape[-1] > 1


def _are_shifted(tokens: NDArray[Any], labels: NDArray[Any]) -> bool:
    """Whether each label is the token behind its own, in all rows that are shown."""
    counted = labels[..., :-1] >= 0
    follow = labels[..., :-1] == tokens[..., 1:]
    same = labels[..., :-1] == tokens[..., :-1]
    return bool(follow[counted].all() and not same[counted].all())


def texts_of(row: Row, columns: TokenColumns, decode: Decode | None) -> list[Text]:
    """The texts of one sample. row: its arrays, without the dimension of samples"""
    tokens = row[columns.tokens]
    if decode is None and columns.tokens == "text" and tokens.size and tokens.min() >= 0:
        decode = _bytes_as_text if tokens.max() < ByteTokenizer.size else None
    if tokens.ndim == 1:
        return [_text(columns.tokens, row, columns, decode)]
    parts = {name: row[name] for name in columns.names}
    return [
        _text(
            f"{columns.tokens} {number + 1}",
            {name: array[number] for name, array in parts.items()},
            columns,
            decode,
        )
        for number in range(len(tokens))
    ]


def real_length(row: Row, columns: TokenColumns) -> int:
    """The tokens of a sample without its padding."""
    return int(_is_real(row, columns).sum())


def _bytes_as_text(ids: Sequence[int]) -> str:
    return ByteTokenizer().decode(ids)


def _is_real(row: Row, columns: TokenColumns) -> NDArray[np.bool_]:
    """True for each token that is no padding: told by an array, or else by what is at the end.

    Equal tokens at the end, none of which is trained on, are padding.
    """
    tokens = row[columns.tokens]
    if columns.real is not None:
        real: NDArray[np.bool_] = row[columns.real] != 0
        return real
    inside = np.ones(tokens.shape, bool)
    trained = _trained(row, columns)
    if trained is None or tokens.ndim > 1:
        return inside
    kept = (tokens != tokens[-1]) | trained
    last = int(np.flatnonzero(kept)[-1]) if kept.any() else len(tokens) - 1
    if len(tokens) - last > 2:  # one token may well end a text
        inside[last + 1 :] = False
    return inside


def _trained(row: Row, columns: TokenColumns) -> NDArray[np.bool_] | None:
    """Whether each token is learnt to be predicted; None: no array says it."""
    counts: NDArray[np.bool_] | None = None
    if columns.labels is not None:
        counts = row[columns.labels] != IGNORED
        if columns.shifted:
            counts = np.concatenate([np.zeros_like(counts[..., :1]), counts[..., :-1]], -1)
    if columns.mask is not None:
        masked: NDArray[np.bool_] = row[columns.mask] != 0
        counts = masked if counts is None else counts & masked
    return counts


def _text(name: str, row: Row, columns: TokenColumns, decode: Decode | None) -> Text:
    tokens, trained = row[columns.tokens], _trained(row, columns)
    real = _is_real(row, columns)
    last = row[columns.labels][-1] if columns.shifted and columns.labels else IGNORED
    follows = bool(last != IGNORED)
    if follows:
        tokens, real = np.append(tokens, last), np.append(real, True)
        trained = None if trained is None else np.append(trained, True)
    ids = tokens[real][:_MOST_TOKENS]
    counted = None if trained is None else trained[real]
    pieces = _pieces(ids, None if counted is None else counted[:_MOST_TOKENS], decode)
    return Text(
        name=name,
        pieces=pieces,
        tokens=int(real.sum()) - follows,
        trained=None if counted is None else int(counted.sum()),
        follows=follows,
        documents=int(row["documents"].max()) if columns.real == "documents" else 1,
        padding=int((~real).sum()),
        more=int(real.sum()) - len(ids),
    )


def _pieces(
    ids: NDArray[Any], trained: NDArray[np.bool_] | None, decode: Decode | None
) -> list[Piece]:
    """The text of the ids, cut where it begins or ends to be trained on."""
    if not len(ids):
        return []
    flags = np.zeros(len(ids), bool) if trained is None else trained
    cuts = [0, *(np.flatnonzero(flags[1:] != flags[:-1]) + 1).tolist(), len(ids)]
    texts = _numbers(ids, cuts) if decode is None else _decoded(ids.tolist(), cuts, decode)
    pieces, room = [], _MOST_CHARACTERS
    for text, begin in zip(texts, cuts, strict=False):
        if text and room > 0:
            pieces.append(Piece(text[:room], None if trained is None else bool(flags[begin])))
        room -= len(text)
    if room < 0:
        pieces.append(Piece(" ...", None if trained is None else False))
    return pieces


def _numbers(ids: NDArray[Any], cuts: Sequence[int]) -> list[str]:
    return [
        " ".join(map(str, ids[begin:end].tolist())) + (" " if end < len(ids) else "")
        for begin, end in pairwise(cuts)
    ]


def _decoded(ids: list[int], cuts: Sequence[int], decode: Decode) -> list[str]:
    """The text of each piece, as it stands in the whole text.

    A piece by itself may read otherwise: tokenizers put a blank between words, and a letter may
    have tokens on both sides of a cut.
    """
    whole = decode(ids)
    ends = [_alike(whole, decode(ids[:cut])) for cut in cuts[1:-1]]
    places = [0, *np.maximum.accumulate(np.array(ends, int)).tolist(), len(whole)]
    return [whole[begin:end] for begin, end in pairwise(places)]


def _alike(one: str, other: str) -> int:
    """How many characters two texts have in common, from their beginning."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))

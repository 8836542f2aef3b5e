"""The data of the huggingface task, prepared: the only page here that the task calls.

prepared = prepare_data(data, cache, model=directory, vocab_size=of_the_model)
prepared.train, prepared.held_out         sources of rows (rows.py)
prepared.collate                          None where rows have one width (packing, random)
prepared.tokenizer                        None for random tokens, or raw ones without
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from samecurve.core.protocols import Source
from samecurve.core.system.cache import cache_key
from samecurve.core.system.files import directory_made_once, write_json
from samecurve.data import spread_out
from samecurve.errors import UserError
from samecurve.tasks.huggingface.data.document_columns import Learns
from samecurve.tasks.huggingface.data.labelled import (
    LabelledRows,
    are_pairs,
    choose_classes,
    describe_classes,
)
from samecurve.tasks.huggingface.data.pairs import PairRows, collate_pairs, count_texts
from samecurve.tasks.huggingface.data.raw_tokens import is_raw, open_raw
from samecurve.tasks.huggingface.data.records import texts_in
from samecurve.tasks.huggingface.data.row_layout import LayoutStatistics, Rows, lay_out
from samecurve.tasks.huggingface.data.sources import InputFile, find_input_files, stamp_files
from samecurve.tasks.huggingface.data.text_tokenizer import NOTES, TextTokenizer
from samecurve.tasks.huggingface.data.token_rows import RandomRows, TokenRows, collate
from samecurve.tasks.huggingface.data.tokenized_source import (
    TokenizedSource,
    digest_files,
    tokenize_once,
)
from samecurve.tasks.huggingface.data.tokenizer_source import (
    has_tokenizer,
    keep_tokenizer,
    stamp_tokenizer,
)
from samecurve.tasks.huggingface.sections import HFData
from samecurve.units import counted, show_count

_FORMAT = 2  # of the rows in the cache

Collate = Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]


@dataclass(frozen=True)
class PreparedData:
    """Rows to train on, rows held out, and their properties.

    tokenizer: None for raw ids without one. vocab_size: ids are below it. largest_id: in the data;
    largest_at: its place in files of raw tokens. lines: for the user, what became of the documents;
    reference: the same as numbers.
    classes: of labelled texts, by number; class_counts: their training rows.
    texts: in a row. has_chats: some documents are conversations.
    """

    train: Source
    held_out: Source | None
    collate: Collate | None
    tokenizer: TextTokenizer | None
    vocab_size: int
    largest_id: int
    fingerprint: str
    lines: tuple[str, ...]
    reference: Mapping[str, float]
    classes: tuple[str, ...] = ()
    class_counts: tuple[int, ...] = ()
    texts: int = 1
    largest_at: str = ""
    has_chats: bool = False


def prepare_data(
    data: HFData,
    cache: Path,
    *,
    model: Path | None = None,
    vocab_size: int | None = None,
    learns: Learns = "tokens",
    classes: Sequence[str] = (),
    for_encoder: bool = False,
) -> PreparedData:
    """Prepare the data of a config. Results are kept in the cache and reused.

    model: its directory, which may hold a tokenizer. vocab_size: the model's, of which random
        tokens are drawn. learns: what the model learns of a row. classes: of labels (none: those
        of the data). for_encoder: a BPE that is trained here gets a mask token.
    UserError: a source, the tokenizer or the chat template can't be used.
    """
    if data.is_random:
        return _random(data, vocab_size, learns)
    home = cache / "huggingface"
    tokenizer, corpora = _tokenized(data, home, model=model, learns=learns, for_encoder=for_encoder)
    train, held_out, statistics, key = _rows(data, corpora, home)
    pad = 0 if tokenizer is None else tokenizer.pad
    make = partial(TokenRows, corpora, width=data.seq_len if data.packing else None, pad=pad)
    rows_held_out = make(held_out, known_by=f"{key}/held out")
    largest = max(corpora, key=lambda corpus: corpus.notes.largest_id)
    prepared = PreparedData(
        train=make(train, known_by=key),
        held_out=spread_out(rows_held_out, data.eval_samples),
        collate=None if data.packing else partial(collate, pad=pad),
        tokenizer=tokenizer,
        vocab_size=1 + largest.notes.largest_id if tokenizer is None else tokenizer.size,
        largest_id=largest.notes.largest_id,
        largest_at=largest.largest_at,
        has_chats=any(corpus.of_kind("messages").any() for corpus in corpora),
        fingerprint=key,
        lines=tuple(_lines(data, statistics)),
        reference=_reference(data, statistics),
    )
    if learns == "pair":
        return _paired(prepared, rows_held_out, count_texts(corpora), data)
    if learns == "tokens":
        return prepared
    return _labelled(prepared, corpora, rows_held_out, data=data, classes=classes)


def _tokenized(
    data: HFData, home: Path, *, model: Path | None, learns: Learns, for_encoder: bool
) -> tuple[TextTokenizer | None, list[TokenizedSource]]:
    """The tokenizer (None: raw tokens without one), and each source as tokens."""
    files = [find_input_files(source.source) for source in data.sources]
    raw = [is_raw(each, source.source) for source, each in zip(data.sources, files, strict=True)]
    digests = [digest_files(each, home) for each in files]
    tokenizer = None
    if not all(raw) or _names_tokenizer(data, model, for_encoder=for_encoder):
        tokenizer = keep_tokenizer(
            data,
            model,
            home,
            content="/".join(digests),
            texts=partial(_texts, files, learns),
            for_encoder=for_encoder,
        )
    corpora: list[TokenizedSource] = []
    for source, each, digest, of_ids in zip(data.sources, files, digests, raw, strict=True):
        if of_ids:
            end = None if tokenizer is None else tokenizer.eos
            corpus: TokenizedSource = open_raw(
                each, home, dtype=data.token_dtype, end=end, content=digest, learns=learns
            )
        else:
            assert tokenizer is not None
            corpus = tokenize_once(
                each, tokenizer, home, name=source.source, content=digest, learns=learns
            )
        corpora.append(corpus)
    return tokenizer, corpora


def _names_tokenizer(data: HFData, model: Path | None, *, for_encoder: bool) -> bool:
    """Whether the config names a tokenizer for raw tokens. UserError: a missing or unfit one."""
    if (data.tokenizer or "").startswith("bpe:"):
        raise UserError(
            f"data.tokenizer {data.tokenizer} is trained on text, and there are token ids alone",
            "the tokenizer that made them, or none",
            "data.tokenizer",
        )
    named = bool(data.tokenizer) or (model is not None and has_tokenizer(model))
    if for_encoder and not named:
        raise UserError(
            "the data has only token ids, and no id is known for the mask or for padding",
            "data.tokenizer: the tokenizer that made them",
            "data.tokenizer",
        )
    return named


def _labelled(
    prepared: PreparedData,
    corpora: Sequence[TokenizedSource],
    rows_held_out: TokenRows,
    *,
    data: HFData,
    classes: Sequence[str],
) -> PreparedData:
    """The data with each text's class beside its tokens. rows_held_out: all of them."""
    chosen = choose_classes(corpora, classes)
    assert isinstance(prepared.train, TokenRows)
    assert prepared.tokenizer is not None
    label = partial(
        LabelledRows,
        corpora=corpora,
        classes=chosen,
        pairs=prepared.tokenizer.pairs if are_pairs(corpora) else None,
        longest=data.seq_len,
    )
    labelled = label(prepared.train)
    counts = labelled.count_classes()
    # pairs only: other rows are already cut
    long = int((prepared.train.row_lengths > data.seq_len).sum())
    cut = [f"{counted(long, 'pair')} longer than {data.seq_len} cut"] if long else []
    return replace(
        prepared,
        train=labelled,
        held_out=spread_out(label(rows_held_out), data.eval_samples),
        collate=partial(collate, pad=prepared.tokenizer.pad),
        fingerprint=labelled.fingerprint(),
        lines=(*prepared.lines, *cut, describe_classes(chosen, counts)),
        classes=tuple(chosen),
        class_counts=tuple(counts.tolist()),
    )


def _paired(
    prepared: PreparedData, rows_held_out: TokenRows, texts: int, data: HFData
) -> PreparedData:
    """The data with several texts in a row. rows_held_out: all of them."""
    assert isinstance(prepared.train, TokenRows)
    assert prepared.tokenizer is not None
    pair = partial(PairRows, longest=data.seq_len, suffix=len(prepared.tokenizer.suffix))
    rows = pair(prepared.train)
    return replace(
        prepared,
        train=rows,
        held_out=spread_out(pair(rows_held_out), data.eval_samples),
        collate=partial(collate_pairs, pad=prepared.tokenizer.pad),
        fingerprint=rows.fingerprint(),
        texts=texts,
        lines=(f"an epoch: {len(rows)} rows of {texts} texts that belong together",),
    )


def stamp_data(data: HFData, model: Path | None = None) -> object:
    """Names, sizes and times of the files that the data is made from."""
    if data.is_random:
        return []
    files = [stamp_files(find_input_files(source.source)) for source in data.sources]
    return [files, stamp_tokenizer(data, model)]


def other_data(source: str, assets: Path) -> Mapping[str, Any]:
    """Config values that make `eval -d SOURCE` read all of a source, in the run's own tokens."""
    values: dict[str, Any] = {
        "data.source": source,
        "data.validation": 0.0,
        "data.eval_samples": None,
    }
    if (assets / NOTES).is_file():
        values |= {"data.tokenizer": str(assets.resolve()), "data.chat_template": None}
    return values


def _texts(files: Sequence[Sequence[InputFile]], learns: Learns) -> Iterable[str]:
    for each in files:
        if not is_raw(each, ""):
            yield from texts_in(each, learns)


def _rows(
    data: HFData, corpora: Sequence[TokenizedSource], home: Path
) -> tuple[Rows, Rows, LayoutStatistics, str]:
    """Rows to train on and rows held out, from the cache; and their key in the cache."""
    identity = [
        _FORMAT,
        [corpus.notes.sha256 for corpus in corpora],
        [source.weight for source in data.sources],
        [data.seq_len, data.packing, data.validation],
    ]
    key = cache_key(identity)
    place = home / "rows" / key
    if not place.is_dir():
        with directory_made_once(place) as scratch:
            train, held_out, statistics = lay_out(data, corpora)
            train.save(scratch, "train")
            held_out.save(scratch, "held_out")
            write_json(scratch / "rows.json", statistics.to_json())
    statistics = LayoutStatistics.from_json(json.loads((place / "rows.json").read_text()))
    return Rows.load(place, "train"), Rows.load(place, "held_out"), statistics, key


def _random(data: HFData, vocab_size: int | None, learns: Learns) -> PreparedData:
    if learns != "tokens":
        raise UserError(
            "the source random has tokens, and neither labels nor texts that belong together",
            "data.source: a file with them; or model.objective: causal, or masked",
            "data.source",
        )
    if vocab_size is None:
        raise UserError(
            "random tokens are drawn from the model's vocabulary, which is not known",
            "--set model.vocab_size=N",
            "model.vocab_size",
        )
    held = round(data.samples * data.validation)
    if data.eval_samples is not None:
        held = min(held, data.eval_samples)
    train = RandomRows(data.samples, data.seq_len, vocab_size)
    tokens = data.samples * data.seq_len
    return PreparedData(
        train=train,
        held_out=RandomRows(held, data.seq_len, vocab_size, data.samples) if held else None,
        collate=None,
        tokenizer=None,
        vocab_size=vocab_size,
        largest_id=vocab_size - 1,
        fingerprint=train.fingerprint(),
        lines=(f"{show_count(tokens)} random tokens an epoch, {data.samples} rows",),
        reference={"tokens": tokens, "vocabulary": vocab_size, "padding": 0.0},
    )


def _padding(data: HFData, statistics: LayoutStatistics) -> float:
    """The share of places without a token in packed rows.

    0 without packing: padding then depends on the microbatch.
    """
    if not data.packing:
        return 0.0
    return 1 - statistics.tokens / (statistics.rows * data.seq_len)


def _reference(data: HFData, statistics: LayoutStatistics) -> dict[str, float]:
    return {
        "tokens": statistics.tokens,
        "loss_tokens": statistics.loss_tokens,
        "padding": _padding(data, statistics),
        "documents_cut": statistics.cut,
        "tokens_left_out": statistics.tokens_left_out,
        "documents_dropped": statistics.empty + statistics.without_loss,
    }


def _lines(data: HFData, statistics: LayoutStatistics) -> Iterable[str]:
    how = f"rows of {data.seq_len}, {_padding(data, statistics):.1%} padding"
    if not data.packing:
        how = f"rows of a document each, {data.seq_len} tokens at most"
    yield (
        f"an epoch: {show_count(statistics.tokens)} tokens, of which"
        f" {show_count(statistics.loss_tokens)} count in the loss; {statistics.rows} {how}"
    )
    if len(statistics.sources) > 1 or statistics.sources[0].weight != 1:
        for source in statistics.sources:
            share = source.tokens / statistics.tokens
            yield (
                f"{source.source}: {counted(source.documents, 'document')}, {source.weight:g}"
                f" times an epoch: {show_count(source.tokens)} tokens, {share:.1%}"
            )
    if statistics.cut:
        left = f", {show_count(statistics.tokens_left_out)} tokens left out"
        pieces = left if statistics.tokens_left_out else ", nothing left out"
        yield f"{counted(statistics.cut, 'document')} longer than {data.seq_len} cut{pieces}"
    if statistics.empty or statistics.without_loss:
        yield (
            f"{counted(statistics.empty, 'empty document')} left out, and"
            f" {counted(statistics.without_loss, 'document')} without a token to be learnt"
        )

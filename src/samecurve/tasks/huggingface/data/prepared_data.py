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

from samecurve.core.config.sections import ALL
from samecurve.core.protocols import Source
from samecurve.core.system.cache import cache_entry, cache_key
from samecurve.core.system.files import write_json
from samecurve.data import spread_out
from samecurve.errors import Refusals, UserError
from samecurve.probe.progress import show_progress
from samecurve.tasks.huggingface.data.document_columns import Learns
from samecurve.tasks.huggingface.data.labelled import (
    LabelledRows,
    are_pairs,
    choose_classes,
    describe_classes,
)
from samecurve.tasks.huggingface.data.pairs import PairRows, collate_pairs, count_texts
from samecurve.tasks.huggingface.data.row_layout import (
    LaidOut,
    LayoutStatistics,
    Rows,
    SourcePart,
    lay_out,
)
from samecurve.tasks.huggingface.data.source_parts import (
    splits_of_sources,
    tokenize_sources,
    without_foreign_labels,
)
from samecurve.tasks.huggingface.data.sources import stamp_files
from samecurve.tasks.huggingface.data.text_tokenizer import NOTES, TextTokenizer
from samecurve.tasks.huggingface.data.token_rows import RandomRows, TokenRows, collate
from samecurve.tasks.huggingface.data.tokenizer_source import (
    check_tokenizer_files,
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
    test: Source | None  # of a split that is named so
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
    tokenizer, parts, lines = tokenize_sources(
        data, home, model=model, learns=learns, for_encoder=for_encoder
    )
    if learns == "label":
        parts, unlabelled = without_foreign_labels(parts, classes)
        lines = [*lines, *unlabelled]
    corpora = [part.corpus for part in parts]
    laid_out, key = _rows(data, parts, home)
    pad = 0 if tokenizer is None else tokenizer.pad
    make = partial(TokenRows, corpora, width=data.seq_len if data.packing else None, pad=pad)
    rows_held_out = make(laid_out.held_out, known_by=f"{key}/held out")
    has_test = any(part.role == "test" for part in parts)
    largest = max(corpora, key=lambda corpus: corpus.notes.largest_id)
    prepared = PreparedData(
        train=make(laid_out.train, known_by=key),
        test=make(laid_out.test, known_by=f"{key}/test") if has_test else None,
        held_out=spread_out(rows_held_out, data.eval_samples),
        collate=None if data.packing else partial(collate, pad=pad),
        tokenizer=tokenizer,
        vocab_size=1 + largest.notes.largest_id if tokenizer is None else tokenizer.size,
        largest_id=largest.notes.largest_id,
        largest_at=largest.largest_at,
        has_chats=any(corpus.of_kind("messages").any() for corpus in corpora),
        fingerprint=key,
        lines=(*lines, *_lines(data, laid_out.statistics)),
        reference=_reference(data, laid_out.statistics),
    )
    if learns == "pair":
        return _paired(prepared, rows_held_out, count_texts(corpora), data)
    if learns == "tokens":
        return prepared
    return _labelled(prepared, parts, rows_held_out, data=data, classes=classes)


def _labelled(
    prepared: PreparedData,
    parts: Sequence[SourcePart],
    rows_held_out: TokenRows,
    *,
    data: HFData,
    classes: Sequence[str],
) -> PreparedData:
    """The data with each text's class beside its tokens. rows_held_out: all of them."""
    corpora = [part.corpus for part in parts]
    chosen = choose_classes(corpora, classes)
    assert isinstance(prepared.train, TokenRows)
    assert prepared.tokenizer is not None
    label = partial(
        LabelledRows,
        corpora=corpora,
        classes=chosen,
        pairs=prepared.tokenizer.pairs if are_pairs(corpora) else None,
        longest=data.seq_len,
        suffix=prepared.tokenizer.suffix,
    )
    labelled = label(prepared.train)
    counts = labelled.count_classes()
    long = int((prepared.train.row_lengths > data.seq_len).sum())
    kind = "pair" if are_pairs(corpora) else "text"
    cut = [f"{counted(long, kind)} longer than {data.seq_len} cut"] if long else []
    return replace(
        prepared,
        train=labelled,
        held_out=spread_out(label(rows_held_out), data.eval_samples),
        test=label(prepared.test) if isinstance(prepared.test, TokenRows) else None,
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
        test=pair(prepared.test) if isinstance(prepared.test, TokenRows) else None,
        collate=partial(collate_pairs, pad=prepared.tokenizer.pad),
        fingerprint=rows.fingerprint(),
        texts=texts,
        lines=(f"an epoch: {len(rows)} rows of {texts} texts that belong together",),
    )


def stamp_data(data: HFData, model: Path | None = None) -> object:
    """Names, sizes and times of the files that the data is made from.

    UserError: a source can't be read; where the tokenizer isn't there either, that is said too.
    """
    if data.is_random:
        return []
    refusals = Refusals()
    with refusals.collected():
        splits = splits_of_sources(data)
    if refusals:
        with refusals.collected():
            check_tokenizer_files(data)
        refusals.raise_any()
    files = [[stamp_files(files) for files in each.files.values()] for each in splits]
    return [files, stamp_tokenizer(data, model)]


def other_data(source: str, assets: Path) -> Mapping[str, Any]:
    """Config values that make `eval -d SOURCE` read all of a source, in the run's own tokens."""
    values: dict[str, Any] = {
        "data.source": source,
        "data.split": ALL,
        "data.validation": 0.0,
        "data.eval_samples": None,
    }
    if (assets / NOTES).is_file():
        values |= {"data.tokenizer": str(assets.resolve()), "data.chat_template": None}
    return values


def _rows(data: HFData, parts: Sequence[SourcePart], home: Path) -> tuple[LaidOut, str]:
    """Rows to train on, to evaluate on and to test on, from the cache; their key in the cache."""
    identity: list[object] = [
        _FORMAT,
        [part.corpus.notes.sha256 for part in parts],
        [source.weight for source in data.sources],
        [data.seq_len, data.packing, data.validation],
    ]
    # rows of such texts were once cut where they are laid out, and lost their last special token
    labelled = [part.corpus for part in parts if part.corpus.notes.classes]
    if any((each.lengths[each.of_kind("classified")] > data.seq_len).any() for each in labelled):
        identity.append("whole texts")
    if data.max_documents is not None:
        identity.append(["at most", data.max_documents])
    if len(parts) > len(data.sources):
        names = [source.source for source in data.sources]
        identity.append([[part.role, names.index(part.source.source)] for part in parts])
    key = cache_key(identity)

    def make(scratch: Path) -> None:
        rows = lay_out(data, parts)
        rows.train.save(scratch, "train")
        rows.held_out.save(scratch, "held_out")
        rows.test.save(scratch, "test")
        write_json(scratch / "rows.json", rows.statistics.to_json())

    place = cache_entry(home / "rows" / key, make, say=show_progress)
    statistics = LayoutStatistics.from_json(json.loads((place / "rows.json").read_text()))
    train, held_out = Rows.load(place, "train"), Rows.load(place, "held_out")
    has_test = any(part.role == "test" for part in parts)
    test = Rows.load(place, "test") if has_test else held_out
    return LaidOut(train, held_out, test, statistics), key


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
        test=None,
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

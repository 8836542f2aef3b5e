"""The data of the huggingface task, prepared: the only page here that the task calls.

prepared = prepare_data(data, cache, model=directory, vocab_size=of_the_model)
prepared.train, prepared.held_out         sources of rows (rows.py)
prepared.collate                          None where rows have one width (packing, random)
prepared.tokenizer                        None for random tokens, or raw ones without
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from samecurve.core.config.sections import ALL
from samecurve.core.planning.fixed import parse_dataclass
from samecurve.data import spread_out
from samecurve.errors import Refusals
from samecurve.seam import (
    Source,
    UserError,
    cache_entry,
    cache_key,
    counted,
    show_count,
    show_progress,
    write_json,
)
from samecurve_products.text.huggingface.data.document_columns import Learns
from samecurve_products.text.huggingface.data.labelled import (
    LabelledRows,
    are_pairs,
    choose_classes,
    describe_classes,
)
from samecurve_products.text.huggingface.data.pairs import PairRows, collate_pairs, count_texts
from samecurve_products.text.huggingface.data.row_layout import (
    USES,
    LaidOut,
    LayoutStatistics,
    Rows,
    SourcePart,
    check_lengths,
    dropped_documents,
    lay_out,
)
from samecurve_products.text.huggingface.data.source_parts import (
    splits_of_sources,
    tokenize_sources,
    without_foreign_labels,
)
from samecurve_products.text.huggingface.data.sources import stamp_files
from samecurve_products.text.huggingface.data.text_tokenizer import NOTES, TextTokenizer
from samecurve_products.text.huggingface.data.token_rows import RandomRows, TokenRows, collate
from samecurve_products.text.huggingface.data.tokenized_source import TokenizedSource
from samecurve_products.text.huggingface.data.tokenizer_source import (
    check_tokenizer_files,
    stamp_tokenizer,
)
from samecurve_products.text.huggingface.sections import HFData

_FORMAT = 2  # of the rows in the cache

Collate = Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]


@dataclass(frozen=True)
class PreparedData:
    """Rows to train on, rows held out, and their properties.

    tokenizer: None for raw ids without one. vocab_size: ids are below it. largest_id: in the data;
    largest_at: its place in files of raw tokens. lines: for the user, what became of the documents;
    reference: the same as numbers.
    classes: of labelled texts, by number; class_counts: their training rows.
    texts: in a row. has_chats: some documents are conversations. parts: the sources, split by
    split; none of random tokens.
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
    parts: tuple[SourcePart, ...] = ()


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

    model: its directory, which may hold a tokenizer. vocab_size: the model's, for random tokens.
    learns: what the model learns of a row. classes: of labels (none: those of the data).
    for_encoder: a BPE that is trained here gets a mask token.
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
    laid_out, key = _rows(data, parts, home)
    corpora, pad = [part.corpus for part in parts], 0 if tokenizer is None else tokenizer.pad
    rows = _token_rows(data, corpora, laid_out.rows, pad=pad, key=key)
    largest = max(corpora, key=lambda corpus: corpus.notes.largest_id)
    prepared = PreparedData(
        train=rows["train"],
        test=rows.get("test"),
        held_out=spread_out(rows["held_out"], data.eval_samples),
        collate=None if data.packing else partial(collate, pad=pad),
        tokenizer=tokenizer,
        vocab_size=1 + largest.notes.largest_id if tokenizer is None else tokenizer.size,
        largest_id=largest.notes.largest_id,
        largest_at=largest.largest_at,
        has_chats=any(corpus.of_kind("messages").any() for corpus in corpora),
        fingerprint=key,
        parts=tuple(parts),
        lines=(*lines, *_lines(data, laid_out.statistics)),
        reference=_reference(data, laid_out.statistics),
    )
    if learns == "pair":
        return _paired(prepared, rows, count_texts(corpora), data)
    if learns == "tokens":
        return prepared
    return _labelled(prepared, rows, corpora, data=data, classes=classes)


def _token_rows(
    data: HFData,
    corpora: Sequence[TokenizedSource],
    laid_out: Mapping[str, Rows],
    *,
    pad: int,
    key: str,
) -> dict[str, TokenRows]:
    """The rows by their use. key: of the data"""
    width = data.seq_len if data.packing else None
    known_by = {"train": key, "held_out": f"{key}/held out", "test": f"{key}/test"}
    return {
        use: TokenRows(corpora, of_use, width=width, pad=pad, known_by=known_by[use])
        for use, of_use in laid_out.items()
    }


def _labelled(
    prepared: PreparedData,
    rows: Mapping[str, TokenRows],
    corpora: Sequence[TokenizedSource],
    *,
    data: HFData,
    classes: Sequence[str],
) -> PreparedData:
    """The data with each text's class beside its tokens. rows: by use"""
    chosen, has_pairs = choose_classes(corpora, classes), are_pairs(corpora)
    assert prepared.tokenizer is not None
    label = partial(
        LabelledRows,
        corpora=corpora,
        classes=chosen,
        pairs=prepared.tokenizer.pairs if has_pairs else None,
        longest=data.seq_len,
        suffix=prepared.tokenizer.suffix,
    )
    labelled = {use: label(of_use) for use, of_use in rows.items()}
    counts = labelled["train"].count_classes()
    long = int((rows["train"].row_lengths > data.seq_len).sum())
    kind = "pair" if has_pairs else "text"
    cut = [f"{counted(long, kind)} longer than {data.seq_len} cut"] if long else []
    return replace(
        prepared,
        train=labelled["train"],
        held_out=spread_out(labelled["held_out"], data.eval_samples),
        test=labelled.get("test"),
        collate=partial(collate, pad=prepared.tokenizer.pad),
        fingerprint=labelled["train"].fingerprint(),
        lines=(*prepared.lines, *cut, describe_classes(chosen, counts)),
        classes=tuple(chosen),
        class_counts=tuple(counts.tolist()),
    )


def _paired(
    prepared: PreparedData, rows: Mapping[str, TokenRows], texts: int, data: HFData
) -> PreparedData:
    """The data with several texts in a row. rows: by use"""
    assert prepared.tokenizer is not None
    pair = partial(PairRows, longest=data.seq_len, suffix=len(prepared.tokenizer.suffix))
    paired = {use: pair(of_use) for use, of_use in rows.items()}
    return replace(
        prepared,
        train=paired["train"],
        held_out=spread_out(paired["held_out"], data.eval_samples),
        test=paired.get("test"),
        collate=partial(collate_pairs, pad=prepared.tokenizer.pad),
        fingerprint=paired["train"].fingerprint(),
        texts=texts,
        lines=(f"an epoch: {len(paired['train'])} rows of {texts} texts that belong together",),
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
    """The rows of each use, from the cache, and their key in the cache.

    UserError: rows are longer than data.seq_len, and are to be refused.
    """
    check_lengths(parts, data)
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
    if any(dropped_documents(part.corpus, data).any() for part in parts):
        identity.append("long rows left out")
    if data.max_documents is not None:
        identity.append(["at most", data.max_documents])
    if len(parts) > len(data.sources):
        names = [source.source for source in data.sources]
        identity.append([[part.role, names.index(part.source.source)] for part in parts])
    key = cache_key(identity)

    def make(scratch: Path) -> None:
        laid_out = lay_out(data, parts)
        for use, rows in laid_out.rows.items():
            rows.save(scratch, use)
        write_json(scratch / "rows.json", asdict(laid_out.statistics))

    place = cache_entry(home / "rows" / key, make, say=show_progress)
    on_disk = json.loads((place / "rows.json").read_text())
    statistics = parse_dataclass(LayoutStatistics, on_disk)
    has_test = any(part.role == "test" for part in parts)
    uses = [use for use in USES if has_test or use != "test"]
    return LaidOut({use: Rows.load(place, use) for use in uses}, statistics), key


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
        "documents_dropped": statistics.empty + statistics.without_loss + statistics.too_long,
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
    if statistics.too_long:
        yield (
            f"{counted(statistics.too_long, 'row')} longer than {data.seq_len} left out"
            " (data.too_long: drop)"
        )
    if statistics.empty or statistics.without_loss:
        yield (
            f"{counted(statistics.empty, 'empty document')} left out, and"
            f" {counted(statistics.without_loss, 'document')} without a token to be learnt"
        )

"""The sources of a config as tokens, split by split, and the tokenizer that made them."""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

from samecurve.seam import UserError
from samecurve_products.text.huggingface.data.document_columns import Learns
from samecurve_products.text.huggingface.data.raw_tokens import is_raw, open_raw
from samecurve_products.text.huggingface.data.records import texts_in
from samecurve_products.text.huggingface.data.row_layout import SourcePart
from samecurve_products.text.huggingface.data.sources import InputFile, find_splits
from samecurve_products.text.huggingface.data.text_tokenizer import TextTokenizer
from samecurve_products.text.huggingface.data.tokenized_source import (
    TokenizedSource,
    digest_files,
    tokenize_once,
)
from samecurve_products.text.huggingface.data.tokenizer_source import has_tokenizer, keep_tokenizer
from samecurve_products.text.huggingface.sections import HFData
from samecurve_products.text_files import Role, SourceSplits, check_split_is_somewhere


def tokenize_sources(
    data: HFData, home: Path, *, model: Path | None, learns: Learns, for_encoder: bool
) -> tuple[TextTokenizer | None, list[SourcePart], list[str]]:
    """The tokenizer (None: raw tokens without one), each split as tokens, and lines for the user.

    What is trained on comes first, source by source.
    """
    splits = splits_of_sources(data)
    files = [each.files["train"] for each in splits]
    raw = [is_raw(each, source.source) for source, each in zip(data.sources, files, strict=True)]
    digests = [digest_files(each, home) for each in files]
    tokenizer = None
    if not all(raw) or _names_tokenizer(data, model, for_encoder=for_encoder):
        tokenizer = keep_tokenizer(
            data,
            model,
            home,
            content="/".join(digests),
            texts=partial(_texts, files, learns, turns=data.instructions == "chat"),
            for_encoder=for_encoder,
            ends=learns == "tokens",  # a classifier, or an embedding, reads what tokenizer() gives
        )
    parts = [
        SourcePart(
            source,
            role,
            _opened(each.files[role], tokenizer, home, data, name=source.source, learns=learns),
        )
        for role in get_args(Role)
        for source, each in zip(data.sources, splits, strict=True)
        if role in each.files
    ]
    return tokenizer, parts, [each.line for each in splits if each.line]


def splits_of_sources(data: HFData) -> list[SourceSplits[InputFile]]:
    """The splits of each source. UserError: a source can't be used, or data.split is nowhere."""
    splits = [find_splits(source.source, data.split) for source in data.sources]
    check_split_is_somewhere(splits, data.split)
    return splits


def _opened(
    files: Sequence[InputFile],
    tokenizer: TextTokenizer | None,
    home: Path,
    data: HFData,
    *,
    name: str,
    learns: Learns,
) -> TokenizedSource:
    """The tokens of files. name: of their source, for the user."""
    content = digest_files(files, home)
    if is_raw(files, name):
        end = None if tokenizer is None else tokenizer.eos
        return open_raw(
            files, home, dtype=data.token_dtype, end=end, content=content, learns=learns
        )
    assert tokenizer is not None
    turns = data.instructions == "chat"
    return tokenize_once(
        files, tokenizer, home, name=name, content=content, learns=learns, turns=turns
    )


def without_foreign_labels(
    parts: Sequence[SourcePart], classes: Sequence[str]
) -> tuple[list[SourcePart], list[str]]:
    """The parts without test splits whose labels are no classes, as benchmarks hide them (-1)."""
    known = set(classes).union(*(p.corpus.notes.classes for p in parts if p.role != "test"))
    kept, lines = [], []
    for part in parts:
        foreign = [name for name in part.corpus.notes.classes if name not in known]
        if part.role == "test" and foreign:
            lines.append(
                f"{part.source.source}: the split test is not measured: its label {foreign[0]} is"
                " none of the classes"
            )
        else:
            kept.append(part)
    return kept, lines


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


def _texts(files: Sequence[Sequence[InputFile]], learns: Learns, *, turns: bool) -> Iterable[str]:
    for each in files:
        if not is_raw(each, ""):
            yield from texts_in(each, learns, turns=turns)

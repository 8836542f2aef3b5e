"""Facts of a config's documents: counts, lengths, and which of them are left out, and why.

A row of a source is named by its place (file and line, or file and row). The places are found by
reading the source again up to the row, for the first few rows of each reason.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from samecurve_products.preview.about import AboutData, LeftOut
from samecurve_products.text.huggingface.data.document_columns import Document, Learns
from samecurve_products.text.huggingface.data.parts import encode_documents
from samecurve_products.text.huggingface.data.prepared_data import PreparedData
from samecurve_products.text.huggingface.data.records import chunks_of, documents_of
from samecurve_products.text.huggingface.data.row_layout import (
    Numbers,
    SourcePart,
    shortened_documents,
)
from samecurve_products.text.huggingface.data.source_parts import splits_of_sources
from samecurve_products.text.huggingface.data.sources import InputFile
from samecurve_products.text.huggingface.data.text_tokenizer import TextTokenizer
from samecurve_products.text.huggingface.sections import HFData
from samecurve_products.text_files import passed_over

_NAMED = 5  # rows of each reason whose place is told
_MOST_ROWS = 200_000  # of a source, that are read again for it


def about_documents(data: HFData, prepared: PreparedData, learns: Learns) -> AboutData:
    """The facts of the documents. learns: what the model learns of a row"""
    trained = [part for part in prepared.parts if part.role == "train"]
    lengths = [part.corpus.lengths[: data.max_documents] for part in trained]
    tokenizer, reference = prepared.tokenizer, prepared.reference
    reads_tokens = learns == "tokens" or data.is_random
    lines = list(prepared.lines)
    left_out: list[LeftOut] = []
    if trained:
        splits = splits_of_sources(data)
        read = [file.path for each in splits for of_role in each.files.values() for file in of_role]
        lines += passed_over([source.source for source in data.sources], read)
        for part, each in zip(trained, splits, strict=True):
            left_out += _left_out(part, each.files["train"], data, tokenizer, learns)
    return AboutData(
        decode=None if tokenizer is None else tokenizer.decode,
        classes=prepared.classes,
        class_counts=prepared.class_counts,
        tokens=int(reference["tokens"]) if reads_tokens else None,
        loss_tokens=int(reference["loss_tokens"])
        if "loss_tokens" in reference and reads_tokens
        else None,
        lengths=np.concatenate(lengths) if lengths else None,
        lengths_of="document" if reads_tokens else "row",
        lines=lines,
        left_out=left_out,
    )


def _left_out(
    part: SourcePart,
    files: Sequence[InputFile],
    data: HFData,
    tokenizer: TextTokenizer | None,
    learns: Learns,
) -> list[LeftOut]:
    """The documents of a source that are left out or cut, by the reason."""
    corpus = part.corpus
    shortened = shortened_documents(corpus, data)
    by_reason = _without_answer(part, shortened.nothing_learnt)
    late = f"what is to be learnt stands behind its first {data.seq_len} tokens"
    by_reason[late] = shortened.learnt_too_late
    by_reason[f"longer than {data.seq_len} tokens (data.too_long: drop)"] = shortened.dropped
    if learns == "tokens":  # texts of other rows are cut one by one, later
        by_reason[f"longer than {data.seq_len} tokens: its end is left out"] = shortened.cut
    empty = "empty: nothing to read"
    wanted = {int(number) for numbers in by_reason.values() for number in numbers[:_NAMED]}
    places: Mapping[int, str] = {}
    empties: Sequence[str] = ()
    by_rows = all(file.form not in {"text", "tokens"} for file in files)
    if tokenizer is not None and by_rows and (wanted or corpus.notes.empty):
        turns = data.instructions == "chat"
        documents = (
            document
            for file in files
            for chunk in chunks_of(file, learns=learns, turns=turns)
            for document in documents_of(chunk)
        )
        places, empties = _places(documents, part, wanted, tokenizer)
    left_out = [LeftOut(empty, corpus.notes.empty, empties)]
    left_out += [
        LeftOut(reason, len(numbers), [places[n] for n in numbers[:_NAMED].tolist() if n in places])
        for reason, numbers in by_reason.items()
    ]
    return [each for each in left_out if each.rows]


def _without_answer(part: SourcePart, numbers: Numbers) -> dict[str, Numbers]:
    """Documents without a token that could be learnt, by the reason. numbers: of the documents"""
    is_conversation = part.corpus.of_kind("messages")[numbers]
    is_prompt = part.corpus.of_kind("completion")[numbers]
    return {
        "no token to be learnt: the assistant says nothing that counts": numbers[is_conversation],
        "no token to be learnt: there is no completion": numbers[is_prompt],
        "no token to be learnt: one token alone, with nothing before it": (
            numbers[~is_conversation & ~is_prompt]
        ),
    }


def _places(
    documents: Iterator[Document],
    part: SourcePart,
    wanted: set[int],
    tokenizer: TextTokenizer,
) -> tuple[dict[int, str], list[str]]:
    """The places of documents by their numbers, and those of the first empty rows.

    An empty row has no number. A place is told only if the row there has as many tokens as the
    document has.
    """
    places: dict[int, str] = {}
    empties: list[str] = []
    missing = min(part.corpus.notes.empty, _NAMED)
    number, last = 0, max(wanted, default=-1)
    for read, document in enumerate(documents):
        if read >= _MOST_ROWS or (number > last and len(empties) >= missing):
            break
        if not any(document.text) and not document.messages:
            if len(empties) < _NAMED:
                empties.append(document.place)
            continue
        if number in wanted:
            ((ids, _),) = encode_documents([document], tokenizer)
            if len(ids) == part.corpus.lengths[number]:
                places[number] = document.place
        number += 1
    return places, empties

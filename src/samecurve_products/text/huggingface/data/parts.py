"""Parts of a source; each is tokenized by itself, by the first process that takes it.

The tokens of a part follow from its chunks and the tokenizer alone, so any number of processes
makes the same tokens. main() is one of them.
"""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.seam import UserError, write_json
from samecurve_products.text.huggingface.data.document_columns import KINDS, Document
from samecurve_products.text.huggingface.data.messages import is_learnt
from samecurve_products.text.huggingface.data.records import documents_of
from samecurve_products.text.huggingface.data.sources import Chunk
from samecurve_products.text.huggingface.data.text_tokenizer import TextTokenizer
from samecurve_products.text_files import batches_of

JOB = "job.json"
_PART = 2 << 20  # bytes of a part, at least
_MOST_PARTS = 2000  # about: each is a few files while it is made
_TOGETHER = 1 << 20  # characters that are tokenized at once

COUNTS = ("empty", "with_assistant", "assistant_tokens", "text_bytes")  # notes that are added up

# tokens, and which of them count in the loss
Encoded = tuple[NDArray[np.uint32], NDArray[np.bool_]]


@dataclass
class PartNotes:
    """Counts of a part. continues: its first document began in the part before."""

    continues: bool = False
    largest_id: int = 0
    loss_tokens: int = 0  # tokens that count in the loss
    empty: int = 0  # documents without a character, left out
    with_assistant: int = 0  # conversations with a turn of the assistant that is learnt
    assistant_tokens: int = 0  # tokens of conversations that count in the loss
    text_bytes: int = 0
    # classes of the part, in the order of their first rows
    labels: list[str] = field(default_factory=list)


def parts_of(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Parts of about the same size, made of neighbouring chunks."""
    least = max(_PART, sum(chunk.size for chunk in chunks) // _MOST_PARTS)
    return list(batches_of(chunks, lambda chunk: chunk.size, least=least))


def write_job(
    directory: Path, parts: Sequence[Sequence[Chunk]], tokenizer: Path, dtype: str
) -> None:
    """Write the job that the tokenizing processes share. dtype: of the tokens on disk."""
    chunks = [[asdict(chunk) for chunk in part] for part in parts]
    write_json(directory / JOB, {"parts": chunks, "tokenizer": str(tokenizer), "dtype": dtype})


def run_job(directory: Path) -> None:
    """Tokenize parts that no other process has taken, until there are none."""
    job = json.loads((directory / JOB).read_text())
    tokenizer = TextTokenizer(Path(job["tokenizer"]))
    for number, chunks in enumerate(job["parts"]):
        with suppress(FileExistsError):
            os.close(os.open(directory / f"{number}.taken", os.O_CREAT | os.O_EXCL))
            part = _Part(directory, number, job["dtype"])
            part.write([Chunk(**chunk) for chunk in chunks], tokenizer)


def read_documents(directory: Path, number: int) -> dict[str, NDArray[Any]]:
    """Arrays over a part's documents: lengths in tokens, kinds, labels (indices in the notes')."""
    with np.load(directory / f"{number}.npz") as arrays:
        return dict(arrays)


class _Part:
    def __init__(self, directory: Path, number: int, dtype: str) -> None:
        self._base = directory / str(number)
        self._dtype = dtype
        self._lengths: list[int] = []
        self._kinds: list[int] = []
        self._labels: list[int] = []
        self._classes: dict[str, int] = {}
        self._notes = PartNotes()

    def write(self, chunks: Sequence[Chunk], tokenizer: TextTokenizer) -> None:
        with (
            open(f"{self._base}.tokens", "wb") as tokens,
            open(f"{self._base}.loss_mask", "wb") as masks,
        ):
            documents = (document for chunk in chunks for document in documents_of(chunk))
            for group in batches_of(documents, _characters, least=_TOGETHER, most=1024):
                for document, (ids, mask) in zip(
                    group, encode_documents(group, tokenizer), strict=True
                ):
                    tokens.write(ids.astype(self._dtype).tobytes())
                    masks.write(mask.astype(np.uint8).tobytes())
                    self._add(document, ids, int(mask.sum()))
        np.savez(
            f"{self._base}.npz",
            lengths=np.array(self._lengths, np.int64),
            kinds=np.array(self._kinds, np.uint8),
            labels=np.array(self._labels, np.int32),
        )
        self._notes.labels = list(self._classes)
        write_json(Path(f"{self._base}.json"), asdict(self._notes))

    def _add(self, document: Document, ids: NDArray[np.uint32], loss_tokens: int) -> None:
        notes = self._notes
        if not document.opens and self._lengths:
            self._lengths[-1] += len(ids)
        elif len(ids) or not (document.opens and document.closes):
            notes.continues |= not document.opens
            self._lengths.append(len(ids))
            self._kinds.append(KINDS.index(document.kind))
            if document.label is not None:
                number = self._classes.setdefault(document.label, len(self._classes))
                self._labels.append(number)
        else:
            notes.empty += 1
        if len(ids):
            notes.largest_id = max(notes.largest_id, int(ids.max()))
        notes.text_bytes += _characters(document)
        notes.with_assistant += any(map(is_learnt, document.messages))
        notes.loss_tokens += loss_tokens
        if document.messages:
            notes.assistant_tokens += loss_tokens


def _characters(document: Document) -> int:
    return sum(map(len, document.text))


def encode_documents(group: Sequence[Document], tokenizer: TextTokenizer) -> list[Encoded]:
    """Encode documents: the tokens of each, and which of them are learnt."""
    by_kind = {
        "text": _encode_texts,
        "completion": _encode_completions,
        "classified": _encode_texts,
        "classified_pair": _encode_two,
        "pair": _encode_pairs,
        "triple": _encode_pairs,
    }
    encoded: list[Encoded] = []
    # neighbours are of one kind, except between files
    for kind, documents in groupby(group, lambda document: document.kind):
        if kind == "messages":
            encoded += [_encode_messages(each, tokenizer) for each in documents]
        else:
            encoded += by_kind[kind](list(documents), tokenizer)
    return encoded


def _encode_texts(group: Sequence[Document], tokenizer: TextTokenizer) -> list[Encoded]:
    encoded = []
    nothing = np.zeros(0, np.uint32)
    plain = tokenizer.encode([document.text[0] for document in group])
    for document, ids in zip(group, plain, strict=True):
        parts = [
            tokenizer.prefix if document.opens else nothing,
            ids,
            tokenizer.suffix if document.closes else nothing,
        ]
        whole = np.concatenate(parts)
        if document.opens and document.closes and not document.text[0]:
            whole = nothing
        encoded.append((whole, np.ones(len(whole), bool)))
    return encoded


def _encode_completions(group: Sequence[Document], tokenizer: TextTokenizer) -> list[Encoded]:
    """Encode prompts and completions. A prompt has the tokens that it has without completion."""
    prompts = tokenizer.encode([document.text[0] for document in group])
    wholes = tokenizer.encode(["".join(document.text) for document in group])
    alone = tokenizer.encode([document.text[1] for document in group])
    encoded = []
    for document, prompt, whole, answer in zip(group, prompts, wholes, alone, strict=True):
        if not any(document.text):
            encoded.append((whole, np.zeros(0, bool)))
            continue
        follows = np.array_equal(whole[: len(prompt)], prompt)
        completion = whole[len(prompt) :] if follows else answer
        ids = np.concatenate([tokenizer.prefix, prompt, completion, tokenizer.suffix])
        mask = np.arange(len(ids)) >= len(tokenizer.prefix) + len(prompt)
        encoded.append((ids, mask))
    return encoded


def _encode_two(group: Sequence[Document], tokenizer: TextTokenizer) -> list[Encoded]:
    """Two texts in one document; the mask marks the first token after the first text."""
    encoded = []
    for document in group:
        first, second = tokenizer.encode(document.text)
        ids = tokenizer.pairs.join(first, second)
        encoded.append((ids, np.arange(len(ids)) == len(tokenizer.pairs.before) + len(first)))
    return encoded


def _encode_pairs(group: Sequence[Document], tokenizer: TextTokenizer) -> list[Encoded]:
    """The texts one after another; the mask marks the begin of the second and the third.

    UserError: one of the texts has no token.
    """
    encoded = []
    for document in group:
        texts = tokenizer.encode(document.text)
        for text, ids in zip(document.text, texts, strict=True):
            if not len(ids):
                raise UserError(
                    f"one of the texts of a row has no token: {text!r}",
                    "each of anchor, positive and negative is a text; leave such rows out",
                    document.place,
                )
        parts = [np.concatenate([tokenizer.prefix, ids, tokenizer.suffix]) for ids in texts]
        begins = np.cumsum([len(part) for part in parts])[:-1]
        mask = np.zeros(sum(map(len, parts)), bool)
        mask[begins] = True
        encoded.append((np.concatenate(parts), mask))
    return encoded


def _encode_messages(document: Document, tokenizer: TextTokenizer) -> Encoded:
    if not document.messages:
        return np.zeros(0, np.uint32), np.zeros(0, bool)
    text, spans = tokenizer.template.spans(document.messages, document.tools, document.place)
    return tokenizer.encode_spans(text, spans)


def main(directory: str) -> None:
    """Run one tokenizing process. Users' errors are passed on in a JSON file."""
    try:
        run_job(Path(directory))
    except UserError as error:
        content = {"cause": error.cause, "remedy": error.remedy, "where": error.where}
        write_json(Path(directory) / f"error.{os.getpid()}.json", content)
        sys.exit(error.exit_code)

"""A data source as tokens: made once, found again by the files' content, mapped by all ranks."""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.system.cache import CHECKED, check_once
from samecurve.seam import (
    Call,
    Process,
    RunError,
    UserError,
    cache_entry,
    cache_key,
    child_environment,
    show_bytes,
    show_progress,
    show_seconds,
    start_process,
    wait_for,
    write_json,
)
from samecurve_products.text.huggingface.data import parts
from samecurve_products.text.huggingface.data.document_columns import KINDS, Kind, Learns
from samecurve_products.text.huggingface.data.lines import text_of
from samecurve_products.text.huggingface.data.parts import (
    COUNTS,
    PartNotes,
    parts_of,
    read_documents,
    run_job,
    write_job,
)
from samecurve_products.text.huggingface.data.records import chunks_of
from samecurve_products.text.huggingface.data.sources import Chunk, InputFile, stamp_files
from samecurve_products.text.huggingface.data.text_tokenizer import TextTokenizer

_FORMAT = 2  # of the cache
_ALONE = 4 << 20  # bytes: one process is done with them before others start
_MOST_PROCESSES = 16
_LOOK_EVERY, _SAY_EVERY = 0.05, 2.0  # seconds
_BLOCK = 1 << 24


@dataclass(frozen=True)
class SourceNotes:
    """Counts and properties of a tokenized source."""

    dtype: str
    num_tokens: int
    vocab_size: int
    largest_id: int
    sha256: str  # of tokens, loss mask and documents
    partly: bool = False  # some tokens do not count in the loss: prompts, or what users say
    empty: int = 0  # documents without a character, left out
    with_assistant: int = 0  # conversations with a turn of the assistant that is learnt
    assistant_tokens: int = 0  # tokens of conversations that count in the loss
    text_bytes: int = 0
    classes: Sequence[str] = ()  # classes of labelled texts, in their order
    largest_file: int = 0  # raw tokens: the file in which the largest id stands first,
    largest_place: int = 0  # and its place there


class TokenizedSource:
    """A tokenized source, mapped. lengths: of the documents, in their order."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.notes = SourceNotes(**json.loads((home / "corpus.json").read_text()))

    @property
    def largest_at(self) -> str:
        """The place of the largest id, for the user; '' where a tokenizer made the ids."""
        return ""

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return np.fromfile(self.home / "lengths.bin", np.int64)

    @cached_property
    def tokens(self) -> Any:
        """Token ids, indexed by an array of places."""
        return np.memmap(self.home / "tokens.bin", self.notes.dtype, "r")

    @cached_property
    def loss_mask(self) -> NDArray[np.uint8] | None:
        """1 for each token that counts in the loss; None: all count."""
        return np.memmap(self.home / "loss_mask.bin", np.uint8, "r") if self.notes.partly else None

    @cached_property
    def labels(self) -> NDArray[np.int32]:
        """The class of each document of a labelled source, as an index into the notes' classes."""
        return np.fromfile(self.home / "labels.bin", np.int32)

    def of_kind(self, kind: Kind) -> NDArray[np.bool_]:
        """True for each document of this kind."""
        kinds = np.fromfile(self.home / "kinds.bin", np.uint8)
        chosen: NDArray[np.bool_] = kinds == KINDS.index(kind)
        return chosen


def digest_files(files: Sequence[InputFile], cache: Path) -> str:
    """A hash of the files' content, in their order; kept by names, sizes and times."""
    stamp = stamp_files(files)
    kept = cache / "digests" / f"{cache_key(stamp)}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):  # not there, or damaged: made again
        known = json.loads(kept.read_text())["sha256"]
        if re.fullmatch(r"[0-9a-f]{64}", known):
            return str(known)
    digest = hashlib.sha256()
    total = sum(file.path.stat().st_size for file in files)
    done, last_line_at = 0, time.monotonic()
    for file in files:
        of_file = hashlib.sha256()
        with open(file.path, "rb") as opened:
            while block := opened.read(_BLOCK):
                of_file.update(block)
                done += len(block)
                if time.monotonic() - last_line_at > _SAY_EVERY:
                    last_line_at = time.monotonic()
                    show_progress(
                        f"data   {show_bytes(done)} of {show_bytes(total)} looked through"
                    )
        digest.update(f"{file.form}/{of_file.hexdigest()}/".encode())
    if stamp_files(files) == stamp:  # no file changed while it was read
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_json(kept, {"sha256": digest.hexdigest()})
    return digest.hexdigest()


def tokenize_once(
    files: Sequence[InputFile],
    tokenizer: TextTokenizer,
    cache: Path,
    *,
    name: str,
    content: str,
    learns: Learns = "tokens",
    turns: bool = False,
) -> TokenizedSource:
    """The tokens of a source, from the cache if they are there.

    One process makes the tokens, and others wait.
    name: of the source, for the user. content: a hash of what its files hold. learns: what the
        model learns of each row. turns: rows of instructions are conversations.
    UserError: a file can't be read, or there is nothing to learn in it.
    """
    identity = [_FORMAT, content, tokenizer.home.name]
    identity += [] if learns == "tokens" else ["labelled 2" if learns == "label" else learns]
    identity += ["turns"] if turns else []
    chunks = [chunk for file in files for chunk in chunks_of(file, learns=learns, turns=turns)]
    # conversations once had arguments as text or as Python, and neither weights nor some ends
    identity += ["messages 3"] if any(chunk.kind == "messages" for chunk in chunks) else []
    home = cache / "tokens" / cache_key(identity)

    def make(scratch: Path) -> None:
        _Tokenization(chunks, tokenizer, scratch, name).run()
        (scratch / CHECKED).touch()

    def check() -> None:
        for chunk in texts:
            text_of(chunk)

    cache_entry(home, make, say=show_progress)
    if texts := [chunk for chunk in chunks if chunk.form == "text"]:
        check_once(home, check)
    return TokenizedSource(home)


def has_column(
    corpora: Sequence[TokenizedSource], column: str, *, having: Kind, lacking: Kind, reason: str
) -> bool:
    """Whether rows have an optional column.

    having, lacking: the kinds of documents with and without the column. reason: why it can't be
    both.
    UserError: some rows have the column, and others lack it.
    """
    has = any(corpus.of_kind(having).any() for corpus in corpora)
    if has and any(corpus.of_kind(lacking).any() for corpus in corpora):
        raise UserError(
            f"some files have a column `{column}`, and others none: {reason}",
            f"a `{column}` in each row, or in none",
            "data.source",
        )
    return has


def sort_classes(names: AbstractSet[str]) -> list[str]:
    """Sort numbers by their values, other names by their letters."""
    if all(re.fullmatch(r"-?\d+", name) for name in names):
        return sorted(names, key=int)
    return sorted(names)


class _Tokenization:
    """The tokenization of one source into a scratch directory."""

    def __init__(
        self, chunks: Sequence[Chunk], tokenizer: TextTokenizer, scratch: Path, name: str
    ) -> None:
        self._tokenizer, self._scratch, self._name = tokenizer, scratch, name
        self._has_chats = any(chunk.kind in {"messages", "turns"} for chunk in chunks)
        self._parts = parts_of(chunks)
        self._sizes = [sum(chunk.size for chunk in part) for part in self._parts]
        self._dtype = "uint16" if tokenizer.size <= 1 << 16 else "uint32"
        self._work = scratch / "parts"

    def run(self) -> None:
        self._work.mkdir()
        write_job(self._work, self._parts, self._tokenizer.home, self._dtype)
        processes = min(len(os.sched_getaffinity(0)), len(self._sizes), _MOST_PROCESSES)
        if processes <= 1 or sum(self._sizes) <= _ALONE:
            run_job(self._work)
        else:
            self._in_processes(processes)
        notes = self._join()
        shutil.rmtree(self._work)
        _check_loss_tokens(notes, self._name, has_chats=self._has_chats)
        write_json(self._scratch / "corpus.json", asdict(notes))

    def _in_processes(self, count: int) -> None:
        """Tokenize in several processes. UserError, RunError: one of them has failed."""
        # there are several processes, so none needs threads
        environment = child_environment(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
        call = Call(parts.__name__, (str(self._work),), environment=environment)
        running = [start_process(call, stdout=DEVNULL) for _ in range(count)]
        try:
            self._wait(running)
        finally:
            for process in running:
                process.kill()
                process.wait()

    def _wait(self, running: Sequence[Process]) -> None:
        began = last_line_at = time.monotonic()
        while alive := [process for process in running if process.poll() is None]:
            wait_for(alive[:1], _LOOK_EVERY)
            if any(process.poll() for process in running):
                break
            if time.monotonic() - last_line_at > _SAY_EVERY:
                last_line_at = time.monotonic()
                show_progress(self._progress(last_line_at - began))
        errors = sorted(self._work.glob("error.*.json"))
        if errors:
            raise UserError(**json.loads(errors[0].read_text()))
        codes = [process.returncode or 0 for process in running]
        if any(codes):
            raise RunError(
                f"a process that tokenizes {self._name} ended with exit code {max(codes, key=abs)}",
                "the lines above say why; without any, the kernel may have ended it for memory",
                "data",
            )

    def _progress(self, seconds: float) -> str:
        done = sum(
            size
            for number, size in enumerate(self._sizes)
            if (self._work / f"{number}.json").exists()
        )
        total = sum(self._sizes)
        text = f"data   {self._name}: {show_bytes(done)} of {show_bytes(total)} tokenized"
        if done:
            text += f" ({done / total:.0%}), left {show_seconds(seconds * (total - done) / done)}"
        return text

    def _join(self) -> SourceNotes:
        """Join the parts, one after another."""
        notes, lengths, kinds = self._documents()
        lengths.tofile(self._scratch / "lengths.bin")
        kinds.tofile(self._scratch / "kinds.bin")
        digest = hashlib.sha256(self._dtype.encode() + lengths.tobytes() + kinds.tobytes())
        digest.update(self._join_files("tokens"))
        digest.update(self._join_files("loss_mask"))
        classes = sort_classes({label for note in notes for label in note.labels})
        digest.update(self._join_labels(notes, classes))
        loss_tokens = sum(note.loss_tokens for note in notes)
        num_tokens = int(lengths.sum())
        if loss_tokens == num_tokens:
            (self._scratch / "loss_mask.bin").unlink()
        return SourceNotes(
            dtype=self._dtype,
            num_tokens=num_tokens,
            vocab_size=self._tokenizer.size,
            largest_id=max((note.largest_id for note in notes), default=0),
            sha256=digest.hexdigest(),
            partly=loss_tokens < num_tokens,
            classes=classes,
            **{name: sum(getattr(note, name) for note in notes) for name in COUNTS},
        )

    def _join_files(self, kind: str) -> bytes:
        """Join an array of all parts in one file. Returns the hash of the array."""
        digest = hashlib.sha256()
        with open(self._scratch / f"{kind}.bin", "wb") as out:
            for number in range(len(self._sizes)):
                part = self._work / f"{number}.{kind}"
                with open(part, "rb") as file:
                    while block := file.read(_BLOCK):
                        digest.update(block)
                        out.write(block)
                part.unlink()
        return digest.digest()

    def _join_labels(self, notes: Sequence[PartNotes], classes: Sequence[str]) -> bytes:
        """Join the labels of all parts as class numbers. Returns classes and labels as bytes."""
        if not classes:
            return b""
        parts = []
        for number, note in enumerate(notes):
            of_part = np.array([classes.index(label) for label in note.labels], np.int32)
            parts.append(of_part[read_documents(self._work, number)["labels"]])
        labels = np.concatenate(parts)
        labels.tofile(self._scratch / "labels.bin")
        return json.dumps(list(classes)).encode() + labels.tobytes()

    def _documents(self) -> tuple[list[PartNotes], NDArray[np.int64], NDArray[np.uint8]]:
        """Notes, lengths and kinds of all documents. A document that two parts share is one."""
        notes, lengths, kinds = [], [np.zeros(0, np.int64)], [np.zeros(0, np.uint8)]
        for number in range(len(self._sizes)):
            note = PartNotes(**json.loads((self._work / f"{number}.json").read_text()))
            documents = read_documents(self._work, number)
            first = 0
            if note.continues:
                lengths[-1][-1] += documents["lengths"][0]
                first = 1
            notes.append(note)
            if len(documents["lengths"]) > first:
                lengths.append(documents["lengths"][first:])
                kinds.append(documents["kinds"][first:])
        return notes, np.concatenate(lengths), np.concatenate(kinds)


def _check_loss_tokens(notes: SourceNotes, name: str, *, has_chats: bool) -> None:
    """UserError: the source is empty, or nothing in it counts in the loss."""
    if not notes.num_tokens:
        raise UserError(
            f"data source {name} holds no text", "a source with text in it", "data.source"
        )
    if has_chats and not notes.with_assistant:
        raise UserError(
            f"data source {name}: no conversation has a turn of the assistant that counts, so"
            " there is nothing to learn",
            'messages with "role": "assistant", without "weight": 0 or "train": false; are the'
            " roles named otherwise there?",
            "data.source",
        )
    if has_chats and not notes.assistant_tokens:
        raise UserError(
            f"data source {name}: the chat template marks nothing of {notes.with_assistant}"
            " conversations as the assistant's, so there is nothing to learn",
            "a template whose {% generation %} ... {% endgeneration %} has the assistant's"
            " content in it: data.chat_template=FILE.jinja",
            "data.chat_template",
        )

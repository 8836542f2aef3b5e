"""A tokenizer with its special tokens and its chat template, kept in a directory of the cache.

The directory holds tokenizer.json as the `tokenizers` library reads it (none for bytes), and
tokenizer_notes.json with special tokens and chat template. The processes that tokenize read only
this directory; a run keeps the same two files.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.planning.fixed import parse_dataclass
from samecurve.seam import UserError
from samecurve_products.text.huggingface.data.chat import ChatTemplate, Span
from samecurve_products.text_files.tokenizer import (
    ByteTokenizer,
    LibraryTokenizer,
    TokenIds,
    Tokenizer,
    library_errors,
)
from samecurve_products.text_files.tokenizer_files import write_tokenizer, write_tokenizer_config

TOKENIZER, NOTES = "tokenizer.json", "tokenizer_notes.json"
END, PAD, MASK = "<|endoftext|>", "<|pad|>", "<|mask|>"  # of a BPE that is trained here


@dataclass(frozen=True)
class TokenizerNotes:
    """Properties that tokenizer.json lacks.

    names: bos_token and others, for chat templates. ends: whether the end-of-text token follows
    each text. A classifier reads texts as the library's tokenizer(text) gives them, without it;
    classifiers that began before had it, and their notes have no such key.
    """

    name: str
    names: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    ends: bool = True


def read_notes(file: Path) -> TokenizerNotes:
    """The notes beside a tokenizer. UserError: the file holds none."""
    try:
        return parse_dataclass(TokenizerNotes, json.loads(file.read_text()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(
            f"{file} can't be read as a tokenizer's notes: {error}",
            "copy it again from the run, or the export, that it belongs to",
            "data.tokenizer",
        ) from None


@dataclass(frozen=True)
class PairLayout:
    """Tokens around two texts that are read together.

    types: how many tokens between the texts have the first text's type; None: there are no types.
    """

    before: TokenIds
    between: TokenIds
    after: TokenIds
    types: int | None

    def join(self, first: NDArray[Any], second: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([self.before, first, self.between, second, self.after])


class TextTokenizer:
    """A tokenizer that is kept in a directory.

    size: ids are below it. prefix, suffix: tokens around a text; the suffix ends with the
    end-of-document token, if there is one. pad: the id of padding. mask: the id of a hidden token,
    or None. special: ids that stand for no text.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.notes = read_notes(home / NOTES)
        self._tokenizer: Tokenizer = ByteTokenizer()
        self._inner: Any = None  # the library's own object; None: tokens are bytes
        self.prefix = self.suffix = np.zeros(0, np.uint32)
        self.pad = 0
        self.eos: int | None = None
        self.mask: int | None = None
        self.special: tuple[int, ...] = ()
        self._template: ChatTemplate | None = None
        if (home / TOKENIZER).exists():
            name = f"the tokenizer {self.notes.name}"
            self._tokenizer = LibraryTokenizer(home / TOKENIZER, name)
            self._inner = self._tokenizer.inner
            with library_errors(f"{name} can't encode a text", "the tokenizer as it was made"):
                self._take_special_tokens()
        self.size = self._tokenizer.size

    def _take_special_tokens(self) -> None:
        self.eos = self._id_of("eos_token")
        self.mask = self._id_of("mask_token")
        pad = self._id_of("pad_token")
        if pad is None:
            pad = self.eos
        self.pad = pad or 0
        self.prefix, self.suffix = self._around()
        self.suffix = self._ended(self.suffix)
        ids = (self._id_of(name) for name in self.notes.names)
        named = {index for index in ids if index is not None}
        self.special = tuple(sorted({*named, *self.prefix.tolist(), *self.suffix.tolist()}))

    def _ended(self, after: TokenIds) -> TokenIds:
        """Tokens after a text, with the end-of-text token as the last where texts have one."""
        if not self.notes.ends or self.eos is None or self.eos in after[-1:]:
            return after
        return np.append(after, np.uint32(self.eos))

    def _id_of(self, name: str) -> int | None:
        token = self.notes.names.get(name)
        index: int | None = self._inner.token_to_id(token) if token else None
        return index

    def _around(self) -> tuple[TokenIds, TokenIds]:
        """The tokens that the tokenizer itself puts before and after a text."""
        plain = self._inner.encode("a", add_special_tokens=False).ids
        full = self._inner.encode("a", add_special_tokens=True).ids
        for begin in range(len(full) - len(plain) + 1):
            if full[begin : begin + len(plain)] == plain:
                end = begin + len(plain)
                return np.array(full[:begin], np.uint32), np.array(full[end:], np.uint32)
        raise UserError(
            f"the tokenizer {self.notes.name} changes a text that it puts its own tokens around",
            "a tokenizer that puts them before and after",
            "data.tokenizer",
        )

    @cached_property
    def pairs(self) -> PairLayout:
        """The tokenizer's own layout of two texts.

        Where it puts nothing between them, so that they would run together: the end-of-text token,
        or a line break, if each text ends with one.
        """
        between = self.suffix if len(self.suffix) else self.encode(["\n"])[0]
        plain = PairLayout(self.prefix, between, self.suffix, None)
        if self._inner is None:
            return plain
        encoding = self._inner.encode("a", "a")
        ids, of_text = np.array(encoding.ids, np.uint32), encoding.sequence_ids
        if not {0, 1} <= set(of_text):
            return plain
        first_end = len(of_text) - of_text[::-1].index(0)
        second = of_text.index(1)
        if second < first_end or (second == first_end and self.notes.ends):
            return plain
        after = self._ended(ids[len(of_text) - of_text[::-1].index(1) :])
        types = encoding.type_ids[first_end:second].count(0) if 1 in encoding.type_ids else None
        return PairLayout(ids[: of_text.index(0)], ids[first_end:second], after, types)

    def encode(self, texts: Sequence[str]) -> list[TokenIds]:
        """The tokens of each text by itself, without prefix and suffix."""
        return self._tokenizer.encode(texts)

    def encode_spans(self, text: str, spans: Sequence[Span]) -> tuple[TokenIds, NDArray[np.bool_]]:
        """The tokens of a text, and for each whether it begins in one of the spans."""
        if self._inner is None:
            ids = self.encode([text])[0]
            places = [
                (len(text[:begin].encode()), len(text[:end].encode())) for begin, end in spans
            ]
            begins = np.arange(len(ids))
        else:
            encoding = self._inner.encode(text, add_special_tokens=False)
            ids = np.asarray(encoding.ids, np.uint32)
            begins = np.array([begin for begin, _ in encoding.offsets], np.int64)
            places = list(spans)
        inside = np.zeros(len(ids), bool)
        for begin, end in places:
            inside |= (begins >= begin) & (begins < end)
        return ids, inside

    def decode(self, ids: Sequence[int], *, special: bool = True) -> str:
        """Text. special: tokens that stand for no text are written out too."""
        return self._tokenizer.decode(ids, special=special)

    def write(self, directory: Path, longest: int | None) -> list[str]:
        """Write the tokenizer as AutoTokenizer reads it. Returns lines for the user.

        longest: tokens that the model takes at most; None: any number
        """
        if self._inner is None:
            return write_tokenizer(None, directory, longest or int(1e30))
        shutil.copyfile(self.home / TOKENIZER, directory / TOKENIZER)
        fields: dict[str, Any] = dict(self.notes.names)
        if longest is not None:
            fields["model_max_length"] = longest
        if self.notes.chat_template is not None:
            fields["chat_template"] = self.notes.chat_template
        write_tokenizer_config(directory, fields)
        return []

    @property
    def template(self) -> ChatTemplate:
        """The chat template. UserError: the tokenizer has none."""
        if self._template is None:
            text = self.notes.chat_template
            if text is None:
                raise UserError(
                    f"the data has conversations (`messages`), and the tokenizer {self.notes.name}"
                    " has no chat template",
                    "data.chat_template=FILE.jinja, or the tokenizer of a chat model",
                    "data.tokenizer",
                )
            added = {} if self._inner is None else self._inner.get_added_tokens_decoder()
            special = [token.content for token in added.values() if token.content.strip()]
            self._template = ChatTemplate(text, self.notes.names, special)
        return self._template

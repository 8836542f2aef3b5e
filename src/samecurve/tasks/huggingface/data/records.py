"""Documents of input files, in the order in which they stand there.

A document is plain text; a prompt and its completion; a conversation; or, where that is learnt, a
text with its label, or texts that belong together. Which one follows from the names of the columns.
Text and JSONL files are cut into chunks, each of whole lines, which may be read by different
processes: a chunk has the lines that begin in it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from samecurve.errors import UserError
from samecurve.tasks.huggingface.data.sources import Form, InputFile

Kind = Literal["text", "completion", "messages", "classified", "pair", "triple"]
KINDS: tuple[Kind, ...] = ("text", "completion", "messages", "classified", "pair", "triple")
Learns = Literal["tokens", "label", "pair"]
COLUMNS: Mapping[Kind, tuple[str, ...]] = {
    "messages": ("messages",),
    "completion": ("prompt", "completion"),
    "text": ("text",),
    "classified": ("text",),  # and one of LABELS; only where labels are learnt
    "pair": ("anchor", "positive"),  # only where such are learnt, as
    "triple": ("anchor", "positive", "negative"),
}  # a row with several is what comes first
LABELS = ("label", "labels")

_CHUNK = 2 << 20  # bytes of a file that one process reads
_SHOWN = 60  # characters of a line in an error
_MARK = b"\xef\xbb\xbf"  # what some editors begin a UTF-8 file with
_TOOLS = "tools"  # a column that a chat template is given, where there is one


@dataclass(frozen=True)
class Chunk:
    """A part of a file: bytes [begin, end), or row groups of parquet. size: bytes, about."""

    path: str
    form: Form
    kind: Kind
    begin: int
    end: int
    size: int
    last: bool  # of its file


@dataclass(frozen=True)
class Document:
    """One document, as it was read. `text` in parts: one, or a prompt and its completion.

    opens, closes: False where a text file's document goes on from, or in, another chunk.
    """

    kind: Kind
    place: str
    text: tuple[str, ...] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Any = None
    label: str | None = None
    opens: bool = True
    closes: bool = True


def chunks_of(file: InputFile, *, learns: Learns = "tokens") -> list[Chunk]:
    """learns: what of a row; it needs the columns for that.

    UserError: it can't be read, or its columns are none of ours.
    """
    if file.form == "parquet":
        return _row_groups(file.path, learns=learns)
    size = file.path.stat().st_size
    if file.form == "arrow":
        of_columns = _kind_of(_arrow_columns(file.path), file.path, learns=learns)
        return [
            Chunk(
                path=str(file.path),
                form=file.form,
                kind=of_columns,
                begin=0,
                end=size,
                size=size,
                last=True,
            )
        ]
    if not size:
        return []
    if learns != "tokens" and file.form == "text":
        raise _no_column([], file.path, learns)
    lines = file.form == "lines"
    kind: Kind = _kind_of_lines(file.path, learns=learns) if lines else "text"
    return [
        Chunk(
            path=str(file.path),
            form=file.form,
            kind=kind,
            begin=begin,
            end=min(begin + _CHUNK, size),
            size=min(_CHUNK, size - begin),
            last=begin + _CHUNK >= size,
        )
        for begin in range(0, size, _CHUNK)
    ]


def documents_of(chunk: Chunk) -> Iterator[Document]:
    """UserError: a line is no JSON object, a field is missing or of another type."""
    if chunk.form == "text":
        yield _text_of(chunk)
        return
    rows = {"lines": _lines, "parquet": _parquet_rows, "arrow": _arrow_rows}[chunk.form](chunk)
    for place, row in rows:
        yield _document(chunk.kind, row, place)


def texts_of(document: Document) -> list[str]:
    """All that stands in it, to train a tokenizer on."""
    contents = [message.get("content") for message in document.messages]
    return [*document.text, *(text for text in contents if isinstance(text, str))]


def _kind_of(columns: Sequence[str], place: Path | str, *, learns: Learns) -> Kind:
    if learns == "label":
        if "text" not in columns or not set(LABELS) & set(columns):
            raise _no_column(columns, place, learns)
        return "classified"
    if learns == "pair":
        if not set(COLUMNS["pair"]) <= set(columns):
            raise _no_column(columns, place, learns)
        return "triple" if "negative" in columns else "pair"
    for kind, needed in COLUMNS.items():
        if all(name in columns for name in needed):
            return kind
    raise UserError(
        f"no column says what a document is; there are {', '.join(columns) or 'none'}",
        "rows have `text`, or `prompt` and `completion`, or `messages`: rename the column",
        str(place),
    )


def _no_column(columns: Sequence[str], place: Path | str, learns: Learns) -> UserError:
    if learns == "pair":
        return UserError(
            "model.objective embed learns which texts belong together: `anchor` and `positive`"
            f" (and `negative`); there are {', '.join(columns) or 'no columns'}",
            "JSONL, parquet or a saved dataset with these columns: rename them",
            str(place),
        )
    return UserError(
        "model.objective classify learns the label of each text, and no column holds one; there"
        f" are {', '.join(columns) or 'none'}",
        "JSONL, parquet or a saved dataset with `text` and `label` (or `labels`)",
        str(place),
    )


def _label(row: Mapping[str, Any], place: str) -> str:
    """UserError: it names no class."""
    value = next((row[name] for name in LABELS if row.get(name) is not None), None)
    if isinstance(value, str | int) and str(value):
        return str(value)
    raise UserError(
        f"`label` is {'missing' if value is None else _type(value)}: it names no class",
        "a text or a whole number; a row that has none is left out of the file",
        place,
    )


def _document(kind: Kind, row: Mapping[str, Any], place: str) -> Document:
    for name in COLUMNS[kind]:
        if row.get(name) is None:
            what = "is empty (null)" if name in row else f"is missing; it has {', '.join(row)}"
            raise UserError(
                f"`{name}` {what}",
                f"each row has {' and '.join(COLUMNS[kind])}, as the first has: fill it in, or"
                " leave the row out",
                place,
            )
    if kind == "messages":
        return Document(
            kind, place, messages=_messages(row["messages"], place), tools=row.get(_TOOLS)
        )
    if kind == "pair" and "negative" in row:
        raise UserError(
            "this row has a `negative`, and the first has none: a batch of both has no one loss",
            "a negative in each row, or in none",
            place,
        )
    texts = tuple(row[name] for name in COLUMNS[kind])
    for name, text in zip(COLUMNS[kind], texts, strict=True):
        if not isinstance(text, str):
            raise UserError(
                f"`{name}` is {_type(text)}, not text",
                "text; a conversation belongs into `messages`",
                place,
            )
    label = _label(row, place) if kind == "classified" else None
    return Document(kind, place, texts, label=label)


def _messages(value: Any, place: str) -> Sequence[Mapping[str, Any]]:
    if isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in value
    ):
        # a column of structs names every field in each message: those without a value are none
        return [
            {name: part for name, part in message.items() if part is not None} for message in value
        ]
    raise UserError(
        f"`messages` is {_type(value)}, not a list of messages",
        'a list such as [{"role": "user", "content": "..."}, {"role": "assistant", ...}]',
        place,
    )


def _type(value: Any) -> str:
    names = {"dict": "an object", "list": "a list of other things", "str": "text"}
    name = type(value).__name__
    return names.get(name, f"{name} ({value})")


def _text_of(chunk: Chunk) -> Document:
    """The lines of a text file that begin in the chunk."""
    with open(chunk.path, "rb") as file:
        begin, end = _line_from(file, chunk.begin), _line_from(file, chunk.end)
        file.seek(begin)
        content = file.read(end - begin)
    if b"\0" in content:
        raise UserError(
            f"{chunk.path} is no text: it has zero bytes",
            "name the text files, or a glob that leaves it out",
            "data.source",
        )
    text = content.removeprefix(_MARK).decode("utf-8", "replace")
    return Document("text", chunk.path, (text,), opens=chunk.begin == 0, closes=chunk.last)


def _line_from(file: Any, offset: int) -> int:
    """Where the first line begins that begins at this byte or after it."""
    if offset == 0:
        return 0
    file.seek(offset - 1)
    file.readline()
    return int(file.tell())


def _lines(chunk: Chunk) -> Iterator[tuple[str, dict[str, Any]]]:
    with open(chunk.path, "rb") as file:
        at = _line_from(file, chunk.begin)
        number = _line_number(Path(chunk.path), at)
        file.seek(at)
        while at < chunk.end:
            line = file.readline()
            content = (line.removeprefix(_MARK) if at == 0 else line).strip()
            if content:
                place = f"{chunk.path}:{number}"
                yield place, _object(content, place)
            at, number = at + len(line), number + 1


def _line_number(path: Path, offset: int) -> int:
    """Of the line that begins at this byte, from 1."""
    lines = 1
    with open(path, "rb") as file:
        while offset > 0 and (block := file.read(min(offset, 1 << 20))):
            lines += block.count(b"\n")
            offset -= len(block)
    return lines


def _object(content: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(content)
    except ValueError:
        row = None
    if isinstance(row, dict):
        return dict(_whole(row)) if b"\\ud" in content.lower() else row
    dots = " ..." if len(content) > _SHOWN else ""
    raise UserError(
        f"not one JSON object in a line: {content[:_SHOWN].decode('utf-8', 'replace')}{dots}",
        "JSON lines: each line a whole {...}. A file that is one array: jq -c '.[]' old.json >"
        " new.jsonl; one that was cut off: make it again",
        place,
    )


def _whole(value: Any) -> Any:
    """With halves of characters replaced, which no encoding has."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, dict):
        return {_whole(name): _whole(item) for name, item in value.items()}
    return value


def _kind_of_lines(path: Path, *, learns: Learns) -> Kind:
    """By its first row."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            content = (line.removeprefix(_MARK) if number == 1 else line).strip()
            if content:
                place = f"{path}:{number}"
                return _kind_of(list(_object(content, place)), place, learns=learns)
    return "text"


def _check_pyarrow() -> None:
    from samecurve.data.shards.parquet import check_installed

    check_installed()


def _row_groups(path: Path, *, learns: Learns) -> list[Chunk]:
    _check_pyarrow()
    import pyarrow
    from pyarrow import parquet

    try:
        footer = parquet.read_metadata(path)
        columns = parquet.read_schema(path).names
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{path}: no whole parquet file: {error}", "make it again, or copy it again", "data"
        ) from None
    kind = _kind_of(columns, path, learns=learns)
    _check_filled(path, footer, kind)
    return [
        Chunk(
            path=str(path),
            form="parquet",
            kind=kind,
            begin=number,
            end=number + 1,
            size=footer.row_group(number).total_byte_size,
            last=number + 1 == footer.num_row_groups,
        )
        for number in range(footer.num_row_groups)
    ]


def _check_filled(path: Path, footer: Any, kind: Kind) -> None:
    """UserError: a column that is needed holds nothing at all."""
    filled: set[str] = set()
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        for index in range(group.num_columns):
            column = group.column(index)
            statistics = column.statistics
            unknown = statistics is None or not statistics.has_null_count
            if unknown or statistics.null_count < column.num_values:
                filled.add(column.path_in_schema.partition(".")[0])
    for name in COLUMNS[kind]:
        if name not in filled:
            raise UserError(
                f"{path}: the column `{name}` is empty: {footer.num_rows} rows, none with a value",
                "a file with something in it, or leave it out of data.source",
                "data.source",
            )


def _parquet_rows(chunk: Chunk) -> Iterator[tuple[str, dict[str, Any]]]:
    from pyarrow import parquet

    with parquet.ParquetFile(chunk.path, pre_buffer=False) as file:
        row = sum(file.metadata.row_group(number).num_rows for number in range(chunk.begin))
        columns = _wanted(file.schema_arrow.names, chunk.kind)
        groups = list(range(chunk.begin, chunk.end))
        for batch in file.iter_batches(1024, groups, columns=columns, use_threads=False):
            for values in batch.to_pylist():
                yield f"{chunk.path}: row {row}", values
                row += 1


def _wanted(names: Sequence[str], kind: Kind) -> list[str]:
    others = LABELS if kind == "classified" else (_TOOLS,)
    return [name for name in (*COLUMNS[kind], *others) if name in names]


def _arrow_columns(path: Path) -> list[str]:
    _check_pyarrow()
    import pyarrow
    from pyarrow import ipc

    try:
        with pyarrow.memory_map(str(path)) as file:
            return list(ipc.open_stream(file).schema.names)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{path}: not as datasets' save_to_disk writes it: {error}",
            "save it again, or copy it again",
            "data.source",
        ) from None


def _arrow_rows(chunk: Chunk) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    from pyarrow import ipc

    row = 0
    with pyarrow.memory_map(chunk.path) as file:
        stream = ipc.open_stream(file)
        columns = _wanted(stream.schema.names, chunk.kind)
        for batch in stream:
            for values in batch.select(columns).to_pylist():
                yield f"{chunk.path}: row {row}", values
                row += 1

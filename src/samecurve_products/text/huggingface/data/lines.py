"""Text and JSONL files in chunks of whole lines: a line belongs to the chunk it begins in."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from samecurve.data.shards.json_lines import MARK, line_number, no_object
from samecurve_products.text.huggingface.data.document_columns import (
    Document,
    Kind,
    Learns,
    kind_of,
)
from samecurve_products.text.huggingface.data.sources import Chunk
from samecurve_products.text_files import check_is_text


def text_of(chunk: Chunk) -> Document:
    """The lines of a text file that begin in the chunk. UserError: they are no text."""
    with open(chunk.path, "rb") as file:
        begin, end = _line_from(file, chunk.begin), _line_from(file, chunk.end)
        file.seek(begin)
        content = file.read(end - begin)
    check_is_text(content, Path(chunk.path), begin)
    text = content.removeprefix(MARK).decode()
    return Document("text", chunk.path, (text,), opens=chunk.begin == 0, closes=chunk.last)


def _line_from(file: Any, offset: int) -> int:
    """The offset of the first line that begins at this byte or after it."""
    if offset == 0:
        return 0
    file.seek(offset - 1)
    file.readline()
    return int(file.tell())


def rows_of_lines(chunk: Chunk) -> Iterator[tuple[str, dict[str, Any]]]:
    with open(chunk.path, "rb") as file:
        at = _line_from(file, chunk.begin)
        number = line_number(Path(chunk.path), at)
        file.seek(at)
        while at < chunk.end:
            line = file.readline()
            content = (line.removeprefix(MARK) if at == 0 else line).strip()
            if content:
                place = f"{chunk.path}:{number}"
                yield place, _object(content, place)
            at, number = at + len(line), number + 1


def _object(content: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(content)
    except (ValueError, RecursionError):
        row = None
    if isinstance(row, dict):
        return dict(_whole(row)) if b"\\ud" in content.lower() else row
    raise no_object(content, place)


def _whole(value: Any) -> Any:
    """The value with unpaired surrogates replaced, which no encoding can hold."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, dict):
        return {_whole(name): _whole(item) for name, item in value.items()}
    return value


def kind_of_lines(path: Path, *, learns: Learns) -> Kind:
    """The kind of a file's documents, from its first row."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            content = (line.removeprefix(MARK) if number == 1 else line).strip()
            if content:
                place = f"{path}:{number}"
                return kind_of(list(_object(content, place)), place, learns=learns)
    return "text"

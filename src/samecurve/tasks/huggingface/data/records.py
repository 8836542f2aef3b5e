"""Documents of input files, in the order in which they stand there.

Text and JSONL files are cut into chunks, which may be read by different processes.
"""

from collections.abc import Iterator, Sequence

from samecurve.tasks.huggingface.data.document_columns import (
    Document,
    Kind,
    Learns,
    document_of,
    kind_of,
    no_column,
)
from samecurve.tasks.huggingface.data.lines import kind_of_lines, rows_of_lines, text_of
from samecurve.tasks.huggingface.data.sources import Chunk, InputFile
from samecurve.tasks.huggingface.data.tables import (
    arrow_columns,
    arrow_rows,
    parquet_rows,
    row_groups,
)

_CHUNK = 2 << 20  # bytes of a file that one process reads


def chunks_of(file: InputFile, *, learns: Learns = "tokens") -> list[Chunk]:
    """learns: what of a row; it needs the columns for that.

    UserError: it can't be read, or its columns are none of ours.
    """
    if file.form == "parquet":
        return row_groups(file.path, learns=learns)
    size = file.path.stat().st_size
    if file.form == "arrow":
        of_columns = kind_of(arrow_columns(file.path), file.path, learns=learns)
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
        raise no_column([], file.path, learns)
    lines = file.form == "lines"
    kind: Kind = kind_of_lines(file.path, learns=learns) if lines else "text"
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
        yield text_of(chunk)
        return
    rows = {"lines": rows_of_lines, "parquet": parquet_rows, "arrow": arrow_rows}[chunk.form](chunk)
    for place, row in rows:
        yield document_of(chunk.kind, row, place)


def texts_in(files: Sequence[InputFile], learns: Learns) -> Iterator[str]:
    """All the text of the files, to train a tokenizer on."""
    for file in files:
        for chunk in chunks_of(file, learns=learns):
            for document in documents_of(chunk):
                yield from document.text
                contents = [message.get("content") for message in document.messages]
                yield from (text for text in contents if isinstance(text, str))

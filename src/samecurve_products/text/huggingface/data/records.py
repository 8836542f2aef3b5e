"""The documents of input files, in their order.

Files are cut into chunks, which different processes may read.
"""

from collections.abc import Iterator, Sequence

from samecurve_products.text.huggingface.data.document_columns import (
    Document,
    Kind,
    Learns,
    document_of,
    kind_of,
    no_column,
)
from samecurve_products.text.huggingface.data.lines import kind_of_lines, rows_of_lines, text_of
from samecurve_products.text.huggingface.data.sources import Chunk, InputFile
from samecurve_products.text.huggingface.data.tables import (
    arrow_columns,
    arrow_rows,
    parquet_rows,
    row_groups,
)

_CHUNK = 2 << 20  # bytes of a file that one process reads


def chunks_of(file: InputFile, *, learns: Learns = "tokens", turns: bool = False) -> list[Chunk]:
    """The chunks of a file.

    learns: what the model learns of a row, which needs its columns. turns: rows of instructions
    are conversations.
    UserError: the file can't be read, or its columns are not known.
    """
    size = file.path.stat().st_size
    if file.form == "parquet":
        kind, group_sizes = row_groups(file.path, learns=learns)
        bounds = [(number, number + 1, size) for number, size in enumerate(group_sizes)]
    else:
        step = size if file.form == "arrow" else _CHUNK
        begins = range(0, size, step or 1)
        bounds = [(begin, min(begin + step, size), min(step, size - begin)) for begin in begins]
        kind = _kind_of(file, learns) if bounds or file.form == "arrow" else "text"
    if turns and kind == "instruction":
        kind = "turns"
    return [
        Chunk(
            path=str(file.path),
            form=file.form,
            kind=kind,
            begin=begin,
            end=end,
            size=size,
            last=end == bounds[-1][1],
        )
        for begin, end, size in bounds
    ]


def _kind_of(file: InputFile, learns: Learns) -> Kind:
    if file.form == "arrow":
        return kind_of(arrow_columns(file.path), file.path, learns=learns)
    if file.form == "lines":
        return kind_of_lines(file.path, learns=learns)
    if learns != "tokens":
        raise no_column([], file.path, learns)
    return "text"


def documents_of(chunk: Chunk) -> Iterator[Document]:
    """The documents of a chunk. UserError: a line is no JSON object, or a field is unfit."""
    if chunk.form == "text":
        yield text_of(chunk)
        return
    rows = {"lines": rows_of_lines, "parquet": parquet_rows, "arrow": arrow_rows}[chunk.form](chunk)
    for place, row in rows:
        yield document_of(chunk.kind, row, place)


def texts_in(files: Sequence[InputFile], learns: Learns, *, turns: bool) -> Iterator[str]:
    """All the text of the files, to train a tokenizer on."""
    for file in files:
        for chunk in chunks_of(file, learns=learns, turns=turns):
            for document in documents_of(chunk):
                yield from document.text
                contents = [message.get("content") for message in document.messages]
                yield from (text for text in contents if isinstance(text, str))

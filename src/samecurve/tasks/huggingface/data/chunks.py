"""A part of an input file, which one process reads."""

from dataclasses import dataclass

from samecurve.tasks.huggingface.data.columns import Kind
from samecurve.tasks.huggingface.data.sources import Form


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

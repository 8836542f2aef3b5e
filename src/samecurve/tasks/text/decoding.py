"""Bytes of a file are text, or the file is refused by its name.

Text is UTF-8 without zero bytes: every trainer of text reads other bytes as rubbish.
"""

import codecs
from pathlib import Path

from samecurve.data.shards.json_lines import line_number
from samecurve.errors import UserError

_BLOCK = 1 << 22  # bytes decoded at once: a whole file's text would take several times its size
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_PLACE = "data.source"


def check_is_text(content: bytes, path: Path, begin: int = 0) -> None:
    """UserError: the content has a zero byte, or is no UTF-8.

    content: whole lines of the file, from the byte `begin` on
    """
    if content.startswith(_UTF16) and begin == 0:
        raise UserError(f"{path} is no UTF-8: it is UTF-16", _convert("utf-16", path), _PLACE)
    if b"\0" in content:
        raise UserError(
            f"{path} is no text: it has zero bytes",
            "name the text files, or a glob that leaves it out; raw token ids are in .bin files",
            _PLACE,
        )
    decoder, view = codecs.getincrementaldecoder("utf-8")(), memoryview(content)
    try:
        for first in range(0, len(content), _BLOCK):
            decoder.decode(view[first : first + _BLOCK])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise _no_utf8(content, path, begin) from None


def _no_utf8(content: bytes, path: Path, begin: int) -> UserError:
    start = len(content)
    try:
        content.decode()
    except UnicodeDecodeError as error:
        start = error.start
    line = line_number(path, begin + start)
    return UserError(
        f"{path} is no text: the byte {content[start]:#04x} of line {line} is no UTF-8",
        f"{_convert('latin1', path)} (latin1, or the encoding that it has); or a glob that leaves"
        " it out",
        _PLACE,
    )


def _convert(encoding: str, path: Path) -> str:
    return f"iconv -f {encoding} -t utf-8 {path} > new.txt"

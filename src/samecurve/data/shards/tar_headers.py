"""The headers of a tar file, in the ustar, GNU and pax formats.

Python's tarfile takes three times as long, and ends in silence where a file is cut off.
Source: POSIX.1-2017, pax, "ustar Interchange Format" and "pax Extended Header"; GNU tar's manual,
"Basic Tar Format".
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from samecurve.errors import UserError

BLOCK = 512
_MOST_DIGITS = 20
_AGAIN = "make it again, or copy it again"
_OF_THE_NEXT = (b"L", b"K", b"x", b"g")  # headers that say more of the next member
_LONGEST = 16 << 20  # bytes of such a header
_REGULAR, _ELSEWHERE = (b"0", b"\0", b"7"), (b"1", b"2", b"S")
NAMES = "surrogateescape"  # for names that are no UTF-8


class Member(NamedTuple):
    """A regular file in a tar: its bytes are [offset, offset + size)."""

    name: str
    offset: int
    size: int


def read_members(path: Path, file_size: int) -> Iterator[Member]:
    """The regular files of a tar, in their order.

    UserError: the tar is not whole, or has a link or a sparse file, whose bytes are elsewhere.
    """
    at = 0
    extended: dict[bytes, bytes] = {}  # what headers before the next member say of it
    with open(path, "rb") as file:
        while (header := _read(file, at, BLOCK)) != bytes(BLOCK):
            kind, size = _kind(path, header, at), _size(path, header[124:136], at)
            if kind in _REGULAR and b"size" in extended:
                size = _number(path, extended[b"size"], 10, at)
            if kind in _OF_THE_NEXT and size > _LONGEST:
                raise broken(path, f"a header of {size} bytes at byte {at}")
            offset = at + BLOCK
            if offset + size > file_size:
                raise broken(path, f"cut off: a member ends at byte {offset + size}")
            if kind == b"L":
                extended[b"path"] = _read(file, offset, size).rstrip(b"\0")
            elif kind == b"x":
                extended.update(_records(path, _read(file, offset, size), at))
            elif kind in _REGULAR or kind in _ELSEWHERE:
                name = extended.get(b"path", _name(header)).decode("utf-8", NAMES)
                if kind in _ELSEWHERE or any(key.startswith(b"GNU.sparse") for key in extended):
                    raise UserError(
                        f"{path}: {name} is a link or a sparse file, whose bytes stand elsewhere",
                        "make it again with tar --dereference --hard-dereference",
                        "data",
                    )
                yield Member(name, offset, size)
            if kind not in _OF_THE_NEXT:
                extended = {}
            at = offset + -(-size // BLOCK) * BLOCK


def broken(path: Path, cause: str) -> UserError:
    return UserError(f"{path}: no whole tar file: {cause}", _AGAIN, "data")


def _read(file: IO[bytes], at: int, size: int) -> bytes:
    file.seek(at)
    return file.read(size)


def _kind(path: Path, header: bytes, at: int) -> bytes:
    """The type of a header. UserError: it is no header."""
    if len(header) < BLOCK:
        raise broken(path, f"cut off at byte {at + len(header)}, before the end that tars have")
    try:
        checksum = int(header[148:156].rstrip(b"\0 ") or b"0", 8)
    except ValueError:
        checksum = -1
    if checksum != sum(header) - sum(header[148:156]) + 8 * ord(" "):
        raise broken(path, f"no header at byte {at}")
    return header[156:157]


def _size(path: Path, field: bytes, at: int) -> int:
    """Octal digits; or, from 8 GiB on, GNU's binary form. UserError: neither."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big")
    return _number(path, field.strip(b"\0 ") or b"0", 8, at)


def _number(path: Path, digits: bytes, base: int, at: int) -> int:
    """UserError: these are no digits."""
    if len(digits) <= _MOST_DIGITS and digits.isdigit():
        with suppress(ValueError):
            return int(digits, base)
    raise broken(path, f"{digits[:_MOST_DIGITS]!r} is no number, in the header at byte {at}")


def _name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    prefix = b""
    if header[257:263] == b"ustar\0":
        prefix = header[345:500].partition(b"\0")[0]
    return prefix + b"/" + name if prefix else name


def _records(path: Path, text: bytes, at: int) -> dict[bytes, bytes]:
    """Parse records like `27 path=some/name\\n`; the number is the record's length.

    UserError: a length is no number, or not that of a record.
    """
    records = {}
    while text.strip(b"\0"):
        length, _, _ = text.partition(b" ")
        end = _number(path, length, 10, at)
        if not len(length) < end <= len(text):
            raise broken(path, f"a record of {end} bytes in the header at byte {at}")
        record, text = text[:end], text[end:]
        key, _, value = record[len(length) + 1 : -1].partition(b"=")
        records[key] = value
    return records

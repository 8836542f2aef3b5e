"""Shards: rows by id in any order are those of the files read from their beginning, whatever the
kind of file; an index is made once; what is broken is named with its place.
"""

import io
import json
import os
import re
import shutil
import tarfile
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samecurve import Shards
from samecurve.data.shards import json_lines
from samecurve.data.shards.json_lines import no_object
from samecurve.data.shards.tar_headers import read_members
from samecurve.errors import RunError, UserError
from samecurve.tasks.adapter.rows import Rows

IDS = np.array([6, 0, 4, 4, 1, 5, 2, 3])
ROWS: list[dict[str, Any]] = [{"n": i, "text": "ä" * (i * 5 % 23)} for i in range(7)]


def said(call: Callable[[], object], kind: type[Exception] = UserError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """ROWS in files as different hands write them; the directory."""
    texts = [json.dumps(row, ensure_ascii=False).encode() for row in ROWS]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + texts[0] + b"\n\n  \n" + texts[1])
    (tmp_path / "b.jsonl").write_bytes(b"")
    (tmp_path / "c.ndjson").write_bytes(b"\r\n".join(texts[2:5]) + b"\r\n\r\n")
    (tmp_path / "d.jsonl").write_bytes(b"\n" + texts[5] + b" \n " + texts[6] + b"\n\n")
    return tmp_path


@pytest.mark.parametrize("block", [3, 64, 1 << 20])
def test_json_lines_are_read_by_id(
    block: int, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "_BLOCK", block)
    shards = Shards([lines / "[ab].jsonl", lines / "?.*"], cache=lines / f"cache-{block}")
    assert len(shards) == 7
    assert shards[IDS] == [ROWS[i] for i in IDS]
    assert [shards[i] for i in (3, -1)] == [ROWS[3], ROWS[6]]
    assert isinstance(shards._index["begin"], np.memmap)  # nothing is held by the row
    some = Shards(lines / "*.*", columns=["n"], cache=lines / f"cache-{block}")
    assert some[IDS] == [{"n": i} for i in IDS]


def write_tar(path: Path, rows: list[dict[str, Any]], form: int) -> list[tuple[str, int, bytes]]:
    """Returns (name, offset, bytes) of each member, as tarfile finds them."""
    with tarfile.open(path, "w", format=form) as tar:
        tar.addfile(tarfile.TarInfo("__meta__.json"))
        folder = tarfile.TarInfo("deep")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for row in rows:
            for extension, value in (("N.txt", b"%d" % row["n"]), ("bin", row["text"].encode())):
                member = tarfile.TarInfo(f"deep/{'x' * (row['n'] * 40)}ö{row['n']}.{extension}")
                member.size, member.mtime = len(value), 1e9 + 0.5
                tar.addfile(member, io.BytesIO(value))
        tar.addfile(tarfile.TarInfo("README"))
    with tarfile.open(path) as tar:
        files = [member for member in tar.getmembers() if member.isreg()]
        contents = [tar.extractfile(member) for member in files]
        return [
            (member.name, member.offset_data, content.read() if content else b"")
            for member, content in zip(files, contents, strict=True)
        ]


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_tar_members_of_one_key_are_a_row(form: int, tmp_path: Path) -> None:
    """Names longer than a header holds, and times in parts of a second, as webdataset writes."""
    rows = ROWS if form != tarfile.USTAR_FORMAT else ROWS[:3]  # which holds no long names
    for name, part in (("t-08.tar", rows[:2]), ("t-09.tar", rows[2:])):
        expected = write_tar(tmp_path / name, part, form)
        file = tmp_path / name
        found = [
            (name, offset, file.read_bytes()[offset : offset + size])
            for name, offset, size in read_members(file, file.stat().st_size)
        ]
        assert found == expected
    shards = Shards(tmp_path / "t-{08..09}.tar", cache=tmp_path / "cache")
    assert len(shards) == len(rows)
    read = shards[np.arange(len(rows))[::-1]][::-1]
    for row, expected_row in zip(read, rows, strict=True):
        assert list(row) == ["__key__", "n.txt", "bin"]
        assert int(row["n.txt"]) == expected_row["n"]
        assert row["bin"].decode() == expected_row["text"]
        assert row["__key__"] == f"deep/{'x' * (expected_row['n'] * 40)}ö{expected_row['n']}"
    assert list(Shards(tmp_path / "t-*.tar", columns=["bin"], cache=tmp_path / "c")[1]) == [
        "__key__",
        "bin",
    ]


@pytest.mark.skipif(find_spec("pyarrow") is None, reason="pyarrow is not installed")
def test_parquet_rows_keep_their_types(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table(
        {
            "n": np.arange(5000, dtype=np.int16),
            "x": np.arange(5000, dtype=np.float32) / 8,
            "list": [np.arange(i % 4, dtype=np.int32) for i in range(5000)],
            "text": [f"row {i}" for i in range(5000)],
            "none": [i if i % 2 else None for i in range(5000)],
        }
    )
    parquet.write_table(table[:2000], tmp_path / "a.parquet", row_group_size=700)
    parquet.write_table(table[2000:], tmp_path / "b.parquet")
    shards = Shards(tmp_path / "*.parquet", cache=tmp_path / "cache")
    ids = np.array([4999, 0, 1999, 2000, 3, 1024])
    for row_id, row in zip(ids, shards[ids], strict=True):
        assert (row["n"], row["x"]) == (row_id, row_id / 8)
        assert (row["n"].dtype, row["x"].dtype, row["list"].dtype) == ("i2", "f4", "i4")
        np.testing.assert_array_equal(row["list"], np.arange(row_id % 4))
        assert row["text"] == f"row {row_id}"
        assert row["none"] == (row_id if row_id % 2 else None)
        row["list"] += 1  # it is the reader's own
    some = Shards(tmp_path / "*.parquet", columns=["text"], cache=tmp_path / "cache")
    assert some[7] == {"text": "row 7"}
    text = said(lambda: Shards(tmp_path / "*.parquet", columns=["txt"], cache=tmp_path / "cache"))
    assert "has no column txt" in text
    assert "n, x, list, text, none" in text
    parquet.write_table(table.select(["n"]), tmp_path / "c.parquet")
    text = said(lambda: Shards(tmp_path / "*.parquet", cache=tmp_path / "cache"))
    assert "c.parquet has other columns than a.parquet: x: none, there float" in text
    (tmp_path / "c.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    text = said(lambda: Shards(tmp_path / "*.parquet", cache=tmp_path / "cache"))
    assert "c.parquet: no whole parquet file" in text


def test_an_index_is_made_once_and_anew_for_a_changed_file(
    lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans = []

    def slow(*arguments: Any) -> None:
        scans.append(1)
        time.sleep(0.2)
        scan(*arguments)

    scan = json_lines.scan
    monkeypatch.setattr(json_lines, "scan", slow)
    opened: list[int] = []

    def open_one() -> None:
        opened.append(len(Shards(lines / "*.*", cache=lines / "cache")))

    threads = [threading.Thread(target=open_one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (opened, len(scans)) == ([7, 7, 7], 1)
    with open(lines / "a.jsonl", "a") as file:
        file.write('\n{"n": 7}\n')
    open_one()
    assert (opened[-1], len(scans)) == (8, 2)


def test_the_fingerprint_follows_the_content(lines: Path) -> None:
    """Not where the files are, nor when they were written."""

    def fingerprint() -> str:
        return Shards(lines / "*.*", cache=lines / "cache").fingerprint()

    first = fingerprint()
    shutil.copytree(lines, lines / "copy", ignore=shutil.ignore_patterns("cache"))
    copied = Shards(lines / "copy/*.*", cache=lines / "cache")
    assert copied.fingerprint() == first
    text = (lines / "d.jsonl").read_text()
    (lines / "d.jsonl").write_text(text.replace('"n": 6', '"n": 9'))  # of the same length
    assert fingerprint() != first


def test_decode_is_told_id_and_epoch_and_its_failures_are_placed(lines: Path) -> None:
    def decode(row: dict[str, Any], epoch: int, id: int) -> tuple[int, int, int]:  # noqa: A002
        return row["n"] // (id != 5), epoch, id

    shards = Shards(lines / "*.*", decode=decode, cache=lines / "cache")
    assert Rows(shards, "data", None)._read_raw(np.array([3, 1]), 2) == [(3, 2, 3), (1, 2, 1)]
    with pytest.raises(ZeroDivisionError) as caught:
        shards[5]
    assert caught.value.__notes__ == [f"row 5 ({lines / 'd.jsonl'}:2)"]


def test_a_file_that_changes_while_it_is_read_ends_the_run(lines: Path) -> None:
    shards = Shards(lines / "*.*", cache=lines / "cache")
    os.utime(lines / "d.jsonl", (1, 1))
    assert shards[0] == ROWS[0]
    assert "d.jsonl has changed since it was indexed" in said(lambda: shards[6], RunError)


def tar_of(path: Path, *names: str) -> bytes:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 600
            tar.addfile(member, io.BytesIO(bytes(600)))
    return path.read_bytes()


def cut(path: Path, size: int) -> None:
    path.write_bytes(tar_of(path, "a.x", "b.x")[:size])


def linked(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        member = tarfile.TarInfo("a.x")
        member.type, member.linkname = tarfile.SYMTYPE, "b.x"
        tar.addfile(member)


GOOD = '{"n": 1}\n'
BROKEN: dict[str, tuple[str, Callable[[Path], object], list[str]]] = {
    # file name, what makes it, what is said of it
    "array": (
        "x.json",
        lambda file: file.write_text('[{"n": 1},\n {"n": 2}]\n'),
        ["x.json:1: not one JSON object in a line: [{", "jq -c '.[]'"],
    ),
    "cut line": (
        "x.jsonl",
        lambda file: file.write_text(GOOD * 3 + '\n{"n": 1, "tex'),
        ['x.jsonl:5: not one JSON object in a line: {"n": 1, "tex'],
    ),
    "pretty": (
        "x.jsonl",
        lambda file: file.write_text(GOOD + '{\n  "n": 1\n}\n'),
        ["x.jsonl:2: not one JSON object in a line: {"],
    ),
    "not json": (
        "x.jsonl",
        lambda file: file.write_text(GOOD + "\n{'n': 1}\n"),
        ["x.jsonl:3: not JSON: Expecting property name"],
    ),
    "not text": (
        "x.jsonl",
        lambda file: file.write_bytes(b'{"n": "\xff"}\n'),
        ["x.jsonl:1: the byte 0xff is no UTF-8", "iconv -f latin1"],
    ),
    "empty": ("x.jsonl", lambda file: file.write_text("\n"), ["hold no row"]),
    "gz": ("x.jsonl.gz", lambda file: file.write_bytes(b""), ["is compressed", "gunzip --keep"]),
    "csv": ("x.csv", lambda file: file.write_bytes(b""), ["no kind of shard ends in .csv"]),
    "folder": ("x", lambda file: file.mkdir(), ["is a directory", "x/*.jsonl"]),
    "nothing": ("x.tar", lambda _: None, ["no such file or match"]),
    "no tar": ("x.tar", lambda file: file.write_bytes(b"a" * 2000), ["no header at byte 0"]),
    "cut member": ("x.tar", lambda file: cut(file, 2500), ["cut off: a member ends at byte 2648"]),
    "cut between": (
        "x.tar",
        lambda file: cut(file, 1536),
        ["cut off at byte 1536, before the end that tars have"],
    ),
    "cut header": ("x.tar", lambda file: cut(file, 1700), ["cut off at byte 1700"]),
    "apart": (
        "x.tar",
        lambda file: tar_of(file, "a.x", "b.x", "a.y"),
        ["members of a stand apart", "tar --sort=name"],
    ),
    "twice": ("x.tar", lambda file: tar_of(file, "a.x", "a.X"), ["a.X comes twice"]),
    "link": ("x.tar", linked, ["a.x is a link", "--dereference"]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_named_with_its_place(case: str, tmp_path: Path) -> None:
    name, make, words = BROKEN[case]
    make(tmp_path / name)

    def read_all() -> None:
        shards = Shards(tmp_path / name, cache=tmp_path / "cache")
        shards[np.arange(len(shards))]

    text = said(read_all)
    assert [word for word in words if word not in text] == [], text


def test_what_shards_can_not_be_made_of(lines: Path) -> None:
    cache = lines / "cache"
    tar_of(lines / "x.tar", "a.x", "b.y")
    text = said(lambda: Shards([lines / "a.jsonl", lines / "x.tar"], cache=cache))
    assert "more than one kind: json lines (a.jsonl) and tar (x.tar)" in text
    assert "those that speak S3" in said(lambda: Shards("gs://bucket/a.tar"))
    assert "was given no path" in said(lambda: Shards([]))
    text = said(lambda: Shards(lines / "x.tar", columns=["z"], cache=cache))
    assert "no member of the shards ends in .z" in text
    assert "columns= of x, y" in text
    text = said(lambda: Shards(lines / "x.tar", columns=["x"], cache=cache)[1])
    assert f"{lines / 'x.tar'}:b: no member .x for this key" in text
    text = said(lambda: Shards(lines / "a.jsonl", columns=["N"], cache=cache)[1])
    assert f"{lines / 'a.jsonl'}:4: this line has no 'N'; it has n, text" in text


def _tar_header(size: bytes, kind: bytes = b"0") -> bytes:
    """A ustar header with this size field."""
    head = bytearray(512)
    head[:5], head[124 : 124 + len(size)], head[156:157] = b"a.txt", size, kind
    head[148:156] = b"%06o\0 " % (sum(head) + 8 * ord(" "))
    return bytes(head)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (_tar_header(b"-0000001000\0"), "b'-0000001000' is no number"),
        (_tar_header(b"0o17"), "b'0o17' is no number"),
        (_tar_header(b"00000001000\0", b"x") + b"0 path=a\n".ljust(512, b"\0"), "a record of 0"),
        (_tar_header(b"00000001000\0", b"x") + b"-9 path=a\n".ljust(512, b"\0"), "b'-9' is no"),
        (_tar_header(b"00000001000\0", b"x") + b"9999 path=a\n".ljust(512, b"\0"), "of 9999 bytes"),
        (_tar_header(b"77777777777\0", b"L"), "a header of 8589934591 bytes"),
        (
            _tar_header(b"00000000014\0", b"x")
            + b"12 size=-99\n".ljust(512, b"\0")
            + _tar_header(b"1"),
            "b'-99' is no number",
        ),
    ],
)
def test_a_tar_with_malformed_numbers_is_named(content: bytes, says: str, tmp_path: Path) -> None:
    """A negative size went back in the file, and a record of 0 bytes came again, both forever."""
    path = tmp_path / "bad.tar"
    path.write_bytes(content + bytes(20_000))
    with pytest.raises(UserError, match=re.escape(says)) as error:
        Shards(path, cache=tmp_path / "cache")
    assert str(path) in error.value.cause


def test_a_damaged_index_is_made_again(lines: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    whole = Shards(lines / "*.jsonl", cache=cache)
    rows, [entry] = whole[np.arange(len(whole))], list(cache.iterdir())
    for name in ("index.json", "begin.bin", "checksums.json"):
        with open(entry / name, "r+b") as file:
            file.write(b"junk")
        again = Shards(lines / "*.jsonl", cache=cache)
        assert again[np.arange(len(again))] == rows
    assert again.fingerprint() == whole.fingerprint()


def test_a_parquet_that_unpacks_to_far_more_than_it_says_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal texts take no room in a file; the cache has a megabyte left."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as files

    path = tmp_path / "bomb.parquet"
    files.write_table(pyarrow.table({"text": ["x" * 10_000] * 5000}), path)
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    error = said(lambda: Shards(path, cache=tmp_path / "cache"))
    assert "bomb.parquet does not fit: 5000 rows, of which" in error
    assert "SAMECURVE_CACHE" in error
    assert not list((tmp_path / "cache").glob("*/*"))


def test_the_command_of_a_remedy_quotes_the_path() -> None:
    remedy = no_object(b"\xff", "my texts/x.jsonl:1").remedy
    assert "iconv -f latin1 -t utf-8 'my texts/x.jsonl' > new.jsonl" in remedy

"""Data in a store is the data of local files: rows by id, whatever lies in the cache; an object
that changes is another set of data, and a run that goes on refuses it.
"""

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from commands import losses, samecurve, write_config
from s3_server import S3, reach
from samecurve import Shards
from samecurve.core.system.cache import cache_home
from samecurve.errors import RunError, UserError
from samecurve.storage.object_cache import Listing, bring

IDS = np.array([5, 0, 3, 3, 1, 4, 2])


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Six rows in two files of each kind."""
    import pyarrow
    from pyarrow import parquet

    for number in range(2):
        rows = [{"n": 3 * number + i, "text": "x" * (40 + i)} for i in range(3)]
        lines = "".join(f'{{"n": {row["n"]}, "text": "{row["text"]}"}}\n' for row in rows)
        (tmp_path / f"part-{number}.jsonl").write_text(lines)
        table = pyarrow.table({"n": [row["n"] for row in rows]})
        parquet.write_table(table, tmp_path / f"part-{number}.parquet")
        with tarfile.open(tmp_path / f"part-{number}.tar", "w") as tar:
            for row in rows:
                member = tarfile.TarInfo(f"{row['n']:03}.txt")
                member.size = len(str(row["text"]))
                tar.addfile(member, io.BytesIO(str(row["text"]).encode()))
    return tmp_path


@pytest.fixture
def address(s3: S3, files: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where these files are in a store."""
    reach(s3, monkeypatch)
    place = s3.place(f"data/{files.name}")
    for file in files.glob("part-*"):
        place.upload(f"deep/er/{file.name}", file)
    return str(place.url)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "tar"])
@pytest.mark.parametrize("cache_bytes", ["1GiB", 0])
def test_rows_are_those_of_local_files(
    kind: str, cache_bytes: int | str, files: Path, address: str
) -> None:
    """With room in the cache, and with none: each row is then a range of its object."""
    local = Shards(files / f"part-*.{kind}", cache=files / "index")
    for pattern in (f"deep/er/part-*.{kind}", f"**/part-{{0..1}}.{kind}"):
        stored = Shards(f"{address}/{pattern}", cache_bytes=cache_bytes, cache=files / "stored")
        assert len(stored) == 6
        assert stored[IDS] == local[IDS]
        assert stored.fingerprint() != local.fingerprint()
        again = Shards(f"{address}/{pattern}", cache=files / "elsewhere")
        assert again.fingerprint() == stored.fingerprint()


def test_an_object_that_changes(files: Path, address: str, s3: S3) -> None:
    """Another fingerprint for a new start; a live one is told, and reads nothing wrong."""
    name = f"{address}/deep/er/part-*.tar"
    before = Shards(name, cache_bytes=0, cache=files / "index")
    content = bytearray((files / "part-0.tar").read_bytes())
    content[600] ^= 1  # within a member: names and sizes stay
    place = s3.place(f"data/{files.name}/deep/er")
    place.write("part-0.tar", bytes(content))
    assert before[5]["__key__"] == "005"  # of a copy: the last one that was brought stays
    with pytest.raises(RunError, match=r"s3://.*/part-0\.tar has changed since it was indexed"):
        before[0]
    assert Shards(name, cache=files / "index").fingerprint() != before.fingerprint()


def test_errors_name_the_object(files: Path, address: str, s3: S3) -> None:
    s3.place(f"data/{files.name}/deep/er").write("wrong.jsonl", b'{"a": 1}\n[2]\n')
    with pytest.raises(UserError) as caught:
        Shards(f"{address}/**/wrong.jsonl", cache=files / "index")
    assert f"{address}/deep/er/wrong.jsonl:2" in str(caught.value)
    with pytest.raises(UserError, match="no such object or match"):
        Shards(f"{address}/deep/*.jsonl")
    with pytest.raises(UserError, match="cache_bytes='much'"):
        Shards(f"{address}/deep/er/part-*.tar", cache_bytes="much")


def test_copies_have_a_bounded_size(address: str) -> None:
    """Those leave that were used least recently; a forked process can't bring any."""
    first, second, third = Listing("data").find(f"{address}/**/part-?.tar") + Listing("data").find(
        f"{address}/**/part-0.jsonl"
    )
    for file in (first, second, first, third):
        bring(file, limit=first.size + third.size)
    assert [file.path.is_file() for file in (first, second, third)] == [True, False, True]
    assert first.path.stat().st_mtime_ns == first.mtime_ns
    assert first.path.is_relative_to(cache_home())
    child = os.fork()
    if not child:  # the library would wait there for threads that are not in it
        try:
            bring(second)
        except RunError as error:
            os._exit(7 if "a forked process can't reach" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_run_on_objects(
    s3: S3, unbroken_run: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its curve is that of the local file; once the object has changed it is not gone on with."""
    reach(s3, monkeypatch)
    place = s3.place("corpus")
    place.upload("squares.txt", corpus)
    config = write_config(tmp_path, Path("corpus.txt"))
    source = ("--data", f"{place.url}/*.txt", "--devices", "cpu")
    train = ("train", "-f", config, "--save-dir", "run", *source)
    samecurve(*train, "--stop-after", 20, cwd=tmp_path)
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(unbroken_run)[:20], rtol=1e-12)
    place.write("squares.txt", corpus.read_bytes().replace(b"square", b"SQUARE"))
    refused = samecurve(*train, cwd=tmp_path, code=2)
    assert "data" in refused.stderr
    place.upload("squares.txt", corpus)
    samecurve(*train, "--stop-after", 5, cwd=tmp_path)
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(unbroken_run)[:25], rtol=1e-12)

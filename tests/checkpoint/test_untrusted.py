"""A checkpoint that was received: whatever its manifest claims is checked before it is believed.

Each manifest here has a right hash of its own: whoever writes one can write that too.
"""

import hashlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoint_files import ARRAYS, save
from samecurve.checkpoint import CorruptCheckpointError, check_cover, hash_of
from samecurve.checkpoint.format import load, verify_checkpoint
from samecurve.checkpoint.store import checkpoints, newest

FILE = "rank-0-of-1.safetensors"
Manifest = dict[str, Any]


def rewrite(checkpoint: Path, change: Callable[[Manifest], object]) -> None:
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps({**manifest, "hash": hash_of(manifest)}))


def rehash(manifest: Manifest, file: Path) -> None:
    """The manifest is told of what is in the file now."""
    content = file.read_bytes()
    manifest["files"][FILE] = {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def rename(manifest: Manifest, name: str) -> None:
    """The arrays lie in another file."""
    manifest["files"] = {name: manifest["files"][FILE]}
    for entry in manifest["arrays"].values():
        entry["boxes"][0]["file"] = name


def box_of(manifest: Manifest, array: str) -> Manifest:
    box: Manifest = manifest["arrays"][array]["boxes"][0]
    return box


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: rename(m, "/etc/hostname"), "'/etc/hostname' is no file name"),
        (lambda m: rename(m, "../step-00000010/" + FILE), "is no file name"),
        (lambda m: rename(m, ".."), "is no file name"),
        (lambda m: m.update(step=7), "of step 7, its directory is step-00000020"),
        (lambda m: m.update(step="20"), "step is no number"),
        (lambda m: m.update(step=10**40), "step is no number"),
        (lambda m: m.pop("epoch"), "epoch is missing"),
        (lambda m: m.pop("fixed"), "fixed is missing"),
        (lambda m: m["fixed"].pop("seed"), "fixed: seed"),
        (lambda m: m["fixed"].update(batch=0), "fixed: a batch"),
        (lambda m: m.pop("files"), "files is missing"),
        (lambda m: m.update(files=[]), "files is no mapping"),
        (lambda m: m.update(arrays=3), "arrays is no mapping"),
        (lambda m: m.update(config=None), "config is no mapping"),
        (lambda m: m["loop"].update(metrics=[]), "metrics is no mapping"),
        (lambda m: m["loop"].update(metrics={"loss": "low"}), "loss is no number"),
        (lambda m: m["loop"].update(best_loss=10**400), "best_loss is no number"),
        (lambda m: m["config"].update({"optimizer.groups": [3]}), "optimizer.groups"),
        (lambda m: m["config"].update({"optimizer.groups": [{"x": 3}]}), "optimizer.groups"),
        (lambda m: m["fixed"]["anchor"].update(step=21), "beyond the step"),
        (lambda m: m["fixed"]["anchor"].update(consumed=65), "beyond the step"),
        (lambda m: m["fixed"].update(threads=10**9), "fixed: threads"),
        (lambda m: m["loop"].update(unheard=1), "unheard is not known"),
        (lambda m: m["files"][FILE].update(bytes=-1), "bytes is no number"),
        (lambda m: m["files"][FILE].update(sha256="no"), "no sha256"),
        (lambda m: m["arrays"]["model/a"].update(shape=[1 << 61, 4]), "nothing is as large"),
        (lambda m: m["arrays"]["model/a"].update(shape=[1 << 40]), "lie in no box"),
        (lambda m: m["arrays"]["model/a"].update(shape=[101]), "1 of its 101 values lie in no box"),
        (lambda m: m["arrays"]["model/a"].update(shape=[99]), "beyond its shape"),
        (lambda m: m["arrays"]["model/a"].update(shape=[100, 1]), "number of dimensions"),
        (lambda m: m["arrays"]["model/a"].update(shape=[-100]), "no list of sizes"),
        (lambda m: m["arrays"]["model/a"].update(dtype="O"), "no dtype is O"),
        (lambda m: m["arrays"]["model/a"].update(dtype=["F32"]), "no dtype is"),
        (lambda m: m["arrays"]["model/a"].update(dtype="F64"), "is F32 in rank-0"),
        (lambda m: m["arrays"]["model/a"].update(boxes=[]), "lies nowhere"),
        (lambda m: m["arrays"]["model/a"]["boxes"].append(box_of(m, "model/a")), "named twice"),
        (lambda m: box_of(m, "model/a").update(offsets=[1]), "beyond its shape"),
        (lambda m: box_of(m, "model/a").update(offsets=[-1]), "no list of sizes"),
        (lambda m: box_of(m, "model/a").update(file="other"), "none of the files"),
        (lambda m: m["arrays"].update({"model/x": m["arrays"]["model/a"]}), "is not in rank-0"),
    ],
)
def test_what_can_not_be_is_refused(
    change: Callable[[Manifest], object], says: str, tmp_path: Path
) -> None:
    save(tmp_path, 20)
    checkpoint = tmp_path / "step-00000020"
    rewrite(checkpoint, change)
    with pytest.raises(CorruptCheckpointError, match=says):
        verify_checkpoint(checkpoint)


BROKEN = [
    b"",
    b"\0" * 7,
    b"\xff" * 64,
    struct.pack("<Q", 1 << 40) + b"{}",
    b"\2" + b"\0" * 7 + b"[]",
]


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_file_is_named(content: bytes, tmp_path: Path) -> None:
    save(tmp_path, 20)
    checkpoint = tmp_path / "step-00000020"
    (checkpoint / FILE).write_bytes(content)
    rewrite(checkpoint, lambda m: rehash(m, checkpoint / FILE))
    with pytest.raises(CorruptCheckpointError, match=f"{FILE} can't be read"):
        verify_checkpoint(checkpoint)


@pytest.mark.parametrize("name", [FILE, "manifest.json"])
@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_links_and_pipes_are_not_read(name: str, kind: str, tmp_path: Path) -> None:
    save(tmp_path, 20)
    checkpoint = tmp_path / "step-00000020"
    if kind == "link":
        (checkpoint / name).rename(tmp_path / name)
        (checkpoint / name).symlink_to(tmp_path / name)
    else:
        (checkpoint / name).unlink()
        os.mkfifo(checkpoint / name)
    says = "link" if kind == "link" else "no ordinary file"
    with pytest.raises(CorruptCheckpointError, match=f"{name}.*{says}"):
        verify_checkpoint(checkpoint)


def test_a_hole_is_refused_where_it_is_read_too(tmp_path: Path) -> None:
    """Who opens a checkpoint without comparing hashes gets no uninitialised memory either."""
    save(tmp_path, 20)
    checkpoint = tmp_path / "step-00000020"
    save_file({**ARRAYS, "model/a": ARRAYS["model/a"][:50]}, checkpoint / FILE)
    rewrite(checkpoint, lambda m: rehash(m, checkpoint / FILE))
    with pytest.raises(CorruptCheckpointError, match="50 of its 100 values lie in no box"):
        load(checkpoint).arrays["model/a"]


def test_other_things_among_checkpoints_are_none(tmp_path: Path) -> None:
    save(tmp_path, 20)
    for name in ("step-abc", "step-", "step-00000021.part"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000030").symlink_to(tmp_path / "step-00000020")
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000030", "step-00000020"]
    found, lines = newest(tmp_path)
    assert found == tmp_path / "step-00000020"
    assert "step-00000030 is a link" in lines[0]


@pytest.mark.parametrize(
    ("boxes", "says"),
    [
        ([((0, 0), (4, 6))], None),
        ([((0, 0), (2, 6)), ((2, 0), (2, 6))], None),
        ([((2, 3), (2, 3)), ((0, 0), (4, 3)), ((0, 3), (2, 3))], None),
        ([((0, 0), (4, 6)), ((4, 0), (0, 6))], None),
        ([((0, 0), (4, 4)), ((0, 3), (4, 3))], "overlap"),
        ([((0, 0), (3, 6)), ((1, 0), (1, 6))], "overlap"),
        ([((0, 0), (2, 6)), ((3, 0), (1, 6))], "6 of its 24 values"),
        ([((0, 0), (5, 6))], "beyond"),
    ],
)
def test_boxes_cover_an_array_once(
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], says: str | None
) -> None:
    wrong = check_cover((4, 6), boxes)
    assert (wrong is None) if says is None else (says in str(wrong))


def test_boxes_that_tile_are_found_to_and_others_not() -> None:
    """Against counting: random boxes in three dimensions."""
    rng = np.random.default_rng(0)
    shape = (3, 2, 4)
    for _ in range(300):
        boxes = []
        counts = np.zeros(shape, np.int64)
        for _ in range(rng.integers(1, 4)):
            low = [int(rng.integers(0, size)) for size in shape]
            high = [int(rng.integers(lo, size + 1)) for lo, size in zip(low, shape, strict=True)]
            boxes.append((low, [hi - lo for lo, hi in zip(low, high, strict=True)]))
            counts[tuple(map(slice, low, high))] += 1
        assert (check_cover(shape, boxes) is None) == bool((counts == 1).all())
        rest = (counts == 0).nonzero()
        ones = [([int(v) for v in at], [1, 1, 1]) for at in zip(*rest, strict=True)]
        assert (check_cover(shape, [*boxes, *ones]) is None) == bool((counts <= 1).all())

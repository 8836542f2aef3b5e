"""A checkpoint is published whole or not at all, and what has been damaged is named and passed
over.
"""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from checkpoint_files import ARRAYS, pieces, save, store
from samecurve.checkpoint import CorruptCheckpointError
from samecurve.checkpoint import store as checkpoint_store
from samecurve.checkpoint.format import load, verify_checkpoint
from samecurve.checkpoint.store import Published, checkpoints, newest, sweep
from samecurve.core.loop import run_due_actions
from samecurve.core.protocols import ArrayShard, Counters
from samecurve.errors import RunError


@pytest.mark.parametrize("world", [1, 3, 5])
def test_ranks_write_shares_and_one_publishes(world: int, tmp_path: Path) -> None:
    saves: list[Published] = []
    stores = [store(tmp_path, rank, world, saves=saves) for rank in range(world)]
    for rank in reversed(range(world)):
        assert not checkpoints(tmp_path)
        stores[rank].save(20, pieces(world, rank), {"skipped": 2})
    for one in stores:
        one.close()
    verify_checkpoint(tmp_path / "step-00000020")
    saved = load(tmp_path / "step-00000020")
    assert (saved.step, saved.loop, [save.step for save in saves]) == (20, {"skipped": 2}, [20])
    assert set(saved.arrays) == set(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(saved.arrays[name], array)


def test_the_copies_from_the_devices_count_as_blocked(tmp_path: Path) -> None:
    """By the loop itself, with an engine whose copies take 0.2 s."""

    def gather(_state: object) -> list[ArrayShard]:
        time.sleep(0.2)
        return pieces(1, 0)

    saves: list[Published] = []
    context: Any = SimpleNamespace(
        plan=SimpleNamespace(eval_samples=None),
        engine=SimpleNamespace(gather=gather, kept=dict),
        hooks=(),
        heartbeat=lambda _step, _phase: None,
        store=store(tmp_path, saves=saves),
    )
    logger: Any = SimpleNamespace(counters=Counters(), restart_clock=lambda: None)
    run_due_actions(context, logger, None, step=3, due={"save"})
    context.store.close()
    assert 0.2 <= saves[0].blocked <= saves[0].seconds


def test_nothing_is_published_while_a_rank_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_store, "_LAST_MOMENT", 0.3)
    one = store(tmp_path, 0, 2)
    one.save(5, pieces(2, 0), {})
    one.abandon()
    assert not checkpoints(tmp_path)
    sweep(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("bit", "does not match its hash"),
        ("cut", "cut off"),
        ("gone", "is missing"),
        ("manifest", "manifest can't be read"),
        ("version", "version 99"),
        ("list", "no mapping"),
        ("step", "does not match its own hash"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    damage: str, says: str, tmp_path: Path
) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    hurt = tmp_path / "step-00000020"
    file, manifest = hurt / "rank-0-of-1.safetensors", hurt / "manifest.json"
    content = bytearray(file.read_bytes())
    if damage == "bit":
        content[-3] ^= 4
        file.write_bytes(content)
    elif damage == "cut":
        file.write_bytes(content[:-10])
    elif damage == "gone":
        file.unlink()
    elif damage == "manifest":
        manifest.write_text(manifest.read_text()[:40])
    elif damage == "list":
        manifest.write_text("[]")
    else:
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), damage: 99}))
    with pytest.raises(CorruptCheckpointError, match=says):
        verify_checkpoint(hurt)
    found, lines = newest(tmp_path)
    assert found == tmp_path / "step-00000010"
    assert len(lines) == 1
    assert "step-00000020 is damaged" in lines[0]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.5), (5, 2.6)):
        save(tmp_path, step, loss, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == [
        "step-00000005",
        "step-00000004",
        "step-00000002",
    ]


def test_all_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step, 1.0 / step, keep=0)
    assert len(checkpoints(tmp_path)) == 5


@pytest.mark.parametrize("damage", ["cut", "manifest"])
def test_what_is_damaged_counts_neither_as_kept_nor_as_best(damage: str, tmp_path: Path) -> None:
    """A run that went on from before it saves under lower numbers, and keeps what it saves."""
    save(tmp_path, 20, 1.0)
    hurt = tmp_path / "step-00000020"
    name = "manifest.json" if damage == "manifest" else "rank-0-of-1.safetensors"
    (hurt / name).write_bytes((hurt / name).read_bytes()[:-10])
    save(tmp_path, 12, 2.0, keep=1)
    save(tmp_path, 14, 2.5, keep=1)
    assert [path.name for path in checkpoints(tmp_path)] == [
        "step-00000020",
        "step-00000014",
        "step-00000012",
    ]


def test_a_failed_save_stops_the_run(tmp_path: Path) -> None:
    """The scratch directory is taken away under it."""
    one = store(tmp_path)
    one.save(1, pieces(1, 0), {})
    one.close()
    (tmp_path / ".step-00000002.t").write_text("a file where the directory should be")
    with pytest.raises(RunError, match="it exists already"):
        one.save(2, pieces(1, 0), {})
    two = store(tmp_path, 0, 2)
    two.save(3, pieces(2, 0), {})
    (tmp_path / ".step-00000003.t" / ".rank-1.json").write_text("no JSON")
    with pytest.raises(RunError, match="saving a checkpoint failed"):
        two.close()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000001"]

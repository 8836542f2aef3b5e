"""TensorBoard and W&B have what the journal has, each step once, through kills and resumes; read
back with their own readers.
"""

import importlib
import json
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator as PluginAccumulator,
)
from tensorboard.util.tensor_util import make_ndarray

from samecurve.observe import read_events
from samecurve.observe.trackers import track
from samecurve.processes import Call, output_of
from tracked_runs import LOSSES, killed_run, resume


def tensorboard(run: Path) -> None:
    ended = threading.Event()
    ended.set()
    track("tensorboard", run, "file", "", ended)


def wandb(run: Path) -> None:
    """In a process, as always: it leaves threads and a service."""
    done = output_of(
        Call("samecurve.observe.trackers", ("wandb", str(run), "offline", "tiny")).command,
        seconds=60,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def run(tmp_path: Path, corpus: Path, cache: Path) -> Path:
    return killed_run(tmp_path / "run", corpus, cache)


def wanted(run: Path) -> dict[str, dict[int, np.float32]]:
    """What the journal says, as TensorBoard holds it."""
    scalars: dict[str, dict[int, np.float32]] = {}
    for event in read_events(run / "journal.jsonl"):
        if event.kind in {"step", "evaluated"}:
            group = "train" if event.kind == "step" else "eval"
            for name, value in event.values.items():
                if isinstance(value, float | int) and not isinstance(value, bool):
                    scalars.setdefault(f"{group}/{name}", {})[event.step] = np.float32(value)
    return scalars


def shown(run: Path) -> tuple[Any, dict[str, list[tuple[int, np.float32]]]]:
    """TensorBoard's reader, and all its scalars; the one behind its pages has the same."""
    reader = EventAccumulator(
        str(run / "logs/tensorboard"), size_guidance={"scalars": 0, "tensors": 0, "images": 0}
    ).Reload()
    scalars = {
        tag: [(event.step, np.float32(event.value)) for event in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }
    other = PluginAccumulator(str(run / "logs/tensorboard"), size_guidance={"tensors": 0}).Reload()
    assert {
        tag: [(event.step, make_ndarray(event.tensor_proto).item()) for event in other.Tensors(tag)]
        for tag in scalars
    } == scalars
    return reader, scalars


def agree(scalars: dict[str, list[tuple[int, np.float32]]], run: Path) -> None:
    """Each step once, each number the journal's."""
    expected = wanted(run)
    assert {
        tag: points for tag, points in scalars.items() if points and not tag.startswith("sensors/")
    } == {tag: list(points.items()) for tag, points in expected.items()}


def test_tensorboard_has_the_journal(run: Path) -> None:
    tensorboard(run)
    reader, scalars = shown(run)
    agree(scalars, run)
    assert len(scalars["train/loss"]) == 12
    assert scalars["sensors/utilisation/0"] == [(9, np.float32(0.5))]
    assert "sensors/utilisation/1" not in scalars
    texts = {
        tag: [
            (event.step, make_ndarray(event.tensor_proto).item().decode())
            for event in reader.Tensors(tag)
        ]
        for tag in reader.Tags()["tensors"]
    }
    assert "Running on 1 device" in texts["plan"][0][1]
    assert "hidden_size: 32" in texts["config"][0][1]
    assert texts["samples/0"] == [(10, "    the *square*")]
    assert "one\n\ntwo" in texts["warnings"][-1][1]
    assert "torn.png is left out: it is no PNG" in texts["warnings"][-1][1]
    assert "secret.png is left out: it lies outside" in texts["warnings"][-1][1]
    (picture,) = reader.Images("pictures/0")
    assert (picture.step, picture.width, picture.height) == (10, 5, 3)
    assert picture.encoded_image_string == (run / "logs/red.png").read_bytes()


def test_a_resume_leaves_each_step_once(run: Path) -> None:
    """A tracker that was killed in a write, then a resume; and the same journal given to a tracker
    for the first time.
    """
    tensorboard(run)
    with open(run / "logs/tensorboard/events.out.tfevents.samecurve", "ab") as file:
        file.write(struct.pack("<Q", 400) + b"half a record")
    resume(run)
    tensorboard(run)
    agree(shown(run)[1], run)
    assert [step for step, _ in shown(run)[1]["train/loss"]] == list(range(1, 14))
    home = run / "logs/tensorboard"
    (home / "events.out.tfevents.samecurve").unlink()
    tensorboard(run)
    agree(shown(run)[1], run)
    (home / "tensorboard-file.json").write_text('{"position"')
    tensorboard(run)
    agree(shown(run)[1], run)


def test_wandb_has_the_journal_offline(run: Path) -> None:
    """Each step once, the first values of those trained again; one id through all starts."""
    pytest.importorskip("wandb", reason="W&B is not installed: pip install -e '.[wandb]'")
    wandb(run)
    first = history(run)
    assert {step: row["train/loss"] for step, row in first.items() if "train/loss" in row} == {
        step: LOSSES[step] for step in range(1, 13)
    }
    assert (first[10]["eval/perplexity"], first[9]["sensors/host_utilisation"]) == (12.18, 0.25)
    resume(run)
    wandb(run)
    both = history(run)
    assert {step: row["train/loss"] for step, row in both.items()} == {
        step: LOSSES[step] + (0.5 if step > 12 else 0) for step in range(1, 14)
    }
    assert (
        "steps 9 to 12 from before"
        in [
            event.values["text"]
            for event in read_events(run / "journal.jsonl")
            if event.kind == "warned"
        ][-1]
    )


def history(run: Path) -> dict[int, dict[str, Any]]:
    """The rows of all offline files, by step; no step in two of them."""
    rows: dict[int, dict[str, Any]] = {}
    for path in sorted((run / "logs/wandb").glob("offline-run-*-1a-2/*.wandb")):
        for content in records(path.read_bytes()):
            record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record.FromString(
                content
            )
            if record.HasField("history"):
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                assert row["_step"] not in rows
                rows[row["_step"]] = row
    return rows


def records(content: bytes) -> Iterator[bytes]:
    """Of W&B's file: seven bytes, then blocks of 32 KiB, a record in one to several pieces, none
    across blocks.
    """
    at, pieces = 7, b""
    while at < len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        pieces += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in {1, 4}:
            yield pieces
            pieces = b""

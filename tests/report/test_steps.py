"""A journal of any length is held in bounded memory, exactly where it is a sum; what a resume makes
void is gone; and a reader goes on where it, or another one, has stopped.
"""

import json
import math
import random
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frozen_page import decoded
from samecurve.core.events import Event
from samecurve.observe import line_of
from samecurve_products.report.columns import columns_of
from samecurve_products.report.journal_reader import JournalReader
from samecurve_products.report.record import EvenEvents
from samecurve_products.report.steps import MAX_POINTS, Steps


def step_line(step: int, noise: random.Random, **more: Any) -> str:
    """A step as a journal has it, about 300 bytes. Some losses are not finite."""
    seconds = 0.05 * (1 + noise.random())
    values = {
        "loss": math.nan if step % 97 == 0 else 2 + noise.random(),
        "grad_norm": 1 + noise.random(),
        "lr": 3e-4 * noise.random(),
        "samples_per_second": 32 / seconds,
        "seconds": seconds,
        "wait_seconds": 0.1 * noise.random(),
        "memory_bytes": 501_764_096 + step % 1000,
        "tokens_per_second": 4096 / seconds,
    }
    return line_of(Event("step", step, values | more, time=1.7e9 + step))


def resumed(step: int) -> str:
    return line_of(Event("resumed", step, {"text": "from a save"}, time=1.7e9))


def reader_of(home: Path, lines: list[str]) -> JournalReader:
    (home / "journal.jsonl").write_text("".join(lines))
    reader = JournalReader(home)
    assert reader.read()
    return reader


def kept(lines: list[str]) -> list[dict[str, Any]]:
    """The steps that no resume made void, the plain way."""
    steps: list[dict[str, Any]] = []
    for values in map(json.loads, lines):
        if values["kind"] == "resumed":
            steps = [each for each in steps if each["step"] <= values["step"]]
        elif values["kind"] == "step":
            steps.append(values)
    return steps


def assert_holds(steps: Steps, wanted: list[dict[str, Any]]) -> None:
    """The points are those of these steps, however they were read."""
    assert len(steps) == len(wanted)
    assert len(steps.points) <= MAX_POINTS
    each = steps.each
    groups = [wanted[at : at + each] for at in range(0, len(wanted), each)]
    assert list(steps.high("step")) == [group[-1]["step"] for group in groups]
    losses = [[one["loss"] for one in group if one["loss"] is not None] for group in groups]
    np.testing.assert_allclose(steps.sums("loss"), [sum(group) for group in losses], rtol=1e-12)
    least = [min(group, default=math.nan) for group in losses]
    np.testing.assert_array_equal(steps.low("loss"), least)
    most = [max(group, default=math.nan) for group in losses]
    np.testing.assert_array_equal(steps.high("loss"), most)
    total = math.fsum(one["seconds"] for one in wanted)
    assert steps.total("seconds") == pytest.approx(total, rel=1e-12)
    assert steps.total("samples") == 32 * len(wanted)
    assert steps.last("step") == wanted[-1]["step"]


def test_points_are_those_of_all_steps(tmp_path: Path) -> None:
    """Every number of steps around which points are joined, and resumes into joined points."""
    noise = random.Random(0)
    for count in (1, 2047, 2048, 2049, 4096, 4097, 9_000):
        lines = [step_line(step, noise) for step in range(1, count + 1)]
        assert_holds(reader_of(tmp_path, lines).content.steps, kept(lines))
    for back in (8_999, 8_998, 8_993, 5_001, 4_096, 40, 8_000):
        first = json.loads(lines[-1])["step"] if back < 100 else 9_000
        lines += [resumed(back), *(step_line(s, noise) for s in range(back + 1, first + 1))]
        lines += [resumed(first - 1), step_line(first, noise), step_line(first + 1, noise)]
        lines += [resumed(first)]
        reader = reader_of(tmp_path, lines)
        assert_holds(reader.content.steps, kept(lines))
    all_steps = sum(json.loads(line)["kind"] == "step" for line in lines)
    voided = reader.content.totals
    assert voided.voided_steps == all_steps - len(kept(lines))
    seconds = math.fsum(json.loads(line).get("seconds", 0.0) for line in lines)
    used = reader.content.steps.total("seconds")
    assert voided.voided == pytest.approx(seconds - used, rel=1e-9)


def test_a_spike_stays_and_a_late_mean_gets_its_column(tmp_path: Path) -> None:
    noise = random.Random(1)
    lines = [step_line(step, noise) for step in range(1, 5_001)]
    lines[1_234] = step_line(1_235, noise, loss=1e30)
    lines[4_999] = step_line(5_000, noise, metrics={"kl": 0.5, "bad": "text"})
    reader = reader_of(tmp_path, lines)
    columns = columns_of(reader.content)
    assert max(decoded(columns["arrays"]["loss/high"])) == pytest.approx(1e30)
    assert max(decoded(columns["arrays"]["loss"])) > 1e29
    kl = decoded(columns["arrays"]["metrics/kl"])
    assert (math.isnan(kl[0]), kl[-1]) == (True, 0.5)
    assert "metrics/bad" not in columns["arrays"]


def test_a_live_journal_is_read_on_and_its_reader_saved(tmp_path: Path) -> None:
    """Torn lines wait for their end; a page gets what is new, or all after a resume."""
    noise = random.Random(2)
    lines = [step_line(step, noise) for step in range(1, 3_001)]
    journal, state = tmp_path / "journal.jsonl", tmp_path / "state"
    journal.write_text("".join(lines[:2_000]) + lines[2_000][:40])
    reader = JournalReader(tmp_path)
    assert reader.read()
    assert (reader.faults(live=True), len(reader.faults(live=False))) == ([], 1)
    before = columns_of(reader.content)
    with open(journal, "a") as file:
        file.write(lines[2_000][40:] + "".join(lines[2_001:2_040]))
    assert reader.read()
    new = columns_of(reader.content, (before["generation"], before["count"]))
    assert (new["start"], new["count"], len(decoded(new["arrays"]["loss"]))) == (2_000, 2_040, 40)
    with open(journal, "a") as file:
        file.write("".join(lines[2_040:]))
    assert not reader.read(most_bytes=1000)
    reader.save(state)
    again = JournalReader.load(tmp_path, state)
    assert again.position == reader.position > 1000
    assert again.read()
    assert reader.read()
    assert_holds(again.content.steps, kept(lines))
    all_columns, from_new = (
        columns_of(again.content),
        columns_of(again.content, (new["generation"], new["count"])),
    )
    assert from_new == all_columns == columns_of(reader.content)
    assert all_columns["start"] == 0
    partial = columns_of(again.content, (all_columns["generation"], all_columns["count"]))
    assert partial["start"] == all_columns["count"] - 1  # it may not have been full
    journal.write_text("".join(lines[100:300]))
    assert again.read()
    assert len(again.content.steps) == 200
    assert columns_of(again.content)["generation"] != all_columns["generation"]
    state.write_bytes(b"PK no state")
    assert JournalReader.load(tmp_path, state).position == 0


@pytest.mark.parametrize("blocks", [200, pytest.param(1_000, marks=pytest.mark.long)])
def test_a_long_journal_fits_into_a_few_megabytes(tmp_path: Path, blocks: int) -> None:
    """Blocks of a hundred steps, with sensors, warnings and evaluations."""
    noise = random.Random(3)
    block = [step_line(step, noise) for step in range(1, 101)]
    with open(tmp_path / "journal.jsonl", "w") as file:
        for at in range(blocks):
            for line in block:
                values = json.loads(line) if at % 100 == 0 else None
                file.write(line if values is None else json.dumps(values) + "\n")
            for kind in ("sensors", "warned", "slow", "evaluated", "sampled"):
                values = {
                    "utilisation_by_device": [0.5] * 8,
                    "text": "x" * 100,
                    "loss": 1 / (1 + at),
                }
                file.write(line_of(Event(kind, 100, values)) * 4)
    tracemalloc.start()
    reader = JournalReader(tmp_path)
    assert reader.read()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(reader.content.steps) == 100 * blocks
    assert held < 12 << 20
    assert reader.content.evaluated.seen == 4 * blocks
    assert reader.content.best is not None
    assert reader.content.best.values["loss"] == 1 / blocks
    assert reader.content.counts["warned"] == 4 * blocks
    began = time.process_time()
    columns = columns_of(reader.content)
    assert time.process_time() - began < 0.2
    assert sum(len(json.dumps(array)) for array in columns["arrays"].values()) < 1 << 20


@pytest.mark.parametrize("resumes", [600, pytest.param(2_000, marks=pytest.mark.long)])
def test_resumes_without_end_cost_no_more_than_the_journal(tmp_path: Path, resumes: int) -> None:
    """Each cuts the same joined point, behind fifty times as many steps that are void."""
    noise = random.Random(4)
    line = step_line(1, noise)
    lines = [line.replace('"step": 1,', f'"step": {step},') for step in range(1, 50 * resumes + 1)]
    for _ in range(resumes):
        lines += [resumed(4_001), *lines[4_001:4_064]]
    began = time.process_time()
    reader = reader_of(tmp_path, lines)
    assert time.process_time() - began < resumes / 100
    assert len(reader.content.steps) > 3_900


def test_events_are_kept_evenly() -> None:
    for count in (1, 5, 64, 65, 1_000):
        events = EvenEvents(64)
        for step in range(count):
            events.add(Event("sensors", step, {"list": [step]}))
        steps = [event.step for event in events]
        assert (steps[0], steps[-1], events.seen) == (0, count - 1, count)
        assert len(steps) <= 64
        assert len(set(np.diff(steps[:-1]))) <= 1
        assert events[-1].values == {"list": [count - 1]}
    events.void_beyond(500)
    events.add(Event("sensors", 501, {}))
    assert [event.step for event in events][-2:] == [events[-2].step, 501]
    assert events[-2].step <= 500

"""A store that fails while a run is mirrored to it: training goes on, the journal says so, and the
program ends with what is owed sent, or says what is not. And a machine that is lost in mid-upload.
"""

import os
import shutil
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from commands import losses, samecurve, started, steps_written, until, write_config
from s3_server import BUCKET, S3, proxy, reach
from samecurve.observe import read_events
from samecurve.run.remote.stored_run import StoredRun
from samecurve.storage.url import ObjectUrl

WIDE = "{hidden_size: 192, num_layers: 2, num_heads: 4, kv_heads: 2, intermediate_size: 384,"


@pytest.fixture
def reached(s3: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """The server, which this process reaches; the runs reach it through a proxy."""
    reach(s3, monkeypatch)
    return s3


def warnings_of(run: Path) -> list[str]:
    events = read_events(run / "journal.jsonl")
    return [event.values["text"] for event in events if event.kind == "warned"]


@pytest.mark.long
@pytest.mark.parametrize("mode", ["refuse", "drop", "stall"])
def test_a_store_that_fails_for_a_while(
    mode: str,
    reached: S3,
    unbroken_run: Path,
    corpus: Path,
    tmp_path: Path,
) -> None:
    """From the first step until after the last one: nothing waits for it, and then all is sent."""
    config = write_config(tmp_path, corpus)
    url = ObjectUrl(BUCKET, f"fails/{mode}")
    run = tmp_path / "runs" / url.short_name
    with proxy(reached.port) as line:
        variables = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{line.port}"}
        words = ("train", "-f", config, "--devices", "cpu", "--save-dir", url)
        with started(*words, cwd=tmp_path, env=variables) as process:
            until(lambda: steps_written(run) > 0)
            line.mode = mode
            until(lambda: steps_written(run) == 60)
            if mode == "stall":
                threading.Timer(10, lambda: setattr(line, "mode", "open")).start()
            else:
                until(lambda: warnings_of(run), timeout=200)
                line.mode = "open"
            shown, _ = process.communicate(timeout=200)
    assert process.returncode == 0, shown
    np.testing.assert_allclose(losses(run), losses(unbroken_run), rtol=1e-12)
    stored = StoredRun(reached.place(url.prefix))
    assert stored.checkpoint_names()[0] == "step-00000060"
    if mode != "stall":
        assert "can't be reached, or dropped the connection" in warnings_of(run)[0]
        assert "training goes on" in warnings_of(run)[0]
        assert "answers again, after" in shown


@pytest.mark.long
def test_a_store_that_fails_beyond_the_limit(reached: S3, corpus: Path, tmp_path: Path) -> None:
    """The run saves, stops and fails; the same command sends the rest and goes on."""
    config = write_config(tmp_path, corpus, steps=1_000_000, save=100_000)
    url = ObjectUrl(BUCKET, "limit")
    run = tmp_path / "runs" / url.short_name
    with proxy(reached.port) as line:
        variables = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{line.port}"}
        limit = ("--set", "track.store_patience=5", "--set", "train.eval_every=0")
        words = ("train", "-f", config, "--devices", "cpu:2", "--save-dir", url, *limit)
        with started(*words, cwd=tmp_path, env=variables) as process:
            until(lambda: steps_written(run) > 0)
            line.mode = "refuse"
            shown, _ = process.communicate(timeout=250)
        assert process.returncode == 1, shown
        assert f"error: {url} lacks a part of this run: the store failed for" in shown
        assert "track.store_patience" in shown
        assert "sends the rest and goes on" in shown
        stopped = [event for event in read_events(run / "journal.jsonl") if event.kind == "stopped"]
        assert len(stopped) == 1
        assert (run / "checkpoints" / f"step-{stopped[0].step:08}" / "manifest.json").is_file()
    samecurve(*words, "--stop-after", 1, cwd=tmp_path)
    names = StoredRun(reached.place("limit")).checkpoint_names()
    assert names[0] == f"step-{stopped[0].step + 1:08}"


@pytest.mark.long
def test_a_machine_that_is_lost_between_two_parts(
    reached: S3, corpus: Path, tmp_path: Path
) -> None:
    """Kill -9 while a later checkpoint is on its way: the one before is gone on from, elsewhere."""
    config = write_config(tmp_path, corpus, steps=40, save=10)
    narrow = config.read_text().partition("max_seq_len")[0]
    config.write_text(config.read_text().replace(narrow, f"model:\n  {WIDE}\n  "))
    samecurve("train", "-f", config, "--devices", "cpu", "--save-dir", "whole", cwd=tmp_path)
    url = ObjectUrl(BUCKET, "lost")
    run = tmp_path / "runs" / url.short_name
    with proxy(reached.port) as line:
        variables = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{line.port}"}
        words = ("train", "-f", config, "--save-dir", url, "--devices")
        with started(*words, "cpu", cwd=tmp_path, env=variables) as process:
            place = reached.place("lost")
            until(lambda: StoredRun(place).checkpoint_names())
            line.hold_part = 2  # the next upload's second part never arrives
            assert line.held.wait(90)
            whole = StoredRun(place).checkpoint_names()
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    assert StoredRun(place).checkpoint_names() == whole
    shutil.rmtree(run)
    done = samecurve(*words, "cpu:2", cwd=tmp_path)
    assert f"{url} ({whole[0]}) was brought" in done.stderr
    np.testing.assert_allclose(losses(run), losses(tmp_path / "whole"), rtol=1e-12)
    assert StoredRun(place).checkpoint_names()[0] == "step-00000040"

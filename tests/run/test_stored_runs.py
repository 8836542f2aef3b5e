"""A run whose --save-dir is in a store: the curve of a local run, gone on with from the store alone
on other devices; broken checkpoints, live runs, and no secret in any file.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from commands import assert_same_run, losses, refused, samecurve, write_config
from s3_server import BUCKET, KEYS, S3, reach
from samecurve.observe import read_events
from samecurve.run.remote import lease
from samecurve.run.remote.lease import Holder, claim
from samecurve.run.remote.stored_run import StoredRun
from samecurve.storage.place import Place
from samecurve.storage.url import ObjectUrl


def train(config: Path, url: str, *flags: object, code: int = 0) -> str:
    command = ("train", "-f", config, "--save-dir", url, *flags)
    done = samecurve(*command, cwd=config.parent, code=code)
    return done.stdout + done.stderr


def journal_of(place: Place) -> bytes:
    parts = StoredRun(place).journal_parts()
    return b"".join(place.read(part.name) for _, part in parts)


def checkpoints_of(place: Place) -> list[str]:
    return StoredRun(place).checkpoint_names()


@pytest.mark.long
def test_a_run_goes_on_from_the_store_alone(
    s3: S3,
    unbroken_run: Path,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One rank until step 30, its machine lost; two ranks elsewhere until the end."""
    reach(s3, monkeypatch)
    config, url = write_config(tmp_path, corpus), f"s3://{BUCKET}/team/a run"
    place = s3.place("team/a run")
    home = tmp_path / "runs" / place.url.short_name
    shown = train(config, url, "--devices", "cpu", "--stop-after", 30)
    assert f"a new run: {url} is the mirror of runs/{home.name}" in shown
    assert journal_of(place) == (home / "journal.jsonl").read_bytes()
    assert checkpoints_of(place) == ["step-00000030", "step-00000020"]
    shutil.rmtree(home)
    shown = train(config, url, "--devices", "cpu:2", "--max-checkpoints", 2)
    assert f"{url} (step-00000030) was brought to runs/{home.name}" in shown
    assert_same_run(home, unbroken_run)
    assert journal_of(place) == (home / "journal.jsonl").read_bytes()
    assert checkpoints_of(place) == ["step-00000060", "step-00000040"]
    again = ("train", "-f", config, "--resume", url, "--max-checkpoints", 2)
    assert "60 of 60 steps were trained before" in samecurve(*again, cwd=tmp_path).stdout

    report = json.loads(samecurve("report", url, "--json", cwd=tmp_path).stdout)
    assert report["runs"][0]["steps"] == 60
    evaluated = samecurve("eval", f"{url}/checkpoints/step-00000040", "--json", cwd=tmp_path)
    assert json.loads(evaluated.stdout)["step"] == 40
    samecurve("export", url, "--best", "--to", "exported", cwd=tmp_path)
    samecurve("compare-runs", url, home, cwd=tmp_path)
    begun = train(config, "new", "--init-from", url, "--stop-after", 1)
    assert "the weights are those of step 60" in begun

    held = [path for path in home.rglob("*") if path.is_file()]
    texts = [path.read_bytes() for path in held] + list(map(place.read, place.list()))
    assert not any(secret.encode() in text for text in texts for secret in KEYS.values())


@pytest.mark.long
def test_a_broken_checkpoint_in_the_store(
    s3: S3, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before it is gone on from, loudly; if all are broken, the run is refused."""
    reach(s3, monkeypatch)
    config, url = write_config(tmp_path, corpus, steps=30, save=10), f"s3://{BUCKET}/broken"
    place = s3.place("broken")
    train(config, url, "--devices", "cpu")
    first = losses(tmp_path / "runs" / place.url.short_name)
    for name in ("step-00000030", "step-00000020"):
        file = next(f for f in StoredRun(place).files_of(name) if f.startswith("rank-"))
        content = place.read(f"checkpoints/{name}/{file}")
        flipped = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
        place.write(f"checkpoints/{name}/{file}", flipped if name.endswith("30") else content[:-1])
    shutil.rmtree(tmp_path / "runs")
    shown = train(config, url, "--devices", "cpu")
    assert f"checkpoint step-00000030 in {url} is broken" in shown
    assert f"checkpoint step-00000020 in {url} is broken" in shown
    assert "going on from step-00000010" in shown
    again = losses(tmp_path / "runs" / place.url.short_name)
    np.testing.assert_allclose(again, first, rtol=1e-12)
    assert checkpoints_of(place) == ["step-00000030", "step-00000020", "step-00000010"]

    for name in checkpoints_of(place):
        place.remove([f"checkpoints/{name}/rank-0-of-1.safetensors"])
    shutil.rmtree(tmp_path / "runs")
    shown = train(config, url, "--devices", "cpu", code=2)
    assert "has no whole checkpoint to go on from" in shown
    assert not (tmp_path / "runs" / place.url.short_name).exists()


@pytest.mark.long
def test_a_directory_that_another_one_has_overtaken(
    s3: S3, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machine a trains to 10, b to 20; a goes on from 20. One that lost a checkpoint brings it."""
    reach(s3, monkeypatch)
    url = f"s3://{BUCKET}/overtaken"
    configs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        configs.append(write_config(tmp_path / name, corpus, steps=30, save=10))
    a, b = configs
    train(a, url, "--devices", "cpu", "--stop-after", 10)
    train(b, url, "--devices", "cpu", "--stop-after", 10)
    shown = train(a, url, "--devices", "cpu", "--stop-after", 5)
    home = a.parent / "runs" / ObjectUrl(BUCKET, "overtaken").short_name
    assert "went on elsewhere" in shown
    assert f"set aside as {home.name}.stale-" in shown
    assert len(losses(home)) == 25
    shutil.rmtree(home / "checkpoints" / "step-00000025")
    shown = train(a, url, "--devices", "cpu")
    assert "step-00000025 was missing" in shown
    resumed = [
        event.step for event in read_events(home / "journal.jsonl") if event.kind == "resumed"
    ]
    assert resumed == [10, 20, 25]

    shown = train(a, f"runs/{home.name}", "--devices", "cpu", "--max-steps", 31)
    assert f"this run is mirrored to {url}, which gets nothing of this start" in shown
    assert "31 of 31 steps were trained before" in train(a, url, "--max-steps", 31)
    assert checkpoints_of(s3.place("overtaken"))[0] == "step-00000031"


def test_a_place_that_belongs_to_a_live_run(
    s3: S3,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A live one is refused; one on another host that renews nothing any more is taken over."""
    reach(s3, monkeypatch)
    place = s3.place("live")
    config = write_config(tmp_path, corpus)
    held = claim(place, "of another directory", "--save-dir")
    words = ("train", "-f", config, "--devices", "cpu", "--save-dir", place.url)
    assert "belongs to a live run: process" in refused(monkeypatch, capsys, *words, cwd=tmp_path)
    held.release()

    elsewhere = replace(Holder.here("of another machine"), host="elsewhere")
    place.write("lease.json", elsewhere.content())
    monkeypatch.setattr(lease, "_HELD", 1.5)
    monkeypatch.setattr(lease, "_LOOK", 0.1)
    taken = claim(place, "mine", "--save-dir")
    assert taken.before == elsewhere
    place.write("lease.json", elsewhere.content())  # it lived after all
    taken._write(taken._holder)
    assert taken.lost


def test_paths_where_an_address_is_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (
        ("export", "runs/a", "--to", "s3://bucket/x"),
        ("report", "runs/a", "--to", "s3://bucket/x"),
        ("ui", "s3://bucket/x"),
    ):
        text = refused(monkeypatch, capsys, *words, cwd=tmp_path)
        assert "s3://bucket/x" in text
        assert "aws s3 sync" in text

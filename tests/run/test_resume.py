"""What may not change under a run, and what is noted of a change."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from commands import (
    assert_same_run,
    losses,
    refused,
    samecurve,
    steps_written,
    write_config,
)
from samecurve.core.config.document import Document, dump_document
from samecurve.core.config.loading import load_document
from samecurve.core.config.sections import Config
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.planner import plan
from samecurve.errors import UserError
from samecurve.run.changes import refuse_changes
from samecurve.run.directory import Run
from samecurve.run.preconditions import (
    check_room,
    most_checkpoints,
    without_room_for_saves,
)
from samecurve.run.resume import Origin
from samecurve.tasks import Tasks
from tiny import MACHINE, config_of, tiny_values

FACTS = Facts.of(
    samples=100,
    eval_samples=7,
    tokens_per_sample=16,
    params=1000,
    trainable=1000,
    blocks=2,
    bytes_per_sample=1,
    flops_per_sample=None,
    coupled=(),
    fingerprint="",
)

GROUPS = [{"match": "embed*", "freeze": True}, {"match": "*norm*", "lr_scale": 0.5}]


def config_with(groups: list[dict[str, Any]]) -> Config:
    values = {
        "task": "language",
        "data": {"source": "a.txt"},
        "batch": {"samples": 8},
        "optimizer": {"groups": groups},
    }
    return load_document(Document(values), Tasks()).config


def never_saved(home: Path, config: Config) -> Origin:
    """A run that was started with this config and ended before its first save."""
    run = Run(home)
    run.config.write_text(dump_document(config.model_dump(mode="json")))
    return Origin(run)


def test_a_run_that_never_saved_notes_no_change_of_its_own_config(tmp_path: Path) -> None:
    """Read from config.yaml, its tuples are tuples; from a manifest they would be lists."""
    origin = never_saved(tmp_path, config_with(GROUPS))
    refuse_changes(origin, config_with(GROUPS))
    assert origin.notes == []


def test_and_notes_one_that_was_made(tmp_path: Path) -> None:
    origin = never_saved(tmp_path, config_with(GROUPS))
    refuse_changes(origin, config_with(GROUPS[1:]))
    [note] = origin.notes
    assert note.startswith("changed since the run was last saved: optimizer.groups [{'match'")


def test_a_run_that_goes_on_compiled_is_told_of_its_bits(tmp_path: Path) -> None:
    """With train.exact, whose bits are those of the programs."""
    before = config_with([]).with_values(train={"exact": True})
    origin = never_saved(tmp_path, before)
    refuse_changes(origin, before.with_values(train={"compile": True}))
    assert origin.notes == [
        "changed since the run was last saved: train.compile False -> True",
        "train.exact: from step 0 on the bits are those of the compiled model, which rounds in"
        " another way",
    ]


def test_stop_after_and_what_a_resume_refuses_and_says(
    *,
    unbroken_run: Path,
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = write_config(tmp_path, corpus)
    samecurve("train", "-f", config, "--save-dir", "run", "--stop-after", 25, cwd=tmp_path)
    assert steps_written(tmp_path / "run") == 25
    for change, says in (
        ("model.num_layers=3", "num_layers 2 -> 3"),
        ("data.validation=0.2", "validation 0.1 -> 0.2"),
        ("train.seed=1", "began with seed 0"),
        ("optimizer.name=sgd", "adamw -> sgd"),
    ):
        assert says in refused(
            monkeypatch,
            capsys,
            "train",
            "-f",
            config,
            "--save-dir",
            "run",
            "--set",
            change,
            cwd=tmp_path,
        )
    done = samecurve(
        "train",
        "-f",
        config,
        "--save-dir",
        "run",
        "--global-batch",
        5,
        "--new-batch",
        "--stop-after",
        5,
        "--lr",
        1e-3,
        cwd=tmp_path,
    ).stdout
    assert "batch 5 = " in done
    assert "optimizer.lr 0.003 -> 0.001" in done
    twig = (
        "train",
        "-f",
        config,
        "--save-dir",
        "branch",
        "--resume",
        "run/checkpoints/step-00000025",
        "--global-batch",
        5,
    )
    samecurve(*twig, "--stop-after", 3, cwd=tmp_path)
    branch = samecurve(*twig, cwd=tmp_path).stdout
    assert "resume step 28" in branch
    assert "batch 10 = " in branch
    assert "would need --new-batch" in (tmp_path / "branch/plan.json").read_text()
    assert losses(tmp_path / "branch") == pytest.approx(losses(unbroken_run)[25:], rel=1e-12)


def test_a_finished_run_begins_no_other(
    *,
    unbroken_run: Path,
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = write_config(tmp_path, corpus)
    for path in (unbroken_run, unbroken_run / "checkpoints/step-00000060"):
        said = refused(
            monkeypatch,
            capsys,
            *("train", "-f", config, "--resume", path, "--save-dir", "new"),
            cwd=tmp_path,
        )
        assert "holds step 60 of 60: a new run that begins from it has nothing left" in said
        assert "--max-steps N, beyond 60, trains on" in said
        assert not (tmp_path / "new").exists()


def test_there_is_room_for_all_that_will_lie_there_at_once(tmp_path: Path) -> None:
    """What is there already needs no more room."""
    run = Run(tmp_path / "run")
    third = shutil.disk_usage(tmp_path).free // 3
    with pytest.raises(UserError, match="up to 4 lie there at once: those that are kept"):
        check_room(run, third, 4)
    for step in (10, 20):
        (run.checkpoints / f"step-{step:08d}").mkdir(parents=True)
    check_room(run, third, 4)
    check_room(run, third, 2)
    with pytest.raises(UserError, match="up to 6 lie there at once, of which 2 are there"):
        check_room(run, third, 6)


def test_saves_by_the_clock_are_left_out_where_the_disk_is_small(tmp_path: Path) -> None:
    ours, third = (
        plan(config_of(tiny_values(Path("x"))), MACHINE, FACTS),
        shutil.disk_usage(tmp_path).free // 3,
    )
    assert without_room_for_saves(Run(tmp_path), 1, ours) == (ours, None)
    without, line = without_room_for_saves(Run(tmp_path), third, ours)
    assert (without.every.save_seconds, most_checkpoints(without)) == (0, 1)
    assert line is not None
    assert "saved at the end only: the disk has no room for 4 checkpoints" in line


def test_the_newest_the_best_and_a_new_one_lie_there_at_once() -> None:
    def most(**train: Any) -> int:
        values = tiny_values(Path("x"), train={"steps": 50, **train})
        return most_checkpoints(plan(config_of(values), MACHINE, FACTS))

    assert most(save_every=0) == 1  # at the end
    assert most() == 4  # by the clock
    assert most(save_every=50) == 2
    assert most(save_every=5) == 4
    assert most(save_every=5, keep=1) == 2
    assert most(save_every=5, keep=0) == 11  # all of them
    assert most(save_every=5, eval_every=5, keep=1) == 3


def test_a_damaged_checkpoint_is_said_and_the_one_before_gone_on_from(
    unbroken_run: Path, tmp_path: Path, corpus: Path
) -> None:
    config = write_config(tmp_path, corpus)
    samecurve("train", "-f", config, "--save-dir", "run", "--stop-after", 45, cwd=tmp_path)
    hurt = tmp_path / "run/checkpoints/step-00000045/rank-0-of-1.safetensors"
    hurt.write_bytes(hurt.read_bytes()[:-50])
    done = samecurve("train", "-f", config, "--save-dir", "run", cwd=tmp_path).stdout
    assert "step-00000045 is damaged" in done
    assert "resume step 40" in done
    assert_same_run(tmp_path / "run", unbroken_run)


def test_the_only_checkpoint_is_damaged(
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It began anew, over the journal of what had been trained."""
    config, run = write_config(tmp_path, corpus), tmp_path / "run"
    train = ("train", "-f", config, "--save-dir", "run")
    samecurve(*train, "--stop-after", 5, cwd=tmp_path)
    [hurt] = (run / "checkpoints").glob("*/*.safetensors")
    hurt.write_bytes(hurt.read_bytes()[:-50])
    before = (run / "journal.jsonl").read_bytes()
    for more in ((), ("--resume", "run")):
        said = refused(monkeypatch, capsys, *train, *more, cwd=tmp_path)
        assert "run has no other checkpoint to go on from: checkpoint step-00000005 is" in said
        assert "a copy of it in its place, in run/checkpoints; or another --save-dir" in said
    assert (run / "journal.jsonl").read_bytes() == before
    said = refused(monkeypatch, capsys, "eval", "run", cwd=tmp_path)
    assert "run has no whole checkpoint: checkpoint step-00000005 is damaged" in said
    assert "put a copy of the damaged checkpoint in its place, in run/checkpoints" in said
    assert hurt.parent.is_dir()

"""A past run comes out again, on other devices too; what was changed in it is found and named."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from commands import samecurve, write_config
from samecurve.checkpoint import MANIFEST, hash_of, read_manifest
from samecurve.errors import UserError
from samecurve_products.lab.audit.picks import MOST_STEPS, pick_at_random, pick_named

# the weights of one rank take a wrong step once, as after a bit that flipped in its memory
FAULTY = """\
import os

import torch

from samecurve import Mean


class Task:
    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def train_data(self):
        x = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).tanh())

    def loss(self, model, batch, step):
        x, y = batch["0"], batch["1"]
        if os.environ.get("FAULT") and step == 6:
            model[2].weight.register_hook(lambda gradient: gradient * (1 + 1e-6))
        return Mean(((model(x) - y) ** 2).sum(), len(x))
"""
FLAGS = ("--exact", "--set", "train.hash_every=1", "--set", "train.keep=0")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A run of 12 steps with --exact, saved every four, stopped and gone on with once."""
    home = tmp_path_factory.mktemp("audited")
    config = write_config(home, corpus, steps=12, save=4)
    for more in (("--stop-after", 6), ("--devices", "cpu:2")):
        samecurve("train", "-f", config, "--save-dir", "run", *FLAGS, *more, cwd=home)
    return home


def copied(trained: Path, home: Path) -> Path:
    samecurve_copy = home / "run"
    for path in trained.glob("run/**/*"):
        if path.is_file():
            place = samecurve_copy / path.relative_to(trained / "run")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())
    return samecurve_copy


def audited(run: Path, *flags: object, code: int = 0) -> str:
    return samecurve("audit", run, *flags, cwd=run.parent, code=code).stdout


def test_steps_come_out_again_on_other_devices(trained: Path) -> None:
    found = json.loads(audited(trained / "run", "--steps", 1, "--devices", "cpu:3", "--json"))
    assert found["exact"]
    assert [(one["verdict"], one["difference"]) for one in found["steps"]] == [("PASS", 0.0)]
    assert "devices: 3 x" in str(found["here"])
    journal = found["journal"]
    assert (journal["faults"], journal["uncovered"], journal["checkpoints"]) == ([], 1, 4)
    assert journal["hashes"] == 4 + 2  # of the checkpoints, and the ends of two starts


def test_a_changed_line_is_found(trained: Path, tmp_path: Path) -> None:
    run = copied(trained, tmp_path)
    lines = run.joinpath("journal.jsonl").read_text().splitlines(keepends=True)
    [at] = [n for n, line in enumerate(lines) if '"step": 7, "kind": "step"' in line]
    values = json.loads(lines[at])
    lines[at] = lines[at].replace(str(values["loss"]), str(values["loss"] * (1 + 1e-9)))
    run.joinpath("journal.jsonl").write_text("".join(lines))
    text = audited(run, "--journal", code=1)
    [first, last] = [int(word) for word in text.split() if word.isdigit()][:2]
    assert "journal.jsonl was changed: lines" in text
    assert first <= at + 1 <= last
    assert "step 7: the loss differs by 1.0e-09" in audited(run, "--step", 7, code=1)


@pytest.mark.long
def test_a_checkpoint_with_hashes_made_anew_is_found(trained: Path, tmp_path: Path) -> None:
    run = copied(trained, tmp_path)
    change_array(run / "checkpoints/step-00000004")
    text = audited(run, "--step", 5, code=1)
    assert "checkpoint step-00000004 is not the one that was saved" in text
    assert "step 5: the grad_norm differs by" in text


def change_array(checkpoint: Path) -> None:
    """One number of one array, and each hash that covers it, as the program would write them."""
    import hashlib

    manifest: dict[str, Any] = dict(read_manifest(checkpoint))
    name = "model/layers.0.mlp.down_proj.weight"
    file = manifest["arrays"][name]["boxes"][0]["file"]
    arrays = load_file(checkpoint / file)
    changed = arrays[name].copy()
    changed.flat[0] += np.float64(1e-3)
    save_file({**arrays, name: changed}, checkpoint / file)
    content = (checkpoint / file).read_bytes()
    manifest["files"][file] = {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    manifest["hash"] = hash_of(manifest)
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.long
def test_a_wrong_step_is_found_by_its_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "task.py").write_text(FAULTY)
    config = tmp_path / "task.yaml"
    config.write_text(
        "task: task.py:Task\nbatch: {samples: 8}\ntrain: {steps: 10, save_every: 5}\n"
        "optimizer: {lr: 1.0e-2, clip: 0}\n"
    )
    with monkeypatch.context() as patch:
        patch.setenv("FAULT", "1")
        words = ("train", "-f", config, "--save-dir", "run", "--devices", "cpu:1", *FLAGS)
        samecurve(*words, cwd=tmp_path, afresh=True)
    text = audited(tmp_path / "run", "--step", 9, code=1)
    assert re.search(r"step 7: the grad_norm differs by \S+, and model/2\.weight", text)
    assert "PASS" in audited(tmp_path / "run", "--step", 6)


@pytest.mark.long
def test_an_ordinary_run_is_held_to_a_tolerance(corpus: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, corpus, steps=6, save=3)
    samecurve("train", "-f", config, "--save-dir", "run", cwd=tmp_path)
    text = audited(tmp_path / "run", "--steps", 2, "--devices", "cpu:2")
    assert "PASS   replayable to 1e-10: 2 steps came out again; without --exact a smaller" in text


def test_what_can_not_be_replayed_is_refused(trained: Path, tmp_path: Path) -> None:
    for words, says in (
        (("run", "--step", 13), "--step 13: the journal has steps 1 to 12"),
        (("nowhere",), "is no run directory"),
    ):
        done = samecurve("audit", *words, cwd=trained, code=2)
        assert says in done.stderr
    run = copied(trained, tmp_path)
    for step in (4, 6, 8):
        for path in (run / f"checkpoints/step-{step:08d}").iterdir():
            path.unlink()
    text = audited(run, "--journal", code=1)
    assert [line.split(" is damaged: ")[0] for line in text.splitlines()] == [
        f"FAIL   checkpoint step-{step:08d}" for step in (8, 6, 4)
    ]


def test_steps_far_from_a_checkpoint_are_trained_if_they_are_named() -> None:
    last, starts = 10_000, [0, 9_900, 9_990]
    picks = pick_at_random(50, starts, last, same_bits=True, seed=1)
    assert len(set(picks)) == 50
    assert all(0 < pick.step - pick.start <= MOST_STEPS for pick in picks)
    assert {pick.start for pick in picks} == set(starts)
    near = pick_at_random(50, starts, last, same_bits=False, seed=1)
    assert {pick.step - pick.start for pick in near} == {1, 2, 3}
    assert pick_named(9_900, starts, last).start == 0
    assert pick_named(9_901, starts, last).start == 9_900
    with pytest.raises(UserError, match="began from another one"):
        pick_named(5, [10], last)

"""Old configs at the command line: `train` and `plan` read them and say how, `convert` writes them
down; nothing is overwritten, what is missing is an error.
"""

import json
import sys
from pathlib import Path

import pytest

from commands import losses, refused, samecurve
from samecurve.cli.main import main
from samecurve.core.config.document import read_document
from samecurve.core.config.loading import load_document
from samecurve.run.directory import Run
from samecurve.tasks import Tasks
from samecurve_products.text.huggingface.sections import HFData

ROOT = Path(__file__).parents[2]
OLD = """\
model: {hidden_size: 32, num_layers: 2, num_heads: 4, kv_heads: 2, intermediate_size: 48, \
vocab_size: 256, max_seq_len: 16, rope_theta: 10000.0}
trainer: {learning_rate: 0.003, batch_size: 2, gradient_accumulation: 2, max_steps: 6, \
num_epochs: 2, checkpoint_dir: kept/nano, log_interval: 1, save_interval: 3, \
load_balance_alpha: 0.0}
"""
DIFFUSION = {
    "enable_multi_gpu": True,
    "distributed_backend": "nccl",
    "use_torchrun": True,
    "learning_rate_scaling": True,
    "batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-5,
    "epochs": 2,
    "train_dtype": "FLOAT_32",
    "model_type": "STABLE_DIFFUSION_15",
    "training_method": "LORA",
    "unet": {},
    "secrets": {"huggingface_token": "hf_abc"},
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "old.yaml").write_text(OLD)
    (tmp_path / "old.json").write_text(json.dumps(DIFFUSION, indent=1))
    return tmp_path


def said(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *arguments: object,
    cwd: Path,
) -> str:
    monkeypatch.chdir(cwd)
    monkeypatch.setattr(sys, "argv", ["samecurve", *map(str, arguments)])
    main()
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "switch", [pytest.param({"enable_multi_gpu": False}, marks=pytest.mark.long), {}]
)
def test_devices_that_a_flag_names_win_over_a_switch_that_is_off(
    switch: dict[str, bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without the switch, too, one device is trained on where no flag says more."""
    values = {**DIFFUSION, "distributed_backend": "GLOO", **switch}
    if not switch:
        del values["enable_multi_gpu"]
    (tmp_path / "old.json").write_text(json.dumps(values))
    (tmp_path / "mine.py").write_text((ROOT / "examples/ragged.py").read_text())
    task = ["--set", "task=mine.py:Ragged", "--set", "model={width: 8, depth: 1}"]
    line = ["plan", "-f", "old.json", *task, "--set", "data={samples: 90, held_out: 10}"]
    assert "world 1   single" in said(monkeypatch, capsys, *line, cwd=tmp_path)
    shown = said(monkeypatch, capsys, *line, "--devices", "cpu:3", cwd=tmp_path)
    assert "world 3   ddp over gloo" in shown
    assert "note   --devices names several devices: it replaces strategy single" in shown
    assert "note   --set task names a model of your own: train.recompute is none" in shown
    everything = refused(monkeypatch, capsys, *line, "--num-gpus=0", cwd=tmp_path)
    assert "no GPU found" in everything


def test_what_is_written_is_planned_as_the_old_file_is(
    home: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = said(monkeypatch, capsys, "convert", "old.yaml", "--to", "new.yaml", cwd=home)
    assert "read   old.yaml:2:33  trainer.batch_size 2 -> batch.per_device" in printed
    assert printed.endswith("wrote  new.yaml; samecurve train -f new.yaml --save-dir kept/nano\n")
    plans = [
        json.loads(
            said(
                monkeypatch,
                capsys,
                "plan",
                "--json",
                "-f",
                name,
                "-d",
                corpus,
                "--devices",
                "cpu:3",
                cwd=home,
            )
        )
        for name in ("old.yaml", "new.yaml")
    ]
    assert plans[0]["plan"] == plans[1]["plan"]
    assert (plans[0]["plan"]["batch"], plans[0]["plan"]["rounds"]) == (12, 2)
    assert plans[0]["origins"]["batch.per_device"] == "old.yaml:2:33 trainer.batch_size"


def test_an_old_config_trains_in_its_own_directory(home: Path, corpus: Path) -> None:
    """On two devices, stopped, and gone on with on three by `--resume PATH`: the batch stays."""
    for more in (
        ["--devices", "cpu:2", "--stop-after", 4],
        ["--devices", "cpu:3", "--resume", "kept/nano"],
    ):
        samecurve("-f", "old.yaml", "-d", corpus, "--strategy", "dp", *more, cwd=home)
    assert len(losses(home / "kept/nano")) == 6
    assert Run(home / "kept/nano").read_plan().global_batch_size == 8
    assert not (home / "runs").exists()


def test_a_diffusion_model_says_all_that_it_lacks_at_once(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = refused(
        monkeypatch,
        capsys,
        "train",
        "--config-path=old.json",
        "--num-gpus=2",
        "--distributed-backend=nccl",
        cwd=home,
    )
    assert "gradient_accumulation_steps 2 -> batch.accumulate" in words
    assert "text_encoder.train is not in the file, and then true" in words
    assert "training_concepts/concepts.json: is not there" in words
    assert "remedy: -d FOLDER" in words
    with pytest.raises(SystemExit) as left:
        said(monkeypatch, capsys, "convert", "old.json", "--to", "new.yaml", cwd=home)
    assert left.value.code == 2
    shown = capsys.readouterr()
    assert "wrote  new.yaml, which is incomplete: " in shown.out
    assert 'remedy: "text_encoder": {"train": false} in the file' in shown.err
    assert "hf_abc" not in shown.out + shown.err + (home / "new.yaml").read_text()


AXOLOTL = """\
base_model: qwen
datasets: [{path: rows, type: sharegpt}]
chat_template: chatml
micro_batch_size: 2
max_steps: 4
learning_rate: 1e-4
fp8: true
"""


def test_convert_takes_the_flags_that_its_remedies_name(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What they set is in the file that is written, which then loads as it is."""
    (home / "axolotl.yaml").write_text(AXOLOTL)
    line = ["convert", "axolotl.yaml", "--to"]
    with pytest.raises(SystemExit) as left:
        said(monkeypatch, capsys, *line, "refused.yaml", cwd=home)
    assert left.value.code == 2
    everything = capsys.readouterr().err
    for remedy in ("-d FILE", "--set data.chat_template=", "--set train.float8=true"):
        assert remedy in everything
    flags = ["-d", "talks.jsonl", "--set", "data.chat_template=null"]
    flags += ["--set", "train.float8=true", "--global-batch", "8"]
    printed = said(monkeypatch, capsys, *line, "new.yaml", *flags, cwd=home)
    assert "read   -  -d talks.jsonl -> data.source" in printed
    assert "fp8 true is train.float8 here: train.float8 is set by a flag" in printed
    assert "wrote  new.yaml; samecurve train -f new.yaml" in printed
    config = load_document(read_document(home / "new.yaml"), Tasks()).config
    assert isinstance(config.data, HFData)
    assert config.data.source == "talks.jsonl"
    assert (config.batch.samples, config.batch.per_device) == (8, None)
    assert "float8" in {feature.name for feature in config.named_features}
    text = (home / "new.yaml").read_text()
    assert "REFUSED" not in text
    assert "#   fp8 true | is train.float8 here" in text
    with pytest.raises(SystemExit):
        said(monkeypatch, capsys, *line, "a.yaml", "--set", "data.no=1", cwd=home)
    assert "data.no: unknown key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["old.yaml", "--to", "old.yaml"], "old.yaml exists"),
        (["old.yaml", "--to", "new.json"], "is written as YAML"),
        (["old.yaml", "--to", "no/such/new.yaml"], "can't be written"),
        (["old.yaml"], "Missing option '--to'"),
        (["none.yaml", "--to", "new.yaml"], "there is no config file"),
        (["ours.yaml", "--to", "new.yaml"], "no config that can be converted"),
        (["torn.json", "--to", "new.yaml"], "torn.json:2:1: not valid JSON"),
    ],
)
def test_refused_and_nothing_written(
    arguments: list[str],
    says: str,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (home / "ours.yaml").write_text("batch: {samples: 8}\n")
    (home / "torn.json").write_text('{"multi_gpu": true,\n')
    before = {path: path.read_text() for path in home.iterdir()}
    assert says in refused(monkeypatch, capsys, "convert", *arguments, cwd=home)
    assert {path: path.read_text() for path in home.iterdir()} == before

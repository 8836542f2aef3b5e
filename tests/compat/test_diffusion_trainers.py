"""Configs of four trainers of pictures, planned on two devices with small pipelines."""

import json
import sys
from pathlib import Path

import pytest

from samecurve.cli.main import main

pytest.importorskip("diffusers", reason="pip install -e '.[diffusion]'")

FILES = {
    "onetrainer.json": """\
{"training_method": "LORA", "model_type": "STABLE_DIFFUSION_15", "base_model_name": "models/sd15",
 "multi_gpu": true, "layer_filter_preset": "attn-mlp", "text_encoder": {"train": false},
 "concepts": [{"path": "pictures", "balancing": 2}], "resolution": "64", "batch_size": 2,
 "epochs": 1, "train_dtype": "FLOAT_32"}
""",
    "kohya.toml": """\
pretrained_model_name_or_path = "models/sd15"
network_module = "networks.lora"
network_train_unet_only = true
train_batch_size = 2
max_train_epochs = 1
resolution = 64
[[datasets]]
  [[datasets.subsets]]
  image_dir = "pictures"
  caption_extension = ".txt"
  num_repeats = 2
""",
    "aitoolkit.yaml": """\
job: extension
config:
  name: birds
  process:
    - type: sd_trainer
      network: {type: lora, linear: 4}
      datasets: [{folder_path: pictures, resolution: 64, num_repeats: 2}]
      train: {batch_size: 2, steps: 9}
      model: {name_or_path: models/sd15}
""",
    "simpletuner.json": """\
{"--model_family": "sd1x", "--model_type": "lora", "--lora_dropout": 0.0,
 "--pretrained_model_name_or_path": "models/sd15", "--data_backend_config": "sets.json",
 "--train_batch_size": 2, "--num_train_epochs": 1, "--grad_clip_method": "norm",
 "--resolution": 64, "--mixed_precision": "no"}
""",
    "sets.json": """\
[{"id": "a", "instance_data_dir": "pictures", "caption_strategy": "textfile", "repeats": 1}]
""",
}


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in FILES if name != "sets.json"])
def test_a_config_is_planned(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """17 pictures, read twice an epoch, make 9 steps of 4 on two devices."""
    from noise_pictures import write_pictures
    from tiny_pipelines import save_sd15

    save_sd15(tmp_path / "models" / "sd15")
    write_pictures(tmp_path / "pictures")
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    monkeypatch.chdir(tmp_path)
    line = ["plan", "--json", "-f", name, "--devices", "cpu:2", "--sync-backend", "gloo"]
    monkeypatch.setattr(sys, "argv", ["samecurve", *line])
    main()
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert (plan["batch"], plan["steps"], plan["rounds"]) == (4, 9, 1)

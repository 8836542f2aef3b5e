"""The configs of examples/ and models/ on emulated GPUs, made small: the losses of a CPU rank."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from class_pictures import CLASSES, make_folder
from emulated import only_emulated
from gpu_runs import TWO, check_equal, check_waits, train
from noise_pictures import write_pictures

from samecurve.core.config.document import read_document

pytestmark = [pytest.mark.long, only_emulated]  # forty configs, each in two runs
ROOT = Path(__file__).parents[2]
Settings = Mapping[str, Any]
ALIKE: Settings = {
    **{"batch": {"samples": 6}, "devices": {}, "train.steps": 3, "train.precision": "f64"},
    **{"train.exact": False, "train.amp": False, "train.compile": False, "train.eval_every": 2},
    **{"train.save_every": 0, "train.sample_every": 0, "train.log_every": 100},
}
LIBRARY: Settings = {"data.tokenizer": "bytes", "data.seq_len": 16, "data.eval_samples": 8}
LLAMA: Settings = {
    **{"model.hidden_size": 32, "model.intermediate_size": 48, "model.num_hidden_layers": 2},
    **{"model.num_attention_heads": 4, "model.num_key_value_heads": 2, "model.vocab_size": 256},
}
# what makes a file's model small, by its task
SMALL: Mapping[str, Settings] = {
    "language": {
        **{"model.hidden_size": 32, "model.num_layers": 2, "model.num_heads": 2},
        **{"model.kv_heads": 1, "model.intermediate_size": 48, "model.max_seq_len": 16},
        **{"data.tokenizer": "bytes", "data.eval_samples": 8},
    },
    "huggingface": LIBRARY,
    "timeseries": {"model.width": 8, "model.depth": 2},
    "vision": {"data.eval_samples": 20, "data.workers": 0},
    "diffusion": {"data.resolution": 16, "data.bucket_step": 4, "data.validation": 0.2},
}
PIPELINES = {"Z-Image": "z_image", "stable-diffusion-xl-base-1.0": "sdxl"}


def names(folder: str) -> list[str]:
    """The configs of a folder for engine torch."""
    files = sorted((ROOT / folder).glob("*.yaml"))
    return [file.stem for file in files if read_document(file).value.get("engine") != "jax"]


def values_of(file: Path, *settings: Settings) -> dict[str, Any]:
    """A config's values with these settings: a section, or a section's field."""
    values: dict[str, Any] = read_document(file).value
    for name, value in [pair for given in settings for pair in given.items()]:
        section, _, field = name.partition(".")
        if field:
            values.setdefault(section, {})[field] = value
        else:
            values[section] = value
    return values


def check_on_gpus(home: Path, values: Mapping[str, Any]) -> None:
    """Two GPUs before a CPU, so that what a run leaves in the cache is theirs."""
    devices = {"gpus": {"use": TWO, "strategy": "ddp"}, "cpu": {"use": "cpu:1"}}
    runs = {
        name: [{"values": {**values, "devices": {**values["devices"], **section}}}]
        for name, section in devices.items()
    }
    answers = train(home, runs, devices=2)
    check_equal(answers["gpus"], answers["cpu"], steps=3)
    check_waits(answers["gpus"])


@pytest.mark.parametrize("name", names("examples"))
def test_an_example(name: str, tmp_path: Path) -> None:
    values = values_of(ROOT / "examples" / f"{name}.yaml", ALIKE)
    check_on_gpus(tmp_path, {**values, "task": f"{ROOT}/{values['task']}"})


@pytest.mark.parametrize("name", names("models"))
def test_a_model(name: str, tmp_path: Path, corpus: Path, pipelines: Mapping[str, Path]) -> None:
    file = ROOT / "models" / f"{name}.yaml"
    given = read_document(file).value
    model, data = given.get("model", {}), given.get("data", {})
    task = given["task"]
    own: dict[str, Any] = {"devices": given.get("devices", {})}
    if name in {"llama-3.1-8b", "qwen2.5-7b"}:
        own |= LLAMA
    if "path" in model:
        own["model.path"] = str(pipelines[PIPELINES[model["path"]]])
    if task == "diffusion":
        own["data.source"] = str(write_pictures(tmp_path / "pictures"))
    if task == "language" or data.get("source") == "python-stdlib":
        own["data.source"] = str(corpus)
    if str(data.get("source")).startswith(("models/", "examples/")):
        own["data.source"] = str(ROOT / data["source"])
    if model.get("objective") == "masked":
        own["data.tokenizer"] = data["tokenizer"]  # which has a token for what is hidden
    if "chat_template" in data:
        own["data.chat_template"] = str(ROOT / data["chat_template"])
        own["data.seq_len"] = 96  # what is learnt comes late in a conversation
    if name == "image-folder":
        own["data.source"] = str(make_folder(tmp_path / "set", dict.fromkeys(CLASSES, 9)))
        own["data.resolution"] = 32
    check_on_gpus(tmp_path, values_of(file, ALIKE, SMALL[task], own))

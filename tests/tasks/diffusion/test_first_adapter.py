"""--init-from with a LoRA that another tool, or this one, has written: a run goes on from it."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("diffusers", reason="pip install -e '.[diffusion]'")

import torch
from noise_pictures import write_pictures
from safetensors.torch import load_file, save_file

from commands import refused, samecurve
from samecurve.observe import read_events

ADAPTER = {"rank": 4, "alpha": 6.0}


def values(folder: Path, model: Mapping[str, Any], *, lr: float, steps: int) -> dict[str, Any]:
    return {
        "task": "diffusion",
        "model": dict(model),
        "data": {
            "source": str(folder),
            "resolution": 16,
            "buckets": False,
            "validation": 0.3,
            "sample_steps": 1,
            "prompts": [],
        },
        "batch": {"samples": 4},
        "optimizer": {"lr": lr},
        "train": {"precision": "f32", "steps": steps, "eval_every": max(1, steps // 4)},
        "devices": {"use": "cpu"},
    }


class Bench:
    """A directory with runs on one tiny pipeline, and what they have evaluated."""

    def __init__(self, home: Path, pipeline: Path) -> None:
        self.home, self.pipeline = home, pipeline
        self.folder = write_pictures(home / "set", 8)

    def train(
        self, name: str, *flags: object, adapter: Mapping[str, Any] = ADAPTER, code: int = 0
    ) -> Any:
        """A run of 4 steps; with --init-from, of one step that changes nothing."""
        begins = "--init-from" in flags and name != "first"
        lr, steps = (1e-30, 1) if begins else (0.05, 4)
        config = self.config(name, {"adapter": dict(adapter)}, lr=lr, steps=steps)
        return samecurve(
            "train", "-f", config, "--save-dir", name, *flags, cwd=self.home, code=code
        )

    def config(
        self, name: str, model: Mapping[str, Any], *, lr: float = 0.05, steps: int = 4
    ) -> Path:
        file = self.home / f"{name}.json"
        model = {"path": str(self.pipeline), **model}
        file.write_text(json.dumps(values(self.folder, model, lr=lr, steps=steps)))
        return file

    def export(self, name: str, form: str) -> Path:
        to = self.home / f"{name}-{form}"
        samecurve("export", name, "--format", form, "--dtype", "f32", "--to", to, cwd=self.home)
        return to

    def losses(self, name: str) -> list[float]:
        """The run's validation losses."""
        events = read_events(self.home / name / "journal.jsonl")
        return [float(event.values["loss"]) for event in events if event.kind == "evaluated"]

    def loss(self, name: str) -> float:
        return self.losses(name)[-1]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, pipelines: Mapping[str, Path]) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("first"), pipelines["sdxl"])
    bench.train("first")
    losses = bench.losses("first")
    assert abs(losses[0] - losses[-1]) > 1e-4 * losses[0]  # the adapter changes what is measured
    return bench


@pytest.fixture(scope="module")
def kohya(bench: Bench) -> Path:
    return bench.export("first", "lora") / "lora.safetensors"


@pytest.mark.long
def test_the_layout_of_front_ends_is_gone_on_from(bench: Bench, kohya: Path) -> None:
    """By two ranks."""
    begun = bench.train("kohya", "--init-from", kohya, "--devices", "cpu:2")
    assert "warn   adapter of" in begun.stdout
    assert bench.loss("kohya") == pytest.approx(bench.loss("first"), rel=1e-6)


@pytest.mark.long
def test_the_same_command_goes_on_and_another_file_is_refused(bench: Bench, kohya: Path) -> None:
    """From a directory in the layout of diffusers, which is gone when the run goes on."""
    directory = bench.export("first", "lora-diffusers")
    begun = bench.train("again", "--init-from", directory)
    assert "the file states no alpha: what it has is divided by" in begun.stdout
    assert bench.loss("again") == pytest.approx(bench.loss("first"), rel=1e-6)
    shutil.rmtree(directory)
    again = bench.train("again", "--init-from", directory, "--max-steps", 2)
    assert "has no effect any more: this run began from it" in again.stdout
    assert bench.loss("again") == pytest.approx(bench.loss("first"), rel=1e-6)
    other = bench.train("again", "--init-from", kohya, "--max-steps", 3, code=2)
    assert "began from the weights" in other.stderr
    none = bench.train("first", "--init-from", kohya, "--max-steps", 9, code=2)
    assert "began from the weights" in none.stderr or "did not begin with" in none.stderr


@pytest.mark.long
def test_a_run_that_was_killed_at_once_begins_with_the_same_adapter(
    bench: Bench, kohya: Path
) -> None:
    """The run's own copy is read, and not the file, which may have changed."""
    file = shutil.copy(kohya, bench.home / "changed.safetensors")
    bench.train("killed", "--init-from", file)
    for checkpoint in (bench.home / "killed" / "checkpoints").iterdir():
        shutil.rmtree(checkpoint)
    save_file({n: t * 0 for n, t in load_file(kohya).items()}, file)
    again = bench.train("killed", "--init-from", file)
    assert "as they were when this run began" in again.stdout
    assert bench.loss("killed") == pytest.approx(bench.loss("first"), rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("has_metadata", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_file_of_diffusers_own(bench: Bench, kohya: Path, *, has_metadata: bool) -> None:
    """As save_lora_weights() writes it: alpha is in its metadata, or else counts as the rank."""
    import diffusers
    from peft import get_peft_model_state_dict  # takes 5 s, in each process that collects tests

    library: Any = diffusers
    pipeline = library.DiffusionPipeline.from_pretrained(bench.pipeline, local_files_only=True)
    pipeline.load_lora_weights(kohya)
    unet, options = pipeline.unet, {}
    layers = get_peft_model_state_dict(unet, adapter_name="default_0")
    if has_metadata:
        config = unet.peft_config["default_0"].to_dict()
        assert config["lora_alpha"] == ADAPTER["alpha"]
        options["unet_lora_adapter_metadata"] = config
    else:
        factor = ADAPTER["alpha"] / ADAPTER["rank"]
        layers = {n: t * factor if "lora_B" in n else t for n, t in layers.items()}
    name = f"own-{has_metadata}"
    pipeline.save_lora_weights(bench.home / f"{name}-files", unet_lora_layers=layers, **options)
    begun = bench.train(name, "--init-from", bench.home / f"{name}-files")
    assert ("states no alpha" in begun.stdout) is not has_metadata
    assert bench.loss(name) == pytest.approx(bench.loss("first"), rel=1e-6)


@pytest.mark.long
def test_what_does_not_fit_is_refused_before_anything_is_written(
    bench: Bench,
    kohya: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def error(file: Path, model: Mapping[str, Any]) -> str:
        config = bench.config("refused", {"adapter": {**ADAPTER, **model}} if model else {})
        words = ("train", "-f", config, "--save-dir", "refused", "--init-from", file)
        text = refused(monkeypatch, capsys, *words, cwd=bench.home)
        assert not (bench.home / "refused").exists()
        return " ".join(text.split())

    other = error(kohya, {"rank": 8, "alpha": 8.0})
    assert "the file's adapter has rank 4, not 8 and alpha 6, not 8" in other
    assert "remedy: model.adapter.rank: 4 and model.adapter.alpha: 6" in other
    fewer = error(kohya, {"target": ["to_q"]})
    assert re.search(r"the file changes \d+ layers that model\.adapter\.target leaves out", fewer)
    foreign = {"lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight": torch.ones(4, 16)}
    save_file(foreign, tmp_path / "flux.safetensors")
    family = error(tmp_path / "flux.safetensors", ADAPTER)
    assert "are of no layer of UNet2DConditionModel" in family
    assert "double_blocks_0_img_attn_qkv" in family
    assert "is an adapter, and this run trains none" in error(kohya, {})


@pytest.mark.long
def test_what_is_of_a_text_encoder_is_named(bench: Bench, kohya: Path, tmp_path: Path) -> None:
    """By `plan`, which reads the file as `train` does."""
    text = {"lora_te1_text_model_encoder_layers_0_mlp_fc1.alpha": torch.ones(())}
    save_file({**load_file(kohya), **text}, tmp_path / "both.safetensors")
    file = tmp_path / "both.safetensors"
    shown = samecurve("plan", "-f", "first.json", "--init-from", file, cwd=bench.home).stdout
    assert "left out, since no text encoder is trained: lora_te1_text_model" in shown

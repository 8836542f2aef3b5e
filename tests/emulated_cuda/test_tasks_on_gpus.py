"""Each task's small models on emulated GPUs: the losses and metrics of a CPU rank, no race, and no
wait of our own in a step.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from emulated import only_emulated
from gpu_runs import HERE, ONE, THREE, TWO, check_equal, check_waits, train
from har_sets import write_har
from noise_pictures import write_pictures

pytestmark = only_emulated
HIDDEN = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
BERT = {**HIDDEN, "architecture": "bert", "num_attention_heads": 4, "max_position_embeddings": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
LLAMA = {**HIDDEN, **HEADS, "architecture": "llama"}
MAMBA = {
    **{"architecture": "mamba2", "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8},
    **{"head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
}
VIT = {"arch": "vit", "cssm": "attention", "width": 8, "depth": 2, "heads": 2, "drop_path": 0.3}
GATED = {"arch": "vit", "cssm": "gated", "width": 8, "depth": 2, "norm": "image"}
UNET = {"architecture": "unet", "widths": [8, 16], "head_width": 8, "text_width": 8}
DIT = {"architecture": "dit", "width": 16, "depth": 2, "head_width": 8, "text_width": 8}
ONE_ROUND = {"train": {"norm_sync": True}, "batch": {}}  # statistics of all samples of a step
# task, model, and what the run has besides
MODELS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "llama": ("huggingface", LLAMA, {}),
    "mixtral": ("huggingface", {**LLAMA, "architecture": "mixtral", "num_local_experts": 4}, {}),
    "mamba2": ("huggingface", MAMBA, {}),
    "masked": ("huggingface", {**BERT, "objective": "masked"}, {}),
    "classify": ("huggingface", {**BERT, "objective": "classify"}, {}),
    "embed": ("huggingface", {**BERT, "objective": "embed"}, {}),
    "vit": ("vision", VIT, {}),
    "gated": ("vision", GATED, {}),
    "backbone": ("vision", {"backbone": "resnet10t"}, ONE_ROUND),
    "unet": ("diffusion", UNET, {}),
    "dit": ("diffusion", DIT, {}),
    "resnet": ("timeseries", {"name": "resnet", "width": 8, "depth": 2, "kernel_size": 3}, {}),
    "transformer": ("timeseries", {"name": "transformer", "width": 8, "patch": 4, "heads": 2}, {}),
    "mlp": ("timeseries", {"name": "mlp", "width": 12, "depth": 2}, {}),
    "segmentation": (f"{HERE}/gpu_tasks.py:Segmentation", {}, {}),
    "speech": (f"{HERE}/gpu_tasks.py:Speech", {}, {}),
}


class Data:
    """The `data` section of each row of MODELS, with files in a folder of the test's own."""

    def __init__(self, home: Path, corpus: Path) -> None:
        self.home, self.corpus = home, corpus

    def section(self, name: str) -> dict[str, Any]:
        task, model, _ = MODELS[name]
        if task == "huggingface":
            return {
                "packing": name != "mamba2",
                **self._texts(model.get("objective", "causal")),
                **{"tokenizer": "bpe:300", "seq_len": 16, "validation": 0.2, "eval_samples": 8},
            }
        if task == "vision":
            return {"source": "digits", "eval_samples": 20}
        if task == "diffusion":
            small = {
                "resolution": 16,
                "bucket_step": 4,
                "crop": "random",
                "flip": 0.5,
                "validation": 0.2,
            }
            captions = {"shuffle": True, "dropout": 0.3}
            return {**small, "source": self._folder(write_pictures), "captions": captions}
        if task == "timeseries":
            return {"source": self._folder(write_har), "augment": {"jitter": 0.1, "scale": 0.2}}
        return {}

    def _folder(self, write: Any) -> str:
        folder = self.home / write.__name__
        return str(folder if folder.exists() else write(folder))

    def _texts(self, objective: str) -> dict[str, Any]:
        if objective in {"causal", "masked"}:
            return {"source": str(self.corpus)}
        row = {
            "classify": '{{"text": "{0} is {1}", "label": "{1}"}}',
            "embed": '{{"anchor": "what is {0}, {1}?", "positive": "{0} is {1}"}}',
        }[objective]
        rows = [row.format(number, ("odd", "even")[number % 2]) for number in range(60)]
        path = self.home / f"{objective}.jsonl"
        path.write_text("\n".join(rows) + "\n")
        return {"source": str(path)}


def run_of(name: str, use: str, strategy: str, data: Data) -> list[dict[str, Any]]:
    """Five steps in f64, with evaluations."""
    task, model, sections = MODELS[name]
    values = {
        "task": task,
        "model": dict(model),
        "data": data.section(name),
        "batch": {"samples": 10, **sections.get("batch", {"per_device": 2})},
        "optimizer": {"lr": 1e-3},
        "train": {
            **{"steps": 5, "precision": "f64", "exact": False, "eval_every": 4, "log_every": 100},
            **sections.get("train", {}),
        },
        "devices": {"use": use, "strategy": strategy},
    }
    return [{"values": values}]


@pytest.mark.long  # a hundred runs; test_strategies_on_gpus.py has one of a classifier
@pytest.mark.parametrize("name", MODELS)
def test_each_model_trains_as_on_cpus(name: str, tmp_path: Path, corpus: Path) -> None:
    data, layouts = Data(tmp_path, corpus), [(ONE, "single"), (TWO, "dp"), (TWO, "ddp")]
    runs = {"cpu": run_of(name, "cpu:1", "single", data)}
    for use, strategy in [*layouts, (THREE, "fsdp")]:
        runs[strategy] = run_of(name, use, strategy, data)
    answers = train(tmp_path, runs)
    for answer in answers.values():
        found = answer.findings
        if name in {"segmentation", "speech"}:  # their losses lack such kernels; no run is exact
            found = [each for each in found if not each.startswith("not_deterministic: ")]
        check_equal(replace(answer, findings=found), answers["cpu"])
        if name != "speech":  # torch's own CTC copies its lengths to the host
            check_waits(answer)

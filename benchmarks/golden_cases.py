"""Ten small runs of shipped configs, whose losses are golden: any machine must come near them.

What they train on is the same on every machine and needs no network: files of this repository, and
data that is drawn from sample numbers.
"""

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from samecurve.core.config.document import read_document
from samecurve.core.config.loading import load_document
from samecurve.core.config.sections import Config
from samecurve.tasks import Tasks

ROOT = Path(__file__).parents[1]
STEPS = 6
_TEXT = "LICENSE"  # English, which no commit changes
_EVERYWHERE: Mapping[str, Any] = {
    "batch": {"samples": 10, "per_device": 3},  # 3, 3, 3 and 1 on any number of devices
    "train.steps": STEPS,
    "train.exact": False,
    "train.compile": False,
    "schedule.warmup": 1,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A config, and what makes it small.

    precision: the one in which the case is trained besides f64
    strategy, devices: the layout of the golden losses; in f64 all layouts have the same losses
    needs: modules that must be installed
    on_gpus: settings for as many GPUs; CPU ranks, and fewer GPUs, have no use for them
    """

    config: str
    precision: str
    strategy: str = "single"
    devices: int = 1
    needs: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    on_gpus: Mapping[str, Any] = field(default_factory=dict)

    def values(self, kind: str, count: int) -> dict[str, Any]:
        """All values by dotted key that differ from the config's, on so many devices of a kind."""
        are_gpus = kind == "cuda" and count == self.devices
        return {**_EVERYWHERE, **self.settings, **(self.on_gpus if are_gpus else {})}

    def missing(self) -> str:
        """The modules that are not installed here."""
        return ", ".join(name for name in self.needs if find_spec(name) is None)

    def config_on(self, kind: str, precision: str, most: int) -> Config:
        """The config for this case's layout, on at most so many devices. kind: cpu or cuda."""
        count = min(self.devices, most)
        document = read_document(ROOT / self.config)
        layout = {
            "train.precision": precision,
            "devices.use": f"cpu:{count}" if kind == "cpu" else ",".join(map(str, range(count))),
            "devices.strategy": self.strategy if count > 1 or self.strategy == "fsdp" else "single",
        }
        for key, value in {**self.values(kind, count), **layout}.items():
            placed = str(ROOT / value) if value == _TEXT else value  # wherever one stands
            document.set(key, placed, "benchmarks/golden_cases.py")
        return load_document(document, Tasks()).config

    def command(self, precision: str) -> str:
        """The command that trains this case by hand on GPUs."""
        flags = [
            f"--set {shlex.quote(f'{key}={_flow(value)}')}"
            for key, value in self.values("cuda", self.devices).items()
        ]
        devices = ",".join(map(str, range(self.devices)))
        layout = f"--devices {devices} --strategy {self.strategy} --dtype {precision}"
        return f"samecurve train -f {self.config} {layout} {' '.join(flags)}"


def _flow(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=math.inf)
    return text.removesuffix("\n").removesuffix("\n...")


# in the order in which they are trained: first what is peculiar to GPUs, last what needs libraries
CASES: Mapping[str, Case] = {
    "operations": Case(
        config="benchmarks/golden_operations.yaml",
        precision="f32",
        strategy="ddp",
        devices=2,
    ),
    "decoder": Case(
        config="models/tiny.yaml",
        precision="bf16",
        strategy="ddp",
        devices=2,
        settings={
            "data.source": _TEXT,
            "model.hidden_size": 64,
            "model.num_layers": 2,
            "model.intermediate_size": 96,
            "model.max_seq_len": 64,
        },
    ),
    "lstm": Case(
        config="examples/lstm.yaml",
        precision="f32",
        settings={"model.width": 32},
    ),
    "batchnorm": Case(
        config="examples/resnet.yaml",
        precision="f32",
        strategy="ddp",
        devices=2,
        settings={"model.width": 8, "batch": {"samples": 10}},  # of a whole step's statistics
    ),
    "digits": Case(
        config="models/digits.yaml",
        precision="bf16",
        strategy="ddp",
        devices=2,
        needs=("sklearn",),
        settings={"model.width": 32, "model.depth": 2},
    ),
    "sensors": Case(
        config="models/har.yaml",
        precision="f16",
        strategy="dp",
        devices=2,
        settings={"model.width": 16, "model.depth": 2},
    ),
    "llama": Case(
        config="models/tiny-llama.yaml",
        precision="bf16",
        strategy="fsdp",
        devices=2,
        needs=("transformers",),
        settings={
            "data.source": _TEXT,
            "data.tokenizer": "bytes",
            "data.seq_len": 64,
            "model.hidden_size": 64,
            "model.intermediate_size": 96,
            "model.num_hidden_layers": 2,
            "train.ema": 0.5,
        },
        on_gpus={"devices.offload": True},
    ),
    "lora-chat": Case(
        config="models/lora-chat.yaml",
        precision="f32",
        needs=("transformers", "peft", "jinja2"),
        settings={
            "model.hidden_size": 64,
            "model.intermediate_size": 96,
            "model.num_hidden_layers": 3,
        },
        on_gpus={"devices.offload_frozen": 1.0},
    ),
    "mixture": Case(
        config="models/tiny-moe.yaml",
        precision="f32",
        strategy="ddp",
        devices=2,
        needs=("transformers",),
        settings={
            "data.source": _TEXT,
            "data.tokenizer": "bytes",
            "data.seq_len": 48,
            "model.hidden_size": 48,
            "model.intermediate_size": 64,
            "model.num_hidden_layers": 2,
        },
    ),
    "diffusion": Case(
        config="models/shapes-unet.yaml",
        precision="f32",
        needs=("diffusers", "transformers"),
        settings={
            "data.resolution": 16,
            "data.bucket_step": 16,
            "model.widths": [16, 32],
        },
    ),
}

"""What `plan --machine` predicts beside what others have published of the same set-ups:
torchtitan's 8B on H100 and A100, MosaicML's MPT 7B on H100 and A100.

Two predictions each: with the MFU that is assumed (nothing of the published figure goes in), and
with the MFU that makes the family's smallest set-up come out right, so that the others show what
the model of collectives is worth. Only figures that were read in the files named. Takes no device;
writes benchmarks/results/published.json. Run: python -m benchmarks.published
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import page
from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.core.config.sections import Config
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.hardware import device_spec
from samecurve.tasks import Tasks, entry_of
from samecurve_products.lab.simulation.cluster import Cluster, read_cluster
from samecurve_products.lab.simulation.forecast import plan_on_cluster
from samecurve_products.lab.simulation.step_time import ASSUMED, Utilization, step_cost

_TITAN = "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md at 31a17bf"
_TITAN_A100 = "pytorch/torchtitan docs/performance.md at 0413364"
_MPT = "mosaicml/llm-foundry scripts/train/benchmarking/README.md at c90b9b3"


@dataclass(frozen=True)
class Published:
    """A published measurement.

    family: set-ups that share an MFU, which is fitted to the first of them
    tokens: tokens a second and device, as published
    memory: GiB a device, if published
    note: differences between the set-up and the prediction
    """

    family: str
    machine: str
    model: str
    per_device: int
    rounds: int
    recompute: str
    tokens: float
    source: str
    note: str = ""
    memory: float | None = None


_LOGITS = "its loss takes all logits as float32, ours some tokens' at a time"
_SLOWER = f"H100 of 96 GB at 500 W, slower than the 989 TFLOP/s counted on; {_LOGITS}"
_NDR = "its network is not told, NDR 400 Gb/s a device is taken"
SETUPS = (
    Published(
        "torchtitan 8B, H100",
        "1x8xH100",
        "llama",
        2,
        1,
        "selective",
        5762,
        f"{_TITAN}, table 1",
        _SLOWER,
        82.4,
    ),
    Published(
        "torchtitan 8B, H100",
        "16x8xH100",
        "llama",
        2,
        1,
        "selective",
        5605,
        f"{_TITAN}, table 3",
        _SLOWER,
        67.0,
    ),
    Published(
        "torchtitan 8B, H100, torch.compile",
        "1x8xH100",
        "llama",
        2,
        1,
        "selective",
        6667,
        f"{_TITAN}, table 1",
        _SLOWER,
        77.0,
    ),
    Published(
        "torchtitan 8B, H100, torch.compile",
        "16x8xH100",
        "llama",
        2,
        1,
        "selective",
        6514,
        f"{_TITAN}, table 3",
        _SLOWER,
        62.0,
    ),
    Published(
        "torchtitan 8B, A100",
        "8x8xA100",
        "llama",
        1,
        1,
        "selective",
        2973,
        _TITAN_A100,
        f"{_LOGITS}; its network is not told, HDR 200 Gb/s a device is taken",
    ),
    Published("MPT 6.7B, H100", "1x8xH100", "mpt", 6, 1, "none", 10643, _MPT),
    Published("MPT 6.7B, H100", "16x8xH100", "mpt", 6, 1, "none", 10475, _MPT, _NDR),
    Published("MPT 6.7B, H100", "32x8xH100", "mpt", 6, 1, "none", 10119, _MPT, _NDR),
    Published("MPT 6.7B, H100", "64x8xH100", "mpt", 6, 1, "none", 9670, _MPT, _NDR),
    Published("MPT 6.7B, A100", "1x8xA100", "mpt", 6, 2, "none", 4641, _MPT),
)


def llama(cache: Path) -> Facts:
    """Llama 3.1 8B at 8,192 tokens, by the program's own count; the tokens are a stand-in, which no
    figure depends on.
    """
    tokens = cache / "tokens.bin"
    np.zeros(1 << 16, np.uint32).tofile(tokens)
    shape = {
        "hidden_size": 4096,
        "num_layers": 32,
        "num_heads": 32,
        "kv_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_seq_len": 8192,
    }
    config = _config({"model": shape, "data": {"source": str(tokens)}})
    counted = entry_of("language").facts(config, str(cache))
    assert counted.params == 8_030_261_248
    return counted.having(samples=1 << 30)


def mpt() -> Facts:
    """MPT 6.7B at 2,048 tokens: 32 layers of 4,096, learnt positions, biases everywhere, tied
    embeddings of 50,368; the published number of parameters. Activations are not counted.

    FLOPs as llm-foundry counts them, but half of attention's, which is causal: 6 a parameter and
    token, 6 x layers x width x length.
    """
    width, layers, length = 4096, 32, 2048
    block = {
        "norm_1": (width,),
        "norm_1.bias": (width,),
        "norm_2": (width,),
        "norm_2.bias": (width,),
        "Wqkv": (3 * width, width),
        "Wqkv.bias": (3 * width,),
        "out_proj": (width, width),
        "out_proj.bias": (width,),
        "up_proj": (4 * width, width),
        "up_proj.bias": (4 * width,),
        "down_proj": (width, 4 * width),
        "down_proj.bias": (width,),
    }
    inside = {
        f"blocks.{layer}.{name}": shape for layer in range(layers) for name, shape in block.items()
    }
    arrays = {
        "wte": (50368, width),
        "wpe": (length, width),
        **inside,
        "norm_f": (width,),
        "norm_f.bias": (width,),
    }
    params = sum(int(np.prod(shape)) for shape in arrays.values())
    assert params == 6_658_859_008
    narrow = tuple(name for name in inside if "norm" not in name)
    return Facts.of(
        samples=1 << 30,
        eval_samples=0,
        tokens_per_sample=length,
        params=params,
        trainable=params,
        blocks=layers,
        bytes_per_sample=None,
        flops_per_sample=float(length * (6 * params + 6 * layers * width * length)),
        coupled=(),
        fingerprint="mpt",
        block_params=(params - 52416 * width) // layers,
        block_arrays=tuple(inside),
        rounded=narrow,
        arrays=arrays,
    )


def _config(values: Mapping[str, Any]) -> Config:
    batch = {"per_device": 1}
    return load_document(
        Document(
            {
                "batch": batch,
                "train": {"precision": "bf16"},
                "devices": {"strategy": "fsdp"},
                **values,
            }
        ),
        Tasks(),
    ).config


def _setup(entry: Published) -> Cluster:
    made = read_cluster(entry.machine)
    if entry.model == "llama" and made.device is device_spec(
        "H100", ""
    ):  # 96 GB of HBM2e at 2.4 TB/s, says the source
        return replace(made, device=replace(made.device, memory=96 << 30, bandwidth=2.4e12))
    return made


def predicted(entry: Published, facts: Facts, share: Utilization) -> tuple[float, int]:
    """Predict: (tokens a second and device, bytes of a device)."""
    config, setup = (
        _config(
            {
                "batch": {"per_device": entry.per_device, "accumulate": entry.rounds},
                "train": {"precision": "bf16", "recompute": entry.recompute},
            }
        ),
        _setup(entry),
    )
    made = plan_on_cluster(
        config, facts.having(largest_tried=entry.per_device), setup
    )  # so it was trained
    found = step_cost(config, made, facts, setup, share)
    assert found is not None
    return (
        made.batch.global_batch_size
        * facts.data.tokens_per_sample
        / found.seconds
        / setup.num_devices,
        sum(term.bytes for term in made.memory),
    )


def fitted(entry: Published, facts: Facts) -> Utilization:
    """The MFU that gives the published figure, by bisection."""
    low, high = 0.01, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if predicted(entry, facts, Utilization(middle, ""))[0] < entry.tokens
            else (low, middle)
        )
    return Utilization(low, f"fitted to {entry.machine}")


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        counted = {"llama": llama(Path(scratch)), "mpt": mpt()}
    fits: dict[str, Utilization] = {}
    results = []
    for entry in SETUPS:
        facts = counted[entry.model]
        first = entry.family not in fits
        share = fits.setdefault(entry.family, fitted(entry, facts) if first else ASSUMED)
        (plain, memory), (scaled, _) = (
            predicted(entry, facts, ASSUMED),
            predicted(entry, facts, share),
        )
        gib = memory / (1 << 30) if facts.bytes_per_sample else None
        assumed, fit = (
            {"mfu": ASSUMED.value, "tokens": plain, "ratio": plain / entry.tokens},
            {"mfu": share.value, "here": first, "tokens": scaled, "ratio": scaled / entry.tokens},
        )
        results.append(
            {**asdict(entry), "assumed": assumed, "fitted": fit, "predicted_memory": gib}
        )
    print(page.published(results))
    place = Path(__file__).parent / "results" / "published.json"
    place.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

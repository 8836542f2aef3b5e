"""The huggingface task on its own data: documents packed or padded, one curve and one loss."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from one_curve import check_one_curve
from samecurve.core.config.sections import Config
from samecurve.tasks import open_task
from tiny import config_of
from worlds import Pool

LLAMA = {
    "architecture": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
WORDS = ["rain", "salt", "bird", "sea", "stone", "house"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts and completions of unlike length."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    with open(path, "w") as file:
        for _ in range(60):
            words = [" ".join(rng.choice(WORDS, rng.integers(1, 5))) for _ in range(2)]
            file.write(json.dumps({"prompt": words[0], "completion": f" {words[1]}"}) + "\n")
    return path


def config(source: Path, *, packing: bool, model: Mapping[str, Any] = LLAMA, **data: Any) -> Config:
    return config_of(
        {
            "task": "huggingface",
            "model": dict(model),
            "data": {
                "source": str(source),
                "tokenizer": "bytes",
                "seq_len": 48,
                "packing": packing,
                "validation": 0.1,
                **data,
            },
            "batch": {"samples": 10},
            "optimizer": {"lr": 3e-3},
            "train": {"steps": 5, "precision": "f64"},
            "devices": {"use": "cpu"},
        }
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("rows_are", "layouts"),
    [("packed", ["ddp:3", "fsdp:2/4"]), ("padded", ["ddp:3/2", "fsdp:2", "fsdp:2/2"])],
)
def test_devices_do_not_change_the_curve(
    rows_are: str, layouts: list[str], rows: Path, pool: Pool, tmp_path: Path
) -> None:
    """Completions learnt, in packed rows and in rows padded by microbatch, laid by length."""
    of_kind = config(rows, packing=rows_are == "packed")
    check_one_curve(of_kind, layouts, pool, tmp_path, steps=5, near=1e-10)


@torch.no_grad()
def test_packed_or_padded_the_documents_have_one_loss(rows: Path, cache: Path) -> None:
    """All of an epoch, summed, to 1e-12; and as many tokens learnt as bytes of completions."""
    torch.manual_seed(0)
    sums, weights = [], []
    network: Any = None
    for packing in (True, False):
        task = open_task(config(rows, packing=packing, validation=0.0), cache)
        network = network or task.model().double()
        data = task.train_data()
        parts = [np.arange(len(data))[first::3] for first in range(3)]
        means = [task.loss(network, tensors(data.read(ids, 0))) for ids in parts]
        sums.append(sum(float(mean.sum) for mean in means))
        weights.append(sum(int(mean.weight) for mean in means))
    learnt = [json.loads(line)["completion"] for line in rows.read_text().splitlines()]
    assert weights[0] == weights[1] == sum(map(len, learnt))
    assert sums[0] == pytest.approx(sums[1], rel=1e-12)
    packed = open_task(config(rows, packing=True, validation=0.0), cache)
    data = packed.train_data()
    batch = tensors(data.read(np.arange(len(data)), 0))
    assert int(batch["documents"].max()) > 1
    apart = float(packed.loss(network, batch).sum)
    places = torch.arange(48).expand_as(batch["positions"])  # the fault: documents see each other
    together = float(packed.loss(network, {**batch, "positions": places}).sum)
    assert abs(together - apart) > 1e-3


def tensors(rows: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in rows.items()}

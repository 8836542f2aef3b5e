"""transformers' own wav2vec2, whole, whose encoder skips layers at random (LayerDrop)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.nn.functional as F
from test_models import InProcess, Result, assert_same, trained
from torch import Tensor, nn

from samecurve import Mean
from samecurve.torch_engine.strategies.sharded.skipped_blocks import skipped_blocks
from tiny import config_of
from worlds import Pool

STEPS = 4
TINY: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "conv_dim": (8, 8),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 8,
    "layerdrop": 0.5,
    "mask_time_length": 2,
}


class Sounds:
    """12 sounds of 400 numbers, each with one of three labels and the spans that are masked."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, ids: Any) -> dict[str, Any]:
        each = [np.random.default_rng(int(i)) for i in ids]
        return {
            "sound": np.stack([generator.normal(size=400) for generator in each]),
            "mask": np.stack([generator.random(39) < 0.3 for generator in each]),
            "label": np.asarray(ids) % 3,
        }


class Classifier(nn.Module):
    """masked: each sound's own spans are masked. The library would draw them with numpy for a whole
    microbatch, which is refused.
    """

    def __init__(self, *, masked: bool) -> None:
        from transformers import Wav2Vec2Config, Wav2Vec2Model

        super().__init__()
        self.masked = masked
        self.encoder = Wav2Vec2Model(Wav2Vec2Config(**TINY, mask_time_prob=0.3 if masked else 0.0))
        self.head = nn.Linear(TINY["hidden_size"], 3)

    def forward(self, sound: Tensor, mask: Tensor) -> Tensor:
        spans = mask if self.masked else None
        hidden = self.encoder(sound, mask_time_indices=spans).last_hidden_state
        logits: Tensor = self.head(hidden.mean(1))
        return logits


class Speech:
    def __init__(self, model: Mapping[str, Any]) -> None:
        self._masked = model["masked"]

    def model(self) -> nn.Module:
        return Classifier(masked=self._masked)

    def loss(self, model: Any, batch: Mapping[str, Tensor]) -> Mean:
        logits = model(batch["sound"], batch["mask"])
        return Mean(F.cross_entropy(logits, batch["label"], reduction="sum"), len(logits))

    def train_data(self) -> Any:
        return Sounds()


def trained_in(layout: str, fields: Mapping[str, bool], pool: Any, home: Path) -> Result:
    """layout: strategy:devices, or strategy:devices/accumulation"""
    exact = fields.get("exact", False)
    strategy, _, count = layout.partition(":")
    devices, _, accumulate = count.partition("/")
    batch = {"per_device": 1} if exact else {"accumulate": int(accumulate or 1)}
    config = config_of(
        {
            "task": f"{__file__}:Speech",
            "model": {"masked": fields["masked"]},
            "batch": {"samples": 6, **batch},
            "train": {"steps": STEPS, "precision": "f64", "exact": exact, "seed": 0},
            "optimizer": {"lr": 1e-2},
            "devices": {"use": f"cpu:{devices}", "strategy": strategy, "preflight": 0},
        }
    )
    return trained(pool, home / layout.replace("/", "x"), config)


LONG = pytest.mark.long  # more layouts, which a run of the first one stands for


@pytest.mark.parametrize(
    ("fields", "layouts"),
    [
        ({"masked": True}, ["fsdp:2"]),
        pytest.param({"masked": True}, ["fsdp:2/3", "fsdp:3"], marks=LONG),
        pytest.param({"masked": False}, ["fsdp:2", "fsdp:2/3", "fsdp:3", "ddp:2"], marks=LONG),
        pytest.param({"masked": False, "exact": True}, ["fsdp:2", "fsdp:3", "ddp:2"], marks=LONG),
        pytest.param({"masked": True, "exact": True}, ["fsdp:2", "fsdp:3", "ddp:2"], marks=LONG),
    ],
)
def test_a_whole_encoder_that_skips_layers_is_one_curve(
    fields: dict[str, bool], layouts: list[str], pool: Pool, tmp_path: Path
) -> None:
    """Of three layers the steps skip 3, 0, 1 and 0 with this seed: the order of calls that the
    first step finds names none of them.
    """
    alone = trained_in("single:1", fields, InProcess(), tmp_path)
    for layout in layouts:
        split = trained_in(layout, fields, pool, tmp_path)
        assert_same(split, alone)
        if fields.get("exact"):
            assert all(np.array_equal(split[name], value) for name, value in alone.items())


TITLES = ["the model", "up.layers.0", "up.layers.1", "up.layers.1.experts.0", "down.layers.0"]


@pytest.mark.parametrize(
    ("called", "at_work", "skipped"),
    [
        ({0, 1}, [], [[2, 3]]),
        ({0, 1, 2, 3}, [], []),  # nobody called `down`: another phase does
        ({0, 1, 2, 3}, ["down.layers."], [[4]]),
        ({0, 4}, ["up.layers.", "down.layers."], [[1], [2, 3]]),
        ({0}, [], [[1], [2, 3], [4]]),  # by methods, which nobody sees
    ],
)
def test_blocks_that_every_rank_skipped_are_those_of_modules_at_work(
    called: set[int], at_work: list[str], skipped: list[list[int]]
) -> None:
    assert skipped_blocks(called, TITLES, at_work) == skipped

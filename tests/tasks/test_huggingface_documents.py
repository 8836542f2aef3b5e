"""The huggingface task on its own data: documents packed or padded, one curve and one loss."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from one_curve import check_one_curve, compare
from samecurve.core.config.sections import Config
from samecurve.core.determinism import Mean
from samecurve.core.determinism.data_order import Ids, by_length
from samecurve.core.protocols import Arrays
from samecurve.data import feed
from samecurve.errors import UserError
from samecurve.tasks import open_task
from samecurve.worker.jobs.train_job import rehearse
from samecurve_products.text.huggingface.sections import HFData, HFModel
from samecurve_products.text.huggingface.torch_task import TorchHuggingFace
from tiny import config_of
from worlds import Pool


class CountsPadding(TorchHuggingFace):
    """The loss is divided by all places of a row, those of padding too."""

    Model, Data = HFModel, HFData

    def _take_objective(self) -> None:
        super()._take_objective()
        own = self.loss

        def loss(model: Any, batch: Arrays) -> Mean:
            return Mean(own(model, batch).sum, batch["input_ids"].numel())

        self.loss = loss


class MeanOfMeans(TorchHuggingFace):
    """Each microbatch counts the same, however many tokens it has."""

    Model, Data = HFModel, HFData

    def _take_objective(self) -> None:
        super()._take_objective()
        own = self.loss

        def loss(model: Any, batch: Arrays) -> Mean:
            mean = own(model, batch)
            return Mean(mean.sum / mean.weight, 1)

        self.loss = loss


def fill_the_last_bucket(index: int, group: Any, attempt: str, **options: Any) -> None:
    """As rehearse(), where a microbatch that samples don't fill gets some of the step's again."""

    def laid(ids: Ids, lengths: Any, micro: int) -> Ids:
        in_order, full = by_length(ids, lengths, micro), len(ids) // micro * micro
        return np.concatenate([in_order[:full], in_order[: len(ids) - full]])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed, "by_length", laid)
        rehearse(index, group, attempt, **options)


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


def config(
    source: Path,
    *,
    packing: bool,
    model: Mapping[str, Any] = LLAMA,
    task: str = "huggingface",
    **data: Any,
) -> Config:
    return config_of(
        {
            "task": task,
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "shown"), [("CountsPadding", "of which 3 and 7"), ("MeanOfMeans", "weight 1 for two")]
)
def test_losses_that_depend_on_the_microbatch_are_seen(
    fault: str, shown: str, rows: Path, pool: Pool, tmp_path: Path
) -> None:
    faulty = config(rows, packing=False, task=f"{__file__}:{fault}")
    with pytest.raises(UserError, match=f"{shown}.*weights don't add up"):
        compare(faulty, ["single/4"], pool, tmp_path, steps=2, near=1e-10)


@pytest.mark.long
def test_samples_that_follow_from_the_microbatch_are_seen(
    rows: Path, pool: Pool, tmp_path: Path
) -> None:
    """Microbatches of 3, 3, 3 and 1 sample; where the batch is one, there is none to fill."""
    padded = config(rows, packing=False)
    verdicts = compare(
        padded, ["single/4"], pool, tmp_path, steps=3, near=1e-10, job=fill_the_last_bucket
    )
    assert [verdict.verdict for verdict in verdicts] == ["FAIL"]
    assert "other samples" in verdicts[0].culprit


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

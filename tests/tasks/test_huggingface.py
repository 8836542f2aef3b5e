"""Models of the transformers library: one curve on any devices, and the library's own curve."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hf_rows
import numpy as np
import pytest
import torch

from one_curve import check_one_curve
from samecurve.core.config.sections import Config
from samecurve.errors import UserError
from samecurve.tasks import open_task
from tiny import config_of
from worlds import Pool

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
MAMBA2 = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 8,
    "n_groups": 1,
    "chunk_size": 8,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "qwen2": {**COMMON, "attention_dropout": 0.1, "tie_word_embeddings": True},
    "mixtral": {**COMMON, "num_local_experts": 4},
    "qwen3_moe": {
        **COMMON,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 8,
    },
    "mamba2": MAMBA2,
}


def config(
    name: str, rows: str = "Padded", model: Mapping[str, Any] | None = None, **sections: Any
) -> Config:
    """Of one of MODELS, with other fields in `model`."""
    fields = {"architecture": name, **MODELS[name], **(model or {})}
    task = f"{hf_rows.__file__}:{rows}" if rows else "huggingface"
    return config_of(
        {
            "task": task,
            "model": fields,
            "data": {"source": "random", "seq_len": 16, "samples": 23, "eval_samples": 7},
            "batch": {"samples": 10},
            "optimizer": {"lr": 3e-3},
            "train": {"steps": 6, "precision": "f64"},
            "devices": {"use": "cpu"},
            **sections,
        }
    )


@pytest.mark.parametrize(
    ("model", "rows", "layouts"),
    [
        ("llama", "Packed", ["fsdp:2/4"]),
        pytest.param("qwen2", "Ragged", ["ddp:2/4"], marks=pytest.mark.long),
        pytest.param("mixtral", "Padded", ["ddp:3"], marks=pytest.mark.long),
        pytest.param("llama", "Packed", ["ddp:3", "hsdp:4"], marks=pytest.mark.long),
        pytest.param("qwen2", "Ragged", ["dp:2", "fsdp:2"], marks=pytest.mark.long),
        pytest.param("mixtral", "Padded", ["fsdp:2/4"], marks=pytest.mark.long),
        pytest.param("mamba2", "Padded", ["ddp:2", "fsdp:2", "fsdp:2/4"], marks=pytest.mark.long),
    ],
)
def test_devices_do_not_change_the_curve(
    model: str, rows: str, layouts: list[str], pool: Pool, tmp_path: Path
) -> None:
    """Documents of unlike length, whose last batch is short; the library's own dropout too."""
    check_one_curve(config(model, rows), layouts, pool, tmp_path, steps=5, near=1e-10)


@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_a_packed_row_is_each_of_its_documents_alone(model: str, cache: Path) -> None:
    """Loss, weight and gradient of three documents in a row, against each in a row of its own."""
    task = open_task(config(model, "Packed", model={"balance": "none"}), cache)
    torch.manual_seed(0)
    network = task.model().double()
    source = hf_rows.Documents(5, 4, packed=True)
    packed = _tensors(source[np.arange(4)])

    alone: list[hf_rows.Row] = []
    for row in range(4):
        content = source.row(row)
        for document in range(1, 4):
            where = content["documents"] == document
            cut = {name: column[where][None] for name, column in content.items()}
            alone.append({**cut, "documents": np.ones_like(cut["documents"])})

    whole = task.loss(network, packed)
    whole.sum.backward()
    gradient = {name: p.grad.clone() for name, p in network.named_parameters()}
    network.zero_grad()
    parts = [task.loss(network, _tensors(row)) for row in alone]
    sum(part.sum for part in parts).backward()

    assert int(whole.weight) == sum(int(part.weight) for part in parts)
    total = float(sum(part.sum.detach() for part in parts))
    assert float(whole.sum.detach()) == pytest.approx(total, rel=1e-12)
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(parameter.grad, gradient[name], rtol=1e-10, atol=1e-13)


def test_what_the_library_has_not_is_refused_with_what_is_near(cache: Path) -> None:
    cases: dict[str, dict[str, Any]] = {
        "model.architecture lama": {"architecture": "lama"},
        "model.hidden_sise": {"hidden_sise": 16},
        "not a multiple of the number of attention heads": {"hidden_size": 30},
        "8 experts a token, of 4": {"architecture": "qwen3_moe", "num_experts": 4},
        "balance sequence: llama has no auxiliary loss": {"balance": "sequence"},
        "this model knows 8 positions": {"max_position_embeddings": 8},
    }
    for said, fields in cases.items():
        with pytest.raises(UserError, match=said):
            open_task(config("llama", model=fields), cache)
    with pytest.raises(UserError) as refused:
        open_task(config("llama", model={"architecture": "qwen22"}), cache)
    assert "qwen2" in refused.value.remedy
    masked = {"architecture": "bert", "objective": "masked", "adapter": {"rank": 4}}
    with pytest.raises(UserError, match="objective masked is not in this version"):
        open_task(config("llama", model=masked), cache)


def test_a_state_that_runs_through_a_row_is_not_packed(cache: Path) -> None:
    with pytest.raises(UserError, match="a document would see the one before it") as refused:
        open_task(config("mamba2", "Packed"), cache).facts()
    assert "data.packing=false" in refused.value.remedy


@torch.no_grad()
def test_router_balance_is_the_library_s_over_the_whole_batch(cache: Path) -> None:
    """Of rows of unlike length, in any split."""
    task = open_task(config("mixtral", model={"router_aux_loss_coef": 0.5}), cache)
    torch.manual_seed(0)
    network = task.model().double()
    rows = task.train_data()[np.arange(6)]
    batch = _tensors(rows)
    ours = task.batch_losses(task.features(network, batch))
    library = network(
        input_ids=batch["input_ids"],
        attention_mask=(batch["documents"] > 0).long(),
        output_router_logits=True,
    )
    balance = ours["balance"]
    assert float(balance.sum / balance.weight) == pytest.approx(float(library.aux_loss), rel=1e-6)

    halves = [{name: column[part] for name, column in batch.items()} for part in (_FIRST, _REST)]
    parts = [task.features(network, half) for half in halves]
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    again = task.batch_losses(joined)["loss"]
    assert float(again.sum) == pytest.approx(float(ours["loss"].sum), rel=1e-12)


_FIRST, _REST = slice(0, 2), slice(2, None)


def _tensors(row: hf_rows.Row) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in row.items()}

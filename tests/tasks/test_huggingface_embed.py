"""Sentence embeddings: the negatives are the whole batch's, on any devices."""

import json
from pathlib import Path
from typing import Any

import hf_runs
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hf_runs import STEPS, plain_adamw, plain_step, train_sharded, write_lines
from test_huggingface import COMMON
from transformers import AutoConfig, AutoModel

import samecurve as program
from commands import losses as losses_of
from one_curve import check_one_curve, compare
from samecurve.core.determinism.data_order import Order
from samecurve.core.protocols import Arrays
from samecurve.errors import UserError
from samecurve.run.export_weights import export
from samecurve.tasks import open_task
from samecurve_products.text.huggingface.float64 import Float64
from samecurve_products.text.huggingface.sections import HFData, HFModel
from samecurve_products.text.huggingface.torch_task import TorchHuggingFace
from tiny import config_of
from worlds import Pool

BERT = {
    "architecture": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
BATCH, TEMPERATURE = 10, 0.1


class NegativesOfTheMicrobatch(TorchHuggingFace):
    """A loss of each microbatch, as without gathering."""

    Model, Data = HFModel, HFData

    def _take_objective(self) -> None:
        super()._take_objective()
        features, batch_loss = self.features, self.batch_loss
        del self.features, self.batch_loss

        def loss(model: Any, batch: Arrays) -> Any:
            return batch_loss(features(model, batch))

        self.loss = loss


def write_pairs(path: Path, *, negatives: bool = False) -> Path:
    lines = []
    for i in range(60):
        row = {"anchor": f"what is {i}" + "?" * (i % 5), "positive": f"{i} is {i * i}" + "." * i}
        lines.append({**row, **({"negative": f"{i} is not {i + 1}"} if negatives else {})})
    return write_lines(path, lines)


def values(pairs: Path, model: dict[str, Any], **sections: Any) -> dict[str, Any]:
    fields = {"objective": "embed", "embedding": {"temperature": TEMPERATURE}, **model}
    data = {"source": str(pairs), "tokenizer": "bytes", "seq_len": 24, "validation": 0.2}
    return hf_runs.values(fields, data, BATCH, **sections)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "negatives", "layouts"),
    [
        (BERT, True, ["ddp:3", "fsdp:2/4..single"]),
        (
            {"architecture": "llama", **COMMON, "vocab_size": 256},
            False,
            ["single/4", "ddp:2/4", "fsdp:2"],
        ),
    ],
)
def test_devices_do_not_change_the_negatives(
    model: dict[str, Any], *, negatives: bool, layouts: list[str], pool: Pool, tmp_path: Path
) -> None:
    """Texts of unlike length, dropout, a short last batch; resumed by another layout."""
    config = config_of(values(write_pairs(tmp_path / "p.jsonl", negatives=negatives), model))
    check_one_curve(config, layouts, pool, tmp_path, steps=7, near=1e-10)


@pytest.mark.long
def test_negatives_of_the_microbatch_alone_are_seen(pool: Pool, tmp_path: Path) -> None:
    of_class = values(write_pairs(tmp_path / "p.jsonl"), BERT)
    config = config_of({**of_class, "task": f"{__file__}:NegativesOfTheMicrobatch"})
    with pytest.raises(UserError, match="compares each sample with each other of the microbatch"):
        compare(config, ["ddp:2"], pool, tmp_path, steps=3, near=1e-10)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pool: Pool, cache: Path) -> Path:
    """A run under fsdp, in accumulation steps, of a directory that the library wrote."""
    home = tmp_path_factory.mktemp("embed")
    torch.manual_seed(1)
    fields: dict[str, Any] = {**BERT, "vocab_size": 256, "hidden_dropout_prob": 0.0}
    fields |= {"attention_probs_dropout_prob": 0.0}
    factory: Any = AutoModel
    base = factory.from_config(AutoConfig.for_model(fields.pop("architecture"), **fields))
    base.double().save_pretrained(home / "base")
    pairs = write_pairs(home / "p.jsonl", negatives=True)
    return train_sharded(home, values(pairs, {"path": str(home / "base")}), pool, cache)


def vector(model: Any, text: str) -> torch.Tensor:
    tokens = torch.tensor([list(text.encode())[:24]])
    with Float64():
        hidden = model(input_ids=tokens).last_hidden_state[0]
    return F.normalize(hidden.mean(0), dim=0)


@pytest.mark.long
def test_losses_are_those_of_a_plain_loop_over_the_library_s_model(
    trained: Path, cache: Path
) -> None:
    """One text after the other, in one process; the loss over all of them."""
    config = config_of(json.loads((trained / "c.yaml").read_text()))
    rows: Any = open_task(config, cache).task.train_data()
    model = AutoModel.from_pretrained(trained / "base", dtype=torch.float64)
    optimizer = plain_adamw(model)
    losses: list[float] = []
    for ids in Order(len(rows), BATCH, 0).ids(range(STEPS)):
        columns = rows[ids]
        texts: list[list[torch.Tensor]] = [[], [], []]
        for tokens, real in zip(columns["input_ids"], columns["documents"], strict=True):
            for number in range(3):
                text = bytes(tokens[number][real[number] > 0].tolist()).decode()
                texts[number].append(vector(model, text))
        anchors, positives, negatives = map(torch.stack, texts)
        scores = anchors @ torch.cat([positives, negatives]).T / TEMPERATURE
        own = torch.arange(len(ids))
        back = scores[:, : len(ids)].T
        loss = (F.cross_entropy(scores, own) + F.cross_entropy(back, own)) / 2
        losses.append(plain_step(model, optimizer, loss))
    np.testing.assert_allclose(losses_of(trained / "run"), losses, rtol=1e-10)


@pytest.mark.long
def test_what_is_exported_is_loaded_by_the_library(trained: Path) -> None:
    export(trained / "run", trained / "out", None, None, 1 << 30)
    library, ours = AutoModel.from_pretrained(trained / "out"), program.load(trained / "run")
    tokens = torch.arange(40)[None] + 40
    with torch.no_grad():
        expected = library.float()(tokens).last_hidden_state
        actual = ours.float()(tokens).last_hidden_state
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_rows_are_texts_each_cut_by_itself(tmp_path: Path, cache: Path) -> None:
    pairs = write_pairs(tmp_path / "p.jsonl", negatives=True)
    task = open_task(config_of(values(pairs, BERT)), cache).task
    rows = task.train_data()[np.arange(5)]
    for tokens, real in zip(rows["input_ids"], rows["documents"], strict=True):
        anchor, positive, negative = (
            bytes(text[there > 0].tolist()).decode()
            for text, there in zip(tokens, real, strict=True)
        )
        number = int(anchor.removeprefix("what is ").rstrip("?"))
        assert positive == (f"{number} is {number**2}" + "." * number)[:24]
        assert negative == f"{number} is not {number + 1}"


def test_what_are_no_pairs_is_refused(tmp_path: Path, cache: Path) -> None:
    pair = {"anchor": "a", "positive": "b"}
    cases: list[tuple[str, list[dict[str, Any]]]] = [
        ("0.jsonl:2: `positive` is missing; it has anchor", [pair, {"anchor": "c"}]),
        (r"1.jsonl:1: .*`anchor` and `positive`.*there are text", [{"text": "a"}]),
        (r"2.jsonl:2: this row has a `negative`", [pair, {**pair, "negative": "c"}]),
        (r"3.jsonl:2: `negative` is missing", [{**pair, "negative": "c"}, pair]),
        (r"4.jsonl:1: one of the texts of a row has no token: ''", [{**pair, "anchor": ""}]),
    ]
    for number, (cause, lines) in enumerate(cases):
        file = tmp_path / f"{number}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        with pytest.raises(UserError, match=cause):
            open_task(config_of(values(file, BERT)), cache)
    pairs = write_pairs(tmp_path / "p.jsonl")
    for fields in ({"temperature": 0}, {"pooling": "max"}):
        with pytest.raises(UserError, match=r"model\.embedding"):
            config_of(values(pairs, {**BERT, "embedding": fields}))
    random = {"source": "random", "seq_len": 16}
    with pytest.raises(UserError, match="nor texts that belong together"):
        open_task(config_of(values(pairs, {**BERT, "vocab_size": 64}, data=random)), cache)

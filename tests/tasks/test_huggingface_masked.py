"""Masked language models: one curve, masks that follow the sample, the library's own loss."""

import json
from pathlib import Path
from typing import Any

import hf_runs
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hf_runs import STEPS, plain_adamw, plain_step, squares, train_sharded, write_lines
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer

import samecurve as program
from commands import losses as losses_of
from commands import samecurve
from one_curve import check_one_curve, compare
from samecurve.core.determinism.data_order import Order
from samecurve.core.determinism.sample_keys import row_keys
from samecurve.core.protocols import Arrays
from samecurve.errors import UserError
from samecurve.observe import read_events
from samecurve.run.export_weights import export
from samecurve.tasks import open_task
from samecurve.torch_engine.randomness.keyed_numbers import KeyedNumbers, Tables
from samecurve_products.text.huggingface.float64 import Float64
from samecurve_products.text.huggingface.masked import Masking
from samecurve_products.text.huggingface.sections import HFData, HFModel
from samecurve_products.text.huggingface.torch_task import TorchHuggingFace
from tiny import config_of
from worlds import Pool

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
BATCH = 10


class Numbers:
    """As samecurve.rng gives them, of rows with these keys."""

    def __init__(self, keys: np.ndarray[Any, Any]) -> None:
        self._numbers = KeyedNumbers(torch.from_numpy(keys), Tables(), "samecurve.rng")
        self._drawn = 0

    def _next(self) -> int:
        self._drawn += 1
        return self._drawn - 1

    def uniform(self, *shape: int, dtype: str = "float32") -> torch.Tensor:
        return self._numbers.uniform(self._next(), list(shape), getattr(torch, dtype))

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return self._numbers.integers(self._next(), list(shape), low, high)


class MaskedByPlace(TorchHuggingFace):
    """Its masks follow a row's place in the microbatch."""

    Model, Data = HFModel, HFData

    def loss(self, model: Any, batch: Arrays) -> Any:
        count, masking = len(batch["input_ids"]), self._masking()
        numbers: Any = Numbers(row_keys(0, 0, np.arange(count)))
        real = batch["documents"] > 0
        tokens, labels = masking.hide(batch["input_ids"], real, numbers)
        logits = model(input_ids=tokens, attention_mask=real.long()).logits.transpose(1, 2)
        return program.Mean(
            F.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum()
        )

    def __getattribute__(self, name: str) -> Any:
        return type(self).loss.__get__(self) if name == "loss" else super().__getattribute__(name)


def write_texts(path: Path) -> Path:
    return write_lines(path, [{"text": text} for text in squares(80)])


def values(texts: Path, model: dict[str, Any], **sections: Any) -> dict[str, Any]:
    fields = {"objective": "masked", "mask_probability": 0.2, **model}
    data = {"source": str(texts), "tokenizer": "bpe:300", "seq_len": 30, "validation": 0.2}
    return hf_runs.values(fields, data, BATCH, **sections)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        ("bert", ["fsdp:2/4..single"]),
        pytest.param("bert", ["ddp:3"], marks=pytest.mark.long),
        pytest.param("modernbert", ["ddp:3", "fsdp:2/4..single"], marks=pytest.mark.long),
        pytest.param("roberta", ["single/4", "fsdp:2"], marks=pytest.mark.long),
    ],
)
def test_devices_do_not_change_the_curve(
    model: str, layouts: list[str], pool: Pool, tmp_path: Path
) -> None:
    """Texts of unlike length, dropout, a short last batch; resumed by another layout."""
    fields = {"architecture": model, **SMALL}
    config = config_of(values(write_texts(tmp_path / "t.jsonl"), fields))
    check_one_curve(config, layouts, pool, tmp_path, steps=9, near=1e-10)


@pytest.mark.long
def test_masks_by_place_in_the_microbatch_are_seen(pool: Pool, tmp_path: Path) -> None:
    fields = {"architecture": "bert", **SMALL}
    of_class = values(write_texts(tmp_path / "t.jsonl"), fields)
    config = config_of({**of_class, "task": f"{__file__}:MaskedByPlace"})
    with pytest.raises(UserError, match="weights don't add up"):
        compare(config, ["ddp:3"], pool, tmp_path, steps=3, near=1e-10)


def test_hidden_tokens_have_the_field_s_shares() -> None:
    """15 %, of which 80 % the mask, 10 % random, 10 % as they were; never padding or a special
    token; of each row one at least; the same in a wider batch; others in another epoch.
    """
    masking = Masking(0.15, mask=4, special=(0, 1, 2, 3, 4), vocab_size=1000)
    tokens = torch.randint(5, 1000, (4000, 64), generator=torch.Generator().manual_seed(0))
    real = torch.arange(64) < torch.randint(4, 65, (4000, 1))
    tokens[:, 0], tokens[:, 2] = 1, 3
    seen, labels = masking.hide(tokens, real, _numbers(0))
    hidden = labels != -100
    assert not hidden[:, [0, 2]].any()
    assert not (hidden & ~real).any()
    assert hidden.any(1).all()
    assert torch.equal(seen[~hidden], tokens[~hidden])
    assert torch.equal(labels[hidden], tokens[hidden])
    long = real.sum(1) > 40
    assert float(hidden[long].sum() / (real[long].sum() - 2 * long.sum())) == pytest.approx(
        0.15, abs=0.005
    )
    asis = seen[hidden] == tokens[hidden]
    assert float((seen[hidden] == 4).double().mean()) == pytest.approx(0.8, abs=0.01)
    assert float(asis.double().mean()) == pytest.approx(0.1, abs=0.01)
    narrow = masking.hide(tokens[:, :20], real[:, :20], _numbers(0))[1]
    rows = (real.sum(1) <= 20).nonzero()[:, 0]
    assert torch.equal(narrow[rows], labels[rows, :20])
    assert not torch.equal(masking.hide(tokens, real, _numbers(1))[1], labels)


def _numbers(epoch: int) -> Any:
    return Numbers(row_keys(0, epoch, np.arange(4000)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pool: Pool, cache: Path) -> Path:
    """A run under fsdp, in accumulation steps, of a directory that the library wrote."""
    home = tmp_path_factory.mktemp("masked")
    torch.manual_seed(1)
    fields = {**SMALL, "vocab_size": 300, "hidden_dropout_prob": 0.0, "pad_token_id": 1}
    factory: Any = AutoModelForMaskedLM
    described = AutoConfig.for_model("bert", **fields, attention_probs_dropout_prob=0.0)
    factory.from_config(described).double().save_pretrained(home / "base")
    content = values(write_texts(home / "t.jsonl"), {"path": str(home / "base")})
    return train_sharded(home, content, pool, cache)


@pytest.mark.long
def test_losses_are_those_of_a_plain_loop_over_the_library_s_model(
    trained: Path, cache: Path
) -> None:
    """One text after the other, in one process, through several epochs."""
    config = config_of(json.loads((trained / "c.yaml").read_text()))
    task = open_task(config, cache)
    rows: Any = task.train_data()
    model = AutoModelForMaskedLM.from_pretrained(trained / "base", dtype=torch.float64)
    optimizer = plain_adamw(model)
    order, losses = Order(len(rows), BATCH, 0), list[float]()
    masking = task.task._masking()
    for step, ids in enumerate(order.ids(range(STEPS))):
        total: Any = torch.zeros((), dtype=torch.float64)
        count = 0
        for row in ids:
            columns = rows[np.array([row])]
            text = torch.from_numpy(columns["input_ids"][:, : int(columns["documents"].sum())])
            epoch = order.position(step).epoch
            numbers: Any = Numbers(row_keys(0, epoch, np.array([row])))
            seen, labels = masking.hide(text, torch.ones_like(text) > 0, numbers)
            with Float64():
                logits = model(input_ids=seen).logits[0]
            total = total + F.cross_entropy(logits, labels[0], reduction="sum")
            count += int((labels != -100).sum())
        losses.append(plain_step(model, optimizer, total / count))
    np.testing.assert_allclose(losses_of(trained / "run"), losses, rtol=1e-10)


@pytest.mark.long
def test_every_evaluation_hides_the_same(trained: Path) -> None:
    """On one device as on the two that trained."""
    line = ("eval", "run", "--devices", "cpu:1", "--json")
    alone = json.loads(samecurve(*line, cwd=trained).stdout)
    both = [
        event.values
        for event in read_events(trained / "run" / "journal.jsonl")
        if event.kind == "evaluated"
    ][-1]
    assert 0 <= alone["accuracy"] <= 1
    assert both["loss"] == pytest.approx(alone["loss"], rel=1e-10)


@pytest.mark.long
def test_what_is_exported_is_loaded_by_the_library(trained: Path) -> None:
    export(trained / "run", trained / "out", None, None, 1 << 30)
    library = AutoModelForMaskedLM.from_pretrained(trained / "out")
    tokenizer = AutoTokenizer.from_pretrained(trained / "out")
    assert tokenizer.mask_token_id is not None
    tokens = tokenizer("the square of 7 is <|mask|>", return_tensors="pt")["input_ids"]
    assert int((tokens == tokenizer.mask_token_id).sum()) == 1
    ours: Any = program.load(trained / "run")
    with torch.no_grad():
        expected, actual = library.float()(tokens).logits, ours.float()(tokens).logits
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_what_can_not_be_masked_is_refused(tmp_path: Path, cache: Path) -> None:
    texts = write_texts(tmp_path / "t.jsonl")
    bert = {"architecture": "bert", **SMALL}
    with_bytes = {"source": str(texts), "tokenizer": "bytes", "seq_len": 30}
    with pytest.raises(UserError, match="the tokenizer bytes has no mask token"):
        open_task(config_of(values(texts, bert, data=with_bytes)), cache)
    for share in (0, 1, 1.5):
        with pytest.raises(UserError, match="mask_probability"):
            config_of(values(texts, {**bert, "mask_probability": share}))
    with pytest.raises(UserError, match="no such masked language model") as refused:
        open_task(config_of(values(texts, {"architecture": "llama"})), cache)
    assert "bert, roberta, modernbert" in refused.value.remedy
    short = {**bert, "architecture": "roberta", "max_position_embeddings": 31}
    with pytest.raises(UserError, match="31 positions, of which 2 are not used"):
        open_task(config_of(values(texts, short)), cache).facts()

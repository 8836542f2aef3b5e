"""Classifiers of texts: one curve, the library's own loss, counts that are exact."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_huggingface import COMMON
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from commands import samecurve
from one_curve import check_one_curve
from samecurve.core.determinism import Mean
from samecurve.errors import UserError
from samecurve.run.weights.initial_weights import read_initial_weights
from samecurve.tasks import entry_of, open_task
from samecurve_products.task_parts.classification import summarize_classes
from tiny import config_of
from worlds import Pool

BERT = {
    "architecture": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.1,
}
LLAMA = {"architecture": "llama", **COMMON, "vocab_size": 256}


def write_texts(path: Path, count: int = 60, column: str = "label") -> Path:
    """Of unlike length; half of them odd, a third of the others zero."""
    lines = []
    for i in range(count):
        label = "odd" if i % 2 else "zero" if i % 3 == 0 else "even"
        lines.append({"text": f"{i} is {label}" + "." * (i % 11), column: label})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def values(texts: Path, model: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {
        "task": "huggingface",
        "model": {"objective": "classify", **model},
        "data": {"source": str(texts), "tokenizer": "bytes", "seq_len": 24, "validation": 0.2},
        "batch": {"samples": 10},
        "optimizer": {"lr": 3e-3},
        "train": {"steps": 6, "precision": "f64"},
        "devices": {"use": "cpu"},
        **sections,
    }


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        ({**LLAMA, "class_weights": "balanced"}, ["ddp:2", "fsdp:2/4"]),
        pytest.param(
            {**BERT, "class_weights": {"zero": 5}}, ["ddp:3", "fsdp:2"], marks=pytest.mark.long
        ),
    ],
)
def test_devices_do_not_change_the_curve(
    model: dict[str, Any], layouts: list[str], pool: Pool, tmp_path: Path
) -> None:
    """Class weights that fall unevenly on microbatches of texts of unlike length; dropout."""
    config = config_of(values(write_texts(tmp_path / "t.jsonl"), model))
    check_one_curve(config, layouts, pool, tmp_path, steps=5, near=1e-10)


@torch.no_grad()
def test_the_loss_is_the_library_s(tmp_path: Path, cache: Path) -> None:
    """torch's own weighted cross-entropy of the library's logits, one text after the other."""
    model = {**LLAMA, "class_weights": "balanced"}
    task = open_task(config_of(values(write_texts(tmp_path / "t.jsonl"), model)), cache).task
    torch.manual_seed(0)
    network = task.model().double().eval()
    rows = task.train_data()
    ids = np.arange(9)
    samples = [{name: column[i] for name, column in rows[ids].items()} for i in range(9)]
    batch = {name: torch.from_numpy(column) for name, column in task.collate(samples).items()}
    ours = task.loss(network, batch)
    alone = [network(input_ids=torch.from_numpy(s["input_ids"])[None]).logits[0] for s in samples]
    counts = np.bincount([int(rows[np.array([i])]["label"][0]) for i in range(len(rows))])
    weights = torch.tensor(counts.sum() / (len(counts) * counts), dtype=torch.float64)
    library = torch.nn.CrossEntropyLoss(weights)(torch.stack(alone), batch["label"])
    assert float(ours.sum / ours.weight) == pytest.approx(float(library), rel=1e-10)
    confusion = task.metrics(network, batch)["confusion"].sum
    assert confusion.sum() == 9
    assert confusion.sum(1).tolist() == torch.bincount(batch["label"], minlength=3).tolist()


@pytest.fixture(scope="module")
def of_pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that puts two texts together as BERT's does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    home = tmp_path_factory.mktemp("pairs")
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *map(str, range(60))]
    words = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    words.save(str(home / "tokenizer.json"))
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    (home / "tokenizer_config.json").write_text(json.dumps(config))
    return home


def write_pairs(path: Path) -> list[dict[str, str]]:
    """Of unlike length on either side."""
    rng = np.random.default_rng(0)
    rows = [
        {
            "text": " ".join(map(str, rng.integers(0, 60, rng.integers(1, 16)))),
            "text_pair": " ".join(map(str, rng.integers(0, 60, rng.integers(1, 16)))),
            "label": str(i % 2),
        }
        for i in range(30)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


@torch.no_grad()
def test_two_texts_are_joined_typed_and_cut_as_the_library_has_it(
    of_pairs: Path, tmp_path: Path, cache: Path
) -> None:
    """Its tokenizer with truncation=True, and the model's answers to that."""
    rows = write_pairs(tmp_path / "t.jsonl")
    data = {"source": str(tmp_path / "t.jsonl"), "tokenizer": str(of_pairs), "seq_len": 16}
    model = {**BERT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = config_of(values(tmp_path, model, data={**data, "validation": 0.0}))
    task = open_task(config, cache).task
    there = task.train_data()[np.arange(len(rows))]
    samples = [{name: column[i] for name, column in there.items()} for i in range(len(rows))]
    ours = {
        (tuple(s["input_ids"].tolist()), tuple(s["types"].tolist()), int(s["label"]))
        for s in samples
    }
    library = AutoTokenizer.from_pretrained(of_pairs)
    expected = set()
    for row in rows:
        text, pair = row["text"], row["text_pair"]
        both = library(text, pair, truncation=True, max_length=16, return_token_type_ids=True)
        ids, types = both["input_ids"], both["token_type_ids"]
        expected.add((tuple(ids), tuple(types), int(row["label"])))
    assert ours == expected

    torch.manual_seed(0)
    network = task.model().double().eval()
    batch = {name: torch.from_numpy(column) for name, column in task.collate(samples[:8]).items()}
    whole = network(
        input_ids=batch["input_ids"],
        attention_mask=(batch["documents"] > 0).long(),
        token_type_ids=batch["types"],
    ).logits
    loss = torch.nn.functional.cross_entropy(whole, batch["label"], reduction="sum")
    assert float(task.loss(network, batch).sum) == pytest.approx(float(loss), rel=1e-12)
    untyped = {name: column for name, column in batch.items() if name != "types"}
    assert float(task.loss(network, untyped).sum) != pytest.approx(float(loss), rel=1e-6)
    answer = task.respond(network, "1 2\t3", tokens=1, temperature=0, seed=0)
    assert answer.count("\n") == 1

    (tmp_path / "u.jsonl").write_text('{"text": "1", "text_pair": "2", "label": "a"}\n')
    (tmp_path / "v.jsonl").write_text('{"text": "1", "label": "b"}\n')
    mixed = {**data, "source": [str(tmp_path / "u.jsonl"), str(tmp_path / "v.jsonl")]}
    with pytest.raises(UserError, match="some files have a column `text_pair`"):
        open_task(config_of(values(tmp_path, model, data=mixed)), cache)


def test_a_text_that_is_cut_keeps_the_tokens_that_end_it(of_pairs: Path, tmp_path: Path) -> None:
    """As the library's tokenizer with truncation=True; [SEP] was cut off."""
    rows = write_pairs(tmp_path / "t.jsonl")
    rows = [{name: row[name] for name in ("text", "label")} for row in rows]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"source": str(tmp_path / "t.jsonl"), "tokenizer": str(of_pairs), "seq_len": 8}
    config = config_of(values(tmp_path, BERT, data={**data, "validation": 0.0}))
    task = open_task(config, tmp_path / "cache").task
    ours = {tuple(ids.tolist()) for ids in task.train_data()[np.arange(len(rows))]["input_ids"]}
    library = AutoTokenizer.from_pretrained(of_pairs)
    expected = [library(row["text"], truncation=True, max_length=8) for row in rows]
    assert ours == {tuple(each["input_ids"]) for each in expected}
    assert any("texts longer than 8 cut" in note for note in task.prepared.lines)


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("pairs", [True, False])
def test_texts_have_the_tokens_of_the_library_s_tokenizer(
    tmp_path: Path, *, begins: bool, pairs: bool
) -> None:
    """Decoders' tokenizers put no end-of-text token after a text, and nothing between two."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    home, names = tmp_path / "tokenizer", ["<s>", "</s>", "<pad>", "<unk>", *map(str, range(60))]
    words = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    if begins:
        words.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B:1", special_tokens=[("<s>", 0)]
        )
    home.mkdir()
    words.save(str(home / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    fields |= {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>"}
    (home / "tokenizer_config.json").write_text(json.dumps(fields))
    rows = write_pairs(tmp_path / "t.jsonl")
    if not pairs:
        rows = [{name: row[name] for name in ("text", "label")} for row in rows]
        (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"source": str(tmp_path / "t.jsonl"), "tokenizer": str(home), "seq_len": 12}
    config = config_of(values(tmp_path, LLAMA, data={**data, "validation": 0.0}))
    task = open_task(config, tmp_path / "cache").task
    ours = {tuple(ids.tolist()) for ids in task.train_data()[np.arange(len(rows))]["input_ids"]}
    library = AutoTokenizer.from_pretrained(home)
    expected = [
        library(row["text"], row.get("text_pair"), truncation=True, max_length=12) for row in rows
    ]
    assert ours == {tuple(each["input_ids"]) for each in expected}

    # a classifier that began before reads its prompts as it was trained
    kept = {path.name: path for path in task.assets().values()}["tokenizer_notes.json"]
    notes = json.loads(kept.read_text())
    assert notes.pop("ends") is False
    old = tmp_path / "old"
    old.mkdir()
    (old / "tokenizer.json").write_text((home / "tokenizer.json").read_text())
    (old / "tokenizer_notes.json").write_text(json.dumps(notes))
    again = values(tmp_path, LLAMA, data={**data, "tokenizer": str(old), "validation": 0.0})
    was = open_task(config_of(again), tmp_path / "cache").task.train_data()
    assert all(ids[-1] == 1 or len(ids) == 12 for ids in was[np.arange(len(rows))]["input_ids"])


def test_scores_follow_from_counts() -> None:
    """F1 is 2 right / (labelled + answered); a class that never occurs is left out."""
    confusion = np.array([[5, 2, 0, 0], [1, 3, 0, 0], [0, 4, 6, 0], [0, 0, 0, 0]])
    shown = summarize_classes({"loss": Mean(1.0, 2), "confusion": Mean(confusion, 3)})
    assert shown["accuracy"] == pytest.approx(14 / 21, rel=1e-12)
    f1 = (10 / (7 + 6), 6 / (4 + 9), 12 / (10 + 6))
    assert shown["macro_f1"] == pytest.approx(sum(f1) / 3, rel=1e-12)


def test_what_is_no_label_is_refused(tmp_path: Path, cache: Path) -> None:
    cases: dict[str, list[dict[str, Any]]] = {
        "no column holds one; there are text": [{"text": "a"}],
        "it names no class": [{"text": "a", "label": "x"}, {"text": "b", "label": 0.5}],
        "all labels are x": [{"text": "a", "label": "x"}],
    }
    for number, (cause, lines) in enumerate(cases.items()):
        file = tmp_path / f"{number}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        with pytest.raises(UserError, match=cause):
            open_task(config_of(values(file, LLAMA)), cache)
    texts = write_texts(tmp_path / "t.jsonl")
    with pytest.raises(UserError, match="the label even is none of the model's classes"):
        open_task(config_of(values(texts, {**LLAMA, "classes": ["odd", "zero"]})), cache)
    with pytest.raises(UserError, match="nil is no label of the data"):
        open_task(config_of(values(texts, {**LLAMA, "class_weights": {"nil": 2}})), cache)


@pytest.mark.long
def test_a_base_s_directory_becomes_a_classifier_s(tmp_path: Path, cache: Path) -> None:
    """Its weights, a head of its own; trained, tested on other texts, asked, exported."""
    texts = write_texts(tmp_path / "t.jsonl", column="labels")
    factory: Any = AutoModelForCausalLM
    base = factory.from_config(AutoConfig.for_model("llama", **{**COMMON, "vocab_size": 256}))
    base.save_pretrained(tmp_path / "base")
    of_base = values(texts, {"path": str(tmp_path / "base")}, train={"steps": 6})
    config = config_of(of_base)
    source = read_initial_weights(
        tmp_path / "base", config, entry_of(config.task).facts(config, cache)
    )
    head = source.arrays["score.weight"].read()
    assert head.shape == (3, 32)
    assert 0.01 < head.std() < 0.03
    assert "lm_head.weight" not in source.arrays

    (tmp_path / "c.yaml").write_text(json.dumps(of_base))
    samecurve("train", "-f", "c.yaml", "--save-dir", "run", cwd=tmp_path)
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "7 is odd", "label": "odd"}\n' * 3)
    shown = json.loads(samecurve("eval", "run", "-d", "other.jsonl", "--json", cwd=tmp_path).stdout)
    assert np.array(shown["confusion"]).sum(1).tolist() == [0, 3, 0]
    answer = samecurve("sample", "run", "--prompt", "8 is even", cwd=tmp_path).stdout
    assert all(name in answer for name in ("odd", "even", "zero"))

    samecurve("export", "run", "--to", "out", cwd=tmp_path)
    reloaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert reloaded.config.id2label == {0: "even", 1: "odd", 2: "zero"}
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("8 is even", return_tensors="pt")
    chance = float(reloaded(input_ids=ids["input_ids"]).logits.detach().softmax(-1).max())
    assert float(answer.split()[1]) == pytest.approx(chance, abs=1e-4)

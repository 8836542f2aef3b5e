"""The data of the huggingface task: what becomes of documents, and that it is the same whoever
reads it.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caches import unmark_checked
from samecurve.core.config.document import read_document
from samecurve.core.config.loading import load_document
from samecurve.data import IGNORED
from samecurve.errors import InvalidConfigError, RunError, UserError
from samecurve.tasks import Tasks
from samecurve_products.text.huggingface.data import lines
from samecurve_products.text.huggingface.data.chat import ChatTemplate
from samecurve_products.text.huggingface.data.packing import pack
from samecurve_products.text.huggingface.data.prepared_data import (
    PreparedData,
    other_data,
    prepare_data,
    stamp_data,
)
from samecurve_products.text.huggingface.sections import HFData

SENTENCE = "a bird sang of the sea and of salt while rain fell on the old stone house"
WORDS = SENTENCE.split()
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ m.content }}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# as some models' templates do, it leaves out of all turns but the last what was thought
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [
    {"role": "user", "content": "the sea"},
    {"role": "assistant", "content": "salt and rain"},
    {"role": "user", "content": "a bird"},
    {"role": "assistant", "content": "sang"},
]

SMALL_PIECES = {"records._CHUNK": 500, "parts._PART": 1200, "tokenized_source._ALONE": 0}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer of words, as save_pretrained writes it."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

    home = tmp_path_factory.mktemp("tokenizer")
    special = ["<s>", "</s>", "<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    names = [
        *special,
        "\n",
        *map(str, range(400)),
        "user",
        "assistant",
        "system",
        *dict.fromkeys(WORDS),
    ]
    words = Tokenizer(
        models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>")
    )
    words.add_special_tokens([AddedToken(name, special=True) for name in special])
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated")]
    )
    words.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", names.index("<s>"))]
    )
    words.save(str(home / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
        "pad_token": "<pad>",
        "chat_template": CHATML,
    }
    (home / "tokenizer_config.json").write_text(json.dumps(config))
    return home


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(count: int, seed: int = 0, longest: int = 40) -> list[dict[str, str]]:
    """Documents of 1 to `longest` words, each unlike all others by its number."""
    rng = np.random.default_rng(seed)
    return [
        {"text": " ".join([*str(i), *rng.choice(WORDS, rng.integers(1, longest + 1))])}
        for i in range(count)
    ]


def prepared(source: Any, home: Path, tokenizer: Path | str = "bytes", **data: Any) -> PreparedData:
    return prepare_data(HFData(source=source, tokenizer=str(tokenizer), **data), home / "cache")


def documents(data: PreparedData) -> list[str]:
    """Every document that is trained on, as text, taken out of its row."""
    assert data.tokenizer
    rows = data.train[np.arange(len(data.train))]
    taken = []
    for ids, numbers in zip(rows["input_ids"], rows["documents"], strict=True):
        for number in range(1, numbers.max() + 1):
            taken.append(data.tokenizer.decode(ids[numbers == number].tolist()))
    return taken


def learnt_text(data: PreparedData) -> list[str]:
    """What is learnt of each row."""
    assert data.tokenizer
    rows = data.train[np.arange(len(data.train))]
    return [data.tokenizer.decode(row[row != IGNORED].tolist()) for row in rows["labels"]]


def test_packed_rows_hold_each_document_once(tmp_path: Path, tokenizer: Path) -> None:
    """Its tokens in their order from position 0, labels on all but the first; in as few rows as
    the tokens could fill, but one in fifty.
    """
    rows = texts(400)
    source = write_lines(tmp_path / "t.jsonl", rows)
    data = prepared(str(source), tmp_path, tokenizer, seq_len=64, validation=0.0)
    assert data.held_out is None
    assert sorted(documents(data)) == sorted(f"<s> {row['text']} </s>" for row in rows)
    batch = data.train[np.arange(len(data.train))]
    tokens = sum(len(row["text"].split()) + 2 for row in rows)
    assert data.reference["tokens"] == (batch["documents"] > 0).sum() == tokens
    assert data.reference["loss_tokens"] == (batch["labels"] != IGNORED).sum() == tokens - 400
    assert len(data.train) <= 1.02 * tokens / 64 + 1
    first = np.diff(batch["documents"], prepend=0, axis=1) > 0
    np.testing.assert_array_equal((batch["positions"] == 0) & (batch["documents"] > 0), first)
    assert {name: column.dtype.name for name, column in batch.items()} == {
        "input_ids": "int64",
        "labels": "int64",
        "positions": "int64",
        "documents": "int32",
    }


def test_packing_is_near_the_least_and_the_same_each_time() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(4, 1, 20_000).astype(np.int64) + 1, 512)
    pieces, row = pack(lengths, 512)
    assert sorted(pieces.tolist()) == list(range(len(lengths)))
    sizes = np.add.reduceat(lengths[pieces], row[:-1])
    assert sizes.max() <= 512
    assert len(sizes) <= 1.001 * lengths.sum() / 512 + 1
    again = pack(lengths, 512)
    np.testing.assert_array_equal(pieces, again[0])
    halves, row = pack(np.array([300] * 5), 512)  # two don't fit
    assert (len(halves), row.tolist()) == (5, [0, 1, 2, 3, 4, 5])


def test_a_row_depends_on_its_id_alone(tmp_path: Path, tokenizer: Path) -> None:
    """So that any world, microbatch or position reads the same; padded rows but for their padding,
    random ones too.
    """
    source = str(write_lines(tmp_path / "t.jsonl", texts(60)))
    packed = prepared(source, tmp_path, tokenizer, seq_len=32).train
    random = prepare_data(HFData(source="random", seq_len=32), tmp_path, vocab_size=1000).train
    for rows in (packed, random):
        ids = np.arange(len(packed))
        whole = rows[ids[::-1]]
        for i in ids:
            for name, column in rows[np.array([i])].items():
                np.testing.assert_array_equal(column[0], whole[name][::-1][i])
    drawn = random[np.arange(50)]["input_ids"]
    assert len({row.tobytes() for row in drawn}) == 50
    assert drawn.max() < 1000
    assert len(np.unique(drawn)) > 700


def test_padded_rows_are_as_long_as_the_longest_read_together(
    tmp_path: Path, tokenizer: Path
) -> None:
    source = str(write_lines(tmp_path / "t.jsonl", texts(60)))
    data = prepared(source, tmp_path, tokenizer, seq_len=32, packing=False)
    assert data.collate
    columns = data.train[np.array([0, 3, 40])]
    samples = [{name: column[row] for name, column in columns.items()} for row in range(3)]
    batch = data.collate(samples)
    sizes = [len(sample["input_ids"]) for sample in samples]
    assert batch["input_ids"].shape == (3, max(sizes))
    assert (batch["documents"] > 0).sum(1).tolist() == sizes
    assert (batch["input_ids"][0, sizes[0] :] == 2).all()  # <pad>
    assert (batch["labels"] != IGNORED).sum(1).tolist() == [size - 1 for size in sizes]


def test_nothing_is_held_out_and_trained_on(tmp_path: Path, tokenizer: Path) -> None:
    source = str(write_lines(tmp_path / "t.jsonl", texts(200, longest=20)))
    whole = documents(prepared(source, tmp_path, tokenizer, seq_len=32, validation=0.0))
    data = prepared(source, tmp_path, tokenizer, seq_len=32, validation=0.25)
    assert data.held_out is not None
    held = data.held_out[np.arange(len(data.held_out))]
    held_tokens = int((held["documents"] > 0).sum())
    left = Counter(documents(data))
    assert left <= Counter(whole)
    assert held_tokens + data.reference["tokens"] == sum(len(text.split()) for text in whole)
    assert held_tokens / (held_tokens + data.reference["tokens"]) == pytest.approx(0.25, abs=0.02)


def test_weights_repeat_a_source_exactly(tmp_path: Path, tokenizer: Path) -> None:
    one = write_lines(tmp_path / "one.jsonl", texts(20, 1))
    two = write_lines(
        tmp_path / "two.jsonl", [{"text": f"house {row['text']}"} for row in texts(9)]
    )
    sources = [{"source": str(one), "weight": 2.3}, {"source": str(two), "weight": 1.0}]
    data = prepare_data(
        HFData.model_validate(
            {"source": sources, "tokenizer": str(tokenizer), "seq_len": 64, "validation": 0.0}
        ),
        tmp_path,
    )
    times = Counter(documents(data))
    of_one = [count for text, count in times.items() if "house" not in text.split()[1]]
    of_two = [count for text, count in times.items() if "house" in text.split()[1]]
    assert sorted(of_one) == [2] * 14 + [3] * 6
    assert of_two == [1] * 9
    assert "2.3 times" in data.lines[1]


def test_the_assistants_tokens_are_learnt_and_no_others(tmp_path: Path, tokenizer: Path) -> None:
    """By hand: what it says, and what ends its turn. With marks or without, the same."""
    source = str(write_lines(tmp_path / "t.jsonl", [{"messages": TALK}]))
    by_hand = "salt and rain <|im_end|> sang <|im_end|>"
    plain = prepared(source, tmp_path, tokenizer, seq_len=64)
    assert learnt_text(plain) == [by_hand]
    assert documents(plain)[0].startswith("<|im_start|> user \n the sea <|im_end|> \n <|im_start|>")
    marked = tmp_path / "marked.jinja"
    marked.write_text(MARKED)
    again = prepared(source, tmp_path, tokenizer, seq_len=64, chat_template=str(marked))
    for name, column in plain.train[np.array([0])].items():
        np.testing.assert_array_equal(column, again.train[np.array([0])][name])
    forgetful = tmp_path / "forgetful.jinja"
    forgetful.write_text(FORGETFUL)
    spans = prepared(source, tmp_path, tokenizer, seq_len=64, chat_template=str(forgetful))
    assert learnt_text(spans) == [by_hand.replace("sang", "<think> </think> sang")]


MISTRAL = (  # no generation prompt; the end of a turn is the end of the text
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (  # another name for the role, contents stripped
    "{{ bos_token }}{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
CALLS = (  # what is called is a part of the turn, after its content
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.name }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BEGIN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
ALWAYS = CHATML.replace(BEGIN, "<|im_start|>assistant{{ '\n' }}")
PLAIN = (  # no special tokens at all
    "{% for m in messages %}### {{ m.role }}\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "last", "learnt"),
    [
        (CHATML, {}, ["salt and rain<|im_end|>", "sang<|im_end|>"]),
        (MARKED, {}, ["salt and rain<|im_end|>", "sang<|im_end|>"]),
        (MISTRAL, {}, ["salt and rain</s>", "sang</s>"]),
        (GEMMA, {"content": " sang\n"}, ["salt and rain<end_of_turn>", "sang<end_of_turn>"]),
        (
            CALLS,
            {"tool_calls": [{"name": "fly"}]},
            ["salt and rain<|im_end|>", "sang<tool_call>fly</tool_call><|im_end|>"],
        ),
        (ALWAYS, {}, ["salt and rain<|im_end|>", "sang<|im_end|>"]),
        (PLAIN, {}, ["salt and rain\n\n", "sang\n\n"]),
    ],
)
def test_what_the_assistant_says_in_templates_of_many_kinds(
    template: str, last: dict[str, Any], learnt: list[str]
) -> None:
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    special = ["<|im_start|>", "<|im_end|>", "</s>", "<start_of_turn>", "<end_of_turn>"]
    special += ["<tool_call>", "</tool_call>"]
    chat = ChatTemplate(template, names, special)
    text, spans = chat.spans([*TALK[:-1], {**TALK[-1], **last}], None, "here")
    assert [text[begin:end] for begin, end in spans] == learnt


def test_a_prompt_that_nobody_asked_for_is_not_learnt() -> None:
    """A template that always ends with it, and strips contents, does not show a turn's end."""
    always = ALWAYS.replace("m.content", "m.content | trim")
    chat = ChatTemplate(always, {}, ["<|im_start|>", "<|im_end|>"])
    talk = [TALK[0], {**TALK[1], "content": " salt"}]
    assert chat._render(talk).endswith("salt<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(UserError, match="does not show which tokens turn 1"):
        chat.spans(talk, None, "here")


def test_a_template_that_hides_a_turn_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    """One whose rendering of a turn can't be found in the whole: no mask is guessed."""
    source = str(write_lines(tmp_path / "t.jsonl", [{"messages": TALK}]))
    hiding = tmp_path / "hiding.jinja"
    hiding.write_text(CHATML.replace("{{ m.content }}", "{{ messages|length }} {{ m.content }}"))
    with pytest.raises(UserError, match="does not show which tokens turn 1") as refused:
        prepared(source, tmp_path, tokenizer, chat_template=str(hiding))
    assert "{% generation %}" in refused.value.remedy
    assert refused.value.where.endswith("t.jsonl:1")
    empty = tmp_path / "empty.jinja"
    empty.write_text(MARKED.replace("'assistant'", "'nobody'"))
    with pytest.raises(UserError, match="marks nothing of 1 conversations as the assistant's"):
        prepared(source, tmp_path, tokenizer, chat_template=str(empty))
    silent = write_lines(tmp_path / "silent.jsonl", [{"messages": TALK[:1]}])
    with pytest.raises(UserError, match="no conversation has a turn of the assistant"):
        prepared(str(silent), tmp_path, tokenizer)
    with pytest.raises(UserError, match="has no chat template"):
        prepared(source, tmp_path, "bytes")


def test_of_a_prompt_nothing_is_learnt(tmp_path: Path, tokenizer: Path) -> None:
    rows = [
        {"prompt": "the sea", "completion": " and salt"},
        {"prompt": "a", "completion": " bird"},
    ]
    source = str(write_lines(tmp_path / "t.jsonl", rows))
    data = prepared(source, tmp_path, tokenizer, packing=False, validation=0.0)
    assert sorted(learnt_text(data)) == ["and salt </s>", "bird </s>"]
    split = prepared(source, tmp_path, "bytes", packing=False, validation=0.0)
    assert sorted(learnt_text(split)) == [" and salt", " bird"]


def test_of_an_instruction_the_output_is_learnt(tmp_path: Path) -> None:
    """In Stanford Alpaca's prompt, with an input or without; the published `text`, which has all of
    it, is not read.
    """
    rows = [
        {"instruction": "Name it.", "input": "a bird", "output": "wren", "text": "all of it"},
        {"instruction": "Sing.", "input": "", "output": "la"},
    ]
    source = str(write_lines(tmp_path / "t.jsonl", rows))
    data = prepared(source, tmp_path, "bytes", packing=False, validation=0.0, seq_len=400)
    assert sorted(learnt_text(data)) == ["la", "wren"]
    assert documents(data) == [
        "Below is an instruction that describes a task. Write a response that appropriately"
        " completes the request.\n\n### Instruction:\nSing.\n\n### Response:\nla",
        "Below is an instruction that describes a task, paired with an input that provides further"
        " context. Write a response that appropriately completes the request.\n\n### Instruction:"
        "\nName it.\n\n### Input:\na bird\n\n### Response:\nwren",
    ]


def test_long_texts_are_cut_into_pieces_and_long_answers_off(
    tmp_path: Path, tokenizer: Path
) -> None:
    long = " ".join(WORDS * 3)
    rows = write_lines(tmp_path / "t.jsonl", [{"text": long}, {"text": ""}])
    data = prepared(str(rows), tmp_path, tokenizer, seq_len=10, validation=0.0)
    assert data.reference["documents_cut"] == 1
    assert data.reference["tokens_left_out"] == 0
    assert data.reference["documents_dropped"] == 1
    assert sorted(" ".join(documents(data)).split()) == sorted(f"<s> {long} </s>".split())
    rows = write_lines(
        tmp_path / "c.jsonl",
        [{"prompt": "a", "completion": long}, {"prompt": long, "completion": "salt"}],
    )
    data = prepared(str(rows), tmp_path, tokenizer, seq_len=10, validation=0.0)
    assert documents(data) == [f"<s> a {' '.join(WORDS[:8])}"]
    assert data.reference["documents_cut"] == 2
    assert data.reference["tokens_left_out"] > 0
    assert data.reference["documents_dropped"] == 1


def answers(count: int, *, long: set[int]) -> list[dict[str, str]]:
    """Completions, each unlike all others; some do not fit into 30 bytes."""
    return [
        {"prompt": f"{i:02d} ", "completion": "x" * (40 if i in long else 8)} for i in range(count)
    ]


@pytest.mark.parametrize("packing", [False, True])
def test_rows_that_are_too_long_are_left_out_cut_or_refused(
    tmp_path: Path, *, packing: bool
) -> None:
    """As the setting says; the plan tells how many, and an epoch's rows are those that are left."""
    source = str(write_lines(tmp_path / "c.jsonl", answers(8, long={2, 5})))
    write_lines(tmp_path / "t.jsonl", [{"text": "whole " * 10}])

    def made(too_long: str, **data: Any) -> PreparedData:
        options = {"seq_len": 30, "validation": 0.0, "packing": packing} | data
        return prepared(source, tmp_path, too_long=too_long, **options)

    cut, dropped = made("cut"), made("drop")
    assert len(documents(cut)) == 8
    assert max(map(len, documents(cut))) == 30
    assert sorted(documents(dropped)) == [
        "".join(row.values()) for row in answers(8, long=set()) if row["prompt"][:2] not in "02 05"
    ]
    assert "2 rows longer than 30 left out (data.too_long: drop)" in dropped.lines
    assert not any("cut" in line for line in dropped.lines)
    assert dropped.reference["documents_dropped"] == 2
    assert dropped.fingerprint != cut.fingerprint  # a run that goes on keeps its rows
    assert made("drop").fingerprint == dropped.fingerprint
    with pytest.raises(UserError) as refused:
        made("refuse")
    assert (
        f"{source}: rows longer than data.seq_len 30: 2 of 8; the longest has 43 tokens"
        in refused.value.cause
    )
    assert "--seq-len 43" in refused.value.remedy
    # where nothing is too long, the setting changes nothing
    assert {made(how, seq_len=43).fingerprint for how in ("cut", "drop", "refuse")} == {
        made("cut", seq_len=43).fingerprint
    }
    with pytest.raises(UserError, match=r"8 are longer than data\.seq_len 5") as nothing:
        made("drop", seq_len=5)
    assert "data.too_long=cut" in nothing.value.remedy
    # of the first two documents none is too long; a long text becomes several documents
    assert made("refuse", max_documents=2).reference["documents_dropped"] == 0
    source = str(tmp_path / "t.jsonl")
    assert "".join(documents(made("drop"))) == "whole " * 10


def test_held_out_and_tested_rows_that_are_too_long_are_left_out_too(tmp_path: Path) -> None:
    for split, long in {"train": {1}, "validation": {0, 3}, "test": {2, 4, 5}}.items():
        write_lines(tmp_path / f"{split}.jsonl", answers(6, long=long))
    data = prepared(str(tmp_path), tmp_path, too_long="drop", seq_len=30, packing=False)
    assert data.held_out is not None
    assert data.test is not None
    assert [len(rows) for rows in (data.train, data.held_out, data.test)] == [5, 4, 3]
    assert "1 row longer than 30 left out (data.too_long: drop)" in data.lines


@pytest.mark.parametrize(
    ("learns", "rows"),
    [
        ("label", [{"text": "a" * n, "label": str(n % 2)} for n in (5, 6, 40, 7)]),
        (
            "label",
            [{"text": "a" * 9, "text_pair": "b" * n, "label": str(n % 2)} for n in (5, 40, 6)],
        ),
        ("pair", [{"anchor": "a" * 9, "positive": "b" * n} for n in (5, 20, 6, 40)]),
        ("pair", [{"anchor": "a" * n, "positive": "b" * 9} for n in (5, 20, 6, 40)]),
        ("pair", [{"anchor": "a", "positive": "b" * 9, "negative": "c" * n} for n in (5, 40, 6)]),
    ],
)
def test_labelled_rows_and_texts_that_belong_together_are_measured_as_they_are_cut(
    learns: Any, rows: list[dict[str, str]], tmp_path: Path
) -> None:
    """Each text of a pair by itself, two texts of one row together."""
    source = str(write_lines(tmp_path / "t.jsonl", rows))

    def made(seq_len: int, too_long: Any) -> PreparedData:
        data = HFData(
            source=source, tokenizer="bytes", seq_len=seq_len, too_long=too_long, validation=0.0,
            packing=False,
        )  # fmt: skip
        return prepare_data(data, tmp_path / "cache", learns=learns)

    def lengths(data: PreparedData) -> list[int]:
        return sorted(
            int((np.asarray(row) > 0).sum())
            for row in data.train[np.arange(len(data.train))]["documents"]
        )

    whole = lengths(made(200, "cut"))
    assert len(lengths(made(25, "cut"))) == len(rows)
    assert lengths(made(25, "drop")) == whole[:-1]
    with pytest.raises(UserError, match=f"rows longer than data.seq_len 25: 1 of {len(rows)};"):
        made(25, "refuse")


def test_every_form_gives_the_same_rows(tmp_path: Path, tokenizer: Path) -> None:
    """JSONL, parquet and saved datasets of the same documents, by any chunk of a file."""
    datasets = pytest.importorskip("datasets")
    rows = [*texts(50), {"text": ""}]
    lines = write_lines(tmp_path / "t.jsonl", rows)
    saved = datasets.Dataset.from_list(rows)
    saved.to_parquet(str(tmp_path / "t.parquet"))
    saved.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": saved}).save_to_disk(str(tmp_path / "parts"))
    sources = [lines, tmp_path / "t.parquet", tmp_path / "saved", tmp_path / "parts"]
    keys = {prepared(str(source), tmp_path, tokenizer).fingerprint for source in sources}
    assert len(keys) == 1
    talks = [{"messages": TALK}, {"messages": TALK[:2]}]
    datasets.Dataset.from_list(talks).save_to_disk(str(tmp_path / "chat"))
    chat = write_lines(tmp_path / "chat.jsonl", talks)
    assert (
        prepared(str(tmp_path / "chat"), tmp_path, tokenizer).fingerprint
        == prepared(str(chat), tmp_path, tokenizer).fingerprint
    )


def test_chunks_and_processes_change_no_token(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files read in pieces of a few lines, by several processes: one text is still one document."""
    lines = str(write_lines(tmp_path / "t.jsonl", texts(80)))
    text = tmp_path / "a.txt"
    text.write_text("\n".join(" ".join(WORDS) for _ in range(60)))
    whole = [prepared(source, tmp_path / "1", tokenizer) for source in (lines, str(text))]
    for name, value in SMALL_PIECES.items():
        monkeypatch.setattr(f"samecurve_products.text.huggingface.data.{name}", value)
    parts = [prepared(source, tmp_path / "2", tokenizer) for source in (lines, str(text))]
    assert [data.fingerprint for data in parts] == [data.fingerprint for data in whole]


_KILLED = """
import sys, os, signal
from pathlib import Path
from samecurve_products.text.huggingface.data import parts, records
from samecurve_products.text.huggingface.data.prepared_data import prepare_data
from samecurve_products.text.huggingface.sections import HFData
records._CHUNK, parts._PART = 500, 1200
write, count = parts._Part.write, []
def killed(self, *arguments):
    write(self, *arguments)
    count.append(1)
    if len(count) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
parts._Part.write = killed
prepare_data(HFData(source=sys.argv[1], tokenizer=sys.argv[2]), Path(sys.argv[3]))
"""


def test_killed_while_it_tokenizes_nothing_half_made_is_used(
    tmp_path: Path, tokenizer: Path
) -> None:
    source = write_lines(tmp_path / "t.jsonl", texts(80))
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", _KILLED, str(source), str(tokenizer), str(cache)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    left = [path for path in (cache / "huggingface" / "tokens").iterdir() if path.is_dir()]
    assert len(left) == 1
    assert (left[0] / "parts" / "2.json").exists()
    data = prepared(str(source), tmp_path, tokenizer)
    assert not left[0].exists()
    assert data.fingerprint == prepared(str(source), tmp_path / "other", tokenizer).fingerprint


def test_the_cache_follows_from_what_files_hold(tmp_path: Path, tokenizer: Path) -> None:
    """A copy elsewhere is not tokenized again; a changed word is."""
    rows = texts(20)
    source = write_lines(tmp_path / "t.jsonl", rows)
    first = prepared(str(source), tmp_path, tokenizer)
    stamp = stamp_data(HFData(source=str(source), tokenizer=str(tokenizer)))
    tokens = tmp_path / "cache" / "huggingface" / "tokens"
    (tmp_path / "elsewhere").mkdir()
    copy = write_lines(tmp_path / "elsewhere" / "copy.jsonl", rows)
    assert prepared(str(copy), tmp_path, tokenizer).fingerprint == first.fingerprint
    assert len([path for path in tokens.iterdir() if path.is_dir()]) == 1
    write_lines(source, [*rows[:-1], {"text": "salt"}])
    os.utime(source, (time.time() + 5,) * 2)
    assert prepared(str(source), tmp_path, tokenizer).fingerprint != first.fingerprint
    assert stamp_data(HFData(source=str(source), tokenizer=str(tokenizer))) != stamp


def test_bpe_is_trained_on_the_sources(tmp_path: Path) -> None:
    """Once, with a token that ends a document; what it makes of a text reads back."""
    source = str(write_lines(tmp_path / "t.jsonl", texts(30)))
    data = prepared(source, tmp_path, "bpe:300", seq_len=256, validation=0.0)
    assert 256 < data.vocab_size <= 300
    assert sorted(documents(data)) == sorted(f"{row['text']}<|endoftext|>" for row in texts(30))
    bytes_ = prepared(source, tmp_path, "bytes", seq_len=256, validation=0.0)
    assert sorted(documents(bytes_)) == sorted(row["text"] for row in texts(30))


def test_a_list_of_sources_is_explained_where_it_is_wrong(tmp_path: Path) -> None:
    """By what each item is, not by all that it could be."""
    config = tmp_path / "c.yaml"
    config.write_text(
        "task: huggingface\nmodel: {architecture: llama}\nbatch: {samples: 2}\ndata:\n  source:\n"
        "    - {source: a.txt, wieght: 2}\n    - 3\n    - {source: b.txt, weight: 0}\n"
    )
    with pytest.raises(InvalidConfigError) as refused:
        load_document(read_document(config), Tasks())
    errors = [(error.where.rpartition("/")[2], error.cause) for error in refused.value.errors]
    assert errors == [
        ("c.yaml:6:23", "data.source.0.wieght: unknown key"),
        ("c.yaml:7:7", "data.source.1: should be a valid string (is 3)"),
        ("c.yaml:8:23", "data.source.2.weight: should be greater than 0 (is 0)"),
    ]
    assert refused.value.errors[0].remedy == "did you mean weight?"


@pytest.mark.parametrize("name", ["own", "bytes"])
def test_a_tokenizer_that_a_run_has_kept_reads_other_data(
    name: str, tmp_path: Path, tokenizer: Path
) -> None:
    """As `eval -d` does: the same tokens, chat template and end of text, all of the source."""
    source = str(write_lines(tmp_path / "t.jsonl", [{"messages": TALK}, {"messages": TALK[:2]}]))
    (tmp_path / "t.jinja").write_text(CHATML)
    data = HFData(
        source=source,
        tokenizer=str(tokenizer) if name == "own" else name,
        chat_template=str(tmp_path / "t.jinja"),
        seq_len=256,
        validation=0.5,
    )
    first = prepare_data(data, tmp_path / "one")
    assert first.tokenizer
    kept = shutil.copytree(first.tokenizer.home, tmp_path / "kept")
    values = {key.partition(".")[2]: value for key, value in other_data(source, kept).items()}
    again = prepare_data(data.model_copy(update=values), tmp_path / "two")
    whole = prepare_data(data.model_copy(update={"validation": 0.0}), tmp_path / "one")
    assert again.held_out is None
    assert again.fingerprint == whole.fingerprint != first.fingerprint


@pytest.mark.parametrize(
    ("content", "cause", "where"),
    [
        ('{"text": "a"}\n{"text": "b\n', "not one JSON object in a line", "t.jsonl:2"),
        ('{"text": "a"}\n\n{"word": "b"}\n', "`text` is missing; it has word", "t.jsonl:3"),
        ('{"text": null}\n', "`text` is empty", "t.jsonl:1"),
        ('{"text": 3}\n', "`text` is int (3), not text", "t.jsonl:1"),
        ('{"words": "a"}\n', "no column says what a document is; there are words", "t.jsonl:1"),
        ('{"messages": "hello"}\n', "`messages` is text, not a list of messages", "t.jsonl:1"),
        ("", "holds no text", "data.source"),
    ],
)
def test_rows_that_are_none(content: str, cause: str, where: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(content)
    with pytest.raises(UserError) as refused:
        prepared(str(tmp_path / "t.jsonl"), tmp_path)
    assert cause in refused.value.cause
    assert refused.value.where.endswith(where)


def test_halves_of_characters_are_replaced(tmp_path: Path) -> None:
    """JSON can write one half of a pair, which no encoding has."""
    (tmp_path / "t.jsonl").write_text('{"text": "a\\ud83d b \\ud83d\\ude00"}\n')
    data = prepared(str(tmp_path / "t.jsonl"), tmp_path)
    assert documents(data) == ["a\ufffd b \U0001f600"]


def test_what_a_process_finds_is_told_as_if_there_were_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [*texts(80), {"word": "salt"}]
    for name, value in SMALL_PIECES.items():
        monkeypatch.setattr(f"samecurve_products.text.huggingface.data.{name}", value)
    with pytest.raises(UserError) as refused:
        prepared(str(write_lines(tmp_path / "t.jsonl", rows)), tmp_path)
    assert refused.value.where.endswith("t.jsonl:81")
    monkeypatch.setattr(sys, "executable", "/bin/false")  # as one that the kernel has ended
    with pytest.raises(RunError, match="ended with exit code 1"):
        prepared(str(write_lines(tmp_path / "t.jsonl", rows[:-1])), tmp_path)
    assert not [path for path in (tmp_path / "cache/huggingface/tokens").iterdir() if path.is_dir()]


def test_an_empty_parquet_column(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    column = pyarrow.array([None, None], pyarrow.string())
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "t.parquet")
    with pytest.raises(UserError, match="the column `text` is empty: 2 rows"):
        prepared(str(tmp_path / "t.parquet"), tmp_path)
    parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "t.parquet")
    with pytest.raises(UserError, match="`text` is empty") as refused:
        prepared(str(tmp_path / "t.parquet"), tmp_path)
    assert refused.value.where.endswith("t.parquet: row 1")


def test_bytes_that_are_no_text_are_refused_of_an_older_cache_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = tmp_path / "a.txt", tmp_path / "b.txt"
    bad.write_bytes(b"rain\0" * 40)
    good.write_bytes(b"rain " * 40)
    with monkeypatch.context() as older:
        older.setattr(lines, "check_is_text", lambda *_: None)
        prepared(str(bad), tmp_path)
        known = prepared(str(good), tmp_path).fingerprint
    unmark_checked(tmp_path / "cache")
    for _ in range(2):
        with pytest.raises(UserError, match="is no text: it has zero bytes"):
            prepared(str(bad), tmp_path)
    assert prepared(str(good), tmp_path).fingerprint == known
    monkeypatch.setattr(lines, "check_is_text", lambda *_: pytest.fail("checked again"))
    assert prepared(str(good), tmp_path).fingerprint == known


def test_what_can_be_no_source_or_tokenizer(tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(UserError, match="no such file, directory or match"):
        prepared(str(tmp_path / "none*.txt"), tmp_path)
    (tmp_path / "x.jsonl.gz").write_bytes(b"")
    with pytest.raises(UserError, match="is compressed"):
        prepared(str(tmp_path / "x.jsonl.gz"), tmp_path)
    (tmp_path / "x.txt").write_bytes(b"a\0b")
    with pytest.raises(UserError, match="is no text: it has zero bytes"):
        prepared(str(tmp_path / "x.txt"), tmp_path)
    (tmp_path / "x.txt").write_bytes(b"ab\ncaf\xe9\n")
    with pytest.raises(UserError, match="byte 0xe9 of line 2 is no UTF-8"):
        prepared(str(tmp_path / "x.txt"), tmp_path)
    source = str(write_lines(tmp_path / "t.jsonl", [{"text": "Zugzwang"}]))
    with pytest.raises(UserError, match="there is no tokenizer in"):
        prepared(source, tmp_path, tmp_path)
    with pytest.raises(UserError, match="no tokenizer: the model is made from its fields"):
        prepare_data(HFData(source=source), tmp_path)
    own = prepare_data(HFData(source=source), tmp_path, model=tokenizer)
    assert own.vocab_size > own.largest_id


def test_a_token_file_that_was_cut_off_is_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(write_lines(tmp_path / "t.jsonl", texts(3)))
    prepared(source, tmp_path)
    [file] = (tmp_path / "cache" / "huggingface" / "tokens").glob("*/tokens.bin")
    content = file.read_bytes()
    file.write_bytes(content[:-2])
    prepared(source, tmp_path)
    assert file.read_bytes() == content
    assert f"{file} has changed since it was made: it is made again" in capsys.readouterr().err


def test_instructions_are_turns_as_llama_factory_reads_them(
    tmp_path: Path, tokenizer: Path
) -> None:
    """`system` and `history` count; Alpaca's prompt, which has no place for them, refuses them."""
    row = {"instruction": "the sea", "input": "a bird", "output": "sang"}
    more = {"system": "salt", "history": [["rain", "fell"]], **row}
    path = str(write_lines(tmp_path / "t.jsonl", [more, {**row, "system": "", "history": []}]))
    data = prepared(path, tmp_path, tokenizer, instructions="chat", packing=False, validation=0.0)
    turns = [
        {"role": "system", "content": "salt"},
        {"role": "user", "content": "rain"},
        {"role": "assistant", "content": "fell"},
        {"role": "user", "content": "the sea\na bird"},
        {"role": "assistant", "content": "sang"},
    ]
    same = write_lines(tmp_path / "m.jsonl", [{"messages": turns}, {"messages": turns[3:]}])
    chats = prepared(str(same), tmp_path, tokenizer, packing=False, validation=0.0)
    assert documents(data) == documents(chats)
    assert data.reference["loss_tokens"] == chats.reference["loss_tokens"]
    assert data.has_chats
    with pytest.raises(UserError, match="`system` has no place") as error:
        prepared(path, tmp_path, tokenizer)
    assert "data.instructions=chat" in error.value.remedy


def test_documents_beyond_the_most_are_not_read(tmp_path: Path) -> None:
    path = str(write_lines(tmp_path / "t.jsonl", texts(30)))
    first = str(write_lines(tmp_path / "f.jsonl", texts(30)[:7]))
    some = prepared(path, tmp_path, max_documents=7, validation=0.0)
    alone = prepared(first, tmp_path, validation=0.0)
    assert some.fingerprint != prepared(path, tmp_path, validation=0.0).fingerprint
    every = np.arange(len(some.train))
    assert some.train[every]["input_ids"].tolist() == alone.train[every]["input_ids"].tolist()


def test_a_damaged_cache_trains_on_no_other_tokens(tmp_path: Path) -> None:
    """Changed bytes trained without a word, and a resume went on with them."""
    source = str(write_lines(tmp_path / "t.jsonl", texts(40)))
    first = prepared(source, tmp_path)
    every = np.arange(len(first.train))
    rows = first.train[every]["input_ids"].copy()
    cache = tmp_path / "cache" / "huggingface"
    for name in ("tokens/*/tokens.bin", "tokens/*/corpus.json", "rows/*/rows.json",
                 "rows/*/train.start.bin", "tokenizers/*/tokenizer_notes.json",
                 "digests/*.json"):  # fmt: skip
        [file] = cache.glob(name)
        file.write_bytes(b"{junk" + file.read_bytes()[5:])
        again = prepared(source, tmp_path)
        assert again.fingerprint == first.fingerprint
        assert np.array_equal(again.train[every]["input_ids"], rows)


def test_content_that_is_a_list_of_texts_is_one_text(tmp_path: Path, tokenizer: Path) -> None:
    """It was rendered as Python writes a list."""
    parts = [{"type": "text", "text": "salt "}, {"type": "text", "text": "and rain"}]
    listed = [TALK[0], {"role": "assistant", "content": parts}]
    lists = write_lines(tmp_path / "l.jsonl", [{"messages": listed}])
    plain = write_lines(tmp_path / "p.jsonl", [{"messages": TALK[:2]}])
    both = [prepared(str(path), tmp_path, tokenizer, validation=0.0) for path in (lists, plain)]
    assert both[0].fingerprint == both[1].fingerprint

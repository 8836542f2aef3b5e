"""Raw token ids as data of Hugging Face models: documents, one stream, and what is no such file."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_huggingface import COMMON

from samecurve.errors import UserError
from samecurve.tasks import open_task
from samecurve_products.text.huggingface.data.prepared_data import PreparedData, prepare_data
from samecurve_products.text.huggingface.sections import HFData
from tiny import config_of

END = 300


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 301 tokens, of which the last ends a document."""
    from tokenizers import Tokenizer, models

    home = tmp_path_factory.mktemp("tokenizer")
    words = {str(number): number for number in range(END)} | {"</s>": END}
    Tokenizer(models.WordLevel(words, unk_token="0")).save(str(home / "tokenizer.json"))
    (home / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return home


def write(path: Path, ids: Any, dtype: str = "uint16") -> str:
    np.array(ids, dtype).tofile(path)
    return str(path)


def prepared(source: str, home: Path, **data: Any) -> PreparedData:
    fields = {"token_dtype": "uint16", "seq_len": 8, "validation": 0.0, **data}
    return prepare_data(HFData(source=source, **fields), home / "cache")


def pieces(data: PreparedData) -> list[list[int]]:
    """Each document of each row."""
    rows = data.train[np.arange(len(data.train))]
    return [
        ids[documents == number].tolist()
        for ids, documents in zip(rows["input_ids"], rows["documents"], strict=True)
        for number in range(1, documents.max() + 1)
    ]


def test_an_end_token_cuts_documents_and_without_one_it_is_a_stream(
    tmp_path: Path, tokenizer: Path
) -> None:
    """Over two files, in either width; a file's end is a document's."""
    documents = [[5, 6, 7, END], [8, END], [9, 10, 11]]
    for dtype in ("uint16", "uint32"):
        home = tmp_path / dtype
        home.mkdir()
        first = list(chain(*documents))
        write(home / "0.bin", first, dtype)
        write(home / "1.bin", [20, 21, END], dtype)
        data = prepared(f"{home}/*.bin", home, tokenizer=str(tokenizer), token_dtype=dtype)
        assert sorted(pieces(data)) == sorted([*documents, [20, 21, END]])
        assert data.tokenizer
        stream = prepared(f"{home}/*.bin", home, token_dtype=dtype, seq_len=4, packing=False)
        whole = [first, [20, 21, END]]
        expected = [ids[at : at + 4] for ids in whole for at in range(0, len(ids), 4)]
        rows = stream.train[np.arange(len(stream.train))]["input_ids"]
        assert sorted(row.tolist() for row in rows) == sorted(e for e in expected if len(e) > 1)
        assert stream.tokenizer is None
        assert (stream.vocab_size, stream.largest_at) == (END + 1, f"{home}/0.bin: token 3")


def test_a_model_trains_on_ids_alone(tmp_path: Path, cache: Path) -> None:
    """Weights of labels and the batch's shape; a vocabulary that is not known, or too small."""
    source = write(tmp_path / "t.bin", np.random.default_rng(0).integers(0, 64, 999))
    values: dict[str, Any] = {
        "task": "huggingface",
        "model": {"architecture": "llama", **COMMON},
        "data": {"source": source, "token_dtype": "uint16", "seq_len": 16},
        "batch": {"samples": 4},
        "train": {"steps": 2},
        "devices": {"use": "cpu"},
    }
    task = open_task(config_of(values), cache)
    assert task.facts().data.samples == 61  # of 63, two held out
    batch = task.train_data()[np.arange(4)]
    assert batch["input_ids"].shape == (4, 16)

    no_size = {name: value for name, value in COMMON.items() if name != "vocab_size"}
    unknown = {**values, "model": {"architecture": "llama", **no_size}}
    with pytest.raises(UserError, match="holds raw tokens; their vocabulary is not known"):
        open_task(config_of(unknown), cache)
    small = {**values, "model": {"architecture": "llama", **COMMON, "vocab_size": 60}}
    with pytest.raises(UserError, match=r"t\.bin: token \d+ has the id 63; the model knows 60"):
        open_task(config_of(small), cache)


def test_what_are_no_such_ids_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    odd = tmp_path / "odd.bin"
    odd.write_bytes(b"\1" * 6)
    with pytest.raises(UserError, match=r"6 bytes, .* no whole number of uint32") as refused:
        prepared(str(odd), tmp_path, token_dtype="uint32")
    assert "token_dtype=uint16" in refused.value.remedy
    wide = write(tmp_path / "wide.bin", np.arange(100), "uint32")
    with pytest.raises(UserError, match="as if its ids were uint32"):
        prepared(wide, tmp_path)
    header = write(tmp_path / "header.bin", [20240520, *range(300)], "uint32")
    with pytest.raises(UserError, match="a header of 1024 bytes"):
        prepared(header, tmp_path)
    with pytest.raises(UserError, match="no tokens, 0 bytes"):
        prepared(write(tmp_path / "empty.bin", []), tmp_path)
    both = tmp_path / "both"
    both.mkdir()
    write(both / "a.bin", [1, 2])
    (both / "b.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(UserError, match=r"raw tokens \(\.bin\) beside others"):
        prepared(str(both), tmp_path, tokenizer=str(tokenizer))
    with pytest.raises(UserError, match="trained on text, and there are token ids alone"):
        prepared(write(tmp_path / "t.bin", [1, 2, 3]), tmp_path, tokenizer="bpe:300")

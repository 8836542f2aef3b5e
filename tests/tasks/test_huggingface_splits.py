"""Sources as hubs leave them: the split test is measured, and never trained on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_huggingface_data import write_lines

from samecurve.errors import UserError
from samecurve_products.text.huggingface.data.prepared_data import (
    PreparedData,
    other_data,
    prepare_data,
)
from samecurve_products.text.huggingface.sections import HFData

# files by their path; all rows of a file are the same word
HUB = {"data/train-00000-of-00002.jsonl": "train", "data/train-00001-of-00002.jsonl": "more",
       "data/test-00000-of-00001.jsonl": "test"}  # fmt: skip


def write(home: Path, files: Mapping[str, str], columns: Mapping[str, Any] = {}) -> Path:
    for name, word in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        row = {"text": f"{word} {word}", **columns}
        write_lines(home / name, [{**row, **({"label": i % 2} if "label" in row else {})}
                                  for i in range(20)])  # fmt: skip
    return home


def prepare(home: Path, source: str, **data: Any) -> PreparedData:
    learns = data.pop("learns", "tokens")
    values = {"packing": False, "validation": 0.1, "tokenizer": "bytes", "seq_len": 64, **data}
    section = HFData(source=source, **values)
    return prepare_data(section, home / ".cache", learns=learns)


def words(rows: Any) -> set[str]:
    """The words of all rows."""
    if rows is None:
        return set()
    ids = [rows[[number]]["input_ids"][0] for number in range(len(rows))]
    return {bytes(each.tolist()).decode().split()[0] for each in ids}


@pytest.mark.parametrize(
    ("files", "source", "used"),
    [
        (HUB, ".", ({"train", "more"}, {"train", "more"}, {"test"})),
        (HUB, "**/*.jsonl", ({"train", "more"}, {"train", "more"}, {"test"})),
        ({"train.jsonl": "a", "test.jsonl": "b"}, ".", ({"a"}, {"a"}, {"b"})),
        ({"train.jsonl": "a", "dev.jsonl": "b"}, ".", ({"a"}, {"b"}, set())),
        ({"x.jsonl": "a", "my_eval.jsonl": "b"}, ".", ({"a"}, {"b"}, set())),
        ({"train/0.jsonl": "a", "valid/0.jsonl": "b", "test/0.jsonl": "c"}, ".",
         ({"a"}, {"b"}, {"c"})),
        ({"train.json": "a", "test.json": "b"}, ".", ({"a"}, {"a"}, {"b"})),
        ({"train.jsonl": "a", "test.jsonl": "b"}, "test.jsonl", ({"b"}, {"b"}, set())),
        ({"contest.jsonl": "a", "latest.jsonl": "b"}, ".", ({"a", "b"}, {"a", "b"}, set())),
    ],
)  # fmt: skip
def test_splits_are_found_by_name(
    tmp_path: Path, files: Mapping[str, str], source: str, used: tuple[set[str], ...]
) -> None:
    home = write(tmp_path, files)
    (home / "README.md").write_text("not a document")
    data = prepare(tmp_path, str(home / source))
    assert (words(data.train), words(data.held_out), words(data.test)) == used
    named = len(files) > 1 and source != "test.jsonl" and "contest.jsonl" not in files
    assert ("data.split=all" in data.lines[0]) == named


def test_another_split_and_all(tmp_path: Path) -> None:
    home = str(write(tmp_path, HUB))
    assert words(prepare(tmp_path, home, split="test").train) == {"test"}
    everything = prepare(tmp_path, home, split="all")
    assert words(everything.train) == {"train", "more", "test"}
    assert not everything.test
    with pytest.raises(UserError, match="has no split dev; it has test, train") as error:
        prepare(tmp_path, home, split="dev")
    assert error.value.remedy == "data.split=train, or data.split=all to train on all of it"
    assert other_data(home, tmp_path)["data.split"] == "all"


def test_pages_named_test_are_text_like_the_others(tmp_path: Path) -> None:
    for name in ("train.md", "test.md", "other.md"):
        (tmp_path / name).write_text(f"{name} ")
    assert words(prepare(tmp_path, str(tmp_path), validation=0).train) == {
        "train.md", "test.md", "other.md",
    }  # fmt: skip
    (tmp_path / "other.md").unlink()
    data = prepare(tmp_path, str(tmp_path), validation=0)
    assert (words(data.train), words(data.test)) == ({"train.md"}, {"test.md"})


def test_hidden_labels_of_a_test_split_are_no_class(tmp_path: Path) -> None:
    write(tmp_path, {"train.jsonl": "a"}, {"label": 0})
    write_lines(tmp_path / "test.jsonl", [{"text": "b", "label": -1}])
    data = prepare(tmp_path, str(tmp_path), learns="label")
    assert data.classes == ("0", "1")
    assert data.test is None
    assert "its label -1 is none of the classes" in data.lines[1]
    write(tmp_path, {"test.jsonl": "b"}, {"label": 0})
    measured = prepare(tmp_path, str(tmp_path), learns="label").test
    assert measured is not None
    assert measured[np.arange(2)]["label"].tolist() == [0, 1]

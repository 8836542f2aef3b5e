"""`samecurve data show`: what a run will read, before it runs."""

import base64
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from har_sets import CLASSES, LENGTH, write_har
from numpy.typing import NDArray
from PIL import Image

from commands import refused, samecurve
from samecurve.core.config.sections import Config
from samecurve.core.determinism.sample_keys import RowKeys
from samecurve.core.planning.planner import plan as make_plan
from samecurve.core.protocols import Round
from samecurve.core.sample_numbers import rng
from samecurve.data.feed import Feed
from samecurve.tasks import open_task
from samecurve.terminal import printable
from samecurve.torch_engine.randomness.replaced_functions import keyed_trial
from samecurve_products.page.block_text import BlockText
from samecurve_products.page.data_show import data_blocks
from samecurve_products.preview.open_data import Preview, preview
from samecurve_products.preview.parts import Curves, Value
from samecurve_products.preview.text_parts import Text
from tiny import MACHINE, config_of

ROOT = Path(__file__).parents[2]
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
HOSTILE = '<script>alert("1")</script>\x1b[31m\x07 & \u202e </p>'
LLAMA = {
    "architecture": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 300,
}
PICTURES = f"""
import numpy as np
from torch import nn
from samecurve import Mean

print("a line of a user's file")

class Pictures:
    def __len__(self):
        return 20

    def __getitem__(self, ids):
        rows = [np.random.default_rng(i) for i in ids]
        return {{
            "picture": np.stack([row.random((3, 16, 300), np.float32) for row in rows]),
            "grey": np.stack([row.integers(0, 256, (16, 12), np.uint8) for row in rows]),
            "odd": np.array([[1.0, np.nan, np.inf]] * len(ids), np.float32),
            "label": np.asarray(ids) % 2,
        }}

class Task:
    def model(self):
        return nn.Linear(2, 2)

    def loss(self, model, batch):
        return Mean(model(batch["picture"]).sum(), len(batch["label"]))

    def train_data(self):
        return Pictures()

    def facts(self):
        reference = {{"class_weight/cat": 1.0, "class_weight/dog": 1.0}}
        return {{"notes": ({HOSTILE!r},), "reference": reference}}
"""


def chats(home: Path, rows: Sequence[Mapping[str, Any]], **data: Any) -> Config:
    (home / "plain.jinja").write_text(PLAIN)
    source = home / "chats.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = {
        "source": str(source),
        "tokenizer": "bytes",
        "chat_template": str(home / "plain.jinja"),
        "seq_len": 64,
        "validation": 0.0,
        **data,
    }
    return config_of(
        {
            "task": "huggingface",
            "model": {**LLAMA, "objective": "causal"},
            "data": section,
            "batch": {"samples": 4},
            "optimizer": {"lr": 1e-3},
            "train": {"steps": 2, "seed": 3},
            "devices": {"use": "cpu"},
        }
    )


def turns(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": t} for n, t in enumerate(texts)]}


def windows(home: Path, **data: Any) -> Config:
    return config_of(
        {
            "task": "timeseries",
            "model": {"name": "mlp", "width": 8, "depth": 1},
            "data": {"source": str(write_har(home / "har")), **data},
            "batch": {"samples": 5},
            "optimizer": {"lr": 1e-3},
            "train": {"steps": 2, "seed": 11},
            "devices": {"use": "cpu"},
        }
    )


def shown(config: Config, cache: Path, count: int = 4, split: Any = "train") -> Preview:
    batch = config.batch.samples
    return preview(config, cache, split=split, count=count, global_batch_size=batch)


def first_batch(config: Config, cache: Path) -> tuple[list[int], dict[str, NDArray[Any]]]:
    """Ids and rows of step 1, as the feed of a run gives them."""
    task = open_task(config, cache)
    plan = make_plan(config, MACHINE, task.facts())
    rounds: list[Round] = []

    def stage(staged: Sequence[Round], _of: int) -> None:
        rounds.extend(staged)

    feed = Feed(plan, [0], task.train_data(), None, stage, prefetch=0)
    next(iter(feed))
    microbatches = [each for one_round in rounds for each in one_round if each is not None]
    ids = [int(number) for each in microbatches for number in each.keys.ids]
    names = microbatches[0].arrays
    return ids, {
        name: np.concatenate([each.arrays[name] for each in microbatches]) for name in names
    }


def blocks_of(blocks: Sequence[Mapping[str, Any]], kind: str) -> list[Any]:
    return [block for block in blocks if block["type"] == kind]


def loss_text(block: Mapping[str, Any]) -> list[str]:
    return [p["text"] for line in block["lines"] for p in line if p.get("tone") == "loss"]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SAMECURVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_samples_are_those_of_step_1(tmp_path: Path, own_cache: Path) -> None:
    """Of windows, as the loss augments them; the labels and the curves' numbers are the run's."""
    config = windows(tmp_path, augment={"jitter": 0.5, "scale": 0.2})
    ids, rows = first_batch(config, own_cache)
    seen = shown(config, own_cache, count=7)
    assert [sample.id for sample in seen.samples][:5] == ids
    assert [sample.step for sample in seen.samples] == [1] * 5 + [2] * 2
    task = open_task(config, own_cache)
    with keyed_trial(RowKeys(11, 0, 0, np.array(ids))):
        batch = {name: torch.from_numpy(array) for name, array in rows.items()}
        augmented = task.task._augmented(batch).numpy()
    assert not np.allclose(augmented, rows["x"])  # it does change them
    for place, sample in enumerate(seen.samples[:5]):
        (curves,) = sample.of(Curves)
        np.testing.assert_array_equal(np.stack(curves.values), augmented[place])
        labels = {part.name: part.text for part in sample.of(Value)}
        assert labels["label"] == CLASSES[rows["label"][place]]


def test_held_out_windows_are_in_their_order_and_not_augmented(
    tmp_path: Path, own_cache: Path
) -> None:
    config = windows(tmp_path, augment={"jitter": 0.5}, validation=0.4)
    rows = open_task(config, own_cache).test_data()
    assert rows is not None
    seen = shown(config, own_cache, count=2, split="test")
    assert [sample.id for sample in seen.samples] == [0, 1]
    (curves,) = seen.samples[1].of(Curves)
    np.testing.assert_array_equal(np.stack(curves.values), rows[np.arange(2)]["x"][1])


def test_windows_and_classes(tmp_path: Path, own_cache: Path) -> None:
    del own_cache
    blocks = data_blocks(windows(tmp_path), samples=2)
    chart = blocks_of(blocks, "chart")[0]
    assert len(chart["lines"]) == 9
    assert chart["lines"][0]["label"] == "body_acc_x"
    assert chart["lines"][0]["x"] == list(range(LENGTH))
    (classes,) = (block for block in blocks_of(blocks, "bars") if block["name"] == "classes")
    counted = {row["label"]: row["parts"][0]["value"] for row in classes["rows"]}
    assert set(counted) == set(CLASSES)
    assert sum(counted.values()) == 36  # of four people; the fifth is held out
    lines = " ".join(block["text"] for block in blocks_of(blocks, "text"))
    assert "9 windows of 1 subject held out" in lines


def test_what_the_assistant_says_is_trained_on(tmp_path: Path, own_cache: Path) -> None:
    """Exactly its words, in pieces as they stand in the text; the pieces make up the whole text."""
    del own_cache
    talk = turns("what is the sea?", "salt \N{SNOWMAN} water", "and rain?", "water")
    config = chats(tmp_path, [talk] * 8, packing=False, seq_len=128)
    (spans, *_) = blocks_of(data_blocks(config), "spans")
    assert loss_text(spans) == ["salt \N{SNOWMAN} water", "water"]
    text = "\n".join("".join(piece["text"] for piece in line) for line in spans["lines"])
    assert text == (
        "user: what is the sea?\nassistant: salt \N{SNOWMAN} water\nuser: and rain?\n"
        "assistant: water\n"
    )
    quiet = [p for line in spans["lines"] for p in line if p.get("tone") != "loss"]
    assert {piece["tone"] for piece in quiet} == {"quiet"}


def test_packed_rows_are_those_of_step_1(tmp_path: Path, own_cache: Path) -> None:
    config = chats(tmp_path, [turns(f"the sea {n}?", f"salt {n}") for n in range(30)])
    ids, rows = first_batch(config, own_cache)
    seen = shown(config, own_cache)
    assert [sample.id for sample in seen.samples] == ids
    for place, sample in enumerate(seen.samples):
        (text,) = sample.of(Text)
        assert text.tokens == int((rows["documents"][place] > 0).sum())
        assert text.trained == int((rows["labels"][place] >= 0).sum())
        assert text.padding == 64 - text.tokens
        spelt = "".join(piece.text for piece in text.pieces)
        assert spelt.encode() == bytes(rows["input_ids"][place][: text.tokens].tolist())


def test_a_row_that_is_left_out_is_named_with_its_reason(tmp_path: Path, own_cache: Path) -> None:
    del own_cache
    rows = [turns("one", "answer") for _ in range(9)]
    rows[2] = turns("nobody answers")
    rows[4] = {"messages": []}
    rows[6] = turns("x" * 90, "too late to be read")
    rows[7] = turns("short", "y" * 90)
    table = blocks_of(data_blocks(chats(tmp_path, rows)), "table")[0]
    assert table["head"] == ["rows", "why", "where"]
    by_place = {where.rpartition(":")[2]: (count, why) for count, why, where in table["rows"]}
    assert by_place.keys() == {"3", "5", "7", "8"}
    assert by_place["3"] == ("1", "no token to be learnt: the assistant says nothing that counts")
    assert by_place["5"] == ("1", "empty: nothing to read")
    assert by_place["7"][1] == "what is to be learnt stands behind its first 64 tokens"
    assert by_place["8"][1] == "longer than 64 tokens: its end is left out"


def test_files_that_are_passed_over_are_named(tmp_path: Path, own_cache: Path) -> None:
    del own_cache
    home = tmp_path / "set"
    home.mkdir()
    config = chats(home, [turns("one", "answer")] * 9)
    (home / "README.md").write_text("a page")
    config = config.with_values(data={"source": str(home)})
    lines = [block["text"] for block in blocks_of(data_blocks(config), "text")]
    (line,) = (line for line in lines if "not read" in line)
    assert "2 files not read: README.md, plain.jinja" in line


def test_hidden_tokens_of_a_masked_model_are_those_that_it_learns(
    tmp_path: Path, own_cache: Path
) -> None:
    """The text is as the model sees it, with the mask; what is marked is what the loss counts."""
    (tmp_path / "t.txt").write_text("a bird sang of the sea and of salt while rain fell\n" * 60)
    config = config_of(
        {
            "task": "huggingface",
            "model": {
                **{k: v for k, v in LLAMA.items() if k != "vocab_size"},
                "architecture": "bert",
                "objective": "masked",
            },
            "data": {
                "source": str(tmp_path / "t.txt"),
                "tokenizer": "bpe:270",
                "seq_len": 24,
                "validation": 0.0,
            },
            "batch": {"samples": 4},
            "optimizer": {"lr": 1e-3},
            "train": {"steps": 2, "seed": 5},
            "devices": {"use": "cpu"},
        }
    )
    seen = shown(config, own_cache)
    task: Any = open_task(config, own_cache)
    ids = np.array([sample.id for sample in seen.samples])
    batch = {name: torch.from_numpy(a) for name, a in task.train_data()[ids].items()}
    with keyed_trial(RowKeys(5, 0, 0, ids)):
        real = batch["documents"] > 0
        tokens, labels = task.task._masking().hide(batch["input_ids"], real, rng(batch))
    masks = 0
    for place, sample in enumerate(seen.samples):
        (text,) = sample.of(Text)
        assert text.trained == int((labels[place] >= 0).sum()) > 0
        kept = tokens[place][real[place]].tolist()
        spelt = task.task.tokenizer.decode(kept)
        assert "".join(piece.text for piece in text.pieces) == spelt
        masks += spelt.count("<|mask|>")
    assert masks


def test_texts_that_belong_together_are_shown_one_by_one(tmp_path: Path, own_cache: Path) -> None:
    """The model is given each of them by itself, which is no array of its own."""
    del own_cache
    rows = [{"anchor": f"the sea {n}", "positive": f"salt water {n}"} for n in range(20)]
    config = chats(tmp_path, [])
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config.with_values(
        model={"architecture": "bert", "objective": "embed", "vocab_size": 300},
        data={"source": str(tmp_path / "pairs.jsonl"), "chat_template": None},
    )
    blocks = data_blocks(config, samples=1)
    texts = [
        "".join(piece["text"] for line in block["lines"] for piece in line)
        for block in blocks_of(blocks, "spans")
    ]
    number = texts[0].rpartition(" ")[2]
    assert texts == [f"the sea {number}", f"salt water {number}"]
    (arrays,) = blocks_of(blocks, "table")
    assert [row[0] for row in arrays["rows"]] == ["input_ids", "documents"]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    (tmp_path / "pictures.py").write_text(PICTURES)
    config = tmp_path / "pictures.yaml"
    config.write_text(
        f"task: {tmp_path}/pictures.py:Task\nbatch: {{samples: 4}}\noptimizer: {{lr: 1.0e-3}}\n"
        "train: {steps: 2}\ndevices: {use: cpu}\n"
    )
    return config


def test_a_users_pictures_and_hostile_text(pictures: Path, own_cache: Path) -> None:
    """Valid JSON alone on stdout, although the user's file prints; no NaN; PNGs that open; text
    that stays text, in JSON and on a terminal.
    """
    del own_cache
    done = samecurve(
        *("data", "show", "-f", pictures, "--json", "--samples", "6"), cwd=pictures.parent
    )
    assert "a line of a user's file" in done.stderr

    def no_constant(name: str) -> None:
        raise AssertionError(name)

    blocks = json.loads(done.stdout, parse_constant=no_constant)["blocks"]
    (block,) = blocks_of(blocks, "pictures")
    assert len(block["items"]) == 8  # of twelve
    sizes = set()
    for item in block["items"]:
        head, _, content = item["src"].partition(",")
        assert head == "data:image/png;base64"
        image = Image.open(io.BytesIO(base64.b64decode(content)))
        image.load()
        sizes.add((image.mode, image.size))
    assert sizes == {("RGB", (256, 14)), ("L", (12, 16))}
    assert re.search(r"sample \d+, picture, .*label (cat|dog)", block["items"][0]["caption"])
    assert "float32 3 x 16 x 300" in block["items"][0]["caption"]
    assert printable(HOSTILE) in [text["text"] for text in blocks_of(blocks, "text")]
    assert any("odd has 40" in text["text"] for text in blocks_of(blocks, "text"))
    for coloured in (False, True):
        text = BlockText(coloured=coloured, width=80).show(blocks)
        assert "\\x1b[31m\\x07" in text
        assert "\\u202e" in text
        assert "\x07" not in text
        assert "\x1b[31m\\x07" not in text


def test_at_most_2048_samples_are_read(tmp_path: Path, own_cache: Path) -> None:
    """Of a corpus of 50,000 samples; lengths of some, and it says so."""
    (tmp_path / "t.txt").write_bytes(b"salt and rain, " * 27_000)
    config = config_of(
        {
            "model": {"hidden_size": 8, "num_layers": 1, "num_heads": 1, "max_seq_len": 8},
            "data": {"source": str(tmp_path / "t.txt"), "validation": 0.0},
            "batch": {"samples": 4},
            "optimizer": {"lr": 1e-3},
            "train": {"steps": 2},
            "devices": {"use": "cpu"},
        }
    )
    seen = shown(config, own_cache)
    assert seen.counts["train"] > 50_000
    assert seen.statistics.read == 2048
    assert not seen.statistics.all_lengths
    (text,) = seen.samples[0].of(Text)
    assert (text.tokens, text.trained, text.follows) == (8, 8, True)
    assert text.pieces[0].trained is False  # nothing stands before the first token


def test_a_loss_that_looks_into_its_model_leaves_rows_as_they_are_read(
    pictures: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The words say which it is."""
    text = pictures.parent / "pictures.py"
    text.write_text(
        PICTURES.replace("return Mean(", "next(model.parameters())\n        return Mean(")
    )
    config = config_of(dict(yaml.safe_load(pictures.read_text())))
    assert not shown(config, own_cache).are_model_inputs
    monkeypatch.setenv("SAMECURVE_CACHE", str(own_cache))
    words = " ".join(block["text"] for block in blocks_of(data_blocks(config), "text"))
    assert "as they are read" in words


@pytest.mark.long
def test_the_old_form_still_works(tmp_path: Path) -> None:
    done = samecurve("data", "har", "--synthetic", "set", cwd=tmp_path)
    assert (tmp_path / "set/activity_labels.txt").is_file()
    assert "samecurve train -f models/har.yaml -d set" in done.stdout


def test_errors_name_their_place(
    tmp_path: Path,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As for every verb; with --json they are JSON too."""
    del own_cache
    (tmp_path / "no.yaml").write_text("data: {source: nowhere.txt}\nbatch: {samples: 2}\n")
    said = refused(monkeypatch, capsys, "data", "show", "-f", "no.yaml", cwd=tmp_path)
    assert "error: data.source: " in said or "error: data source nowhere.txt" in said
    assert "remedy: " in said
    done = samecurve("data", "show", "-f", "no.yaml", "--json", cwd=tmp_path, code=2)
    (error,) = json.loads(done.stdout)["errors"]
    assert error["where"] == "data.source"
    (tmp_path / "t.txt").write_text("salt and rain " * 900)
    words = ("data", "show", "-f", "no.yaml", "-d", "t.txt", "--split", "test")
    said = refused(monkeypatch, capsys, *words, cwd=tmp_path)
    assert "--split: the task has no data for test" in said

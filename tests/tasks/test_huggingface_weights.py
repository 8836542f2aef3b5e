"""A library's directory in, the library's own curve, and a library's directory out."""

from pathlib import Path
from typing import Any

import hf_runs
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hf_runs import STEPS, plain_adamw, plain_step, squares, train_sharded, write_lines
from test_huggingface import COMMON, config
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import samecurve as program
from commands import losses as losses_of
from samecurve.core.determinism.data_order import Order
from samecurve.errors import UserError
from samecurve.run.export_weights import export
from samecurve.run.sample_run import Prompt, sample
from samecurve.run.weights.initial_weights import read_initial_weights
from samecurve.tasks import entry_of, open_task
from samecurve_products.text.huggingface.float64 import Float64
from tiny import config_of
from worlds import Pool

BATCH = 6


def library_model(name: str, **fields: Any) -> Any:
    torch.manual_seed(1)
    factory: Any = AutoModelForCausalLM
    return factory.from_config(AutoConfig.for_model(name, **{**COMMON, **fields}))


def values(base: Path, documents: Path) -> dict[str, Any]:
    data = {"source": str(documents), "tokenizer": "bytes", "seq_len": 48}
    return hf_runs.values({"path": str(base)}, data, BATCH)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pool: Pool, cache: Path) -> Path:
    """A run under fsdp of a directory that the library wrote, on packed documents."""
    home = tmp_path_factory.mktemp("library")
    model = library_model("llama", vocab_size=256, tie_word_embeddings=True)
    model.double().save_pretrained(home / "base")
    rows = [{"text": text} for text in squares(200)]
    documents = write_lines(home / "documents.jsonl", rows)
    return train_sharded(home, values(home / "base", documents), pool, cache)


def plain_loop(home: Path, cache: Path) -> list[float]:
    """The library's model over each document by itself, in one process."""
    task = open_task(config_of(values(home / "base", home / "documents.jsonl")), cache)
    rows = task.train_data()
    model = AutoModelForCausalLM.from_pretrained(home / "base", dtype=torch.float64).train()
    optimizer = plain_adamw(model)
    losses: list[float] = []
    for ids in Order(len(rows), BATCH, 0).ids(range(STEPS)):
        total: Any = torch.zeros((), dtype=torch.float64)
        count = 0
        columns = rows[ids]
        for tokens, documents in zip(columns["input_ids"], columns["documents"], strict=True):
            for number in range(1, documents.max() + 1):
                text = torch.from_numpy(tokens[documents == number])[None]
                with Float64():  # norms and angles too: else a bit of theirs is 1e-8 of the loss
                    logits = model(input_ids=text).logits[0, :-1]
                total = total + F.cross_entropy(logits, text[0, 1:], reduction="sum")
                count += text.shape[1] - 1
        losses.append(plain_step(model, optimizer, total / count))
    return losses


def test_losses_are_those_of_a_plain_loop_over_the_library_s_model(
    trained: Path, cache: Path
) -> None:
    """Tied weights, sharded, accumulated and packed, against one document after another."""
    np.testing.assert_allclose(losses_of(trained / "run"), plain_loop(trained, cache), rtol=1e-10)


def test_what_is_exported_is_loaded_by_the_library(trained: Path, tmp_path: Path) -> None:
    export(trained / "run", tmp_path / "out", None, "f32", 1 << 30)
    library = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ours = program.load(trained / "run").float()
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            library(tokens).logits, ours(tokens).logits, rtol=1e-6, atol=1e-6
        )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.encode("the") == list(b"the")


@pytest.mark.long
def test_a_continuation_follows_from_its_seed(trained: Path) -> None:
    prompt = Prompt(text="the square", tokens=12, seed=3)
    first, again = (sample(trained / "run", prompt, "cpu").texts[0] for _ in range(2))
    assert first == again
    assert first.startswith("the square")
    other = Prompt(text="the square", tokens=12, seed=4)
    assert sample(trained / "run", other, "cpu").texts != [first]


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_that_files_hold_one_by_one_become_one_array(
    name: str, tmp_path: Path, cache: Path
) -> None:
    """And are written as they were read."""
    described = config(name, rows="")
    model = open_task(described, cache).task._class._from_config(
        open_task(described, cache).task.config
    )
    model.save_pretrained(tmp_path / "base")
    fields = described.model.model_dump()
    here = config_of(
        {
            **described.model_dump(mode="json", exclude={"model"}),
            "model": {"path": str(tmp_path / "base"), "balance": fields["balance"]},
        }
    )
    source = read_initial_weights(tmp_path / "base", here, entry_of(here.task).facts(here, cache))
    state = model.state_dict()
    assert set(source.arrays) == set(state)
    for array_name, tensor in state.items():
        np.testing.assert_array_equal(source.arrays[array_name].read(), tensor.numpy())
    names = {n: torch.zeros(tuple(a.shape)) for n, a in source.arrays.items()}
    written, _ = open_task(here, cache).task.export_hf(names, tmp_path, "float32")
    assert any(".experts.0." in written_name for written_name in written)


def test_a_directory_that_is_not_whole_is_refused(tmp_path: Path, cache: Path) -> None:
    def opened(**model: Any) -> None:
        described = config("llama", rows="").model_dump(mode="json", exclude={"model"})
        here = config_of({**described, "model": {"path": str(tmp_path), **model}})
        read_initial_weights(tmp_path, here, entry_of(here.task).facts(here, cache))

    with pytest.raises(UserError, match=r"has no config\.json"):
        opened()
    library_model("llama").config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"has no model\.safetensors"):
        opened()
    library_model("llama").save_pretrained(tmp_path)
    opened()
    with pytest.raises(UserError, match="shape"):
        opened(intermediate_size=64)

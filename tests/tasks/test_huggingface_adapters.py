"""Adapters of the peft library: one curve on any devices, the base frozen and named by its hash."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hf_runs import squares, write_lines
from safetensors.numpy import load_file
from test_huggingface import MODELS, config
from test_huggingface_weights import library_model
from transformers import AutoModelForCausalLM

import samecurve as program
from commands import losses as losses_of
from commands import samecurve
from one_curve import check_one_curve
from samecurve.checkpoint import read_manifest
from samecurve.core.planning.optimizer import optimizer_state
from samecurve.errors import UserError
from samecurve.run.export_weights import export
from samecurve.run.sample_run import Prompt, sample
from samecurve.tasks import entry_of
from starts import start, train
from worlds import Pool

if TYPE_CHECKING:
    from collections.abc import Mapping

LORA = {"rank": 4, "alpha": 8}


def adapted(name: str = "llama", rows: str = "Packed", **adapter: Any) -> Any:
    return config(name, rows, model={"adapter": {**LORA, **adapter}})


@pytest.mark.parametrize(
    ("model", "adapter", "layouts"),
    [
        (
            "qwen2",
            {"kind": "dora", "target": ["q_proj", "down_proj"], "dropout": 0.1},
            ["fsdp:2/4"],
        ),
        pytest.param(
            "llama",
            {"dropout": 0.1},
            ["ddp:2", "fsdp:2/4", "dp:2", "ddp:2/4", "hsdp:4"],
            marks=pytest.mark.long,
        ),
        pytest.param("mixtral", {}, ["ddp:2/4", "fsdp:2"], marks=pytest.mark.long),
        pytest.param("llama", {"kind": "dora"}, ["dp:2", "ddp:3"], marks=pytest.mark.long),
    ],
)
def test_devices_do_not_change_the_curve(
    model: str, adapter: dict[str, Any], layouts: list[str], pool: Pool, tmp_path: Path
) -> None:
    """The adapter's own dropout too."""
    here = adapted(model, "Ragged" if model == "qwen2" else "Packed", **adapter)
    check_one_curve(here, layouts, pool, tmp_path, steps=5, near=1e-10)


def values(home: Path, layout: str = "single:1", **sections: Any) -> dict[str, Any]:
    """Of a run on the directory home/base."""
    strategy, _, count = layout.partition(":")
    fields: dict[str, Any] = {
        "task": "huggingface",
        "model": {"path": str(home / "base"), "adapter": LORA},
        "data": {"source": str(home / "d.jsonl"), "tokenizer": "bytes", "seq_len": 48},
        "batch": {"samples": 6},
        "optimizer": {"lr": 3e-2},
        "schedule": {"decay": "constant"},
        "train": {"steps": 6, "precision": "f64", "save_every": 3},
        "devices": {"use": f"cpu:{count}", "strategy": strategy, "preflight": 0},
    }
    return {**fields, **sections}


def make_base(home: Path, name: str = "llama", seed: int = 1) -> None:
    fields = {key: value for key, value in MODELS[name].items() if key != "vocab_size"}
    model = library_model(name, **{**fields, "vocab_size": 256})
    if seed != 1:
        with torch.no_grad():
            model.get_input_embeddings().weight[seed, seed] += 1e-3
    model.save_pretrained(home / "base")
    write_lines(home / "d.jsonl", [{"text": text} for text in squares(60)])


@pytest.mark.parametrize(
    ("by", "kind"),
    [
        pytest.param("path", "lora", marks=pytest.mark.long),
        pytest.param("architecture", "dora", marks=pytest.mark.long),
        pytest.param("path", "dora", marks=pytest.mark.long),
        pytest.param("architecture", "lora", marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_holds_the_adapter_and_its_resume_goes_on(
    kind: str, by: str, pool: Pool, tmp_path: Path, cache: Path
) -> None:
    """Stopped under fsdp and gone on with under ddp, against one that never stopped."""
    make_base(tmp_path)
    model: Mapping[str, Any] = {"path": str(tmp_path / "base")}
    if by == "architecture":
        model = {"architecture": "llama", **MODELS["llama"], "vocab_size": 256}
    fields = {**model, "adapter": {**LORA, "kind": kind}}

    whole = start(tmp_path / "whole", values(tmp_path, model=fields), cache)
    expected = train(pool, whole)

    run = tmp_path / "run"
    first = values(tmp_path, "fsdp:2", model=fields)
    first["train"] = {**first["train"], "steps": 3}
    train(pool, start(run, first, cache))
    losses = train(pool, start(run, values(tmp_path, "ddp:2", model=fields), cache))
    assert losses == pytest.approx(expected, rel=1e-10)

    saved = read_manifest(run / "checkpoints" / "step-00000006")
    names = [name for name in saved["arrays"] if name.startswith("model/")]
    parts = ("lora_A", "lora_B", "lora_magnitude_vector")
    assert names
    assert all(any(part in name for part in parts) for name in names)
    assert saved["arrays"]["frozen/sha256"]["shape"] == [32]
    assert not (run / "initial").exists()
    assert (run / "base.json").is_file() is (by == "path")
    assert not list(run.glob("**/model*.safetensors"))


@pytest.mark.long
def test_another_base_is_refused(pool: Pool, tmp_path: Path, cache: Path) -> None:
    """By the launcher from its files, and by the ranks from its values, whoever wrote them."""
    make_base(tmp_path)
    run = tmp_path / "run"
    train(pool, start(run, values(tmp_path), cache))
    more = values(tmp_path)
    more["train"] = {**more["train"], "steps": 9}
    make_base(tmp_path, seed=2)
    with pytest.raises(UserError, match=r"not the base .* model\.safetensors changed \(SHA-256"):
        start(run, more, cache)
    with pytest.raises(UserError, match="not the base"):
        sample(run, Prompt(text="a"), "cpu")

    other = start(tmp_path / "other", more, cache)
    kept = json.loads((run / "base.json").read_text())
    kept["files"] = json.loads((tmp_path / "other" / "base.json").read_text())["files"]
    (run / "base.json").write_text(json.dumps(kept))
    assert other.run.exists()
    with pytest.raises(Exception, match="was trained on a base whose frozen weights"):
        train(pool, start(run, more, cache))


@pytest.mark.long
def test_a_seeded_base_is_the_same_wherever_it_is_made(
    pool: Pool, tmp_path: Path, cache: Path
) -> None:
    """samecurve.load() makes it anew: the evaluation's loss is that of the run's own."""
    make_base(tmp_path)
    model = {"architecture": "llama", **MODELS["llama"], "vocab_size": 256, "adapter": LORA}
    run = tmp_path / "run"
    train(pool, start(run, values(tmp_path, "fsdp:2", model=model), cache))
    assert sample(run, Prompt(text="the", tokens=3), "cpu").texts
    weight = program.load(run).model.layers[0].self_attn.q_proj.base_layer.weight
    assert weight.dtype == torch.float64
    assert float(weight.std()) == pytest.approx(0.02, rel=0.2)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's own
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", "lora"),
        pytest.param("gpt2", "dora", marks=pytest.mark.long),
        pytest.param("llama", "dora", marks=pytest.mark.long),
        pytest.param("gpt2", "lora", marks=pytest.mark.long),
    ],
)
def test_merged_and_adapter_forms_agree(
    name: str, kind: str, pool: Pool, tmp_path: Path, cache: Path
) -> None:
    """As the libraries load them, and as samecurve.load() has it."""
    from peft import PeftModel  # takes 5 s, in each process that collects tests

    if name == "gpt2":
        MODELS["gpt2"] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    make_base(tmp_path, name)
    model = {"path": str(tmp_path / "base"), "adapter": {**LORA, "kind": kind}}
    train(pool, start(tmp_path / "run", values(tmp_path, model=model), cache))
    export(tmp_path / "run", tmp_path / "merged", None, None, 1 << 30)
    export(tmp_path / "run", tmp_path / "adapter", "peft", None, 1 << 30)

    tokens = torch.arange(40)[None]
    factory: Any = AutoModelForCausalLM
    wide = {"dtype": torch.float64}
    base = factory.from_pretrained(tmp_path / "base", **wide).eval()
    before = base(tokens).logits.detach()
    merged = factory.from_pretrained(tmp_path / "merged", **wide).eval()
    apart = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    ours = program.load(tmp_path / "run")
    with torch.no_grad():
        expected = ours(tokens).logits
        assert float((expected - before).abs().max()) > 1e-2
        torch.testing.assert_close(merged(tokens).logits, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(apart(tokens).logits, expected, rtol=1e-6, atol=1e-6)
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all("lora_" in key for key in written)


def test_the_plan_counts_frozen_weights_without_gradients(cache: Path) -> None:
    here = adapted("llama", "")
    described = entry_of(here.task).facts(here, str(cache))
    layers = {"q": 32 * 32, "k": 32 * 16, "v": 32 * 16, "o": 32 * 32, "mlp": 3 * 32 * 48}
    assert described.params - described.trainable == 2 * (sum(layers.values()) + 64) + 32 + 4096
    sizes = [(32, 32), (32, 16), (32, 16), (32, 32), (32, 48), (32, 48), (48, 32)]
    assert described.trainable == 2 * 4 * sum(a + b for a, b in sizes)
    state = optimizer_state(here.optimizer, here.train.precision, described)
    assert state.bytes == 2 * 8 * described.trainable


def test_targets_and_ranks_that_are_none_are_refused(cache: Path) -> None:
    for target, remedy in {"q_prj": "q_proj", "lm_head": "all-linear"}.items():
        with pytest.raises(UserError, match=f"target {target} names no linear") as refused:
            entry_of("huggingface").facts(adapted("llama", "", target=[target]), str(cache))
        assert remedy in refused.value.remedy
    with pytest.raises(UserError, match="empty list"):
        entry_of("huggingface").facts(adapted("llama", "", target=[]), str(cache))
    pattern = r"model.layers.\d+.(mlp.(up|down)|self_attn.q)_proj"
    facts = entry_of("huggingface").facts(adapted("llama", "", target=pattern), str(cache))
    assert any("(down_proj, q_proj, up_proj)" in note for note in facts.notes)
    with pytest.raises(UserError, match="is no regular expression"):
        entry_of("huggingface").facts(adapted("llama", "", target="(up"), str(cache))
    with pytest.raises(UserError, match="rank"):
        adapted("llama", "", rank=0)


@pytest.mark.long
def test_muon_takes_an_adapter_s_matrices(pool: Pool, tmp_path: Path) -> None:
    here = config(
        "llama", "Packed", model={"adapter": LORA}, optimizer={"name": "muon", "lr": 3e-3}
    )
    check_one_curve(here, ["ddp:2", "fsdp:2"], pool, tmp_path, steps=4, near=1e-10)


@pytest.mark.long
def test_the_verbs_take_such_a_run(tmp_path: Path) -> None:
    make_base(tmp_path)
    (tmp_path / "c.yaml").write_text(json.dumps(values(tmp_path)))
    samecurve("train", "-f", "c.yaml", "--save-dir", "run", cwd=tmp_path)
    assert len(losses_of(tmp_path / "run")) == 6
    samecurve("eval", "run", "--devices", "cpu:2", "--strategy", "ddp", cwd=tmp_path)
    shown = samecurve("export", "run", "--to", "out", "--format", "peft", cwd=tmp_path)
    assert "28 arrays" in shown.stdout
    two = ("--devices", "cpu:2", "--strategy", "ddp")
    samecurve("verify", "-f", "c.yaml", *two, cwd=tmp_path)

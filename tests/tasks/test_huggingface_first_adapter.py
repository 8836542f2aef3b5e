"""--init-from with a LoRA of a language model, as the peft library writes it."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_runs import squares, write_lines
from test_huggingface import MODELS
from test_huggingface_weights import library_model

from commands import refused, samecurve
from samecurve.observe import read_events

pytestmark = pytest.mark.filterwarnings(  # peft's own
    "ignore:.is_gradient_checkpointing:FutureWarning"
)
ADAPTER = {"rank": 4, "alpha": 6.0, "target": ["q_proj", "v_proj"]}


def write_config(home: Path, name: str, **adapter: Any) -> Path:
    """A run of one step that changes nothing."""
    values = {
        "task": "huggingface",
        "model": {"path": str(home / "base"), "adapter": {**ADAPTER, **adapter}},
        "data": {
            "source": str(home / "d.jsonl"),
            "tokenizer": "bytes",
            "seq_len": 48,
            "validation": 0.2,
        },
        "batch": {"samples": 6},
        "optimizer": {"lr": 1e-30},
        "train": {"steps": 1, "precision": "f32", "eval_every": 1},
        "devices": {"use": "cpu"},
    }
    (home / f"{name}.json").write_text(json.dumps(values))
    return home / f"{name}.json"


def validation_loss(run: Path) -> float:
    events = read_events(run / "journal.jsonl")
    return float([event.values["loss"] for event in events if event.kind == "evaluated"][-1])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("first")
    fields = {key: value for key, value in MODELS["llama"].items() if key != "vocab_size"}
    library_model("llama", **{**fields, "vocab_size": 256}).save_pretrained(home / "base")
    write_lines(home / "d.jsonl", [{"text": text} for text in squares(40)])
    return home


def write_adapter(home: Path, name: str, **options: Any) -> Mapping[str, torch.Tensor]:
    """An adapter that is not zero, saved by peft. Returns the weights that it makes of the base."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(home / "base", local_files_only=True)
    config = LoraConfig(
        **{"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"], **options}
    )
    model: Any = get_peft_model(base, config)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.3)
    model.save_pretrained(home / name)
    merged = model.merge_and_unload()
    merged.save_pretrained(home / f"{name}-merged")
    tensors: Mapping[str, torch.Tensor] = merged.state_dict()
    return tensors


def check_loss(home: Path, name: str, *flags: object, **adapter: Any) -> str:
    """Begin with the adapter, and with the merged weights: the validation losses are equal."""
    train = ("train", "-f", write_config(home, name, **adapter), "--save-dir")
    begun = samecurve(*train, f"{name}-run", "--init-from", home / name, *flags, cwd=home)
    whole = home / f"{name}-merged"
    samecurve(*train, f"{name}-whole", "--init-from", whole, cwd=home)
    expected, loss = (validation_loss(home / f"{name}-{run}") for run in ("whole", "run"))
    assert loss == pytest.approx(expected, rel=1e-6)
    return str(begun.stdout)


@pytest.mark.long
def test_an_adapter_of_peft_is_gone_on_from(home: Path) -> None:
    """On two ranks; and what this program exports is read again."""
    base = library_model("llama", **{**MODELS["llama"], "vocab_size": 256}).state_dict()
    merged = write_adapter(home, "lora")
    assert any((merged[key] - base[key]).abs().max() > 0.05 for key in merged)
    shown = check_loss(home, "lora", "--devices", "cpu:2", "--strategy", "fsdp")
    assert "warn   adapter of" in shown
    assert "alpha" not in shown.partition("warn   adapter of")[2].partition("\n")[0]
    samecurve("export", "lora-run", "--format", "peft", "--dtype", "f32", "--to", "own", cwd=home)
    config = write_config(home, "own-run")
    samecurve("train", "-f", config, "--save-dir", "own-run", "--init-from", "own", cwd=home)
    losses = [validation_loss(home / run) for run in ("lora-run", "own-run")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "adapter"),
    [
        ({"use_dora": True}, {"kind": "dora"}),
        ({"use_rslora": True}, {"alpha": 12}),
        ({"alpha_pattern": {"q_proj": 3}}, {}),
    ],
)
def test_other_forms_of_peft(home: Path, options: dict[str, Any], adapter: dict[str, Any]) -> None:
    name = f"form-{next(iter(options))}"
    write_adapter(home, name, **options)
    shown = check_loss(home, name, **adapter)
    assert ("several factors" in shown) is ("alpha_pattern" in options)


@pytest.mark.long
def test_what_peft_wrote_for_another_config_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_adapter(home, "wide", target_modules=["q_proj", "gate_proj"])
    write_adapter(home, "head", modules_to_save=["lm_head"])

    def error(name: str, **adapter: Any) -> str:
        config = write_config(home, "refused", **adapter)
        words = ("train", "-f", config, "--save-dir", "refused", "--init-from", name)
        text = refused(monkeypatch, capsys, *words, cwd=home)
        assert not (home / "refused").exists()
        return " ".join(text.split())

    wide = error("wide")
    assert re.search(r"changes \d+ layers that model\.adapter\.target leaves out: .*gate_p", wide)
    assert "remedy: model.adapter.target: [gate_proj, q_proj, v_proj]" in wide
    assert "of no layer of LlamaForCausalLM" in error("head")
    other = error("wide", target=["q_proj", "gate_proj"], rank=2, alpha=1.0)
    assert "the file's adapter has rank 4, not 2 and alpha 6, not 1" in other

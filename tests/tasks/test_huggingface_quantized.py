"""Frozen bases in 4 and 8 bits: one curve on any devices, that of the values that are packed."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_huggingface import config
from test_huggingface_adapters import LORA, make_base, values
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM

import samecurve as program
from one_curve import check_one_curve
from samecurve.core.config.loading import LoadedConfig
from samecurve.core.determinism.data_order import Order
from samecurve.core.planning.memory import memory_options, packed_bytes, replicated_state
from samecurve.errors import UserError
from samecurve.run.export_weights import export
from samecurve.run.prepare import StartRequest, prepare
from samecurve.run.resume import Options
from samecurve.tasks import Tasks, entry_of, open_task
from samecurve.torch_engine.model.model_builder import FirstValues
from samecurve_products.lora.quantized import CODES, SCALES, Packing, QuantizedLinear
from samecurve_products.lora.sections import Quantize
from samecurve_products.text.huggingface.adapter import add_adapter, linear_layers
from samecurve_products.text.huggingface.float64 import Float64
from samecurve_products.text.huggingface.sections import Adapter
from starts import start, train
from tiny import MACHINE, config_of
from worlds import Pool

STEPS = 6
is_there = find_spec("bitsandbytes") is not None
needs_library = pytest.mark.skipif(not is_there, reason="bitsandbytes is not installed")
_PACKED = [
    pytest.param("4bit", marks=[needs_library, pytest.mark.long]),
    pytest.param("8bit", marks=[needs_library, pytest.mark.long]),
]


def by_hand(matrix: torch.Tensor, quantize: Quantize) -> torch.Tensor:
    """What a matrix is worth once it is packed, without the library's way back."""
    if quantize == "bf16":
        return matrix.bfloat16().float()
    parts = Packing(quantize, *matrix.shape).pack(matrix)
    codes, scales = parts[CODES], parts[SCALES]
    if quantize == "8bit":
        return codes * scales[:, None] * torch.tensor(1 / 127)
    from bitsandbytes.functional import get_4bit_type

    halves = torch.stack([codes >> 4, codes & 15], 1).flatten()[: matrix.numel()]
    levels: torch.Tensor = get_4bit_type("nf4", device="cpu")
    spread = scales.repeat_interleave(64)[: matrix.numel()]
    return (levels[halves.long()] * spread).view(matrix.shape)


def on_packed(home: Path, layout: str, quantize: Quantize = "4bit", **train: Any) -> dict[str, Any]:
    here = values(home, layout)
    here["model"] = {**here["model"], "quantize": quantize}
    here["train"] = {**here["train"], "steps": STEPS, **train}
    return here


def plain_loop(home: Path, cache: Path, quantize: Quantize | None) -> list[float]:
    """The library's model with its weights as they are worth once packed, and peft's layers.

    quantize: None: the weights as they are in the files
    """
    task = open_task(config_of(on_packed(home, "single:1")), cache)
    rows, first = task.train_data(), FirstValues(task, 0, lambda _: None)
    ours = first.build()
    first.materializer(ours, torch.device("cpu"))(ours)
    model = AutoModelForCausalLM.from_pretrained(home / "base").train()
    layers: dict[str, Any] = dict(linear_layers(model)) if quantize else {}
    for layer in layers.values():
        layer.weight.data = by_hand(layer.weight.data, quantize or "none")
    add_adapter(model, Adapter(rank=LORA["rank"], alpha=LORA["alpha"]))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        parameter.data = ours.get_parameter(name).data.clone()
    model = model.double()
    optimizer = torch.optim.AdamW(
        trained.values(), lr=3e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    losses: list[float] = []
    for ids in Order(len(rows), 6, 0).ids(range(STEPS)):
        columns = rows[ids]
        total: Any = torch.zeros((), dtype=torch.float64)
        count = 0
        for tokens, documents in zip(columns["input_ids"], columns["documents"], strict=True):
            for number in range(1, documents.max() + 1):
                text = torch.from_numpy(tokens[documents == number])[None]
                with Float64():
                    logits = model(input_ids=text).logits[0, :-1]
                total = total + F.cross_entropy(logits, text[0, 1:], reduction="sum")
                count += text.shape[1] - 1
        optimizer.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        losses.append(float(total.detach() / count))
    return losses


@needs_library
@pytest.mark.long
@pytest.mark.parametrize(
    ("quantize", "layouts"),
    [
        ("4bit", ["ddp:2", "ddp:3", "dp:2", "fsdp:2/4", "hsdp:4"]),
        ("8bit", ["ddp:2", "ddp:3", "fsdp:2/4"]),
    ],
)
def test_devices_do_not_change_the_curve(
    quantize: str, layouts: list[str], pool: Pool, tmp_path: Path
) -> None:
    """A base of the seed; packed rows, the adapter's dropout."""
    model = {"adapter": {**LORA, "dropout": 0.1}, "quantize": quantize}
    here = config("llama", "Packed", model=model)
    check_one_curve(here, layouts, pool, tmp_path, steps=5, near=1e-10)


@needs_library
@pytest.mark.long
def test_dora_s_magnitudes_are_those_of_the_packed_weights(pool: Pool, tmp_path: Path) -> None:
    dora = {**LORA, "kind": "dora", "target": ["q_proj", "down_proj"]}
    here = config("qwen2", "Ragged", model={"adapter": dora, "quantize": "4bit"})
    check_one_curve(here, ["ddp:2", "fsdp:2"], pool, tmp_path, steps=5, near=1e-10)


@pytest.mark.parametrize("quantize", [pytest.param("bf16", marks=pytest.mark.long), *_PACKED])
def test_a_run_is_that_of_the_packed_values_and_is_exported_with_them(
    quantize: Quantize, pool: Pool, tmp_path: Path, cache: Path
) -> None:
    """Stopped under fsdp, gone on with under ddp; against a plain loop in one process."""
    make_base(tmp_path)
    run = tmp_path / "run"
    train(pool, start(run, on_packed(tmp_path, "fsdp:2", quantize, steps=3), cache))
    losses = train(pool, start(run, on_packed(tmp_path, "ddp:2", quantize), cache))
    np.testing.assert_allclose(losses, plain_loop(tmp_path, cache, quantize), rtol=1e-10)
    apart = np.abs(np.array(losses) / plain_loop(tmp_path, cache, None) - 1)
    assert apart.min() > 1e-6  # the weights as they are in the files are not those

    other: Quantize = "bf16" if quantize == "4bit" else "4bit"
    if other == "4bit" and not is_there:
        other = "none"
    with pytest.raises(UserError, match=rf"model\.quantize {quantize} -> {other}"):
        start(run, on_packed(tmp_path, "ddp:2", other, steps=9), cache)

    written = export(run, tmp_path / "merged", None, None, 1 << 30)
    assert any(f"its {quantize} weights written as float64" in note for note in written.notes)
    library = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        expected = program.load(run)(tokens).logits
        torch.testing.assert_close(library(tokens).logits, expected, rtol=1e-6, atol=1e-6)
    export(run, tmp_path / "adapter", "peft", None, 1 << 30)
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()


@pytest.mark.parametrize(
    "quantize", ["bf16", *(pytest.param(kind, marks=needs_library) for kind in ("4bit", "8bit"))]
)
@pytest.mark.parametrize("shape", [(32, 48), (33, 7), (128, 64), (1, 3)])
def test_a_packed_layer_is_a_plain_one_with_the_packed_values(
    shape: tuple[int, int], quantize: Quantize
) -> None:
    """Rows shorter than a block of scales too; nothing unpacked is kept for backward."""
    torch.manual_seed(0)
    plain = nn.Linear(shape[1], shape[0])
    packed = QuantizedLinear(plain, quantize)
    worth = by_hand(plain.weight.data, quantize)
    torch.testing.assert_close(packed.weight, worth, rtol=1e-6, atol=0)
    weight = plain.weight.detach()
    assert 0 < float((worth - weight).abs().max()) < 0.2 * float(weight.abs().max())

    kept: list[torch.dtype] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.dtype)
        return tensor

    x: Any = torch.randn(5, shape[1], dtype=torch.float64, requires_grad=True)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        product = packed(x)
    product.square().sum().backward()
    ours, x.grad = x.grad, None
    assert len(kept) == 2
    assert set(kept) <= {torch.uint8, torch.int8, torch.float32}
    expected: Any = F.linear(x, packed.weight.double(), plain.bias.double())
    expected.square().sum().backward()
    torch.testing.assert_close(ours, x.grad, rtol=1e-12, atol=1e-14)


@needs_library
def test_the_plan_counts_packed_weights_and_their_scales(cache: Path) -> None:
    fields = {"adapter": LORA, "quantize": "4bit"}
    here = config("llama", "", model=fields)
    described = entry_of(here.task).facts(here, str(cache))
    matrices = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    others = 2 * 64 * 32 + 5 * 32
    assert packed_bytes(described) == matrices // 2
    assert described.quantized.block_packed == matrices // 4
    assert described.params - described.trainable == others + matrices // 64
    terms = {term.name: term for term in replicated_state(memory_options(here), described, 2)}
    assert terms["packed"].bytes == matrices // 4
    assert terms["packed"].formula.startswith(f"{matrices} weights x 0.5 B; their 240")
    whole = entry_of("huggingface").facts(config("llama", "", model={"adapter": LORA}), str(cache))
    assert described.flops_per_sample == whole.flops_per_sample
    assert described.bytes_per_sample == whole.bytes_per_sample


@pytest.mark.long
def test_a_base_in_bf16_has_one_curve(pool: Pool, tmp_path: Path) -> None:
    here = config("llama", "Packed", model={"adapter": LORA, "quantize": "bf16"})
    check_one_curve(here, ["ddp:2", "fsdp:2"], pool, tmp_path, steps=3, near=1e-10)


@pytest.mark.long
def test_a_base_in_bf16_takes_half_and_trains_alike_under_bf16(
    pool: Pool, tmp_path: Path, cache: Path
) -> None:
    """Products under bf16 round a weight of four bytes to the same value."""
    make_base(tmp_path)
    losses = [
        train(pool, start(tmp_path / kind, values_of(tmp_path, kind), cache))
        for kind in ("none", "bf16")
    ]
    assert losses[0] == losses[1]
    here = config_of(values_of(tmp_path, "bf16"))
    described = entry_of(here.task).facts(here, str(cache))
    matrices = packed_bytes(described) // 2
    terms = replicated_state(memory_options(here), described, 1)
    [packed] = [term for term in terms if term.name == "packed"]
    assert packed.bytes == 2 * matrices
    assert packed.formula.startswith(f"{matrices} weights x 2 B")
    [note] = [note for note in described.notes if "bf16 base" in note]
    assert "each rounded once" in note


@pytest.mark.long
def test_a_base_is_in_bf16_by_default_under_bf16_and_a_run_keeps_its_own(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMECURVE_CACHE", str(cache))
    make_base(tmp_path)
    wide = values_of(tmp_path, "none")
    default = {**wide, "model": {k: v for k, v in wide["model"].items() if k != "quantize"}}
    in_f32 = {**default, "train": {**default["train"], "precision": "f32"}}
    assert [quantize_of(here) for here in (wide, default, in_f32)] == ["none", "bf16", "none"]
    start(tmp_path / "wide", wide, cache)
    assert resumed(tmp_path / "wide", default, "none") == "none"
    written = tmp_path / "wide" / "config.yaml"  # of a version that had no such key
    text = written.read_text()
    written.write_text(text.replace("  quantize: none\n", ""))
    assert written.read_text() != text
    assert resumed(tmp_path / "wide", default, "none") == "none"
    start(tmp_path / "narrow", default, cache)
    assert resumed(tmp_path / "narrow", in_f32, "bf16") == "bf16"


def resumed(home: Path, values: dict[str, Any], kept: Quantize) -> str:
    """The base's format of a run that goes on, with a config that does not name it."""
    loaded = LoadedConfig(config_of(values), "tiny", {})
    kept_config = config_of({**values, "model": {**values["model"], "quantize": kept}})
    facts = entry_of(kept_config.task).facts(kept_config, os.environ["SAMECURVE_CACHE"])
    options = Options(save_dir=home)
    request = StartRequest(loaded=loaded, options=options, facts=facts, machine=MACHINE)
    prepared = prepare(request)
    prepared.lock.release()
    quantize: str = prepared.run.read_config(Tasks()).model.model_dump()["quantize"]
    return quantize


def quantize_of(values: dict[str, Any]) -> str:
    quantize: str = config_of(values).model.model_dump()["quantize"]
    return quantize


def values_of(home: Path, quantize: str) -> dict[str, Any]:
    """A run under bf16, on one device."""
    return on_packed(home, "single:1", quantize, steps=3, precision="bf16")  # type: ignore[arg-type]


def test_what_can_t_be_packed_is_refused(cache: Path) -> None:
    with pytest.raises(UserError, match=r"without model\.adapter") as refused:
        entry_of("huggingface").facts(config("llama", "", model={"quantize": "4bit"}), str(cache))
    assert "adapter: {kind: lora}" in refused.value.remedy
    if not is_there:
        with pytest.raises(UserError, match="needs bitsandbytes: not installed") as absent:
            entry_of("huggingface").facts(
                config("llama", "", model={"adapter": LORA, "quantize": "8bit"}), str(cache)
            )
        assert "[quantize]" in absent.value.remedy

"""Models of Oxidizr that only the transformers library has: read from its YAML, and trained with
one curve on any devices.
"""

from pathlib import Path
from typing import Any

import pytest

from one_curve import check_one_curve
from samecurve.core.config.document import parse_document
from samecurve.core.config.loading import load_document
from samecurve.tasks import Tasks, open_task
from samecurve_products.convert.converted_config import ConvertedConfig
from samecurve_products.convert.tools import convert
from worlds import Pool

MODEL = (
    "hidden_size: 32, num_layers: 3, num_heads: 4, intermediate_size: 48, vocab_size: 64,"
    " max_seq_len: 16, rope_theta: 10000.0"
)
LATENT = "kv_latent_dim: 16, q_latent_dim: 12, d_rope: 4"
EXPERTS = "num_experts: 4, experts_per_tok: 2"
SHARED = f"{EXPERTS}, shared_expert_enabled: true"
MAMBA2 = (
    "mamba2_num_heads: 8, mamba2_head_dim: 8, mamba2_state_size: 8, mamba2_chunk_size: 8,"
    " mamba2_n_groups: 1, mamba2_conv_kernel: 4, mamba2_expand: 2"
)
KINDS = {
    "mixtral": f"kv_heads: 2, {EXPERTS}",
    "granitemoeshared": SHARED,
    "deepseek_v3": f"{LATENT}, {SHARED}",
    "mamba2": f"mamba_layers: [0, 1, 2], {MAMBA2}",
    "bamba": f"mamba_layers: [0, 2], {MAMBA2}",
    "granitemoehybrid": f"mamba_layers: [0, 2], {LATENT}, {SHARED}, {MAMBA2}",
}
LONG = {"deepseek_v3", "granitemoeshared", "bamba", "granitemoehybrid", "mamba2", "mixtral"}


def read(more: str, trainer: str = "") -> ConvertedConfig:
    """An old config with these fields of the model."""
    text = (
        f"model: {{{MODEL}, {more}}}\n"
        "data: {source: random, samples: 23, eval_samples: 4}\n"
        "trainer: {learning_rate: 0.003, batch_size: 5, gradient_accumulation: 1, max_steps: 5,"
        f" num_epochs: 1, load_balance_alpha: 0.05{trainer}}}\n"
    )
    converted = convert(parse_document(text, "old.yaml"))
    assert converted is not None
    return converted


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind in LONG)) for kind in KINDS]
)
def test_an_old_model_trains_as_the_library_s(kind: str, pool: Pool, tmp_path: Path) -> None:
    """Batch 5 of 23 rows, the last one short, over one rank and over two."""
    converted = read(KINDS[kind])
    assert converted.unresolved(converted.document) == []
    for key, value in (
        ("train.precision", "f64"),
        ("devices.use", "cpu"),
        ("batch", {"samples": 5}),
    ):
        converted.document.set(key, value, f"--set {key}")
    config = load_document(converted.document, Tasks()).config
    assert getattr(config.model, "architecture", "") == kind
    check_one_curve(config, ["ddp:2"], pool, tmp_path, steps=5, near=1e-10)


def shapes(more: str, tmp_path: Path) -> dict[str, tuple[int, ...]]:
    """Of the arrays of the model that is built."""
    config = load_document(read(more).document, Tasks()).config
    arrays = open_task(config, tmp_path).facts().model.arrays
    return {name.removeprefix("model/"): tuple(shape) for name, shape in arrays.items()}


def test_widths_are_those_of_the_old_model(tmp_path: Path) -> None:
    """Latents, rotary parts and experts, where the library has their equal."""
    found = shapes(KINDS["deepseek_v3"], tmp_path)
    attention = "model.layers.0.self_attn."
    assert found[f"{attention}q_a_proj.weight"] == (12, 32)
    assert found[f"{attention}q_b_proj.weight"] == (4 * (8 + 4), 12)
    assert found[f"{attention}kv_a_proj_with_mqa.weight"] == (16 + 4, 32)
    assert found[f"{attention}kv_b_proj.weight"] == (4 * (8 + 8), 16)
    assert found["model.layers.0.mlp.experts.down_proj"] == (4, 32, 48)
    assert found["model.layers.0.mlp.shared_experts.up_proj.weight"] == (48, 32)


@pytest.mark.parametrize(
    ("more", "outcome", "says"),
    [
        (KINDS["mixtral"], "read", "trainer.load_balance_alpha 0.05 -> model.router_aux_loss_coef"),
        (KINDS["deepseek_v3"], "left", "trainer.load_balance_alpha 0.05: has no equal"),
        (KINDS["granitemoehybrid"], "left", "has no equal: the library has no latent attention"),
        (KINDS["mamba2"], "left", "of layers with attention, of which there are none"),
        (f"{KINDS['bamba']}, mamba3_enabled: true", "refused", "the library has no Mamba-3"),
        ("mamba_layers: [0, 1]", "refused", "without mamba2_num_heads is Mamba-1 there"),
    ],
)
def test_what_has_no_equal_is_named(more: str, outcome: str, says: str) -> None:
    converted = read(more)
    if outcome == "refused":
        wrong = map(str, converted.unresolved(converted.document))
        assert any(says in each for each in wrong)
    else:
        assert any(
            line.startswith(outcome) and says in line for line in converted.summary_lines()
        ), converted.summary_lines()


def test_every_field_of_each_kind_has_one_reading() -> None:
    for more in KINDS.values():
        converted: Any = read(more)
        fields = [each.field for each in converted.readings if not each.field.startswith("(")]
        named = {
            part.split(":")[0].strip() for part in f"{MODEL}, {more}".split(", ") if ":" in part
        }
        assert len(fields) == len(set(fields))
        assert {f"model.{name}" for name in named} <= set(fields)

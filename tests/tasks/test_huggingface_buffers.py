"""Buffers that no checkpoint keeps have the same values at a first start and at a resume.

A first start gives each module its first values by the library's rule (`_init_weights`), and a
resume reads the weights instead. The rule may set buffers anew: Gemma's does so with a scale, which
has other digits once the model is cast to float64.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from one_curve import check_one_curve
from samecurve.core.config.sections import Config
from samecurve.errors import UserError
from samecurve.tasks import open_task
from samecurve.torch_engine.model.model_builder import FirstValues, all_given
from samecurve.torch_engine.model.model_setup import (
    cast_weights,
    parameters_on_meta,
    unsaved_buffers,
)
from samecurve_products.text.huggingface.torch_task import TorchHuggingFace
from tiny import config_of
from worlds import Pool

CPU = torch.device("cpu")
FIELDS = {
    "vocab_size": 64,
    "hidden_size": 40,  # its root has more digits than a float32
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


def config(architecture: str) -> Config:
    return config_of(
        {
            "task": "huggingface",
            "model": {"architecture": architecture, **FIELDS},
            "data": {"source": "random", "seq_len": 16, "samples": 23, "eval_samples": 7},
            "batch": {"samples": 10},
            "optimizer": {"lr": 3e-3},
            "train": {"steps": 6, "precision": "f64"},
            "devices": {"use": "cpu"},
        }
    )


def started(task: Any, *, resumed: bool) -> nn.Module:
    """The model in float64, as a run begins with it: with first values, or all from a file."""
    first = FirstValues(task, 3, lambda _: None)
    model = cast_weights(first.build(), "f64")
    assert all(parameter.is_meta for parameter in model.parameters())
    first.materializer(model, CPU, all_given if resumed else None)(model)
    return model


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3_text"])
def test_a_resume_has_the_buffers_of_the_first_start(architecture: str, cache: Path) -> None:
    opened: Any = open_task(config(architecture), cache)
    first, resumed = (unsaved_buffers(started(opened, resumed=how)) for how in (False, True))
    assert any(name.endswith("embed_scale") for name in first)
    assert first.keys() == resumed.keys()
    for name, buffer in first.items():
        assert torch.equal(buffer, resumed[name]), name


@pytest.mark.parametrize(
    "architecture", [pytest.param("gemma2", marks=pytest.mark.long), "gemma3_text"]
)
def test_a_resume_continues_the_curve(architecture: str, pool: Pool, tmp_path: Path) -> None:
    check_one_curve(config(architecture), ["ddp:2..fsdp:2"], pool, tmp_path, steps=4, near=1e-12)


class Scaled(nn.Module):
    """A layer with a factor that is a buffer."""

    factor: torch.Tensor

    def __init__(self, *, saved: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("factor", torch.ones(1), persistent=saved)


@pytest.mark.parametrize("saved", [True, False])
def test_a_rule_of_a_task_that_sets_an_unsaved_buffer_is_refused(*, saved: bool) -> None:
    """It would hold for the first start only. A buffer that checkpoints keep may be set."""

    def init_module(_model: nn.Module, module: Any) -> None:
        nn.init.zeros_(module.weight)
        module.factor.fill_(2)

    task = SimpleNamespace(
        model=lambda: Scaled(saved=saved), init_module=init_module, initial=lambda *_: None
    )
    if saved:
        assert float(dict(started(task, resumed=False).named_buffers())["factor"]) == 2
        return
    with pytest.raises(
        UserError, match="changes the buffer factor, which no checkpoint keeps"
    ) as e:
        started(task, resumed=False)
    assert "persistent=True" in e.value.remedy


def few_layers(config_class: Any) -> Any:
    """A config of two layers where the class can be asked for them, else its default."""
    with suppress(Exception):
        return config_class(num_hidden_layers=2, vocab_size=64)
    return config_class()


def outlines() -> Iterator[tuple[str, Any]]:
    """A model of each architecture of the installed library: no weights, few layers, real buffers.

    Architectures that need fields of their own are left out; the test counts the others.
    """
    from transformers.models.auto import modeling_auto

    seen = set()
    for objective in ("CAUSAL_LM", "MASKED_LM", "SEQUENCE_CLASSIFICATION"):
        classes: Any = getattr(modeling_auto, f"MODEL_FOR_{objective}_MAPPING")
        for config_class, kind in classes.items():
            if isinstance(kind, tuple) or kind in seen:
                continue
            seen.add(kind)
            model = None
            with suppress(Exception), parameters_on_meta():
                model = kind._from_config(few_layers(config_class), dtype=torch.float32)
            if model is not None:
                yield kind.__name__, model


@pytest.mark.long
def test_no_architecture_of_the_library_has_other_buffers_at_a_resume(cache: Path) -> None:
    """Long: some 200 models are built. Gemma's above hold the promise."""
    opened: Any = open_task(config("gemma2"), cache)
    built, changing = 0, set[str]()
    for name, plain in outlines():
        model = cast_weights(plain, "f64")
        for buffer in unsaved_buffers(model).values():
            buffer.copy_(~buffer if buffer.dtype == torch.bool else buffer + 1)  # a rule is seen
        before = {key: buffer.clone() for key, buffer in unsaved_buffers(model).items()}
        for rule in (TorchHuggingFace.init_module, library_rule):
            for module in model.modules():
                if any(True for _ in module.parameters(recurse=False)):
                    with suppress(AttributeError):  # xLSTM's rule is for another class
                        rule(opened, model, module)
            changed = [k for k, b in unsaved_buffers(model).items() if not same(b, before[k])]
            if rule is library_rule and changed:
                changing.add(name)
            else:
                assert not changed, (name, changed)
        built += 1
    assert built > 250
    assert {"Gemma2ForCausalLM", "Gemma3ForCausalLM"} <= changing, sorted(changing)


def library_rule(_task: Any, model: Any, module: nn.Module) -> None:
    model._init_weights(module)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one == other) | (one != one)).all())  # noqa: PLR0124 - a nan is itself

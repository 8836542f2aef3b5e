"""Parameter groups change what is trained and how, and nothing else: one curve under every strategy
and engine, through checkpoints, and as a plain loop has it.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from commands import refused, samecurve
from samecurve.core.planning.planner import plan
from samecurve.core.weights import values as initial_values
from samecurve.observe import read_events
from tiny import MACHINE, Outcome, TinyRun, config_of, ragged_task, tiny_values, train_tiny
from worlds import Pool

GROUPS = [
    {"match": "embed*", "freeze": True},
    {"match": "layers.0.self_attn.*", "freeze": True},
    {"match": "*norm*", "lr_scale": 2.0, "weight_decay": 0.2},
    {"match": "layers.1.*", "lr_scale": 0.1},
]
STEPS = 8
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "ddp:2": (2, {"devices": {"strategy": "ddp"}}),
    "fsdp:2": (2, {"devices": {"strategy": "fsdp"}, "train": {"recompute": "block"}}),
    "dp:2": (1, {"devices": {"strategy": "dp", "use": "cpu:2"}}),
    "exact ddp:2": (2, {"devices": {"strategy": "ddp"}, "train": {"exact": True}}),
    "jax:1": (1, {"engine": "jax", "devices": {"use": "cpu:1"}}),
    "jax:2": (1, {"engine": "jax", "devices": {"use": "cpu:2"}}),
    "jax-fsdp:2": (1, {"engine": "jax", "devices": {"use": "cpu:2", "strategy": "fsdp"}}),
}


def values_of(corpus: Path, layout: str) -> tuple[int, dict[str, Any]]:
    world, how = LAYOUTS[layout]
    values = tiny_values(
        corpus,
        optimizer={"groups": GROUPS},
        train={"steps": STEPS, **how.get("train", {})},
        devices=how.get("devices", {}),
    )
    return world, {**values, "engine": how.get("engine", "torch")}


def run(pool: Pool, corpus: Path, cache: Path, home: Path, layout: str, **how: Any) -> Outcome:
    world, values = values_of(corpus, layout)
    outcome: Outcome = pool.run(world, train_tiny, TinyRun(home, values, cache, **how))[0]
    return outcome


@pytest.fixture(scope="module")
def plain(
    corpus: Path, cache: Path
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Losses of a loop of torch alone, its weights before and after."""
    config = config_of(values_of(corpus, "single")[1])
    task = ragged_task(config, cache)
    made = plan(config, MACHINE, task.facts())
    model = task.model().double()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(
            torch.from_numpy(
                initial_values(
                    made.fixed.seed,
                    name,
                    tuple(parameter.shape),
                    task.initial(name, tuple(parameter.shape)),
                )
            )
        )
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    named = {
        name: parameter
        for name, parameter in model.named_parameters()
        if "embed" not in name and not name.startswith("layers.0.self_attn")
    }
    norms = [parameter for name, parameter in named.items() if "norm" in name]
    slow = [
        parameter
        for name, parameter in named.items()
        if name.startswith("layers.1.") and "norm" not in name
    ]
    rest = [
        parameter
        for name, parameter in named.items()
        if not name.startswith("layers.1.") and "norm" not in name
    ]
    optimizer = torch.optim.AdamW(
        [
            {"params": norms, "weight_decay": 0.2, "scale": 2.0},
            {"params": slow, "scale": 0.1},
            {"params": rest, "scale": 1.0},
        ],
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )
    losses = []
    for step in range(STEPS):
        rows = task.train_data()[made.order.ids(range(step, step + 1))[0]]
        mean = task.loss(model, {name: torch.from_numpy(array) for name, array in rows.items()})
        losses.append(mean.sum.item() / mean.weight.item())
        model.zero_grad()
        torch.autograd.backward(mean.sum / mean.weight)
        torch.nn.utils.clip_grad_norm_(list(named.values()), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = made.lr_at(step) * group["scale"]
        optimizer.step()
    return (
        losses,
        before,
        {name: parameter.detach() for name, parameter in model.named_parameters()},
    )


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=[pytest.mark.long] if layout == "jax:1" else [])
        for layout in LAYOUTS
        if layout != "jax-fsdp:2"
    ],
)
def test_groups_are_one_curve(
    layout: str, *, plain: Any, pool: Pool, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    losses, before, after = plain
    outcome = run(pool, corpus, cache, tmp_path, layout)
    np.testing.assert_allclose(outcome.losses, losses, rtol=1e-12)
    for name, tensor in after.items():
        np.testing.assert_allclose(
            outcome.arrays[f"model/{name}"], tensor.numpy(), rtol=0, atol=1e-12
        )
    frozen = [name for name in before if name.startswith(("embed", "layers.0.self_attn"))]
    for name in frozen:
        np.testing.assert_array_equal(outcome.arrays[f"model/{name}"], before[name].numpy())
    assert {
        name.split("/", 2)[2] for name in outcome.arrays if name.startswith("optimizer/exp_avg/")
    } == before.keys() - set(frozen)


@pytest.mark.long
def test_a_run_with_groups_moves_between_engines(
    plain: Any, pool: Pool, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    losses, _, after = plain
    run(pool, corpus, cache, tmp_path, "fsdp:2", stop_at=3)
    run(
        pool,
        corpus,
        cache,
        tmp_path,
        "jax-fsdp:2",
        resume=tmp_path / "checkpoints" / "step-00000003",
        stop_at=6,
    )
    outcome = run(
        pool, corpus, cache, tmp_path, "ddp:2", resume=tmp_path / "checkpoints" / "step-00000006"
    )
    np.testing.assert_allclose(outcome.losses, losses, rtol=1e-12)
    for name, tensor in after.items():
        np.testing.assert_allclose(
            outcome.arrays[f"model/{name}"], tensor.numpy(), rtol=0, atol=1e-12
        )


def test_groups_are_refused_before_a_run_is_made_and_changes_are_said(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = tmp_path / "tiny.json"

    def groups(*found: dict[str, Any]) -> None:
        config.write_text(
            json.dumps(tiny_values(corpus, optimizer={"groups": found}, train={"steps": 4}))
        )

    train = ("train", "-f", config, "--save-dir", "run", "--devices", "cpu")
    groups({"match": "lm_haed*", "freeze": True})
    assert (
        "did you mean" in (said := refused(monkeypatch, capsys, *train, cwd=tmp_path))
        or "names are like" in said
    )
    assert not (tmp_path / "run").exists()
    groups({"match": "embed*", "freeze": True}, {"match": "*norm*", "lr_scale": 0.5})
    samecurve(*train, "--stop-after", 2, cwd=tmp_path)
    groups({"match": "*norm*", "lr_scale": 0.5})
    assert "embed_tokens.weight was frozen when this run was last saved" in refused(
        monkeypatch, capsys, *train, cwd=tmp_path
    )
    groups({"match": "embed*", "freeze": True}, {"match": "*norm*", "lr_scale": 0.25})
    samecurve(*train, cwd=tmp_path)
    said = [
        event.values["text"]
        for event in read_events(tmp_path / "run" / "journal.jsonl")
        if event.kind == "warned"
    ][-1]
    assert said.endswith(
        "optimizer.groups [{'match': 'embed*', 'freeze': True}, {'match': '*norm*', 'lr_scale':"
        " 0.5}] -> [{'match': 'embed*', 'freeze': True}, {'match': '*norm*', 'lr_scale': 0.25}]"
    )

"""The config's optimizers whose updates look at whole matrices: each as its authors' in torch, one
curve under every strategy and through moves between them, its state as large as planned.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matrices import Net
from torch import nn

from one_curve import check_one_curve, compare
from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.core.config.sections import Config
from samecurve.core.events import REQUESTS
from samecurve.core.planning.planner import plan
from samecurve.data.feed import Feed
from samecurve.errors import UserError
from samecurve.features.optimizers.adamw8bit.torch_optimizer import levels, quantized
from samecurve.features.optimizers.muon.torch_optimizer import orthogonal
from samecurve.tasks import Tasks, open_task
from samecurve.torch_engine.engine import TorchEngine
from samecurve.torch_engine.model.model_setup import cast_weights
from samecurve.torch_engine.optimizers import HostCopyParam, hidden_matrices
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.step import State
from tiny import MACHINE
from worlds import Pool

HERE = Path(__file__).parent
ASKED = [0] * len(REQUESTS)
RATES = {"adafactor": 0.02, "muon": 0.02, "adamw8bit": 0.005}
# one of them in make test, all in make test-long
FIRST_OF_THEM = [
    pytest.param(name, marks=[pytest.mark.long] if name != "muon" else []) for name in RATES
]
# of the model; rows of blocks of 64 and of 256 numbers, and rows without
SIZES = {"adamw8bit": {"width": 64, "inner": 70}}
# Every strategy, worlds that divide no parameter, and moves between them in mid-run
LAYOUTS = ["ddp:3", "fsdp:2..single..fsdp:3"]
MORE = [
    "dp:2",
    "ddp:2",
    "fsdp:1",
    "fsdp:2",
    "fsdp:3",
    "hsdp:4",
    "fsdp:4",
    "fsdp:2..single..ddp:2..fsdp:3",
    "dp:3..fsdp:2..hsdp:4..ddp:3",
    "ddp:2..dp:2",
]


def config_of(name: str, **sections: Any) -> Config:
    values = {
        "task": f"{HERE}/matrices.py:Matrices",
        "batch": {"samples": 10},
        "devices": {"use": "cpu"},
        "schedule": {"warmup": 2},
        "model": SIZES.get(name, {}),
        **sections,
    }
    values["optimizer"] = {
        "name": name,
        "lr": RATES.get(name, 1e-3),
        **sections.get("optimizer", {}),
    }
    values["train"] = {"steps": 8, "precision": "f64", **sections.get("train", {})}
    return load_document(Document(values), Tasks()).config


def opened(config: Config) -> tuple[TorchEngine, Feed]:
    """An engine on one device of this process, and what feeds it."""
    task = open_task(config, "")
    made = plan(config, MACHINE, task.facts())
    engine = TorchEngine(task, made, config.optimizer, Comm(), [torch.device("cpu")])
    return engine, Feed(
        made, made.layout.devices_of(0), task.train_data(), None, engine.stage, prefetch=0
    )


Make = Callable[[Mapping[str, torch.nn.Parameter]], list[torch.optim.Optimizer]]


def check_plain_loop(config: Config, make: Make, near: float = 1e-12) -> State:
    """Losses of the engine are those of a loop with others' optimizers, which are driven by the
    schedule; so are the weights in the end.

    make: the optimizers of parameters by name
    near: how far losses, relative, and weights may be
    """
    engine, feed = opened(config)
    state = engine.init()
    model = cast_weights(engine.task.model(), config.train.precision)
    model.load_state_dict({name: one.clone() for name, one in state.model.state_dict().items()})
    optimizers = make(dict(model.named_parameters()))
    for step, batch in feed:
        rows = {
            name: torch.cat([micro.arrays[name] for round_ in batch.rounds for micro in round_])
            for name in ("words", "next")
        }
        mean = engine.task.loss(model, rows)
        model.zero_grad()
        torch.autograd.backward(mean.sum / mean.weight)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(engine.plan.lr_at(step), dtype=torch.float64)
            optimizer.step()
        state, metrics = engine.step(state, batch, engine.plan.lr_at(step), ASKED)
        assert metrics.read().loss == pytest.approx(mean.sum.item() / mean.weight, rel=near)
    for name, parameter in model.named_parameters():
        trained = state.model.get_parameter(name)
        torch.testing.assert_close(trained, parameter, rtol=0, atol=near, msg=name)
    return state


def test_adafactor_is_torchs() -> None:
    """Over eight steps, with the config's decay on matrices."""

    def make(named: Mapping[str, torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
        matrices = [one for one in named.values() if one.ndim > 1]
        vectors = [one for one in named.values() if one.ndim < 2]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors},
        ]
        return [torch.optim.Adafactor(groups)]

    state = check_plain_loop(config_of("adafactor"), make)
    sizes = {
        name: tuple(tensor.shape)
        for param in state.trained
        if param.name in {"embed.weight", "layers.0.experts", "head.bias"}
        for name, tensor in state.optimizer.state_of(param).items()
    }
    assert sizes == {"row_var": (3, 8, 1), "col_var": (3, 1, 5), "variance": (11,)}


class _InFloat64:
    """torch, whose bfloat16 is another."""

    bfloat16 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def test_muon_and_its_adamw_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's takes its products in bfloat16, here as everywhere in float64."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # before torch 2.15
    monkeypatch.setattr("torch.optim._muon.torch", _InFloat64())
    matrices = {
        f"layers.{block}.{layer}.weight" for block in (0, 1) for layer in ("up", "down", "gate")
    }

    def make(named: Mapping[str, torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
        rest = [(name, one) for name, one in named.items() if name not in matrices]
        groups: list[dict[str, Any]] = [
            {"params": [one for _, one in rest if one.ndim > 1], "weight_decay": 0.1},
            {"params": [one for _, one in rest if one.ndim < 2], "weight_decay": 0.0},
        ]
        of_matrices = [one for name, one in named.items() if name in matrices]
        return [
            torch.optim.Muon(of_matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(groups, betas=(0.9, 0.95)),
        ]

    groups = [{"match": "*experts", "optimizer": "adamw"}]
    config = config_of("muon", optimizer={"groups": groups})
    state = check_plain_loop(config, make)
    by_muon = {
        param.name
        for param in state.trained
        if "momentum_buffer" in state.optimizer.state_of(param)
    }
    assert by_muon == matrices


def test_a_stack_of_matrices_is_updated_as_each_of_them() -> None:
    stack = torch.randn(3, 8, 5, dtype=torch.float64)
    each = torch.stack([orthogonal(matrix) for matrix in stack])
    torch.testing.assert_close(orthogonal(stack), each, rtol=0, atol=1e-14)
    values = torch.linalg.svdvals(orthogonal(stack))
    assert 0.6 < values.min() < values.max() < 1.3


def test_adamw8bit_is_torchaos(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, as torchao computes, with its blocks as large as ours: levels and codes to the
    bit; a run but for some numbers that rounding moved to the next level, about 2e-4 of weights
    that moved by 2e-2.
    """
    torchao = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    from torchao.optim import quant_utils

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for signed in (True, False):
        theirs = torch.tensor(quant_utils.create_dynamic_map(signed))
        assert torch.equal(levels(signed=signed), theirs)
        values = torch.randn(4096) if signed else torch.rand(4096) ** 3
        scaled, scales = quant_utils.scale_tensor(values, 64)
        codes = quant_utils.quantize_8bit_with_qmap(scaled, theirs)
        for ours, expected in zip(quantized(values, 64, theirs), (codes, scales), strict=True):
            assert torch.equal(ours, expected)

    def make(named: Mapping[str, torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
        of_64 = [one for name, one in named.items() if name.endswith("up.weight")]
        of_256 = [one for name, one in named.items() if name.endswith("experts")]
        rest = [one for one in named.values() if not any(one is o for o in of_64 + of_256)]
        groups: list[dict[str, Any]] = [
            {"params": [one for one in rest if one.ndim > 1], "weight_decay": 0.1},
            {"params": [one for one in rest if one.ndim < 2], "weight_decay": 0.0},
        ]
        how: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1}
        return [
            torchao.AdamW8bit(of_64, block_size=64, **how),
            torchao.AdamW8bit(of_256, block_size=256, **how),
            torch.optim.AdamW(groups, betas=(0.9, 0.95), foreach=False),
        ]

    check_plain_loop(config_of("adamw8bit", train={"precision": "f32"}), make, near=5e-4)


@pytest.mark.parametrize("name", FIRST_OF_THEM)
@pytest.mark.parametrize(
    "layouts", [LAYOUTS, pytest.param(MORE, marks=pytest.mark.long)], ids=["main", "more"]
)
def test_it_is_one_curve(name: str, layouts: list[str], pool: Pool, tmp_path: Path) -> None:
    """Losses, norms and weights, and what goes on from each other's checkpoints."""
    check_one_curve(config_of(name), layouts, pool, tmp_path, steps=4, near=1e-11)


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("adafactor", ["ddp:2"]),
        ("muon", ["fsdp:2"]),
        pytest.param("adamw8bit", ["ddp:2", "fsdp:3"], marks=pytest.mark.long),
        pytest.param("muon", ["ddp:2", "fsdp:3", "hsdp:4..ddp:3"], marks=pytest.mark.long),
        pytest.param("adamw8bit", ["fsdp:2", "hsdp:4..ddp:3"], marks=pytest.mark.long),
    ],
)
def test_exact_gives_the_same_bits(
    name: str, layouts: list[str], pool: Pool, tmp_path: Path
) -> None:
    config = config_of(name, train={"exact": True})
    check_one_curve(config, layouts, pool, tmp_path, steps=3, near=0)


def test_exact_refuses_sums_that_follow_the_shards() -> None:
    devices = {"use": "cpu:2", "strategy": "fsdp"}
    config = config_of("adafactor", train={"exact": True}, devices=devices)
    facts = open_task(config, "").facts()
    with pytest.raises(UserError, match=r"under fsdp: adafactor adds up .* shard by shard"):
        plan(config, MACHINE, facts)


@pytest.mark.parametrize("name", RATES)
def test_a_step_that_is_not_finite_is_left_out_on_the_device(name: str) -> None:
    """As on a GPU, where nobody waits to know whether it is: weights and state stay as they were,
    and a step that is finite is the same as on the host.
    """
    ends = []
    for on_device in (False, True):
        engine, _ = opened(config_of(name))
        state = engine.init()
        for value in (0.1, float("nan"), -0.2):
            finite = value == value  # noqa: PLR0124 - not a nan
            before = values_of(state)
            for number, param in enumerate(state.trained):
                param.view.grad = torch.full_like(param.view, value * (1 + number))
            state.optimizer.step(1e-2, finite=torch.tensor(finite) if on_device else finite)
            assert (values_of(state) == before) != finite
        ends.append(values_of(state))
    for one, other in zip(*(end.values() for end in ends), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-15)


def values_of(state: State) -> dict[str, Any]:
    """Of all parameters and their state, by name."""
    tensors = {param.name: param.view.detach() for param in state.trained}
    for param in state.trained:
        for name, tensor in state.optimizer.state_of(param).items():
            tensors[f"{name} of {param.name}"] = tensor
    tensors |= dict(state.optimizer.shared_state())
    return {name: tensor.tolist() for name, tensor in tensors.items()}


class Faulty:
    """A pool whose ranks take each shard for the whole parameter, or for one block."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def run(self, world: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return self._pool.run(world, with_local_statistics, function, *arguments, **options)


def with_local_statistics(
    index: int, group: Any, function: Callable[..., Any], *arguments: Any
) -> Any:
    from samecurve.features.optimizers.adamw8bit import torch_optimizer as adamw_8bit
    from samecurve.torch_engine.strategies import Strategy as Single
    from samecurve.torch_engine.strategies.sharded.strategy import Sharded

    def of_shards(_self: Any, _params: Any, matrices: Any, function: Any) -> Any:
        return ((number, function(matrix)) for number, matrix in enumerate(matrices))

    def with_one_scale(values: torch.Tensor, block: int, ascending: torch.Tensor) -> Any:
        codes, scales = quantized(values, len(values), ascending)
        return codes, scales.expand(len(values) // block)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adamw_8bit, "quantized", with_one_scale)
        patch.setattr(Sharded, "sum_over_parts", Single.sum_over_parts)
        patch.setattr(Sharded, "map_whole", of_shards)
        return function(index, group, *arguments)


@pytest.mark.parametrize("name", FIRST_OF_THEM)
def test_statistics_of_a_shard_alone_are_seen(name: str, pool: Pool, tmp_path: Path) -> None:
    faulty: Any = Faulty(pool)
    (verdict,) = compare(config_of(name), ["fsdp:2"], faulty, tmp_path, steps=3, near=1e-6)
    assert verdict.verdict == "FAIL"


@pytest.mark.parametrize("name", RATES)
def test_its_state_is_as_large_as_planned(name: str) -> None:
    engine, _ = opened(config_of(name))
    state = engine.init()
    held = sum(
        tensor.nbytes
        for param in state.trained
        for tensor in state.optimizer.state_of(param).values()
    )
    planned = {term.name: term.bytes for term in engine.plan.memory}
    assert held == planned["optimizer"] < 2 * planned["weights"]


HIDDEN = {
    "embedding, blocks, head": (Net(), "up.weight down.weight gate.weight experts"),
    "blocks of one layer, with a head": (
        nn.ModuleDict(
            {"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), "head": nn.Linear(4, 2)}
        ),
        "layers.1.weight layers.2.weight",
    ),
    "a sequence of layers": (
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)),
        "2.weight",
    ),
    "no blocks": (
        nn.ModuleDict({name: nn.Linear(4, 4) for name in ("input", "middle", "output")}),
        "middle.weight",
    ),
    "convolutions": (
        nn.Sequential(nn.Conv1d(2, 4, 3), nn.Conv1d(4, 4, 3), nn.Flatten(), nn.Linear(4, 2)),
        "",
    ),
    "complex": (nn.Sequential(*[nn.Linear(4, 4, dtype=torch.complex64) for _ in range(3)]), ""),
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_muon_is_for_the_matrices_of_hidden_layers(kind: str) -> None:
    model, names = HIDDEN[kind]
    hidden = hidden_matrices(model)
    assert [name for name in hidden if name.endswith(tuple(names.split()))] == list(hidden)
    blocks = 2 if isinstance(model, Net) else 1
    assert len(hidden) == blocks * len(names.split())


def test_the_plan_says_which_parameters_muon_has() -> None:
    groups = [
        {"match": "head.weight", "optimizer": "muon"},
        {"match": "layers.0.*", "optimizer": "adamw"},
    ]
    made = opened(config_of("muon", optimizer={"groups": groups}))[0].plan
    assert made.reasons["optimizer"] == (
        "muon updates 5 parameters (328 scalars: layers.1.experts and 4 more); adamw updates 15"
        " parameters (402 scalars: scale and 14 more); optimizer.groups says otherwise by name"
    )
    assert "layers.0.*: by adamw (8 parameters" in made.reasons["groups"]


@pytest.mark.parametrize(
    ("name", "group", "cause"),
    [
        ("muon", {"match": "*up.bias", "optimizer": "muon"}, "of shape [7]: muon updates matrices"),
        ("adamw", {"match": "*", "optimizer": "muon"}, "is for optimizer.name muon, not adamw"),
        ("muon", {"match": "*", "optimizer": "muon", "freeze": True}, "is frozen"),
    ],
)
def test_groups_that_muon_cannot_serve_are_refused(
    name: str, group: dict[str, Any], cause: str
) -> None:
    with pytest.raises(UserError) as refused:
        opened(config_of(name, optimizer={"lr": 1e-3, "groups": [group]}))
    assert cause in str(refused.value)


@pytest.mark.parametrize("name", RATES)
def test_engine_jax_refuses_it(name: str) -> None:
    config = config_of(name).model_copy(update={"engine": "jax"})
    facts = open_task(config_of(name), "").facts()
    with pytest.raises(UserError, match=f"optimizer {name} is for engine torch") as refused:
        plan(config, MACHINE, facts)
    assert "--engine torch" in refused.value.remedy


def test_a_parameter_on_a_gpu_is_moved_by_its_copy_in_host_memory() -> None:
    """As under devices.offload, where the shards of others lie in host memory."""
    parameter = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
    copied = HostCopyParam("gate", parameter, nn.Parameter(torch.zeros(2, 2)))
    copied.refresh()
    before = copied.view.grad
    assert before is None
    parameter.grad = torch.full_like(parameter, 1j)
    copied.refresh()
    assert copied.view.tolist() == [[1.0, 2.0], [3.0, -1.0]]
    assert copied.view.grad is not None
    assert copied.view.grad.tolist() == [[0.0, 1.0], [0.0, 1.0]]
    torch.optim.SGD([copied.view], lr=0.5).step()
    copied.move_back()
    assert parameter.tolist() == [1 + 1.5j, 3 - 1.5j]

"""Frozen weights in host memory (devices.offload_frozen) change no bit: of losses, trained weights,
evaluations and samples, under every strategy that has them, through stops and resumes.

CPU ranks take the same way as a GPU, with copies from one part of host memory to another.
"""

import copy
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from frozen import INPUTS, Layer, Net, Stage
from torch import nn
from torch.utils.checkpoint import checkpoint

from batch_runs import Alone
from samecurve.checkpoint.format import load
from samecurve.core.planning.planner import plan
from samecurve.features.offload_frozen.block_buffers import BlockBuffers
from samecurve.features.offload_frozen.offloaded_blocks import FrozenOffload, piece_length
from samecurve.features.offload_frozen.saved_weights import SavedWeights
from samecurve.features.recompute import Recompute
from samecurve.features.recompute.torch_hooks import recompute
from samecurve.observe import read_events
from samecurve.tasks import open_task
from samecurve.torch_engine.model.frozen_blocks import frozen_blocks
from samecurve.torch_engine.strategies import Strategy
from samecurve.worker.jobs.train_job import rehearse
from starts import start
from tiny import MACHINE, config_of
from worlds import Pool

FILE = Path(__file__).parent / "frozen.py"
CPU = torch.device("cpu")
STEPS = 4
Values = dict[str, Any]

# --- whole runs


def values_of(layout: str, share: float, **sections: Any) -> Values:
    strategy, _, count = layout.partition(":")
    train = {"steps": STEPS, "eval_every": 2, "sample_every": 2, "save_every": 2}
    return {
        "task": f"{FILE}:Adapted",
        "optimizer": {"lr": 3e-2},
        "schedule": {"decay": "constant"},
        **sections,
        "batch": {"samples": 10, **sections.get("batch", {})},
        "train": {**train, **sections.get("train", {})},
        "devices": {"use": f"cpu:{count}", "strategy": strategy, "preflight": 0}
        | ({"offload_frozen": share} if share else {}),
    }


def outcome(home: Path) -> Values:
    """What a run leaves, of which no bit may differ."""
    events = read_events(home / "journal.jsonl")
    last = max((home / "checkpoints").glob("step-*"))

    def each(kind: str, *names: str) -> list[list[Any]]:
        return [[event.values[name] for name in names] for event in events if event.kind == kind]

    return {
        "steps": each("step", "loss", "grad_norm"),
        "evaluated": each("evaluated", "loss"),
        "sampled": each("sampled", "texts"),
        "arrays": {name: array.tobytes() for name, array in load(last).arrays.items()},
    }


def trained(ranks: Any, home: Path, cache: Path, values: Values) -> Values:
    prepared = start(home, values, cache)
    ranks.run(prepared.plan.layout.world_size, rehearse, prepared.attempt.to_json())
    return outcome(home)


RUNS: dict[str, tuple[str, float, Values]] = {
    "dp, several rounds, blocks that run again": (
        "dp:2",
        1.0,
        {"train": {"recompute": "block", "ema": 0.5}, "batch": {"per_device": 2}},
    ),
}
MORE_RUNS: dict[str, tuple[str, float, Values]] = {
    "half of the blocks, saved with the rest, products kept": (
        "single:1",
        0.5,
        {"task": f"{FILE}:Kept", "train": {"precision": "f64", "recompute": "selective"}},
    ),
    "products kept": ("dp:2", 1.0, {"train": {"recompute": "selective"}}),
    "bf16": ("single:1", 1.0, {"train": {"precision": "bf16"}}),
    "exact": ("dp:2", 1.0, {"train": {"exact": True, "hash_every": 1}}),
    "frozen by name": (
        "dp:2",
        1.0,
        {"task": f"{FILE}:Trained", "optimizer": {"groups": [{"match": "*base*", "freeze": True}]}},
    ),
}


@pytest.mark.parametrize(
    "name", [*RUNS, *(pytest.param(name, marks=pytest.mark.long) for name in MORE_RUNS)]
)
def test_no_bit_of_a_run_changes(name: str, tmp_path: Path, cache: Path) -> None:
    layout, share, sections = {**RUNS, **MORE_RUNS}[name]
    plain = trained(Alone(), tmp_path / "plain", cache, values_of(layout, 0, **sections))
    moved = trained(Alone(), tmp_path / "moved", cache, values_of(layout, share, **sections))
    assert moved == plain
    assert len(plain["steps"]) == STEPS
    assert plain["sampled"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "first", "then"),
    [
        ("none", 1.0, 0.4),
        pytest.param("block", 1.0, 0.0, marks=pytest.mark.long),
        pytest.param("block", 0.0, 1.0, marks=pytest.mark.long),
    ],
)
def test_a_run_goes_on_with_another_share(
    how: str, first: float, then: float, *, pool: Pool, tmp_path: Path, cache: Path
) -> None:
    """Two ranks under ddp, stopped half way."""
    train = {"recompute": how, "ema": 0.9}
    plain = trained(pool, tmp_path / "plain", cache, values_of("ddp:2", 0, train=train))
    run = tmp_path / "run"
    trained(pool, run, cache, values_of("ddp:2", first, train={**train, "steps": 2}))
    moved = trained(pool, run, cache, values_of("ddp:2", then, train=train))
    assert moved["arrays"] == plain["arrays"]
    assert moved["steps"] == plain["steps"]


def test_the_plan_counts_what_the_engine_moves() -> None:
    """Blocks, bytes and buffers, but for the gaps between arrays."""
    config = config_of(values_of("single:1", 0.5))
    facts = open_task(config, "").facts()
    planned = plan(config, MACHINE, facts)
    offload = offloaded(Net(), 0.5)
    buffers = offload.buffers[0]
    (term,) = (term for term in planned.memory if term.name == "buffers")
    held = sum(len(buffer.bytes) for buffer in buffers.all)
    assert term.bytes <= held <= term.bytes + 512 * 2 * 9
    assert (
        f"{len(buffers.sources)} of {len(facts.model.frozen_block_params)} blocks"
        in (planned.reasons["offload"])
    )


# --- one model


def offloaded(
    net: nn.Module, share: float = 1.0, how: Recompute = "none", device: torch.device = CPU
) -> FrozenOffload:
    """Move the model's frozen weights to host memory, and the rest to its device."""
    offload = FrozenOffload(share)
    offload.add(net)
    recompute(net, how)
    strategy: Any = Strategy(None, None, [device])  # type: ignore[arg-type]  # not read here
    keep = offload.set_aside(lambda _part: None, pinned=device.type == "cuda")
    strategy.distribute([net], keep)
    offload.put_back(strategy, [device])
    return offload


def stepped(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The result of a forward pass, and the gradients of a backward pass."""
    net.zero_grad()
    torch.manual_seed(5)  # of dropout
    result = net(x)
    torch.autograd.backward(result.square().sum())
    return [result.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]


def penalized(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of a loss that has a gradient in it."""
    net.eval().zero_grad()
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    torch.autograd.backward(slope.square().sum())
    return [p.grad for p in net.parameters() if p.grad is not None]


def twins(kind: Callable[[], nn.Module] = Net, **how: Any) -> tuple[nn.Module, nn.Module]:
    """Two models alike, of which the second one is offloaded."""
    torch.manual_seed(1)
    plain = kind()
    moved = copy.deepcopy(plain)
    recompute(plain, how.get("how", "none"))
    offloaded(moved, **how)
    return plain, moved


def is_same(
    plain: nn.Module, moved: nn.Module, run: Callable[..., Sequence[torch.Tensor]] = stepped
) -> bool:
    """Whether three steps of both have the same bits; the order is known from the second on."""
    x = torch.randn(7, INPUTS)
    pairs = [(run(plain, x), run(moved, x)) for _ in range(3)]
    return all(len(one) == len(other) and all(map(torch.equal, one, other)) for one, other in pairs)


class Checkpointed(Net):
    """It runs several blocks again by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def both(x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.down[1](self.down[0](x))
            return result

        x = checkpoint(both, self.inlet(x), use_reentrant=False)
        result: torch.Tensor = self.outlet(self.up[0](self.middle(x)))
        return result


class Tied(Net):
    """Weights that two blocks share, and a block that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        layers: Any = self.down[1]
        layers.layers[0].gate.weight = layers.layers[2].gate.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up[0](self.up[0](self.down[1](self.inlet(x))))
        result: torch.Tensor = self.outlet(x)
        return result


@pytest.mark.parametrize("how", ["none", "block", "selective"])
def test_no_bit_of_a_step_changes(how: Recompute) -> None:
    for share in (1.0, 0.5, 0.1):
        assert is_same(*twins(share=share, how=how))


def test_models_that_ask_in_their_own_way() -> None:
    assert is_same(*twins(Checkpointed))
    assert is_same(*twins(Tied, how="block"))
    assert is_same(*twins(), run=penalized)


def test_faults_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept weight that is read from whatever the buffer holds now; one that is no copy where
    the next kept tensor runs other blocks again.
    """
    monkeypatch.setattr(
        SavedWeights,
        "_again",
        lambda self, kept, *, is_copied: kept.within(self._buffers.all[is_copied]),
    )
    assert not is_same(*twins())
    monkeypatch.setattr(
        SavedWeights,
        "_again",
        lambda self, kept, *, is_copied: kept.within(self._buffers.need(self._block)),  # noqa: ARG005 - as it is called
    )
    assert is_same(*twins())
    assert not is_same(*twins(how="block"))


def test_a_block_is_read_once_its_copy_has_been_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a copy ends late: what is read before it was waited for is no number."""

    def start(_self: BlockBuffers, source: torch.Tensor, target: torch.Tensor) -> Any:
        target.fill_(0xFF)
        return lambda: target.copy_(source)

    monkeypatch.setattr(BlockBuffers, "_start", start)
    monkeypatch.setattr(BlockBuffers, "_await", lambda _self, copied: copied())
    for how in ("none", "block"):
        assert is_same(*twins(how=how))
    monkeypatch.setattr(BlockBuffers, "_await", lambda _self, _copied: None)
    assert not is_same(*twins())


def test_values_in_host_memory_change_only_after_copies_ahead_have_read_them() -> None:
    """As the split check does, which moves weights: forget() waits for the stream of copies."""
    buffers = BlockBuffers([torch.zeros(8, dtype=torch.uint8) for _ in range(2)], CPU)
    stream = Mock()
    buffers._stream = stream
    buffers.forget()
    stream.synchronize.assert_called_once_with()


@pytest.mark.parametrize(("how", "passes"), [("none", 2), ("block", 3)])
def test_blocks_are_copied_ahead_in_the_order_of_the_step_before(
    how: Recompute, passes: int
) -> None:
    """A stage's layers are copied once more where the stage runs again; two are always there."""
    net = Net()
    (buffers,) = offloaded(net, how=how).buffers
    blocks = len(buffers.sources)
    assert blocks == 2 + 3 + 2 + 1 + 2
    for _ in range(2):
        stepped(net, torch.ones(3, INPUTS))
    buffers.waited = copied = 0
    copied = buffers.copied
    stepped(net, torch.ones(3, INPUTS))
    assert buffers.waited == 0
    times = (buffers.copied - copied) / len(buffers.sources[0])
    assert 2 * (blocks - 2) <= times <= passes * blocks


def test_blocks_are_as_fine_as_what_holds_nearly_all_of_them() -> None:
    """Layers inside of stages, but for a stage of one; not the parts of a layer, which has weights
    beside them.
    """
    blocks = frozen_blocks(Net())
    assert [type(block.module) for block in blocks] == [*[Layer] * 7, Stage, Layer, Layer]
    net = Net().requires_grad_(True)
    assert not frozen_blocks(net)


@pytest.mark.parametrize(("size", "count"), [(416 << 20, 32), (98 << 20, 50), (1, 1), (512, 7)])
def test_little_of_the_pieces_of_host_memory_stays_empty(size: int, count: int) -> None:
    rest, pieces = size * count, []
    while rest > 0:
        length = piece_length(rest, size)
        assert length >= size
        assert length.bit_count() == 1
        pieces.append(length)
        rest -= length // size * size
    assert sum(pieces) <= 1.2 * size * count


def test_weights_lie_in_host_memory_between_calls_and_in_their_modules() -> None:
    plain, net = twins()
    names = [name for name, _ in plain.named_parameters()]
    stepped(net, torch.ones(3, INPUTS))
    assert [name for name, _ in net.named_parameters()] == names
    for one, other in zip(plain.parameters(), net.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.requires_grad == other.requires_grad


class Returning(nn.Sequential):
    """A block that returns its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = [layer(x) for layer in self]
        return torch.stack(kept)


class Weight(nn.Linear):
    def forward(self, _x: torch.Tensor) -> torch.Tensor:
        return self.weight


class Changing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


class InPlace(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sigmoid(super().forward(x) + self.shift)
        return x.add_(1) * 2

    shift = nn.Parameter(torch.ones(6))


def test_what_a_block_returns_is_its_own() -> None:
    net = Returning(*[Weight(6, 6).requires_grad_(False) for _ in range(5)])
    x, expected = torch.ones(1, 6), copy.deepcopy(net)(torch.ones(1, 6))
    offloaded(net)
    assert torch.equal(net(x), expected)


def test_what_would_be_lost_is_refused() -> None:
    changing = nn.Sequential(*[Changing(6, 6).requires_grad_(False) for _ in range(3)])
    offloaded(changing)
    with pytest.raises(RuntimeError, match="changes frozen weights"):
        changing(torch.ones(1, 6))
    in_place = nn.Sequential(*[InPlace(6, 6).requires_grad_(False) for _ in range(3)])
    offloaded(in_place)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(in_place(torch.ones(1, 6)).sum())


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["none", "block"])
def test_copies_on_a_stream_of_their_own_change_no_bit(how: Recompute) -> None:
    """Weights of some MB, so that copies and products overlap; a device holds two blocks."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.ones(1, 2048))
            self.layers = nn.ModuleList(
                [nn.Linear(2048, 2048).requires_grad_(False) for _ in range(24)]
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * self.first
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            return x

    device, held = torch.device("cuda:0"), []
    gc.collect()  # models of other tests refer to themselves: their buffers would go meanwhile
    torch.manual_seed(1)
    plain = Wide()
    moved = copy.deepcopy(plain)
    recompute(plain.to(device), how)
    (buffers,) = offloaded(moved, how=how, device=device).buffers
    x = torch.randn(512, 2048, device=device)
    results = []
    for net in (plain, moved):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results.append([stepped(net, x) for _ in range(5)])
        held.append(torch.cuda.max_memory_allocated() - before)
    assert all(
        torch.equal(one, other)
        for ours, theirs in zip(*results, strict=True)
        for one, other in zip(ours, theirs, strict=True)
    )
    assert sum(len(buffer.bytes) for buffer in buffers.all) < 3 * 2048 * 2049 * 4
    assert all(values.is_pinned() for values in buffers.sources)
    assert held[1] <= 1.1 * held[0]

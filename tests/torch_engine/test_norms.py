import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.utils.checkpoint import checkpoint

from samecurve.errors import UserError
from samecurve.features.norm_sync.batch_norm import synchronise_batch_norms
from samecurve.torch_engine.model import coupling_layers
from samecurve.torch_engine.process_group import Comm, Peers
from samecurve.torch_engine.randomness import MicroBatchContext
from samecurve.torch_engine.strategies.threads import ThreadTeam
from worlds import Pool

CPU = torch.device("cpu")

Result = dict[str, NDArray[np.float64]]
ROWS = 10


def network() -> nn.Sequential:
    """Every kind: with and without affine and running values, momentum and cumulative average, two
    and four dimensions.
    """
    generator = torch.Generator().manual_seed(0)  # its own: threads share torch's
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.Tanh(),
        nn.Conv2d(6, 4, 3),
        nn.BatchNorm2d(4, momentum=None, affine=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.BatchNorm1d(16, track_running_stats=False),
        nn.Linear(16, 5),
        nn.SyncBatchNorm(5, eps=0.1, momentum=0.3),
        nn.Tanh(),
    ).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(
                0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            )
    return net


def plain() -> nn.Sequential:
    """The same for one device by torch alone, whose SyncBatchNorm needs a GPU."""
    net = network()
    whole = nn.BatchNorm1d(5, eps=0.1, momentum=0.3).double()
    whole.load_state_dict(net[9].state_dict())
    net[9] = whole
    return net


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return 5 + torch.randn(2, ROWS, 3, 6, 6, generator=generator, dtype=torch.float64), torch.randn(
        2, ROWS, 5, generator=generator, dtype=torch.float64
    )


def trained(
    net: nn.Module,
    context: MicroBatchContext,
    index: int,
    counts: Sequence[int],
    device: str = "cpu",
) -> Result:
    """Two passes over this peer's rows, gradients added up.

    Count 0: a dummy, ten times as large as a real row, whose loss is dropped.
    """
    result: Result = {}
    first, count = sum(counts[:index]), counts[index]
    for turn, (whole, target) in enumerate(zip(*data(), strict=True)):
        own = whole[first : first + count] if count else 10 * whole[:1]
        own = own.clone().requires_grad_()
        context.begin(None, real=bool(count))
        output = net(own.to(device)).cpu()
        loss = (output.square() * (target[first : first + count] if count else 0.0)).sum()
        torch.autograd.backward(loss)
        assert own.grad is not None
        result |= {
            f"output {turn}": output.detach().numpy()[:count],
            f"input {turn}": own.grad.numpy()[:count],
        }
        assert count or not own.grad.any()
    result |= {
        f"gradient {name}": parameter.grad.cpu().numpy()
        for name, parameter in net.named_parameters()
        if parameter.grad is not None
    }
    return result | {
        f"buffer {name}": buffer.double().cpu().numpy() for name, buffer in net.named_buffers()
    }


def synchronised(peers: Peers, counts: Sequence[int], device: str = "cpu") -> Result:
    net, context = network().to(device), MicroBatchContext(torch.device(device))
    synchronise_batch_norms(net, peers, context)
    return trained(net, context, peers.rank, counts, device)


def on_rank(
    _rank: int, group: dist.ProcessGroup, counts: Sequence[int], device: str = "cpu"
) -> Result:
    return synchronised(Comm(group), counts, device)


def assert_whole(found: Sequence[Result]) -> None:
    """What the peers found together is what one torch model finds on the whole batch; running
    values are bitwise equal on all.
    """
    expected = trained(plain(), MicroBatchContext(CPU), 0, (ROWS,))
    for name, value in expected.items():
        parts = [one[name] for one in found]
        kind = name.split()[0]
        assert kind != "buffer" or all(np.array_equal(part, parts[0]) for part in parts)
        mine = (
            np.concatenate(parts)
            if kind in ("output", "input")
            else sum(parts)
            if kind == "gradient"
            else parts[0]
        )
        np.testing.assert_allclose(
            mine, value, rtol=1e-12, atol=1e-12 * max(1, np.abs(value).max()), err_msg=name
        )


@pytest.mark.parametrize("counts", [(10,), (1, 9), (4, 3, 3), (4, 0, 6), (0, 3, 1, 6)])
def test_ranks_normalise_as_one_device_does(pool: Pool, counts: tuple[int, ...]) -> None:
    """Unequal shares, a rank with one row, ranks with a dummy."""
    assert_whole(pool.run(len(counts), on_rank, counts))


@pytest.mark.gpu
def test_ranks_on_a_gpu_normalise_as_one_cpu_does(pool: Pool) -> None:
    """Three ranks share it, over Gloo, which lacks all_gather there."""
    assert_whole(pool.run(3, on_rank, (4, 0, 6), "cuda:0"))


@pytest.mark.parametrize("counts", [(10,), (7, 3), (4, 3, 3), (0, 1, 9)])
def test_threads_normalise_as_one_device_does(counts: tuple[int, ...]) -> None:
    team = ThreadTeam(len(counts))
    try:
        assert_whole(team.run([partial(synchronised, peer, counts) for peer in team.peers]))
    finally:
        team.close()


def normalised(
    peers: Peers, inputs: Sequence[torch.Tensor], real: Sequence[bool] = (True, True)
) -> tuple[torch.Tensor, torch.Tensor, nn.BatchNorm1d]:
    """(output, gradient of its sum of cubes) of a fresh norm on this peer's input."""
    norm, context = nn.BatchNorm1d(inputs[0].shape[1]), MicroBatchContext(CPU)
    synchronise_batch_norms(norm, peers, context)
    context.begin(None, real=real[peers.rank])
    own = inputs[peers.rank].clone().requires_grad_()
    output = norm(own)
    torch.autograd.backward(output.float().pow(3).sum())
    assert own.grad is not None
    return output.detach(), own.grad, norm


def on_two(
    inputs: Sequence[torch.Tensor], real: Sequence[bool] = (True, True)
) -> list[tuple[torch.Tensor, torch.Tensor, nn.BatchNorm1d]]:
    team = ThreadTeam(2)
    try:
        return team.run([partial(normalised, peer, inputs, real) for peer in team.peers])
    finally:
        team.close()


def test_a_dummy_of_infinities_reaches_nobody() -> None:
    whole = torch.randn(6, 3)
    (output, gradient, norm), (_, nothing, other) = on_two(
        [whole, torch.full((2, 3), torch.inf)], (True, False)
    )
    alone, alone_gradient, reference = normalised(Comm(), [whole])
    assert torch.equal(output, alone)
    assert torch.equal(gradient, alone_gradient)
    assert not nothing.any()
    assert all(
        torch.equal(a, b) and torch.equal(a, c)
        for a, b, c in zip(norm.buffers(), other.buffers(), reference.buffers(), strict=True)
    )
    assert all(p.grad is not None and not p.grad.any() for p in other.parameters())


def test_a_mean_far_from_zero_costs_no_digits() -> None:
    """Mean 10000, deviation 1, in float32; half the batch lies 20 deviations off.

    A sum of squares would lose the variance altogether.
    """
    whole = (
        1e4
        + torch.randn(2000, 2, generator=torch.Generator().manual_seed(0))
        + torch.tensor([0.0, 20.0]).repeat_interleave(1000)[:, None]
    )
    (first, _, norm), (second, _, _) = on_two([whole[:700], whole[700:]])
    exact = nn.BatchNorm1d(2).double()
    torch.testing.assert_close(
        torch.cat([first, second]), exact(whole.double()).float(), atol=2e-4, rtol=0
    )
    torch.testing.assert_close(norm.running_var, exact.running_var.float(), rtol=1e-6, atol=0)  # type: ignore[union-attr]


def test_narrow_inputs_keep_their_type_and_wide_statistics() -> None:
    """bfloat16 from autocast, float32 weights: as torch's own, whose output is bfloat16 too."""
    whole = (3 + torch.randn(64, 4, generator=torch.Generator().manual_seed(0))).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        expected = nn.BatchNorm1d(4)(whole)
    (first, gradient, norm), (second, _, _) = on_two([whole[:20], whole[20:]])
    assert first.dtype == gradient.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(torch.cat([first, second]), expected, atol=0.02, rtol=0.01)
    torch.testing.assert_close(norm.running_mean, 0.1 * whole.float().mean(0))


def test_one_value_alone_has_no_variance_and_makes_no_nan() -> None:
    output, gradient, norm = normalised(Comm(), [torch.full((1, 2), 3.0)], (True,))
    assert not output.any()
    assert not gradient.any()
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.running_mean.tolist() == pytest.approx([0.3, 0.3])
    assert norm.running_var.tolist() == [1, 1]


def test_an_overflow_does_not_stay_in_the_running_values() -> None:
    """The step itself is lost, in that channel."""
    whole = torch.randn(6, 2)
    whole[3, 1] = torch.inf
    (output, _, norm), (_, _, other) = on_two([whole[:4], whole[4:]])
    assert output.isfinite().all(0).tolist() == [True, False]
    for running in (norm.running_mean, norm.running_var):
        assert running is not None
        assert running.isfinite().all()
    assert norm.running_mean is not None
    assert norm.running_mean.tolist() == pytest.approx([0.1 * whole[:, 0].mean().item(), 0])
    assert all(torch.equal(a, b) for a, b in zip(norm.buffers(), other.buffers(), strict=True))


def test_the_model_stays_what_it_was() -> None:
    """Objects, names, kinds; evaluation by torch's own code; a block that is computed again counts
    once.
    """
    net, reference = plain(), plain()
    before, names = dict(net.named_parameters()) | dict(net.named_buffers()), list(net.state_dict())
    synchronise_batch_norms(net, Comm(), MicroBatchContext(CPU))
    assert list(net.state_dict()) == names
    assert all(
        value is before[name] for name, value in (*net.named_parameters(), *net.named_buffers())
    )
    assert isinstance(net[1], nn.BatchNorm2d)
    whole = data()[0][0]
    torch.autograd.backward(checkpoint(net, whole, use_reentrant=False).sum())
    reference(whole)
    for mine, theirs in zip(net.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    net = copy.deepcopy(net)
    reference.load_state_dict(net.state_dict())
    assert torch.equal(net.eval()(whole), reference.eval()(whole))


def test_what_couples_is_named_and_what_cannot_be_honoured_is_refused() -> None:
    class Own(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(super().forward(x))

    model = nn.ModuleDict(
        {
            "a": nn.BatchNorm2d(2),
            "b": nn.Sequential(nn.LayerNorm(2), nn.SyncBatchNorm(2)),
            "c": nn.LazyBatchNorm1d(),
            "d": nn.InstanceNorm2d(2),
        }
    )
    assert coupling_layers(model) == ("BatchNorm2d a", "SyncBatchNorm b.1", "LazyBatchNorm1d c")
    for found, words in (
        (model, "LazyBatchNorm1d c has no shape yet"),
        (nn.Sequential(Own(2)), "Own 0 has a forward pass of its own"),
    ):
        with pytest.raises(UserError, match=words):
            synchronise_batch_norms(found, Comm(), MicroBatchContext(CPU))
    norm: Any = nn.BatchNorm1d(2)
    synchronise_batch_norms(norm, Comm(), MicroBatchContext(CPU))
    with pytest.raises(UserError, match="complex"):
        norm(torch.ones(3, 2, dtype=torch.complex64))

"""Checks of operators: what CUDA runs as one kernel, what torch has for CUDA alone, and what has no
deterministic kernel there. emulator_checks.py runs them too.
"""

import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

# isort: split
import emulated_cuda_native as native  # after torch, which brings it

from samecurve.core.nondeterministic import OPERATIONS

DEVICE = torch.device("cuda:0")
sys.path.append(str(Path(__file__).parents[1]))
with torch.device(DEVICE):
    from nondeterministic_calls import CALLS, HARMLESS


def launches(call: Callable[[], torch.Tensor], *, backward: bool = True) -> dict[str, int]:
    """The operations that a call launches, and its backward pass: how often each."""
    native.count(True, False)
    result = call()
    if backward:
        result.sum().backward()
    counted = native.counts()["launches"]
    native.count(False)
    names = {
        name.removeprefix("aten::").partition(".")[0]: count
        for name, count in counted.items()
        if name.startswith("aten::")  # and not a copy
    }
    return {name: count for name, count in names.items() if count and name not in {"sum", "fill_"}}


def check_what_cuda_runs_as_one_kernel_is_one_launch() -> None:
    """Where the CPU's build of torch has no kernel for all devices, it splits these up."""
    image = torch.randn(2, 4, 3, 3, device=DEVICE, requires_grad=True)
    weight = torch.ones(3, device=DEVICE, requires_grad=True)
    scale = torch.ones(4, device=DEVICE, requires_grad=True)
    for call, names in (
        (lambda: F.layer_norm(image, (3,), weight), "native_layer_norm"),
        (lambda: F.rms_norm(image, (3,), weight), "_fused_rms_norm"),
        (lambda: F.group_norm(image, 2, scale), "native_group_norm"),
        (lambda: F.silu(image), "silu"),
        (lambda: F.mish(image), "mish"),
        (lambda: F.gelu(image), "gelu"),
        (lambda: F.dropout(image, 0.5), "native_dropout"),
    ):
        for leaf in (image, weight, scale):
            leaf.grad = None  # else a gradient is added to it
        assert launches(call) == {names: 1, f"{names}_backward": 1}, names
    whole, parts = image.detach().flatten(), [torch.empty(36, device=DEVICE) for _ in range(2)]

    def split_up() -> torch.Tensor:
        torch.split_with_sizes_copy(whole, [36, 36], out=parts)
        return parts[0]

    split = launches(split_up, backward=False)
    assert split == {"split_with_sizes_copy": 1}
    joined = launches(lambda: torch._chunk_cat(parts, 0, 2), backward=False)
    assert joined == {"_chunk_cat": 1}
    assert torch.equal(torch.cat(parts), whole)


def gradients(device: str, call: Callable[[list[torch.Tensor]], torch.Tensor]) -> list[list[float]]:
    """The result of a call on the same eight tensors, and the gradient of each."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(6, 6, generator=generator, dtype=torch.float64) for _ in range(8)]
    tensors = [tensor.to(device).requires_grad_() for tensor in made]
    result = call(tensors)
    result.mul(torch.linspace(0, 1, result.numel(), dtype=torch.float64).view_as(result).to(device))
    result.square().sum().backward()
    grads = [tensor.grad for tensor in tensors if tensor.grad is not None]
    return [tensor.detach().flatten().tolist() for tensor in (result, *grads)]


def check_recurrent_layers_equal_the_cpus() -> None:
    """The cells of LSTM and GRU have one kernel on CUDA, and none of this kind on CPUs."""

    def cell(kind: Any) -> Callable[[list[torch.Tensor]], torch.Tensor]:
        def call(tensors: list[torch.Tensor]) -> torch.Tensor:
            x, state, other = tensors[:3]
            gates = {nn.LSTMCell: 4, nn.GRUCell: 3}[kind]
            weights = [torch.cat(tensors[3:4] * gates), torch.cat(tensors[4:5] * gates)]
            biases = [torch.cat([row[0] for row in tensors[5:6] * gates])] * 2
            if kind is nn.LSTMCell:
                hidden, memory = torch.lstm_cell(x, (state, other), *weights, *biases)
                return hidden + memory
            result: torch.Tensor = torch.gru_cell(x, state, *weights, *biases)
            return result

        return call

    for kind in (nn.LSTMCell, nn.GRUCell):
        ours, cpus = gradients("cuda", cell(kind)), gradients("cpu", cell(kind))
        assert len(ours) == len(cpus) >= 6
        for one, other in zip(ours, cpus, strict=True):
            assert one == pytest.approx(other, rel=1e-10, abs=1e-12)
    layer = nn.LSTM(4, 4, num_layers=2, device=DEVICE)
    layer(torch.randn(3, 2, 4, device=DEVICE))[0].sum().backward()
    assert layer.weight_ih_l0.grad is not None
    assert nn.GRU(4, 4, device=DEVICE, dtype=torch.bfloat16)(
        torch.randn(3, 4, device=DEVICE, dtype=torch.bfloat16)
    )[0].shape == (3, 4)


def check_rms_norm_equals_the_cpus() -> None:
    def call(tensors: list[torch.Tensor]) -> torch.Tensor:
        return F.rms_norm(tensors[0], (6,), tensors[1][0]) + F.rms_norm(tensors[2], (6, 6))

    for one, other in zip(gradients("cuda", call), gradients("cpu", call), strict=True):
        assert one == pytest.approx(other, rel=1e-10, abs=1e-12)


def check_sync_batch_norm_equals_the_batch_norm_of_all_samples() -> None:
    """Two ranks of two samples each, by the operators that torch has for CUDA alone."""
    whole = torch.randn(4, 3, 5, dtype=torch.float64, device=DEVICE, requires_grad=True)
    layer = nn.BatchNorm1d(3, dtype=torch.float64, device=DEVICE)
    layer(whole).square().sum().backward()
    again = nn.BatchNorm1d(3, dtype=torch.float64, device=DEVICE)
    parts = whole.detach().chunk(2)
    counts = torch.full((2,), 10.0, dtype=torch.float64, device=DEVICE)
    means, inverses = zip(*(torch.batch_norm_stats(part, again.eps) for part in parts), strict=True)
    mean, inverse = torch.batch_norm_gather_stats_with_counts(
        parts[0],
        torch.stack(means),
        torch.stack(inverses),
        again.running_mean,
        again.running_var,
        0.1,
        again.eps,
        counts,
    )
    torch.testing.assert_close(again.running_var, layer.running_var)
    torch.testing.assert_close(again.running_mean, layer.running_mean)
    given = (again.weight, again.bias, mean, inverse)
    outs = [torch.batch_norm_elemt(part, *given, again.eps) for part in parts]
    reduced = [
        torch.batch_norm_backward_reduce(
            2 * out, part, mean, inverse, again.weight, True, True, True
        )
        for out, part in zip(outs, parts, strict=True)
    ]
    sums, moments, of_weight, of_bias = (sum(each) for each in zip(*reduced, strict=True))
    torch.testing.assert_close(of_weight, layer.weight.grad)
    torch.testing.assert_close(of_bias, layer.bias.grad)
    of_inputs = [
        torch.batch_norm_backward_elemt(
            2 * out, part, mean, inverse, again.weight, sums, moments, counts.int()
        )
        for out, part in zip(outs, parts, strict=True)
    ]
    torch.testing.assert_close(torch.cat(of_inputs), whole.grad)


# ---- determinism


def check_operations_without_a_deterministic_kernel_raise() -> None:
    """The operations of samecurve's list, each with torch's text, and none beside them."""
    torch.use_deterministic_algorithms(True)
    try:
        for row in OPERATIONS:
            alert = re.escape(row.alert)
            with (
                torch.device(DEVICE),
                pytest.raises(RuntimeError, match=rf"^{alert}_? does not have a deterministic"),
            ):
                with_backward(CALLS[row.words])
        for call in HARMLESS.values():
            with torch.device(DEVICE):
                with_backward(call)
        torch.use_deterministic_algorithms(True, warn_only=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.ones(2, 3, device=DEVICE).median(-1)
        assert "median CUDA with indices output" in str(caught[0].message)
    finally:
        torch.use_deterministic_algorithms(False)


def check_operations_without_a_deterministic_kernel_are_found_in_any_mode() -> None:
    """Those of a backward pass have no line, and are told apart by their names."""

    def found() -> set[str]:
        rows = [row for row in native.reports() if row["kind"] == "not_deterministic"]
        return {row["text"].partition(" has no ")[0] for row in rows}

    before = found()
    with torch.device(DEVICE):
        for call in HARMLESS.values():
            with_backward(call)
        assert found() == before
        for row in OPERATIONS:
            with_backward(CALLS[row.words])
    assert {row.words for row in OPERATIONS} - found() <= {"take"}  # whose finding names put_


def with_backward(call: Callable[[], torch.Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = call()
    if result.requires_grad:
        result.sum().backward()

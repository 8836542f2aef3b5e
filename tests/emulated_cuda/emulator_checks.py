"""Checks that run inside a process with two emulated H100 of 64 MiB; test_emulator.py starts it.

Each check is a function: it returns where its promise holds and raises where it does not. Run by
hand: `python tests/emulated_cuda/run.py tests/emulated_cuda/emulator_checks.py [check ...]`.
"""

import gc
import io
import json
import sys
import traceback
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

# isort: split
import emulated_cuda_native as native  # after torch, which brings it
import operator_checks

DEVICE = torch.device("cuda:0")
MIB = 1 << 20


def findings(kind: str, line_of: str) -> list[dict[str, Any]]:
    """Findings of a kind whose lines, of this side or of the other, name a check."""
    return [
        row
        for row in native.reports()
        if row["kind"] == kind and any(line_of in line for line in row["here"] + row["there"])
    ]


def one_finding(kind: str, check: str) -> dict[str, Any]:
    [finding] = findings(kind, check)
    assert any(f"emulator_checks.py:{line}" in finding["here"][0] for line in range(1, 999))
    return finding


def side_stream() -> Any:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream


# ---- devices


def check_devices_are_those_of_the_environment() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 2
    assert torch.cuda.get_device_name(1) == "NVIDIA H100 80GB HBM3"
    assert torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.get_device_properties(0).total_memory == 64 * MIB
    assert torch.version.cuda
    assert torch.version.hip is None
    with torch.cuda.device(1):
        assert torch.empty(1, device="cuda").device == torch.device("cuda:1")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.empty(1, device="cuda:2")


def check_a_step_equals_the_cpus() -> None:
    def losses(device: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
        model = model.double().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        inputs, targets = torch.randn(6, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0, 1])
        seen = []
        for _ in range(3):
            loss = F.cross_entropy(model(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            seen.append(loss.item())
        return seen

    assert losses("cuda") == pytest.approx(losses("cpu"), rel=1e-12)


def check_attention_is_fused_and_equals_the_math() -> None:
    query = torch.randn(2, 4, 8, 16, device=DEVICE, requires_grad=True)
    fused = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert "EfficientAttention" in str(fused.grad_fn)
    host = query.detach().cpu().requires_grad_()
    plain = F.scaled_dot_product_attention(host, host, host, is_causal=True)
    fused.sum().backward()
    plain.sum().backward()
    torch.testing.assert_close(fused.cpu(), plain)
    torch.testing.assert_close(query.grad.cpu(), host.grad)  # type: ignore[union-attr]
    half = query.detach().bfloat16()
    assert "Flash" in str(F.scaled_dot_product_attention(half.requires_grad_(), half, half).grad_fn)


def check_recurrent_cells_equal_the_cpus() -> None:
    for kind in (nn.LSTM, nn.GRU):
        net, x = (
            kind(4, 4, num_layers=2, bidirectional=True).double(),
            torch.randn(3, 2, 4).double(),
        )
        found = []
        for device in ("cpu", "cuda"):
            with torch.backends.cudnn.flags(enabled=False):  # else torch warns that it is not here
                loss = net.to(device)(x.to(device))[0].square().sum()
            gradients = torch.autograd.grad(loss, list(net.parameters()))
            found.append([gradient.cpu() for gradient in gradients])
        torch.testing.assert_close(*found)


def check_a_ctc_loss_takes_lengths_of_the_host() -> None:
    scores, words = torch.randn(8, 2, 5), torch.ones(2, 3, dtype=torch.long)
    lengths = torch.tensor([8, 8]), torch.tensor([3, 2])
    on_cpu = F.ctc_loss(scores.log_softmax(-1), words, *lengths)
    on_gpu = F.ctc_loss(scores.cuda().log_softmax(-1), words.cuda(), *lengths)
    torch.testing.assert_close(on_gpu.cpu(), on_cpu)


def check_autocast_conjugates_and_integers() -> None:
    layer = nn.Linear(4, 4, device=DEVICE)
    with torch.autocast("cuda", torch.bfloat16):
        assert layer(torch.randn(2, 4, device=DEVICE)).dtype is torch.bfloat16
    numbers = torch.tensor([1 + 2j, 3 - 1j], device=DEVICE)
    assert (numbers.conj() * 1).cpu().tolist() == [1 - 2j, 3 + 1j]
    half = torch.randn(2, 3, device=DEVICE, dtype=torch.float16, requires_grad=True)
    wide = F.softmax(half, -1, dtype=torch.float32)
    wide.sum().backward()
    assert wide.dtype is torch.float32
    assert torch.histc(torch.tensor([1, 2, 2], device=DEVICE), 3, 1, 3).tolist() == [1, 2, 0]


def check_copies_views_and_saves() -> None:
    grid = torch.arange(6.0, device=DEVICE).reshape(2, 3)
    assert grid.t()[1].tolist() == [1.0, 4.0]
    other = grid.to("cuda:1")
    assert other.device == torch.device("cuda:1")
    assert other.cpu().numpy().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert "device='cuda:0'" in repr(grid)
    file = io.BytesIO()
    torch.save({"grid": grid}, file)
    file.seek(0)
    assert torch.equal(torch.load(file)["grid"], grid)
    view = native.host_view(grid)
    view[0, 0] = 9
    assert grid[0, 0].item() == 9
    storage = grid.untyped_storage()
    storage.resize_(0)
    storage.resize_(24)
    assert grid.isnan().all(), "memory that is handed out again holds poison"


# ---- memory


def check_memory_is_counted_and_cached_as_on_cuda() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    base, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    small, large = torch.empty(1, device=DEVICE), torch.empty(3 * MIB, device=DEVICE)
    assert torch.cuda.memory_allocated() - base == 512 + 12 * MIB
    address = large.data_ptr()
    del large
    assert torch.cuda.memory_allocated() - base == 512
    assert torch.cuda.max_memory_allocated() - base == 512 + 12 * MIB
    assert torch.cuda.memory_reserved() - reserved >= 12 * MIB
    again = torch.empty(3 * MIB, device=DEVICE)
    assert again.data_ptr() == address, "the same stream gets the freed block at once"
    assert again[:5].isnan().all(), "memory is poisoned when it is handed out"
    del again, small
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == reserved
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] == base
    assert stats["num_alloc_retries"] == 0
    assert "Allocated memory" in torch.cuda.memory_summary()
    free, total = torch.cuda.mem_get_info()
    assert total == 64 * MIB
    assert free == total - reserved


def check_out_of_memory_has_torchs_text() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(100 * MIB, dtype=torch.uint8, device="cuda:1")
    text = str(caught.value)
    assert text.startswith("CUDA out of memory. Tried to allocate 100.00 MiB. GPU 1 has a total")
    assert "64.00 MiB of which" in text
    assert torch.cuda.memory_stats(1)["num_ooms"] == 1


def check_a_recorded_stream_delays_reuse() -> None:
    stream = side_stream()
    used = torch.zeros(2 * MIB, device=DEVICE)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        total = used.sum()
    used.record_stream(stream)
    address = used.data_ptr()
    del used
    fresh = torch.empty(2 * MIB, device=DEVICE)
    assert fresh.data_ptr() != address
    stream.synchronize()
    assert total.item() == 0
    assert torch.empty(2 * MIB, device=DEVICE).data_ptr() == address
    assert not findings("use_after_free", "check_a_recorded_stream_delays_reuse")


# ---- planted faults


def check_fault_missing_wait_stream() -> None:
    stream = side_stream()
    with torch.cuda.stream(stream):
        written = torch.ones(8, device=DEVICE) * 2
    read = written + 1
    assert read.isnan().all(), "a read without a wait must give a wrong number"
    finding = one_finding("race", "check_fault_missing_wait_stream")
    assert "check_fault_missing_wait_stream" in finding["there"][0]
    torch.cuda.current_stream().wait_stream(stream)
    assert (written + 1).tolist() == [3.0] * 8


def check_fault_overwritten_while_read() -> None:
    stream = side_stream()
    source = torch.ones(8, device=DEVICE)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        kept = source * 1
    source.fill_(5.0)
    assert source.isnan().all()
    one_finding("race", "check_fault_overwritten_while_read")
    torch.cuda.synchronize()
    assert kept.tolist() == [1.0] * 8


def check_fault_memory_freed_on_another_stream() -> None:
    stream = side_stream()
    used = torch.ones(300, device=DEVICE)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = used * 2
    del used
    torch.empty(300, device=DEVICE)
    torch.cuda.synchronize()
    assert result.isnan().all(), "the freed memory was another tensor's when it was read"
    one_finding("use_after_free", "check_fault_memory_freed_on_another_stream")


def check_fault_copy_to_the_host_not_awaited() -> None:
    target = torch.zeros(4, pin_memory=True)
    target.copy_(torch.ones(4, device=DEVICE), non_blocking=True)
    assert target.isnan().all(), "the copy arrives when the host waits, not before"
    finding = one_finding("late_copy", "check_fault_copy_to_the_host_not_awaited")
    assert finding["there"] != finding["here"]
    torch.cuda.synchronize()
    assert target.tolist() == [1.0] * 4


def check_neighbours_of_late_copies_stay_open_to_the_host() -> None:
    """Parts of one pinned tensor share pages; the host may use the part that no copy touches."""
    whole, ones = torch.zeros(4096, pin_memory=True), torch.ones(8, device=DEVICE)
    whole[:8].copy_(ones, non_blocking=True)
    ones.copy_(whole[16:24], non_blocking=True)
    whole[8:16].fill_(2.0)
    assert whole[2048:].sum() == 0
    torch.cuda.synchronize()
    assert whole[:16].tolist() == [1.0] * 8 + [2.0] * 8
    for kind in ("late_copy", "pinned_source"):
        assert not findings(kind, "check_neighbours_of_late_copies_stay_open_to_the_host")


def check_fault_pinned_buffer_reused_too_early() -> None:
    buffer = torch.ones(4, pin_memory=True)
    copied = torch.empty(4, device=DEVICE).copy_(buffer, non_blocking=True)
    buffer.fill_(2.0)
    doubled = copied * 2
    assert doubled.isnan().all()
    finding = one_finding("pinned_source", "check_fault_pinned_buffer_reused_too_early")
    assert finding["here"][0] != finding["there"][0], "the write, and the copy that it spoils"


def check_pinned_memory_comes_and_goes_in_order() -> None:
    """Offload: to the host, back to the device, and again, ordered by the stream alone."""
    parked, values = torch.empty(4, pin_memory=True), torch.full((4,), 3.0, device=DEVICE)
    for _ in range(2):
        parked.copy_(values, non_blocking=True)
        values = torch.empty(4, device=DEVICE).copy_(parked, non_blocking=True) + 1
    assert values.tolist() == [5.0] * 4
    assert not findings("pinned_source", "check_pinned_memory_comes_and_goes_in_order")


def check_fault_wrong_device() -> None:
    with pytest.raises(RuntimeError, match="found at least two devices, cuda:0 and cpu"):
        torch.ones(3, device=DEVICE) + torch.ones(3)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(3, 3, device=DEVICE) @ torch.ones(3, 3, device="cuda:1")
    one_finding("device", "check_fault_wrong_device")


def check_blocking_copies_on_a_side_stream_are_no_fault() -> None:
    """A model made on a side stream, as Fabric does for DDP."""
    with torch.cuda.stream(side_stream()):
        layer = nn.Linear(4, 4).to(DEVICE)
    assert not layer(torch.ones(1, 4, device=DEVICE)).isnan().any()
    assert not findings("race", "check_blocking_copies_on_a_side_stream_are_no_fault")


# ---- waits


def check_queries_answer_truthfully() -> None:
    event = torch.cuda.Event()
    torch.ones(4, device=DEVICE)
    event.record()
    assert [event.query() for _ in range(3)] == [False, False, True]
    event.record()
    event.synchronize()
    assert event.query()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    end.record()
    assert start.elapsed_time(end) >= 0


def check_host_syncs_are_counted_with_their_lines() -> None:
    values = torch.ones(4, device=DEVICE)
    native.count(True)
    values.sum().item()
    counts = native.counts()
    native.count(False)
    assert counts["by_sync"] == {"aten::_local_scalar_dense": 1}
    [line] = counts["sync_at"]
    assert "check_host_syncs_are_counted_with_their_lines" in line


def check_sync_debug_mode_objects() -> None:
    values = torch.ones(4, device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            values.sum().item()
        torch.cuda.set_sync_debug_mode("warn")
        with pytest.warns(UserWarning, match="called a synchronizing CUDA operation"):
            values.nonzero()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_launches_are_counted_as_cuda_launches() -> None:
    tensors = [torch.ones(10, device=DEVICE) for _ in range(150)]
    native.count(True)
    torch._foreach_mul_(tensors, 2.0)
    tensors[0].view(5, 2)
    counts = native.counts()
    native.count(False)
    assert counts["launches"]["aten::_foreach_mul_.Scalar"] == 2  # 110 tensors in one kernel
    assert counts["launches"]["aten::view."] == 0
    assert counts["bytes"]["aten::_foreach_mul_.Scalar"] == 150 * 10 * 4 * 2


# ---- randomness, refusals


def check_random_state_is_sixteen_bytes_and_repeats() -> None:
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    assert state.shape == (16,)
    first = torch.randn(5, device=DEVICE)
    second = torch.randn(5, device=DEVICE)
    assert not torch.equal(first, second)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.randn(5, device=DEVICE), first)
    generator = torch.Generator(DEVICE).manual_seed(7)
    assert torch.equal(torch.randn(5, device=DEVICE, generator=generator), first)
    generator.set_offset(4)
    assert torch.equal(torch.randn(5, device=DEVICE, generator=generator), second)


def check_graphs_are_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match="no CUDA graphs"):
        torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="no CUDA graphs"):
        torch.cuda.graph(None)  # type: ignore[arg-type]


def main(chosen: list[str]) -> None:
    """Run the checks, or those that are chosen, and print a JSON row for each."""
    checks = {**globals(), **vars(operator_checks)}
    for name in chosen or [name for name in checks if name.startswith("check_")]:
        try:
            checks[name]()
            error = ""
        except BaseException:  # the parent prints it
            error = traceback.format_exc()
        print(json.dumps({"check": name, "error": error}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

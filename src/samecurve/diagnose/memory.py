"""Explain an out-of-memory error: the sizes, and flags that keep the batch and need less memory."""

import re
import resource

from samecurve.core.planning.plan import Plan
from samecurve.errors import RunError
from samecurve.units import counted, show_bytes

_REQUESTED = (
    re.compile(r"[Tt]r(?:ied|ying) to allocate ([\d.]+) ?([KMGT]?i?B)"),
    re.compile(r"(?:to allocate|allocating) (\d+) ()bytes"),
)
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_ERROR_TYPES = {"OutOfMemoryError", "MemoryError"}
_ERROR_WORDS = (
    "DefaultCPUAllocator: can't allocate memory",
    "Cannot allocate memory",
    "RESOURCE_EXHAUSTED",
)


def explain_out_of_memory(
    error: BaseException, plan: Plan, *, rank: int, peak_bytes: int
) -> RunError | None:
    """The out-of-memory error with its sizes and remedy; None: the error is another one.

    The error is recognised by type name and words, so that no engine is imported.

    peak_bytes: what the rank has held at most
    """
    text = _out_of_memory_text(error)
    if text is None:
        return None
    device = plan.layout.devices[plan.layout.devices_of(rank)[0]]
    requested = _requested_bytes(text)
    cause = (
        f"rank {rank} ran out of memory on {device.place} ({device.name},"
        f" {show_bytes(device.memory)}): it had held {show_bytes(peak_bytes)} at most,"
    )
    if requested:
        cause += f" and asked for {show_bytes(requested)} more,"
    cause += f" with {counted(plan.batch.micro_batch_size, 'sample')} at once"
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if device.kind == "cpu" and limit != resource.RLIM_INFINITY:
        cause += f"; `ulimit -v` limits its address space to {show_bytes(limit)}"
    flags = _smaller_flags(plan, peak_bytes + requested)
    return RunError(cause, f"the same command with {flags}; it goes on from the last save")


def _out_of_memory_text(error: BaseException) -> str | None:
    """The message of an out-of-memory error and of its cause; None: the error is another one."""
    errors = [error]
    if error.__cause__:
        errors.append(error.__cause__)
    text = "\n".join(map(str, errors))
    type_names = {kind.__name__ for one in errors for kind in type(one).__mro__}
    if type_names & _ERROR_TYPES or any(words in text for words in _ERROR_WORDS):
        return text
    return None


def _requested_bytes(text: str) -> int:
    """The bytes that the failed allocation asked for; 0 where the message doesn't say."""
    for pattern in _REQUESTED:
        if match := pattern.search(text):
            return int(float(match[1]) * _UNITS[match[2]])
    return 0


def _smaller_flags(plan: Plan, wanted_bytes: int) -> str:
    """Flags that need less memory and change no result.

    The memory of one sample is estimated from what this step wanted.
    """
    ways = []
    if plan.batch.micro_batch_size > 1:
        fixed_bytes = sum(term.bytes for term in plan.memory if term.name != "activations")
        bytes_per_sample = max(1.0, (wanted_bytes - fixed_bytes) / plan.batch.micro_batch_size)
        room = 0.9 * min(device.memory for device in plan.layout.devices) - fixed_bytes
        fits = max(1, min(plan.batch.micro_batch_size // 2, int(room / bytes_per_sample)))
        global_batch_size = plan.batch.global_batch_size
        rounds = -(-global_batch_size // (plan.layout.num_devices * fits))
        ways.append(
            f"--global-batch {global_batch_size} --batch-size {fits} keeps the batch of"
            f" {global_batch_size}, in {rounds} rounds of {fits}"
        )
    if plan.compute.recompute == "none":
        ways.append("--set train.recompute=block keeps fewer activations")
    share = plan.layout.offload_frozen
    if 0 < share < 1:
        ways.append("--set devices.offload_frozen=1 keeps all frozen blocks in host memory")
    if plan.layout.shards == 1 and plan.layout.num_devices > 1 and not share:
        ways.append("--strategy fsdp shares the model's state out")
    return ", or ".join(ways or ["--set devices.offload=true, more devices, or a smaller model"])

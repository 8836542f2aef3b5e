"""Explain an out-of-memory error: the sizes, and flags that keep the batch and need less memory."""

import re
import resource
from collections.abc import Sequence

from samecurve.core.events import Activity
from samecurve.core.feature_list import listed_with, rows_of, saving_memory
from samecurve.core.planning.machine import Device
from samecurve.core.planning.plan import Plan
from samecurve.core.strategies import auto_strategy
from samecurve.errors import RunError
from samecurve.units import counted, show_bytes

_REQUESTED = (
    re.compile(r"[Tt]r(?:ied|ying) to allocate ([\d.]+) ?([KMGT]?i?B)"),
    re.compile(r"(?:to allocate|allocating) (\d+) ()bytes"),
)
# torch's words on a GPU: its size, what is free, and what this process has, with CUDA's own
_SHARES = re.compile(
    r"total capacity of ([\d.]+ ?\w+) of which ([\d.]+ ?\w+) is free\."
    r"[^\n]* this process has ([\d.]+ ?\w+) memory in use"
)
_FULL = re.compile(r"GPU (\d+) has a total capacity")
_OTHERS = 0.02  # share of a GPU's memory from which other processes are mentioned
_UNITS = {"": 1, "B": 1, "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_ERROR_TYPES = {"OutOfMemoryError", "MemoryError"}
_ERROR_WORDS = (
    "DefaultCPUAllocator: can't allocate memory",
    "Cannot allocate memory",
    "RESOURCE_EXHAUSTED",
)


def explain_out_of_memory(
    error: BaseException, plan: Plan, *, rank: int, peak_bytes: int, activity: Activity = "step"
) -> RunError | None:
    """The out-of-memory error with its sizes and remedy; None: the error is another one.

    The error is recognised by type name and words, so that no engine is imported.

    peak_bytes: what the rank has held at most. activity: of the rank, as its heartbeat has it
    """
    text = _out_of_memory_text(error)
    if text is None:
        return None
    device = _full_device(text, [plan.layout.devices[at] for at in plan.layout.devices_of(rank)])
    requested = _requested_bytes(text)
    cause = (
        f"rank {rank} ran out of memory on {device.place} ({device.name},"
        f" {show_bytes(device.memory)}): it had held {show_bytes(peak_bytes)} at most,"
    )
    if requested:
        cause += f" and asked for {show_bytes(requested)} more,"
    if activity == "sample":
        cause += " while it made samples"
    else:
        cause += f" with {counted(plan.batch.micro_batch_size, 'sample')} at once"
        cause += ", in an evaluation" if activity == "evaluate" else ""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if device.kind == "cpu" and limit != resource.RLIM_INFINITY:
        cause += f"; `ulimit -v` limits its address space to {show_bytes(limit)}"
    remedy = f"the same command with {_smaller_flags(plan, peak_bytes + requested, activity)}"
    if others := _held_by_others(text):
        cause += f"; other processes held {show_bytes(others)} of it"
        remedy = f"end the other processes (`nvidia-smi` lists them); or {remedy}"
    return RunError(cause, f"{remedy}; it goes on from the last save")


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


def _full_device(text: str, devices: Sequence[Device]) -> Device:
    """The device that the message names; the first, where it names none. devices: of the rank"""
    match = _FULL.search(text)
    named = [device for device in devices if match and device.index == int(match[1])]
    return [*named, *devices][0]


def _held_by_others(text: str) -> int:
    """Bytes of the GPU that other processes hold, by torch's words; 0: few, or they don't say."""
    match = _SHARES.search(text)
    if match is None:
        return 0
    total, free, own = map(_bytes_of, match.groups())
    others = total - free - own
    return others if others > _OTHERS * total else 0


def _bytes_of(size: str) -> int:
    """'1.02 GiB' -> bytes."""
    number, unit = size.split()
    return int(float(number) * _UNITS[unit])


def _smaller_flags(plan: Plan, wanted_bytes: int, activity: Activity) -> str:
    """Flags that need less memory and change no result."""
    if activity == "sample":
        return "--set train.sample_every=0 makes no samples"
    ways = []
    if plan.batch.micro_batch_size > 1:
        fits = _samples_that_fit(plan, wanted_bytes)
        global_batch_size = plan.batch.global_batch_size
        rounds = -(-global_batch_size // (plan.layout.num_devices * fits))
        ways.append(
            f"--global-batch {global_batch_size} --batch-size {fits} keeps the batch of"
            f" {global_batch_size}, in {rounds} rounds of {fits}"
        )
    if activity == "evaluate":
        ways.append("--set train.eval_every=0 leaves evaluations out")
    rows = saving_memory(listed_with(plan.features))
    remedies = [row.load().remedy(plan.features.get(row.name), activity) for row in rows]
    ways += [remedy for remedy in remedies if remedy]
    sharded = auto_strategy(plan.layout.engine, "only a shard fits")
    is_served = all(row.load().serves(sharded) for row in rows_of(plan.features))
    if plan.layout.shards == 1 and plan.layout.num_devices > 1 and is_served:
        ways.append(f"--strategy {sharded.name} shares the model's state out")
    return ", or ".join(ways or ["--set devices.offload=true, more devices, or a smaller model"])


def _samples_that_fit(plan: Plan, wanted_bytes: int) -> int:
    """The samples at once that a device has memory for, at most half of those that it has not.

    The memory of one sample is estimated from what was wanted, which on a GPU is without the
    process itself.
    """
    devices, samples = plan.layout.devices, plan.batch.micro_batch_size
    fixed = {term.name: term.bytes for term in plan.memory if term.name != "activations"}
    room = 0.9 * min(device.memory for device in devices) - sum(fixed.values())
    if devices[0].kind == "cuda":
        fixed.pop("process", None)
    bytes_per_sample = max(1.0, (wanted_bytes - sum(fixed.values())) / samples)
    return max(1, min(samples // 2, int(room / bytes_per_sample)))

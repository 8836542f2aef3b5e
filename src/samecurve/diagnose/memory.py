"""Out of memory, told with its sizes and the flags that keep the batch and need less."""

import re
import resource

from samecurve.core.planning.plan import Plan
from samecurve.errors import RunError
from samecurve.units import show_bytes

_ASKED = (
    re.compile(r"[Tt]r(?:ied|ying) to allocate ([\d.]+) ?([KMGT]?i?B)"),
    re.compile(r"(?:to allocate|allocating) (\d+) ()bytes"),
)
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def explain_out_of_memory(
    error: BaseException, plan: Plan, rank: int, peak: int
) -> RunError | None:
    """peak: bytes that the rank has held at most.

    None: the error is another one. Told by name and words, so that no engine is imported.
    """
    errors = [
        error,
        *([error.__cause__] if error.__cause__ else []),
    ]  # it may come explained, as raised by a user's line
    text = "\n".join(map(str, errors))
    names = {kind.__name__ for one in errors for kind in type(one).__mro__}
    if not (
        {"OutOfMemoryError", "MemoryError"} & names
        or "DefaultCPUAllocator: can't allocate memory" in text
        or "Cannot allocate memory" in text
        or "RESOURCE_EXHAUSTED" in text
    ):
        return None
    asked = next(
        (
            int(float(found[1]) * _UNITS[found[2]])
            for pattern in _ASKED
            if (found := pattern.search(text))
        ),
        0,
    )
    device = plan.devices[plan.devices_of(rank)[0]]
    wanted = f", and asked for {show_bytes(asked)} more" if asked else ""
    cause = (
        f"rank {rank} ran out of memory on {device.place} ({device.name},"
        f" {show_bytes(device.memory)}): it had held {show_bytes(peak)} at most{wanted}, with"
        f" {plan.micro_batch_size} sample{'s' if plan.micro_batch_size > 1 else ''} at once"
    )
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if device.kind == "cpu" and limit != resource.RLIM_INFINITY:
        cause += f"; `ulimit -v` limits its address space to {show_bytes(limit)}"
    return RunError(
        cause,
        f"the same command with {_smaller(plan, peak + asked)}; it goes on from the last save",
    )


def _smaller(plan: Plan, wanted: int) -> str:
    """Flags that need less and leave every result as it is.

    What one sample needs follows from what this step wanted.
    """
    ways = []
    if plan.micro_batch_size > 1:
        held = sum(term.bytes for term in plan.memory if term.name != "activations")
        each = max(1.0, (wanted - held) / plan.micro_batch_size)
        fits = max(
            1,
            min(
                plan.micro_batch_size // 2,
                int((0.9 * min(device.memory for device in plan.devices) - held) / each),
            ),
        )
        rounds = -(-plan.global_batch_size // (plan.num_devices * fits))
        ways.append(
            f"--global-batch {plan.global_batch_size} --batch-size {fits} keeps the batch of {plan.global_batch_size}, in"
            f" {rounds} rounds of {fits}"
        )
    if plan.recompute == "none":
        ways.append("--set train.recompute=block keeps fewer activations")
    if plan.shards == 1 and plan.num_devices > 1:
        ways.append("--strategy fsdp shares the model's state out")
    return ", or ".join(ways or ["--set devices.offload=true, more devices, or a smaller model"])

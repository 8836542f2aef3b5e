"""A plan in words: the banner of a run, and each decision."""

from collections import Counter

from samecurve.core.determinism.microbatches import split_batch
from samecurve.core.feature_list import listed_with
from samecurve.core.planning.plan import Plan
from samecurve.units import counted, show_bytes

# what only some plans decide -> its place in the banner, among the features' lines, and the words
# before its reason
_SAID = {
    "auto_strategy": (0, "strategy "),
    "optimizer": (500, "optimizer "),
    "defaults": (510, ""),
}


def banner(plan: Plan) -> list[str]:
    """The banner of a run: the plan in a few lines."""
    reasons = plan.reasons
    needed = show_bytes(sum(term.bytes for term in plan.memory))
    room = show_bytes(min(device.memory for device in plan.layout.devices))
    certainty = "estimate"
    if not plan.memory_estimate:
        certainty = "estimate, without activations"
    lines = [
        f"plan   world {plan.layout.num_devices}   {strategy_text(plan)}   "
        f"{plan.compute.precision}   {_name_devices(plan)}",
        f"       {arithmetic(plan)} ({reasons['batch']})   lr {plan.schedule.peak:.3g}"
        f" ({reasons['lr']})",
        f"       {plan.steps} steps of {plan.batch.global_batch_size} samples; an epoch is"
        f" {plan.order.steps_per_epoch}   memory {needed} of {room} a device ({certainty})",
        f"       Running on {counted(plan.layout.num_devices, 'device')}{_say_kind(plan)}"
        f"{_say_compiled(plan)}",
    ]
    if "balance" in reasons:
        lines.append(f"       balance {_balance(plan)}: {reasons['balance']}")
    if bits := plan.say_bits():
        lines.append(f"       {bits}")
    lines += _said(plan)
    lines += [f"       {note}" for note in reasons.get("task", "").splitlines()]
    lines += [f"       group {group}" for group in reasons.get("groups", "").splitlines()]
    return lines + [f"warn   {warning}" for warning in plan.warnings]


def _said(plan: Plan) -> list[str]:
    """A line for each decision that only some plans have."""
    places = dict(_SAID)
    for row in listed_with(plan.features):
        places |= {name: (row.order, label) for name, label in row.banner.items()}
    in_order = sorted(places.items(), key=lambda item: item[1])
    found = [(name, label) for name, (_, label) in in_order if name in plan.reasons]
    return [f"       {label}{plan.reasons[name]}" for name, label in found]


def strategy_text(plan: Plan) -> str:
    """The strategy, with the engine if it is not torch, and with the backend if there is one."""
    words = [plan.layout.strategy]
    if plan.layout.engine != "torch":
        words.insert(0, plan.layout.engine)
    if plan.layout.backend != "none":
        words.append(f"over {plan.layout.backend}")
    return " ".join(words)


def _say_kind(plan: Plan) -> str:
    if plan.layout.num_devices == 1:
        return ""
    if plan.layout.devices[0].kind == "cuda":
        return " (multi-GPU enabled)"
    if plan.layout.engine == "jax":
        return " (virtual CPU devices)"
    return " (CPU ranks)"


def _say_compiled(plan: Plan) -> str:
    if plan.layout.engine == "jax":
        return "; the first step is compiled before it runs"
    if plan.compiles_blocks:
        return f"; compiled: {plan.reasons['compile']}"
    return ""


def arithmetic(plan: Plan) -> str:
    """How the batch is divided: 'batch 256 = 4 devices x 16 x 4 rounds'.

    Unequal microbatches are listed, and so are unequal shares of the devices.
    """
    global_batch_size, micro = plan.batch.global_batch_size, plan.batch.micro_batch_size
    rounds = counted(plan.batch.accumulation_steps, "round")
    devices = counted(plan.layout.num_devices, "device")
    sizes = [last - first for first, last in split_batch(global_batch_size, micro)]
    if plan.batch.microbatch_seconds:
        shares = " + ".join(map(str, plan.batch.microbatches_per_device))
        microbatches = f"{shares} microbatches of {micro}"
        if sizes[-1] < micro:
            microbatches += f", the last one of {sizes[-1]}"
        return f"batch {global_batch_size} = {microbatches}, in {rounds}"
    if global_batch_size == plan.layout.num_devices * micro * plan.batch.accumulation_steps:
        return f"batch {global_batch_size} = {devices} x {micro} x {rounds}"
    parts = " + ".join(
        f"{counted(count, 'microbatch')} of {size}" for size, count in Counter(sizes).items()
    )
    return f"batch {global_batch_size} = {parts}, over {devices} in {rounds}"


def _balance(plan: Plan) -> str:
    if not plan.batch.microbatch_seconds:
        return "even"
    shares = plan.batch.microbatches_per_device
    return f"{' + '.join(map(str, shares))} of {sum(shares)} microbatches"


def _name_devices(plan: Plan) -> str:
    counts = Counter(device.name for device in plan.layout.devices)
    names = [name if count == 1 else f"{count} x {name}" for name, count in counts.items()]
    return f"{', '.join(names)}; {plan.reasons['devices']}"


def _places(plan: Plan) -> str:
    """The places of one host's devices, and the number of hosts."""
    places = [device.place for device in plan.layout.devices]
    if plan.layout.devices[0].kind != "cpu":
        places = list(dict.fromkeys(places))
    text = ", ".join(places)
    hosts = plan.layout.num_devices // len(places)
    if hosts > 1:
        text += f" on {hosts} hosts"
    return text


def decisions(plan: Plan) -> dict[str, str]:
    """The decisions in words, by the names of their reasons."""
    values = {
        "devices": _places(plan),
        "strategy": plan.layout.strategy,
        "sync": plan.layout.backend,
        "precision": plan.compute.precision,
        "batch": arithmetic(plan),
        "micro": f"{plan.batch.micro_batch_size} samples a microbatch",
        "steps": str(plan.steps),
        "lr": f"{plan.schedule.peak:.6g}",
        "threads": f"{plan.compute.threads} a rank",
    }
    if "gather" in plan.reasons:
        values["gather"] = "once a step" if plan.layout.gathers_once else "in each round"
    if "save" in plan.reasons:
        values["save"] = f"about every {plan.every.save_seconds / 60:g} minutes"
    if "balance" in plan.reasons:
        values["balance"] = _balance(plan)
    return values

"""A plan in words: the banner of a run, and the whole table of `samecurve plan`."""

from collections import Counter
from collections.abc import Mapping

from samecurve.core.determinism.microbatches import split_batch
from samecurve.core.planning.plan import Plan
from samecurve.units import show_bytes, show_count


def banner(plan: Plan) -> list[str]:
    """What matters of a plan, in a few lines."""
    held = sum(term.bytes for term in plan.memory)
    room = min(device.memory for device in plan.devices)
    over = f" over {plan.backend}" if plan.backend != "none" else ""
    several = (
        "multi-GPU enabled"
        if plan.devices[0].kind == "cuda"
        else "virtual CPU devices"
        if plan.engine == "jax"
        else "CPU ranks"
    )
    engine = "" if plan.engine == "torch" else f"{plan.engine} "
    first = (
        "; the first step is compiled before it runs"
        if plan.engine == "jax"
        else f"; compiled: {plan.reasons['compile']}"
        if plan.compile
        else ""
    )
    known = "estimate" if plan.memory_estimate else "estimate, without activations"
    lines = [
        (
            f"plan   world {plan.num_devices}   {engine}{plan.strategy}{over}   {plan.precision}  "
            f" {_devices(plan)}"
        ),
        (
            f"       {arithmetic(plan)} ({plan.reasons['batch']})   lr {plan.schedule.peak:.3g}"
            f" ({plan.reasons['lr']})"
        ),
        (
            f"       {plan.steps} steps of {plan.global_batch_size} samples; an epoch is"
            f" {plan.order.steps_per_epoch}   memory {show_bytes(held)} of {show_bytes(room)} a"
            f" device ({known})"
        ),
        f"       Running on {plan.num_devices} device{'s' if plan.num_devices > 1 else ''}"
        + (f" ({several})" if plan.num_devices > 1 else "")
        + first,
    ]
    if "balance" in plan.reasons:
        lines.append(f"       balance {_balance(plan)}: {plan.reasons['balance']}")
    if plan.exact:
        lines.append(f"       exact: {plan.reasons['exact']}")
    if "optimizer" in plan.reasons:
        lines.append(f"       optimizer {plan.reasons['optimizer']}")
    lines += [f"       group {group}" for group in plan.reasons.get("groups", "").splitlines()]
    return lines + [f"warn   {warning}" for warning in plan.warnings]


def arithmetic(plan: Plan) -> str:
    """'batch 256 = 4 devices x 16 x 4 rounds', or the slots where they are unequal, and who has how
    many where that is.
    """
    sizes = [
        last - first for first, last in split_batch(plan.global_batch_size, plan.micro_batch_size)
    ]
    if plan.microbatch_seconds:
        last = f", the last one of {sizes[-1]}" if sizes[-1] < plan.micro_batch_size else ""
        return (
            f"batch {plan.global_batch_size} = {' + '.join(map(str, plan.microbatches_per_device))} slots of {plan.micro_batch_size}{last},"
            f" in {plan.accumulation_steps} round{'s' if plan.accumulation_steps > 1 else ''}"
        )
    if plan.global_batch_size == plan.num_devices * plan.micro_batch_size * plan.accumulation_steps:
        return (
            f"batch {plan.global_batch_size} = {plan.num_devices} device{'s' if plan.num_devices > 1 else ''} x"
            f" {plan.micro_batch_size} x {plan.accumulation_steps} round{'s' if plan.accumulation_steps > 1 else ''}"
        )
    parts = " + ".join(
        f"{count} slot{'s' if count > 1 else ''} of {size}"
        for size, count in Counter(sizes).items()
    )
    return (
        f"batch {plan.global_batch_size} = {parts}, over {plan.num_devices} device{'s' if plan.num_devices > 1 else ''} in"
        f" {plan.accumulation_steps} round{'s' if plan.accumulation_steps > 1 else ''}"
    )


def _balance(plan: Plan) -> str:
    return (
        f"{' + '.join(map(str, plan.microbatches_per_device))} of {sum(plan.microbatches_per_device)} slots"
        if plan.microbatch_seconds
        else "even"
    )


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_plain(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain, value))}]"
    return (
        "(none)" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def _devices(plan: Plan) -> str:
    names = Counter(device.name for device in plan.devices)
    shown = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in names.items())
    return f"{shown}; {plan.reasons['devices']}"


def _places(plan: Plan) -> str:
    """Those of one host, and how many hosts there are."""
    places = (
        list(dict.fromkeys(device.place for device in plan.devices))
        if plan.devices[0].kind != "cpu"
        else [device.place for device in plan.devices]
    )
    hosts = plan.num_devices // len(places)
    return ", ".join(places) + (f" on {hosts} hosts" if hosts > 1 else "")


def decisions(plan: Plan) -> dict[str, str]:
    """What was decided, in words, by its name in `because`."""
    return {
        "devices": _places(plan),
        "strategy": plan.strategy,
        "sync": plan.backend,
        "precision": plan.precision,
        "batch": arithmetic(plan),
        "micro": f"{plan.micro_batch_size} samples a slot",
        "steps": str(plan.steps),
        "lr": f"{plan.schedule.peak:.6g}",
        "threads": f"{plan.threads} a rank",
        **({"balance": _balance(plan)} if "balance" in plan.reasons else {}),
    }


def table(
    plan: Plan,
    origins: Mapping[str, str],
    values: Mapping[str, object],
    formulas: Mapping[str, str],
) -> str:
    """Every decision with its reason, the memory terms, and where each config value came from."""
    lines = [*banner(plan), "", "decision    value, because"]
    lines += [
        f"  {name:<10}{value}: {plan.reasons[name]}" for name, value in decisions(plan).items()
    ]
    lines += [
        f"  {name:<10}{plan.reasons[name]}"
        for name in ("coupled", "dropout", "compile", "float8")
        if name in plan.reasons
    ]
    lines += ["", f"memory on each device (estimate): {plan.reasons['memory']}"]
    lines += [
        f"  {term.name:<12}{show_bytes(term.bytes):>10}   {term.formula}" for term in plan.memory
    ]
    if plan.flops_per_step:
        peak = (
            f"; peak {show_count(plan.peak_flops)}FLOP/s"
            if plan.peak_flops
            else "; the devices' peak is not on file, so TFLOP/s are shown instead of MFU"
        )
        lines += [
            "",
            (
                f"compute     {show_count(plan.flops_per_step)}FLOP a step:"
                f" {formulas.get('flops', '')}{peak}"
            ),
        ]
    lines += ["", "config value                                    from"]
    lines += [
        f"  {f'{key} = {_plain(value)}':<45} {origins.get(key, 'default')}"
        for key, value in values.items()
    ]
    return "\n".join(lines)

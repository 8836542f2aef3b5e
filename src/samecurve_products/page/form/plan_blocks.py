"""A plan beside the form: batch arithmetic, memory of each device, decisions with their reasons."""

from collections.abc import Iterator, Mapping

from samecurve.core.planning.memory import usable_share
from samecurve.observe.plan_text import decisions, strategy_text
from samecurve.seam import Plan, arithmetic, counted, show_bytes, show_count
from samecurve_products.report.blocks import Bar, Block, bars, cards, details, text
from samecurve_products.report.plan_blocks import memory_parts, memory_table, reasons_table

_NOTES = ("task", "groups")  # reasons of several lines, shown as notes
_MOST_DEVICES = 16  # that have a bar each


def plan_blocks(plan: Plan, formulas: Mapping[str, str]) -> list[Block]:
    """Everything that the plan decides."""
    reasons = {name: why for name, why in plan.reasons.items() if name not in _NOTES}
    return [
        _cards(plan),
        *(text(warning, "warn") for warning in plan.warnings),
        _memory_bars(plan),
        details("Memory, term by term", [memory_table(plan.memory)]),
        reasons_table(reasons, decisions(plan)),
        *_notes(plan, formulas),
    ]


def _cards(plan: Plan) -> Block:
    epochs = plan.steps / plan.order.steps_per_epoch
    held = sum(term.bytes for term in plan.memory)
    room = min(device.memory for device in plan.layout.devices)
    certainty = "estimate" if plan.memory_estimate else "estimate, without activations"
    samples, lr = f"{plan.global_batch_size:,} samples", f"{plan.schedule.peak:.6g}"
    length = f"{epochs:.3g} epochs of {counted(plan.order.steps_per_epoch, 'step')}"
    devices = counted(plan.layout.num_devices, "device")
    return cards(
        [
            ("Batch", samples, f"{arithmetic(plan)}; {plan.reasons['batch']}"),
            ("Learning rate", lr, plan.reasons["lr"]),
            ("Length", f"{plan.steps:,} steps", length),
            ("Memory a device", show_bytes(held), f"of {show_bytes(room)} ({certainty})"),
            ("Runs on", devices, f"{strategy_text(plan)}, {plan.compute.precision}"),
        ]
    )


def _memory_bars(plan: Plan) -> Block:
    """A bar for each device: the terms of its memory, the process too, against its capacity."""
    rows, parts = [], memory_parts(plan.memory, on_cpu=True)
    for device in plan.layout.devices[:_MOST_DEVICES]:
        name = f"{'GPU' if device.kind == 'cuda' else 'rank'} {device.index}"
        planned = int(device.memory * usable_share(device.kind, device.memory))
        rows.append(Bar(name, parts, device.memory, ("the plan uses at most", planned)))
    note = plan.reasons["memory"]
    return bars("memory", "Memory of each device", rows, form="bytes", note=note)


def _notes(plan: Plan, formulas: Mapping[str, str]) -> Iterator[Block]:
    lines = [line for name in _NOTES for line in plan.reasons.get(name, "").splitlines()]
    if plan.flops.flops_per_step:
        count = show_count(plan.flops.flops_per_step)
        lines.append(f"{count}FLOP a step: {formulas.get('flops', '')}")
    if lines:
        yield details("Notes on model and data", [text(line, "quiet") for line in lines])

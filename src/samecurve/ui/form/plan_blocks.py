"""A plan as blocks of the page: arithmetic, memory of each device, decisions with their reasons."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from samecurve.core.planning.memory import usable_share
from samecurve.core.planning.plan import Plan
from samecurve.observe.plan_text import arithmetic, decisions, strategy_text
from samecurve.units import counted, show_bytes, show_count

Block = dict[str, Any]
_SHOWN = {  # how decisions are called on the page
    "devices": "Devices",
    "strategy": "Strategy",
    "sync": "Backend",
    "precision": "Precision",
    "batch": "Batch",
    "micro": "Microbatch",
    "steps": "Steps",
    "lr": "Learning rate",
    "threads": "Threads",
    "save": "Saves",
    "balance": "Balance",
}


def plan_blocks(plan: Plan, formulas: dict[str, str]) -> list[Block]:
    """Everything that the plan decides, for the side of the form."""
    blocks = [_cards(plan)]
    blocks += [_note(warning, "warn") for warning in plan.warnings]
    blocks += [memory_bars(plan), _memory_table(plan), reasons_table(plan)]
    notes = _notes(plan)
    if notes:
        blocks.append({"type": "details", "summary": "Notes on model and data", "blocks": notes})
    if plan.flops_per_step:
        formula = formulas.get("flops", "")
        text = f"{show_count(plan.flops_per_step)}FLOP a step: {formula}"
        blocks.append({"type": "text", "text": text, "tone": "quiet"})
    return blocks


def _cards(plan: Plan) -> Block:
    epochs = plan.steps / plan.order.steps_per_epoch
    held = sum(term.bytes for term in plan.memory)
    room = min(device.memory for device in plan.layout.devices)
    items = [
        {
            "title": "Batch",
            "value": f"{plan.global_batch_size:,} samples",
            "note": f"{arithmetic(plan)}; {plan.reasons['batch']}",
        },
        {
            "title": "Learning rate",
            "value": f"{plan.schedule.peak:.6g}",
            "note": plan.reasons["lr"],
        },
        {
            "title": "Length",
            "value": f"{plan.steps:,} steps",
            "note": f"{epochs:.3g} epochs of {plan.order.steps_per_epoch:,} steps",
        },
        {
            "title": "Memory a device",
            "value": show_bytes(held),
            "note": f"of {show_bytes(room)} ({_certainty(plan)})",
        },
        {
            "title": "Runs on",
            "value": counted(plan.layout.num_devices, "device"),
            "note": f"{strategy_text(plan)}, {plan.compute.precision}",
        },
    ]
    return {"type": "cards", "items": items}


def _certainty(plan: Plan) -> str:
    return "estimate" if plan.memory_estimate else "estimate, without activations"


def memory_bars(plan: Plan) -> Block:
    """A bar for each device: the terms of its memory against its capacity."""
    parts = [
        {"label": term.name, "value": term.bytes, "colour": number}
        for number, term in enumerate(plan.memory)
    ]
    rows = []
    for number, device in enumerate(plan.layout.devices):
        label = device.name if device.kind == "cuda" else "CPU rank"
        planned = int(device.memory * usable_share(device.kind, device.memory))
        marks = [{"label": "planned with at most", "value": planned}]
        row = {"label": f"{number}: {label}", "parts": parts, "limit": device.memory}
        rows.append({**row, "marks": marks})
    note = plan.reasons["memory"]
    head = {"type": "bars", "name": "memory", "title": "Memory of each device", "note": note}
    return {**head, "format": "bytes", "rows": rows}


def _memory_table(plan: Plan) -> Block:
    rows = [[term.name, show_bytes(term.bytes), term.formula] for term in plan.memory]
    table = {"type": "table", "head": ["Term", "Bytes", "Formula"], "rows": rows}
    return {"type": "details", "summary": "Memory, term by term", "blocks": [table]}


def reasons_table(plan: Plan) -> Block:
    """Every decision with its reason."""
    rows = [
        [_SHOWN.get(name, name), value, plan.reasons[name]]
        for name, value in decisions(plan).items()
        if name in plan.reasons
    ]
    others = ("coupled", "modes", "dropout", "compile", "float8", "exact", "loss", "optimizer")
    rows += [[name.capitalize(), "", plan.reasons[name]] for name in others if name in plan.reasons]
    return {"type": "table", "head": ["Decision", "Value", "Because"], "rows": rows}


def _notes(plan: Plan) -> list[Block]:
    names = ("task", "groups", "defaults", "phases", "after_step")
    lines = [line for name in names for line in plan.reasons.get(name, "").splitlines()]
    return [{"type": "text", "text": line, "tone": "quiet"} for line in lines]


def _note(text: str, tone: str) -> Block:
    return {"type": "text", "text": text, "tone": tone}


def device_names(plan: Plan) -> str:
    """'2 x H100'."""
    counts = Counter(device.name for device in plan.layout.devices)
    return ", ".join(name if n == 1 else f"{n} x {name}" for name, n in counts.items())


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], *, numbers: bool = False) -> Block:
    return {
        "type": "table",
        "head": list(head),
        "rows": [list(r) for r in rows],
        "numbers": numbers,
    }

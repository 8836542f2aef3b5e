"""The tables of `samecurve plan`: decisions and memory, and where each config value came from."""

from collections.abc import Mapping

from samecurve.core.feature_list import listed_with
from samecurve.core.planning.plan import Plan
from samecurve.observe.plan_text import banner, decisions
from samecurve.observe.text_table import Column, table_text
from samecurve.units import show_bytes, show_count


def table(plan: Plan, formulas: Mapping[str, str]) -> str:
    """Every decision with its reason, and the memory terms.

    formulas: how the task's facts came about
    """
    reasons = plan.reasons
    decided = [[name, f"{value}: {reasons[name]}"] for name, value in decisions(plan).items()]
    table_only = [name for row in listed_with(plan.features) for name in row.table_only]
    decided += [
        [name, reasons[name]] for name in ("coupled", "dropout", *table_only) if name in reasons
    ]
    memory = [[term.name, show_bytes(term.bytes), term.formula] for term in plan.memory]
    lines = [
        *banner(plan),
        "",
        table_text([Column("decision"), Column("value, because")], decided),
        "",
        f"memory on each device (estimate): {reasons['memory']}",
        table_text(
            [Column("term"), Column("bytes", right=True), Column("formula")], memory, titles=False
        ),
    ]
    if plan.flops.flops_per_step:
        peak = "the devices' peak is not on file, so TFLOP/s are shown instead of MFU"
        if plan.flops.peak_flops:
            peak = f"peak {show_count(plan.flops.peak_flops)}FLOP/s"
        flops = f"{show_count(plan.flops.flops_per_step)}FLOP a step: {formulas.get('flops', '')}"
        lines += ["", f"compute     {flops}; {peak}"]
    return "\n".join(lines)


def table_of_keys(values: Mapping[str, object], origins: Mapping[str, str]) -> str:
    """Where each config value came from. values, origins: by config key"""
    rows = [[key, origins.get(key, "default"), _plain(value)] for key, value in values.items()]
    return table_text([Column("config key"), Column("from"), Column("value")], rows)


def _plain(value: object) -> str:
    """A config value as a YAML file would have it."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_plain(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain, value))}]"
    if value is None:
        return "(none)"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)

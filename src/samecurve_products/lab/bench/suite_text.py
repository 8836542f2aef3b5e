"""The results of a suite in words: a line for each combination at once, and one table."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from samecurve.core.measurement.profile_types import ProfileSchedule
from samecurve.seam import Column, counted, show_bytes, show_count, table_text
from samecurve_products.lab.bench.doubts import busy_machine, doubtful_speedups

Entry = Mapping[str, Any]  # a model in a layout, with the keys of its file

_COLUMNS: dict[str, Callable[[Entry], str]] = {
    "model": lambda entry: str(entry["model"]),
    "layout": lambda entry: str(entry["layout"]),
    "sync": lambda entry: str(entry["backend"]),
    "batch": lambda entry: entry["arithmetic"].removeprefix("batch "),
    "ms a step": lambda entry: f"{entry['seconds']['median'] * 1e3:.4g}",
    "steps/s": lambda entry: f"{entry['steps_per_second']:.3g}",
    "tokens/s": lambda entry: _count(entry["tokens_per_second"]),
    "a device": lambda entry: _count(entry["tokens_per_second_per_device"]),
    "speed-up": lambda entry: f"{entry['speedup']:.2f}",
    "peak memory": lambda entry: show_bytes(entry["memory_bytes"]),
    "last loss": lambda entry: f"{entry['losses'][-1]:.6g}",
    "apart": lambda entry: f"{entry['apart']:.1g}",
}


def _count(number: float | None) -> str:
    return "-" if number is None else show_count(number)


def head(name: str, home: Path, schedule: ProfileSchedule) -> str:
    warm = counted(schedule.warm, "step")
    return (
        f"suite  {name}: {warm} thrown away, then {schedule.timed} timed, for each in processes of"
        f" its own; results in {home}"
    )


def line(entry: Entry) -> str:
    name = f"       {entry['model']}  {entry['layout']} "
    if entry["status"] != "measured":
        return f"{name} {_reason(entry)}"
    kept = "  (kept from before)" if entry.get("kept") else ""
    return (
        f"{name} {entry['steps_per_second']:.3g} steps/s, "
        f"{_count(entry['tokens_per_second'])} tokens/s{kept}"
    )


def _reason(entry: Entry) -> str:
    first = entry["why"].splitlines()[0]
    return f"{entry['status']}: {first}" + (f" ({entry['remedy']})" if entry["remedy"] else "")


def _measured_cells(entries: Sequence[Entry]) -> list[list[str]]:
    measured = [entry for entry in entries if entry["status"] == "measured"]
    return [[cell(entry) for cell in _COLUMNS.values()] for entry in measured]


def as_text(name: str, entries: Sequence[Entry]) -> str:
    """A table of the measured combinations, then the refused ones with their reasons."""
    table = table_text([Column(title) for title in _COLUMNS], _measured_cells(entries), indent=0)
    return "\n".join([table, *notes(name, entries)])


def markdown(name: str, entries: Sequence[Entry]) -> str:
    """The text of as_text() in Markdown."""
    rows = [list(_COLUMNS), ["---"] * len(_COLUMNS), *_measured_cells(entries)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return "\n\n".join([table, *notes(name, entries)]) + "\n"


def notes(name: str, entries: Sequence[Entry]) -> list[str]:
    """Lines below the table: what its columns mean, what was refused, and doubts."""
    lines = [
        f"suite {name}: medians of the timed steps. speed-up: samples a second against the model's"
        " first layout; apart: the largest relative distance of a loss to that layout's",
    ]
    refused = [entry for entry in entries if entry["status"] == "refused"]
    lines += [f"{entry['model']} {entry['layout']}: {_reason(entry)}" for entry in refused]
    return lines + _doubts(entries)


def _doubts(entries: Sequence[Entry]) -> list[str]:
    """Warnings: speed-ups that are not plausible, and a machine that was busy.

    Results of earlier versions lack the load, and say nothing of it.
    """
    measured = [entry for entry in entries if entry["status"] == "measured" and "load" in entry]
    lines = []
    for model in dict.fromkeys(entry["model"] for entry in measured):
        base, *rows = [entry for entry in measured if entry["model"] == model]
        lines.append(doubtful_speedups(base, rows, base["cores"], f"{model} "))
    if measured:
        busiest = max(measured, key=lambda entry: entry["load"])
        lines.append(busy_machine(busiest["load"], busiest["cores"]))
    return [line for line in lines if line]


def failures(entries: Sequence[Entry]) -> list[str]:
    """Lines on each combination that failed: its cause and remedy."""
    lines = []
    for entry in entries:
        if entry["status"] == "failed":
            lines.append(f"failed {entry['model']} {entry['layout']}: {entry['why']}")
            if entry["remedy"]:
                lines.append(f"  remedy: {entry['remedy']}")
    return lines

"""The table of the fault campaign, in the result file, on the screen and in benchmarks/chaos.md."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

_HEAD = (
    "fault",
    "injected",
    "recovered",
    "steps lost at most",
    "seconds, median",
    "worst",
)


class _Outcome(Protocol):
    @property
    def kind(self) -> str: ...
    @property
    def recovered(self) -> bool: ...
    @property
    def lost_steps(self) -> int | None: ...
    @property
    def seconds(self) -> float | None: ...


def rows_of(outcomes: Iterable[_Outcome]) -> list[dict[str, Any]]:
    """A row for each kind of fault, in the order in which they came."""
    kinds: dict[str, list[_Outcome]] = {}
    for outcome in outcomes:
        kinds.setdefault(outcome.kind, []).append(outcome)
    return [_row(kind, of_kind) for kind, of_kind in kinds.items()]


def _row(kind: str, outcomes: list[_Outcome]) -> dict[str, Any]:
    lost = [each.lost_steps for each in outcomes if each.lost_steps is not None]
    seconds = [each.seconds for each in outcomes if each.seconds is not None]
    return {
        "fault": kind,
        "injected": len(outcomes),
        "recovered": sum(each.recovered for each in outcomes),
        "lost_steps_at_most": max(lost, default=None),
        "median_seconds": round(statistics.median(seconds), 2) if seconds else None,
        "worst_seconds": round(max(seconds), 2) if seconds else None,
    }


def table(result: Mapping[str, Any]) -> str:
    """The rows as a table in Markdown, with their sum."""
    lines = [_HEAD, ("---", *["---:"] * (len(_HEAD) - 1))]
    for row in result["rows"]:
        numbers = (row["lost_steps_at_most"], row["median_seconds"], row["worst_seconds"])
        shown = ["" if number is None else f"{number:.3g}" for number in numbers]
        lines.append((row["fault"], str(row["injected"]), str(row["recovered"]), *shown))
    worst = [row["worst_seconds"] for row in result["rows"] if row["worst_seconds"] is not None]
    lost = [row["lost_steps_at_most"] or 0 for row in result["rows"]]
    total = (str(result["injected"]), str(result["recovered"]), str(max(lost)))
    lines.append(("all", *total, "", f"{max(worst):.3g}" if worst else ""))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def campaign_text(result: Mapping[str, Any]) -> str:
    """What benchmarks/chaos.md says of a campaign: a sentence, the table, the bare restarts."""
    bare = "".join(
        _bare_row(name, seconds) for name, seconds in result["bare_restart_seconds"].items()
    )
    return (
        f"{result['recovered']} of {result['injected']} faults were recovered, in"
        f" {result['seconds'] / 60:.0f} minutes on {result['cores']} cores ({result['machine']},"
        f" torch {result['versions']['torch']}, seed {result['seed']}; a save every"
        f" {result['save_every']} steps).\n\n{table(result)}\n"
        "Beside it, a bare restart by torch's elastic launcher in the same campaign, from the death"
        " of a rank to the second beginning of the script (which reads and trains nothing):\n\n"
        "| torchrun | tried | came back | seconds, median | worst |\n"
        f"|---|---:|---:|---:|---:|\n{bare}"
    )


def _bare_row(name: str, tries: Sequence[float | None]) -> str:
    """None: it did not come back within its limit."""
    seconds = [each for each in tries if each is not None]
    times = (f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}") if seconds else ("", "")
    return f"| {' | '.join((name, str(len(tries)), str(len(seconds)), *times))} |\n"


def show(result: Mapping[str, Any]) -> str:
    """The table in plain columns, for a screen."""
    rows = [
        line.removeprefix("| ").removesuffix(" |").split(" | ")
        for line in table(result).splitlines()
    ]
    rows = [row for row in rows if not row[0].startswith("---")]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(lines)

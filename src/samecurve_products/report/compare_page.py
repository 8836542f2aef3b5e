"""The page that compares several runs: their curves in the same charts, and what differs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from samecurve_products.report import run_page
from samecurve_products.report.blocks import (
    Block,
    Cell,
    Page,
    details,
    header,
    heading,
    pre,
    table,
    text,
)
from samecurve_products.report.charts import charts
from samecurve_products.report.record import RunRecord
from samecurve_products.report.summary import differences, summary
from samecurve_products.report.words import show_value, summary_rows

_DASH = "\N{EN DASH}"
_TITLES = {
    "config": "Settings that differ",
    "plan": "What the plans made of it",
    "environment": "What they ran in",
}


def compare_page(
    records: Sequence[RunRecord],
    names: Sequence[str],
    bits: Sequence[str],
    picture: Callable[[Path], run_page.PictureSource],
) -> Page:
    """The page of several runs.

    bits: lines that say whether the runs are equal to the last bit; []: it was not asked
    picture: gives a run directory's sources of pictures
    """
    title = f"{len(records)} runs compared"
    blocks: list[Block] = [header(title)]
    for record, name in zip(records, names, strict=True):
        blocks += run_page.notes(record, f"{name}: ")
    if bits:
        blocks += [heading("Equal to the last bit?"), pre("\n".join(bits), wrap=True)]
    blocks += charts(records, names)
    blocks += [heading("Summary"), _runs_table(records, names)]
    blocks += _differences(differences(records), names)
    for record, name in zip(records, names, strict=True):
        shown = run_page.samples(record, picture(record.directory))
        inner = [*run_page.plan_in_short(record), *run_page.happened(record), *shown]
        hint = f"plan, what happened, samples; all of it: samecurve report {record.directory}"
        blocks += [heading(name), details(hint, inner)]
    runs = [run_page.run_of(records[index], name, index) for index, name in enumerate(names)]
    return {"title": title, "blocks": blocks, "runs": runs}


def _runs_table(records: Sequence[RunRecord], names: Sequence[str]) -> Block:
    """The rows of the summary in which any run has a value, below how each run ended."""
    outcomes: list[Cell] = []
    for words, tone in map(run_page.badge, records):
        outcomes.append({"text": words, "tone": tone})
    rows: list[list[Cell]] = [["outcome", *outcomes]]
    runs = [summary_rows(summary(record)) for record in records]
    for title in runs[0]:
        shown = [run[title] for run in runs]
        cells: list[Cell] = [{"text": value or _DASH, "note": note} for value, note in shown]
        if any(value for value, _ in shown):
            rows.append([title, *cells])
    return table(["", *names], rows, numbers=True)


def _differences(
    parts: Mapping[str, Mapping[str, Sequence[object]]], names: Sequence[str]
) -> Iterator[Block]:
    """A table of the values that differ between the runs."""
    for part, title in _TITLES.items():
        yield heading(title)
        rows = [[key, *(show_value(v, key) for v in values)] for key, values in parts[part].items()]
        if rows:
            yield table([part, *names], rows)
        else:
            yield text(f"The same {part} in all.", "quiet")

"""Evaluations of a run: a table of all, and the arrays of the last (a confusion matrix)."""

from collections.abc import Iterator
from itertools import chain

from samecurve.core.evaluation import class_names, class_scores, is_confusion
from samecurve.seam import Event, counted
from samecurve_products.report.blocks import Block, Cell, details, heading, table, text
from samecurve_products.report.record import RunRecord
from samecurve_products.report.summary import metrics_of
from samecurve_products.report.words import show_number, show_value

WHERE_ALL_ARE = "journal.jsonl has them all"
_MAX_ROWS = 300
_MAX_COLUMNS = 65  # columns of an evaluation's array that are shown, row numbers included
_ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"


def evaluations(record: RunRecord) -> Iterator[Block]:
    if not record.evaluated:
        return
    steps = [(event.step, metrics_of(event)) for event in record.evaluated]
    names = dict.fromkeys(["loss", *chain.from_iterable(metrics for _, metrics in steps)])
    rows: list[list[Cell]] = [
        [step, *(show_number(metrics[name]) if name in metrics else "" for name in names)]
        for step, metrics in steps
    ]
    yield heading("Evaluations")
    summary = counted(record.evaluated.seen, "evaluation")
    yield details(summary, [shortened_table(["step", *names], rows, WHERE_ALL_ARE)])
    yield from _arrays(record.evaluated[-1], record)


def tested(record: RunRecord) -> Iterator[Block]:
    """The result of the best checkpoint on the task's test data."""
    if event := record.tested:
        rows = [[name, show_number(value)] for name, value in metrics_of(event).items()]
        yield heading("Test")
        yield text(f"The checkpoint of step {event.step}, on data that nothing was chosen by.")
        yield table([], rows, numbers=True)
        yield from _arrays(event, record)


def shortened_table(head: list[str], rows: list[list[Cell]], where_all: str) -> Block:
    """A table without its middle rows, if it is very long."""
    if len(rows) > _MAX_ROWS:
        half = _MAX_ROWS // 2
        note = f"{len(rows) - 2 * half} rows left out here: {where_all}"
        gap: list[Cell] = [_ELLIPSIS, "", note, *[""] * (len(head) - 3)]
        rows = [*rows[:half], gap[: max(2, len(head))], *rows[-half:]]
    return table(head, rows)


def _arrays(event: Event, record: RunRecord) -> Iterator[Block]:
    """Small arrays of an evaluation as tables."""
    for name, value in event.values.items():
        if not isinstance(value, list):
            continue
        yield heading(f"{name} at step {event.step}", 3)
        if is_confusion(value) and len(value) < _MAX_COLUMNS:
            yield from _confusion(value, record)
            continue
        rows = [row if isinstance(row, list) else [row] for row in value]
        head = ["", name]
        if all(isinstance(row, list) for row in value):
            head = ["", *map(str, range(max(map(len, rows), default=0)))]
        nested = any(isinstance(item, list) for row in rows for item in row)
        if nested or len(head) > _MAX_COLUMNS or len(rows) > _MAX_ROWS:
            yield text("Too large for this page; journal.jsonl has it.", "quiet")
        else:
            shown = [[str(index), *map(show_value, row)] for index, row in enumerate(rows)]
            yield table(head, shown, numbers=True)


def _confusion(matrix: list[list[int]], record: RunRecord) -> Iterator[Block]:
    """A confusion matrix, shaded by the share of each row, and a table of the classes."""
    names = class_names(record.plan.data.reference if record.plan else {}, len(matrix))
    yield text("Rows: the label. Columns: the answer.", "quiet")
    rows = []
    for name, counts in zip(names, matrix, strict=True):
        whole = max(1, sum(counts))
        cells: list[Cell] = [{"text": str(n), "share": round(n / whole, 3)} for n in counts]
        rows.append([name, *cells])
    yield table(["", *names], rows, numbers=True)
    scores: list[list[Cell]] = []
    for score in class_scores(matrix, names):
        shares = (score.precision, score.recall, score.f1)
        scores.append([score.name, score.samples, *(f"{share:.4f}" for share in shares)])
    yield table(["", "samples", "precision", "recall", "F1"], scores, numbers=True)

"""The report as one self-contained HTML page: no script, no network, pictures inside the page.

Texts of a run are shown as text, never as markup.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files

import samecurve
from samecurve.report import page_sections as sections
from samecurve.report.canvas import MADE_BY, Picture
from samecurve.report.markup import Html, element, joined, table
from samecurve.report.record import RunRecord
from samecurve.report.summary import differences, outcome, summary
from samecurve.report.words import SUMMARY_ROWS, show_moment, show_value

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(
    records: Sequence[RunRecord],
    names: Sequence[str],
    pictures: Sequence[Picture],
    missing: Sequence[str],
    *,
    now: float,
) -> str:
    """The page of one run, or of several compared.

    missing: charts that could not be drawn
    now: seconds since 1970, when it is made
    """
    if len(records) == 1:
        title, of_runs = names[0], "run"
        body = _one_run(records[0], names[0], pictures, missing)
    else:
        title, of_runs = f"{len(records)} runs compared", "runs"
        body = _several_runs(records, names, pictures, missing)
    foot = (
        f"Made by {MADE_BY} {samecurve.__version__}, {show_moment(now)}, from the files of the"
        f" {of_runs}."
    )
    return document(title, MADE_BY, body, foot)


def document(title: str, made_by: str, body: Iterable[Html], foot: str) -> str:
    """A whole page in the style of the report."""
    about = [
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="generator", content=made_by),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        element("title", f"{title} \N{MIDDLE DOT} samecurve"),
        element("style", Html(files(__package__).joinpath("page.css").read_text())),
    ]
    head = element("head", *about)
    body_html = element("body", *body, element("p", foot, class_="quiet"))
    return f"<!doctype html>\n{element('html', head, body_html, lang='en')}\n"


def _one_run(
    record: RunRecord, name: str, pictures: Sequence[Picture], missing: Sequence[str]
) -> Iterator[Html]:
    directory = element("span", str(record.directory), class_="quiet")
    yield element("header", element("h1", name), _outcome_badge(record), directory)
    yield from sections.notes(record)
    yield _summary_cards(record)
    yield from sections.plan_in_short(record)
    yield from charts_section(pictures, missing)
    yield from sections.happened(record)
    yield from sections.starts(record)
    yield from sections.evaluations(record)
    yield from sections.test(record)
    yield from sections.samples(record)
    yield from sections.plan(record)
    yield from sections.config(record)
    yield from sections.environment(record)
    yield from sections.checkpoints(record)


def _summary_cards(record: RunRecord) -> Html:
    run = summary(record)
    cards = []
    for row in SUMMARY_ROWS:
        value, more = row.show(run)
        if value:
            text = [value, element("small", more)] if more else [value]
            cards.append(element("div", element("dt", row.title), element("dd", *text)))
    return element("dl", *cards, class_="cards")


def _several_runs(
    records: Sequence[RunRecord],
    names: Sequence[str],
    pictures: Sequence[Picture],
    missing: Sequence[str],
) -> Iterator[Html]:
    yield element("header", element("h1", f"{len(records)} runs compared"))
    badges = [
        joined(name, " ", _outcome_badge(record), " ")
        for name, record in zip(names, records, strict=True)
    ]
    yield element("p", joined(*badges))
    for name, record in zip(names, records, strict=True):
        yield from sections.notes(record, f"{name}: ")
    yield from _summary_table(records, names)
    yield from _differences(differences(records), names)
    yield from charts_section(pictures, missing)
    for name, record in zip(names, records, strict=True):
        inner = [
            *sections.plan_in_short(record),
            *sections.happened(record),
            *sections.samples(record),
        ]
        hint = f"plan, what happened, samples; all of it: samecurve report {record.directory}"
        yield element("h2", name)
        yield element("details", element("summary", hint), *inner)


def _summary_table(records: Sequence[RunRecord], names: Sequence[str]) -> Iterator[Html]:
    """The rows of the summary in which any run has a value."""
    runs = [summary(record) for record in records]
    rows: list[list[object]] = []
    for row in SUMMARY_ROWS:
        cells = [row.show(run) for run in runs]
        if any(value for value, _ in cells):
            rows.append([row.title, *(_summary_cell(value, more) for value, more in cells)])
    yield element("h2", "Summary")
    yield table(["", *names], rows, numbers=True)


def _summary_cell(value: str, more: str) -> Html:
    if not more:
        return joined(value or "\N{EN DASH}")
    return joined(value or "\N{EN DASH}", element("div", more, class_="quiet"))


def _differences(
    parts: Mapping[str, Mapping[str, Sequence[object]]], names: Sequence[str]
) -> Iterator[Html]:
    """A table of the values that differ between the runs."""
    titles = {
        "config": "What was asked for otherwise",
        "plan": "What the plans made of it",
        "environment": "What they ran in",
    }
    for part, title in titles.items():
        yield element("h2", title)
        rows: list[list[object]] = [
            [key, *(show_value(value, key) for value in values)]
            for key, values in parts[part].items()
        ]
        if rows:
            yield table([part, *names], rows)
        else:
            yield element("p", f"The same {part} in all.", class_="quiet")


def charts_section(pictures: Sequence[Picture], missing: Sequence[str]) -> Iterator[Html]:
    drawn = []
    for picture in pictures:
        parts = [element("b", picture.title), picture.svg]
        if picture.note:
            parts.append(element("figcaption", picture.note))
        drawn.append(element("figure", *parts))
    yield element("h2", "Charts")
    yield element("div", *drawn, class_="figures")
    if missing:
        text = f"Not drawn, since there are no numbers for it: {', '.join(missing)}."
        yield element("p", text, class_="quiet")


def _outcome_badge(record: RunRecord) -> Html:
    how = outcome(record)
    return element("span", how, class_=f"outcome {how.replace(' ', '-')}")

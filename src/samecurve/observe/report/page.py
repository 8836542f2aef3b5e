"""The report as one HTML page that needs nothing else: no script, no network, pictures within.

What a run says is text, never markup.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

import samecurve
from samecurve.observe.report import sections
from samecurve.observe.report.canvas import MADE_BY, Picture
from samecurve.observe.report.markup import Html, element, joined, table
from samecurve.observe.report.reading import RunRecord
from samecurve.observe.report.summary import differences, outcome, summary
from samecurve.observe.report.words import SUMMARY_ROWS, show_moment, show_value

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(
    records: Sequence[RunRecord],
    names: Sequence[str],
    pictures: Sequence[Picture],
    left_out: Sequence[str],
    now: float,
) -> str:
    """now: seconds since 1970, when it is made."""
    title = names[0] if len(records) == 1 else f"{len(records)} runs compared"
    body = (
        _one(records[0], names[0], pictures, left_out)
        if len(records) == 1
        else _several(records, names, pictures, left_out)
    )
    foot = (
        f"Made by {MADE_BY} {samecurve.__version__}, {show_moment(now)}, from the files of the"
        f" run{'s' if len(records) > 1 else ''}."
    )
    return document(title, MADE_BY, body, foot)


def document(title: str, made_by: str, body: Iterable[Html], foot: str) -> str:
    """A whole page of this look."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="generator", content=made_by),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        element("title", f"{title} \N{MIDDLE DOT} samecurve"),
        element("style", Html(files(__package__).joinpath("page.css").read_text())),
    )
    return (
        "<!doctype"
        f" html>\n{element('html', head, element('body', *body, element('p', foot, class_='quiet')), lang='en')}\n"
    )


def _one(
    record: RunRecord, name: str, pictures: Sequence[Picture], left_out: Sequence[str]
) -> Iterator[Html]:
    found = summary(record)
    yield element(
        "header",
        element("h1", name),
        _pill(record),
        element("span", str(record.directory), class_="quiet"),
    )
    yield from sections.notes(record)
    yield element(
        "dl",
        *(
            element(
                "div",
                element("dt", title),
                element("dd", value, element("small", more) if more else ""),
            )
            for title, value, more in (row(found) for row in SUMMARY_ROWS.values())
            if value
        ),
        class_="cards",
    )
    yield from sections.plan_in_short(record)
    yield from pictures_section(pictures, left_out)
    yield from sections.happened(record)
    yield from sections.starts(record)
    yield from sections.evaluations(record)
    yield from sections.samples(record)
    yield from sections.plan(record)
    yield from sections.config(record)
    yield from sections.environment(record)
    yield from sections.checkpoints(record)


def _several(
    records: Sequence[RunRecord],
    names: Sequence[str],
    pictures: Sequence[Picture],
    left_out: Sequence[str],
) -> Iterator[Html]:
    yield element("header", element("h1", f"{len(records)} runs compared"))
    yield element(
        "p",
        joined(
            *(
                part
                for name, record in zip(names, records, strict=True)
                for part in (name, " ", _pill(record), " ")
            )
        ),
    )
    for name, record in zip(names, records, strict=True):
        yield from sections.notes(record, f"{name}: ")
    yield element("h2", "Summary")
    found = [summary(record) for record in records]
    yield table(
        ["", *names],
        [[title, *(_cell(row(run)) for run in found)] for title, row in _titled(found)],
        numbers=True,
    )
    yield from _differences(differences(records), names)
    yield from pictures_section(pictures, left_out)
    for name, record in zip(names, records, strict=True):
        inner = [
            *sections.plan_in_short(record),
            *sections.happened(record),
            *sections.samples(record),
        ]
        yield element("h2", name)
        yield element(
            "details",
            element(
                "summary",
                f"plan, what happened, samples; all of it: samecurve report {record.directory}",
            ),
            *inner,
        )


def _titled(found: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The rows of the summary in which any run has a figure."""
    for row in SUMMARY_ROWS.values():
        titles = [row(run) for run in found]
        if any(value for _, value, _ in titles):
            yield titles[0][0], row


def _cell(row: tuple[str, str, str]) -> Html:
    _, value, more = row
    return joined(value or "\N{EN DASH}", element("div", more, class_="quiet") if more else "")


def _differences(
    found: Mapping[str, Mapping[str, Sequence[Any]]], names: Sequence[str]
) -> Iterator[Html]:
    """Only what is not the same for all."""
    titles = {
        "config": "What was asked for otherwise",
        "plan": "What the plans made of it",
        "environment": "What they ran in",
    }
    for part, title in titles.items():
        yield element("h2", title)
        if found[part]:
            yield table(
                [part, *names],
                [
                    [key, *(show_value(value, key) for value in values)]
                    for key, values in found[part].items()
                ],
            )
        else:
            yield element("p", f"The same {part} in all.", class_="quiet")


def pictures_section(pictures: Sequence[Picture], left_out: Sequence[str]) -> Iterator[Html]:
    yield element("h2", "Figures")
    yield element(
        "div",
        *(
            element(
                "figure",
                element("b", picture.title),
                picture.svg,
                element("figcaption", picture.note) if picture.note else "",
            )
            for picture in pictures
        ),
        class_="figures",
    )
    if left_out:
        yield element(
            "p",
            f"Not drawn, since there are no numbers for it: {', '.join(left_out)}.",
            class_="quiet",
        )


def _pill(record: RunRecord) -> Html:
    how = outcome(record)
    return element("span", how, class_=f"outcome {how.replace(' ', '-')}")

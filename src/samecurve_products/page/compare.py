"""The routes of the pages Compare and Machine.

The comparison of two runs to the last bit is made by another process.
"""

import os
import threading
from collections.abc import Sequence
from typing import TypedDict

from fastapi import FastAPI
from starlette.responses import Response

from samecurve.processes import output_of
from samecurve.seam import printable, python_module, show_bytes
from samecurve_products.page.answers import json_answer
from samecurve_products.page.errors import RefusedError
from samecurve_products.page.indexer import journal_size
from samecurve_products.page.machine_page import machine_page
from samecurve_products.page.roots import ListedRun
from samecurve_products.page.run_pages import picture_of
from samecurve_products.page.site import Site
from samecurve_products.report.blocks import Page
from samecurve_products.report.compare_page import compare_page
from samecurve_products.report.redact import redact, redact_blocks

MOST_RUNS = 12
_MOST_JOURNAL = 256 << 20  # bytes; the comparison holds both journals in memory
_PATIENCE = 120.0  # seconds
_ONE = threading.Lock()  # a comparison to the last bit at a time


class ComparedBits(TypedDict):
    """The lines of `samecurve compare-runs`, and what it found. equal: None: it can't tell."""

    lines: list[str]
    equal: bool | None


def add(app: FastAPI, site: Site) -> None:
    """Add the routes to the application."""

    @app.get("/api/compare")
    def compare(runs: str = "") -> Response:
        return json_answer(comparison(site, chosen_runs(site, runs)))

    @app.get("/api/compare/bits")
    def bits(runs: str = "") -> Response:
        first, second = chosen_runs(site, runs, most=2)
        return json_answer(compare_bits(first, second))

    @app.get("/api/machine")
    def machine() -> Response:
        return json_answer(machine_page(site.devices, site.catalogue.roots))


def chosen_runs(site: Site, ids: str, most: int = MOST_RUNS) -> list[ListedRun]:
    """The runs of ids with commas between them. RefusedError: one is missing, or too many."""
    names = list(dict.fromkeys(filter(None, ids.split(","))))
    if not 2 <= len(names) <= most:
        raise RefusedError(
            400, f"{len(names)} runs can't be compared", f"choose 2 to {most} runs", "runs"
        )
    return [site.find(name) for name in names]


def comparison(site: Site, runs: Sequence[ListedRun]) -> Page:
    """The page of several runs."""
    by_home = {listed.home: listed for listed in runs}
    records = [site.pages.record(listed) for listed in runs]
    names = [printable(listed.name) for listed in runs]
    page = compare_page(records, names, (), lambda home: picture_of(by_home[home]))
    shown: Page = redact_blocks(page)
    return shown


def compare_bits(first: ListedRun, second: ListedRun) -> ComparedBits:
    """Compare two runs to the last bit, as `samecurve compare-runs` does."""
    for listed in (first, second):
        size = journal_size(listed.home)
        if size > _MOST_JOURNAL:
            words = f"{listed.name}: its journal has {show_bytes(size)}, too long to compare here"
            return {"lines": [printable(words), _in_terminal(first, second)], "equal": None}
    folder = first.root.path
    paths = [f"./{os.path.relpath(listed.home, folder)}" for listed in (first, second)]
    command = python_module("samecurve", "compare-runs", "--", *paths)
    if not _ONE.acquire(timeout=_PATIENCE):
        raise RefusedError(409, "another comparison is under way", "try again in a minute")
    try:
        done = output_of(command, cwd=folder, seconds=_PATIENCE)
    except TimeoutError:
        words = f"the comparison took more than {_PATIENCE:.0f} s"
        return {"lines": [words, _in_terminal(first, second)], "equal": None}
    finally:
        _ONE.release()
    output = done.stdout if done.returncode in {0, 1} and done.stdout else done.stderr
    lines = output.splitlines()
    equal = {0: True, 1: False}.get(done.returncode) if done.stdout else None
    return {"lines": [redact(printable(line)) for line in lines], "equal": equal}


def _in_terminal(first: ListedRun, second: ListedRun) -> str:
    return printable(f"in a terminal: samecurve compare-runs {first.home} {second.home}")

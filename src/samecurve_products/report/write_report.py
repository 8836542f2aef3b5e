"""`samecurve report RUN...`: one page in one file, made from the files of runs.

Files of runs are only read. Nothing is written until everything is made.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

import samecurve
from samecurve.seam import RunError, UserError, regular_only
from samecurve_products.report.blocks import Page
from samecurve_products.report.compare_page import compare_page
from samecurve_products.report.frozen import frozen_html
from samecurve_products.report.png import need_matplotlib, png
from samecurve_products.report.record import RunRecord
from samecurve_products.report.run_page import picture_data, run_page
from samecurve_products.report.summary import differences, summary
from samecurve_products.report.words import show_moment

MADE_BY = "samecurve report"
_PAGE = "report.html"
_PAGE_SUFFIXES = {".html", ".htm"}
_MAKER_WITHIN = 2000  # first bytes of a file, which name the program that made it
_FOR_SEVERAL = Path("report")


def write_report(
    records: Sequence[RunRecord],
    to: Path | None,
    *,
    pictures: bool = False,
    bits: Sequence[str] = (),
) -> list[Path]:
    """Write the page; returns what was written, the page first.

    to: the directory, or a file x.html; None: the run's own directory for one run, report/ for
        several
    pictures: also write each chart as report-NAME.png beside the page
    bits: lines that say whether the runs are equal to the last bit

    UserError: no directory to write to, a file there that no report wrote, or no matplotlib for
    pictures. RunError: the disk is full.
    """
    if pictures:
        need_matplotlib("--png")
    directory = to or _FOR_SEVERAL
    if to is None and len(records) == 1:
        directory = records[0].directory
    name = _PAGE
    if to is not None and to.suffix in _PAGE_SUFFIXES and not to.is_dir():
        directory, name = to.parent, to.name
    _check_directory(directory, name, pictures=pictures)
    names = short_names([record.directory for record in records])
    page = _page(records, names, bits)
    of_runs = "run" if len(records) == 1 else "runs"
    moment = show_moment(time.time())
    foot = f"Made by {MADE_BY} {samecurve.__version__}, {moment}, from the files of the {of_runs}."
    contents = {name: frozen_html(page, MADE_BY, foot).encode()}
    if pictures:
        contents |= _pictures(page)
    return _publish(directory, contents, replace_pictures=pictures)


@np.errstate(all="ignore")  # a damaged journal may hold any number
def _page(records: Sequence[RunRecord], names: Sequence[str], bits: Sequence[str]) -> Page:
    if len(records) == 1:
        return run_page(records[0], names[0], picture_data(records[0].directory))
    return compare_page(records, names, bits, picture_data)


def _pictures(page: Page) -> dict[str, bytes]:
    """A PNG for each chart; for several runs the loss over time and over samples, too."""
    drawn = {}
    for block in page["blocks"]:
        if block["type"] not in {"chart", "bars"}:
            continue
        drawn[f"report-{block['name']}.png"] = png([block], page, made_by=MADE_BY)
        if block["name"] == "loss" and len(page["runs"]) > 1:
            for axis, word in (("seconds", "time"), ("samples", "samples")):
                drawn[f"report-loss-{word}.png"] = png([block], page, made_by=MADE_BY, axis=axis)
    return drawn


def report_numbers(records: Sequence[RunRecord]) -> dict[str, object]:
    """The summaries, and the differences between several runs."""
    numbers: dict[str, object] = {"runs": [summary(record) for record in records]}
    if len(records) > 1:
        numbers["differences"] = differences(records)
    return numbers


def short_names(directories: Sequence[Path]) -> list[str]:
    """The last parts of the runs' paths, as many as are needed to tell the runs apart."""
    paths = [directory.resolve().parts for directory in directories]
    depth = 1
    while depth < max(map(len, paths)) and len({path[-depth:] for path in paths}) < len(paths):
        depth += 1
    return [str(Path(*path[-depth:])) for path in paths]


def _check_directory(directory: Path, name: str, *, pictures: bool) -> None:
    """Refuse a directory before anything is made."""
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is no directory", "--to DIR", "--to")
    files = sorted(directory.glob("report-*.png")) if pictures else []
    for path in (directory / name, *files):
        if path.exists() and not _is_ours(path):
            raise UserError(
                f"{path} was not written by samecurve report, and would be overwritten",
                "move it away, or --to another DIR",
                str(path),
            )


def _is_ours(path: Path) -> bool:
    try:
        with open(path, "rb", opener=regular_only) as file:
            return MADE_BY.encode() in file.read(_MAKER_WITHIN)
    except OSError:
        return False


def _publish(
    directory: Path, contents: Mapping[str, bytes], *, replace_pictures: bool
) -> list[Path]:
    """Write each file completely or not at all. A new directory is removed where that fails.

    replace_pictures: pictures of an earlier report that this report does not have are removed
    """
    scratch = {name: directory / f".{name}.{os.getpid()}.part" for name in contents}
    is_new, is_complete = not directory.exists(), False
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            scratch[name].write_bytes(content)
        for name, path in scratch.items():
            path.replace(directory / name)
        is_complete = True
        for stale in directory.glob("report-*.png") if replace_pictures else ():
            if stale.name not in contents and _is_ours(stale):
                stale.unlink()
    except OSError as error:
        raise RunError(
            f"{directory} can't be written: {error.strerror}",
            "--to DIR where you may write and there is room",
            str(directory),
        ) from None
    finally:
        for path in scratch.values():
            with contextlib.suppress(OSError):  # it was renamed already, or never written
                path.unlink(missing_ok=True)
        if is_new and not is_complete:
            shutil.rmtree(directory, ignore_errors=True)
    return [directory / name for name in contents]

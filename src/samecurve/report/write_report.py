"""`samecurve report RUN...`: one page and its charts, made from the files of runs.

Files of runs are only read. Nothing is written until everything is drawn.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np

from samecurve.core.system.files import regular_only
from samecurve.errors import RunError, UserError
from samecurve.report.canvas import MADE_BY, need_matplotlib
from samecurve.report.record import RunRecord
from samecurve.report.summary import Summary, differences, summary

_PAGE = "report.html"
_PAGE_SUFFIXES = {".html", ".htm"}
_MAKER_WITHIN = 2000  # first bytes of a file, which name the program that made it
_FOR_SEVERAL = Path("report")


def write_report(records: Sequence[RunRecord], to: Path | None) -> list[Path]:
    """Write the page and its pictures; returns what was written, the page first.

    to: the directory, or a file x.html: then the page alone, which holds its pictures; None: the
        run's own directory for one run, report/ for several

    UserError: no matplotlib, no directory to write to, or a file there that no report wrote.
    RunError: the disk is full.
    """
    need_matplotlib()
    directory = to or _FOR_SEVERAL
    if to is None and len(records) == 1:
        directory = records[0].directory
    name = _PAGE
    is_file = to is not None and to.suffix in _PAGE_SUFFIXES and not to.is_dir()
    if is_file:
        directory, name = directory.parent, directory.name
    _check_directory(directory, name, pictures=not is_file)
    from samecurve.report.charts import draw
    from samecurve.report.page import page

    names = short_names([record.directory for record in records])
    with np.errstate(all="ignore"):  # a damaged journal may hold any number
        pictures, missing = draw(records, names)
        html = page(records, names, pictures, missing, now=time.time())
    contents = {name: html.encode("utf-8", "replace")}
    if is_file:
        return _publish(directory, contents, replace_pictures=False)
    for picture in pictures:
        contents[f"report-{picture.name}.png"] = picture.png
    return _publish(directory, contents, replace_pictures=True)


class ReportNumbers(TypedDict, total=False):
    runs: list[Summary]
    differences: dict[str, dict[str, list[object]]]  # only for several runs


def report_numbers(records: Sequence[RunRecord]) -> ReportNumbers:
    """The summaries, and the differences between several runs."""
    numbers: ReportNumbers = {"runs": [summary(record) for record in records]}
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
    """Refuse a directory before the charts are drawn, which takes a while."""
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

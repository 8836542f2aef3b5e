"""`samecurve report RUN...`: one page and its pictures, made from what runs left behind.

Runs are only read; nothing is written until all of it is drawn.
"""

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from samecurve.errors import RunError, UserError
from samecurve.observe.report.canvas import MADE_BY, need_matplotlib
from samecurve.observe.report.reading import RunRecord
from samecurve.observe.report.summary import differences, summary

_PAGE = "report.html"
_HEAD = 2000  # bytes of a file in which its maker is named
_ELSEWHERE = Path("report")


def write_report(records: Sequence[RunRecord], to: Path | None) -> list[Path]:
    """Write the page and its pictures.

    to: the directory; the run's own for one run, report/ for several, if None. Returns what was
    written, the page first.

    UserError: no matplotlib, no directory to write to, or a file there that no report wrote.
    RunError: the disk is full.
    """
    need_matplotlib()
    home = to or (records[0].directory if len(records) == 1 else _ELSEWHERE)
    _check_home(home)
    from samecurve.observe.report.figures import draw
    from samecurve.observe.report.page import page

    names = short_names([record.directory for record in records])
    with np.errstate(all="ignore"):  # a damaged journal may hold any number
        pictures, left_out = draw(records, names)
        whole = page(records, names, pictures, left_out, time.time())
    made = {
        _PAGE: whole.encode("utf-8", "replace"),
        **{f"report-{picture.name}.png": picture.png for picture in pictures},
    }
    return _publish(home, made)


def report_numbers(records: Sequence[RunRecord]) -> dict[str, Any]:
    """The summaries, and what differs between several."""
    found: dict[str, Any] = {"runs": [summary(record) for record in records]}
    return {**found, **({"differences": differences(records)} if len(records) > 1 else {})}


def short_names(homes: Sequence[Path]) -> list[str]:
    """The last parts of their paths, as many as tell them apart."""
    whole = [home.resolve().parts for home in homes]
    depth = next(
        (
            depth
            for depth in range(1, max(map(len, whole)) + 1)
            if len({parts[-depth:] for parts in whole}) == len(whole)
        ),
        1,
    )
    return [str(Path(*parts[-depth:])) for parts in whole]


def _check_home(home: Path) -> None:
    """Refused before the figures are drawn, which takes a while."""
    if home.exists() and not home.is_dir():
        raise UserError(f"{home} is no directory", "--to DIR", "--to")
    foreign = [
        path
        for path in (home / _PAGE, *sorted(home.glob("report-*.png")))
        if path.exists() and not _ours(path)
    ]
    if foreign:
        raise UserError(
            f"{foreign[0]} was not written by samecurve report, and would be overwritten",
            "move it away, or --to another DIR",
            str(foreign[0]),
        )


def _ours(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return MADE_BY.encode() in file.read(_HEAD)
    except OSError:
        return False


def _publish(home: Path, made: Mapping[str, bytes]) -> list[Path]:
    """Each file whole or not at all.

    Pictures of an earlier report that this one has not are taken away.
    """
    scratch = [(home / f".{name}.{os.getpid()}.part", home / name) for name in made]
    try:
        home.mkdir(parents=True, exist_ok=True)
        for (part, _), content in zip(scratch, made.values(), strict=True):
            part.write_bytes(content)
        for part, final in scratch:
            part.replace(final)
        for stale in home.glob("report-*.png"):
            if stale.name not in made and _ours(stale):
                stale.unlink()
    except OSError as error:
        raise RunError(
            f"{home} can't be written: {error.strerror}",
            "--to DIR where you may write and there is room",
            str(home),
        ) from None
    finally:
        for part, _ in scratch:
            with contextlib.suppress(
                OSError
            ):  # the one that was renamed is gone, and where none could be written there is none
                part.unlink(missing_ok=True)
    return [final for _, final in scratch]

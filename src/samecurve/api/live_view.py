"""The view of a live run in a notebook: a progress bar and the loss curve, updated in place.

One output shows both. It is updated at most twice a second, so a fast run does not fill the
notebook. IPython is imported only where its kernel already runs.
"""

import html
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from samecurve.core.events import Event
from samecurve.core.planning.plan import Plan
from samecurve.observe.console import PlainView
from samecurve.observe.event_lines import Pace, load_line, step_parts
from samecurve.terminal import printable

_SECONDS = 0.5  # between two updates
_MOST_POINTS = 600
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 560, 190, 56, 22, 8  # pixels of the curve and its margins

_LINE, _DOTS = "#2f8fc9", "#c2500a"  # colours that are legible on white and on black

Bundle = dict[str, str]  # one output in several forms, by MIME type


def notebook_output() -> Callable[[Bundle], None] | None:
    """A function that shows a bundle and, called again, replaces it; None outside a notebook."""
    if "IPython" not in sys.modules:
        return None
    from IPython.core.getipython import get_ipython

    if getattr(get_ipython(), "kernel", None) is None:  # none, or a shell on a terminal
        return None
    from IPython import display

    show_bundle: Any = display.display  # has no types
    handle: Any = None

    def show(bundle: Bundle) -> None:
        nonlocal handle
        if handle is None:
            handle = show_bundle(bundle, raw=True, display_id=True)
        else:
            handle.update(bundle, raw=True)

    return show


class Curve:
    """A loss by step, in at most some hundred points; each is the mean of equally many steps."""

    def __init__(self) -> None:
        self._each = 1  # steps of a point
        self._points: list[tuple[float, float]] = []
        self._open: list[tuple[float, float]] = []  # steps of the point that is not full

    def add(self, step: int, loss: float) -> None:
        self._open.append((step, loss))
        if len(self._open) < self._each:
            return
        self._points.append(_mean(self._open))
        self._open = []
        if len(self._points) == _MOST_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [_mean(list(pair)) for pair in pairs]
            self._each *= 2

    def drop_after(self, step: int) -> None:
        """Forget the steps that a restart computes again."""
        self._points = [point for point in self._points if point[0] <= step]
        self._open = [point for point in self._open if point[0] <= step]

    @property
    def points(self) -> list[tuple[float, float]]:
        return [*self._points, *([_mean(self._open)] if self._open else [])]


def _mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    count = len(points)
    return sum(step for step, _ in points) / count, sum(loss for _, loss in points) / count


class NotebookView:
    """A progress bar and the loss curve in one output; other events are lines below it.

    output: shows a bundle, and replaces the last one
    """

    def __init__(self, plan: Plan, run: Path, output: Callable[[Bundle], None]) -> None:
        self._plan, self._output = plan, output
        self._plain, self._pace = PlainView(plan, run), Pace()
        self._curve, self._evaluations = Curve(), list[tuple[float, float]]()
        self._step, self._words, self._below = 0, "starting", ""
        self._shown_at, self._is_new = -math.inf, True

    def show(self, event: Event) -> None:
        self._pace.add(event)
        values, loss = event.values, event.values.get("loss")
        if event.kind == "step":
            self._step = event.step
            self._words = "  ".join(step_parts(event.step, values, self._plan, self._pace).values())
            if loss is not None:
                self._curve.add(event.step, loss)
        elif event.kind == "sensors":
            self._below = load_line(event)
        elif event.kind == "evaluated" and isinstance(loss, float):
            self._evaluations.append((event.step, loss))
        elif event.kind == "resumed":
            self._curve.drop_after(event.step)
            self._evaluations = [one for one in self._evaluations if one[0] <= event.step]
        self._is_new = True
        if time.monotonic() - self._shown_at >= _SECONDS:
            self._update()
        if event.kind not in {"step", "sensors"} or values.get("skipped"):
            self._plain.show(event)

    def close(self) -> None:
        """Show what came since the last update."""
        if self._is_new:
            self._update()

    def _update(self) -> None:
        self._shown_at, self._is_new = time.monotonic(), False
        text = printable(self._words)
        markup = (
            f'<div><progress value="{self._step}" max="{self._plan.steps}"'
            f' style="width:{_WIDTH}px"></progress><pre style="white-space:pre-wrap;margin:0">'
            f"{html.escape(text)}\n{html.escape(printable(self._below))}</pre>"
            f"{curve_svg(self._curve.points, self._evaluations)}</div>"
        )
        self._output({"text/html": markup, "text/plain": text})


def curve_svg(training: list[tuple[float, float]], evaluations: list[tuple[float, float]]) -> str:
    """The curve of (step, loss) points as an SVG element, evaluations as dots.

    "" while there is nothing to draw.
    """
    points = training + evaluations
    if len(training) < 2:
        return ""
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    if low == high:
        low, high = low - 0.5, high + 0.5

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = _LEFT + (point[0] - first) / (last - first) * (_WIDTH - _LEFT - 8)
        y = _TOP + (high - point[1]) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)
        return round(x, 1), round(y, 1)

    line = " ".join(f"{x},{y}" for x, y in map(place, training))
    dots = "".join(
        f'<circle cx="{x}" cy="{y}" r="3" fill="{_DOTS}"/>' for x, y in map(place, evaluations)
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" aria-label="Loss"'
        ' style="max-width:100%;font:11px sans-serif" fill="currentColor">'
        f"{_grid(low, high)}"
        f'<text x="{_LEFT}" y="{_HEIGHT - 6}">step {first:.0f}</text>'
        f'<text x="{_WIDTH - 8}" y="{_HEIGHT - 6}" text-anchor="end">{last:.0f}</text>'
        f'<polyline points="{line}" fill="none" stroke="{_LINE}" stroke-width="1.5"/>'
        f"{dots}</svg>"
    )


def _grid(low: float, high: float) -> str:
    """Lines at five losses, each with its number."""
    parts = []
    for index in range(5):
        y = _TOP + index / 4 * (_HEIGHT - _TOP - _BOTTOM)
        loss = high - index / 4 * (high - low)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}"'
            ' stroke="currentColor" opacity="0.2"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{loss:.4g}</text>'
        )
    return "".join(parts)

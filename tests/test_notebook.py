"""In a notebook train() shows a progress bar and the loss curve in one output, updated in place."""

import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from samecurve.api.live_view import Bundle, Curve, NotebookView, curve_svg, notebook_output
from samecurve.core.events import Event
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan
from tiny import FACTS, MACHINE, config_of, step_event, tiny_values


@pytest.fixture
def made(tmp_path: Path) -> Plan:
    facts = FACTS.having(samples=1000)
    return plan(config_of(tiny_values(tmp_path, train={"steps": 2000})), MACHINE, facts)


def test_a_fast_run_updates_one_output_now_and_then(
    made: Plan, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2000 steps of 10 ms: an update every half second, and no line for a step."""
    shown: list[Bundle] = []
    view = NotebookView(made, Path("runs/a"), shown.append)
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for step in range(1, 2001):
        now += 0.01
        view.show(step_event(step, 4.0 - step / 1000))
        if step == 1000:
            view.show(Event("evaluated", step, {"loss": 3.1, "seconds": 1.0}))
    view.close()
    view.close()
    assert 38 <= len(shown) <= 42
    last = shown[-1]
    assert last["text/plain"].startswith("step   2000/2000  loss 2.0000")
    assert '<progress value="2000" max="2000"' in last["text/html"]
    assert last["text/html"].count("<polyline") == 1
    assert last["text/html"].count("<circle") == 1
    assert len(last["text/html"]) < 20_000
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["eval   step 1000  loss 3.1000  (1.0 s)"]


def test_a_run_without_a_loss_or_with_markup_in_its_words_is_shown(made: Plan) -> None:
    shown: list[Bundle] = []
    view = NotebookView(made, Path("runs/a"), shown.append)
    event = step_event(1, None)
    event.values["metrics"] = {"<script>": 1.0}
    view.show(event)
    view.show(Event("sensors", 1, {"devices": []}))
    view.close()
    assert "loss not finite" in shown[-1]["text/plain"]
    assert "<script>" not in shown[-1]["text/html"]
    assert "<svg" not in shown[-1]["text/html"]


def test_a_curve_has_some_hundred_points_and_every_step_counts() -> None:
    curve = Curve()
    for step in range(1, 100_001):
        curve.add(step, float(step))
    points = curve.points
    assert 300 <= len(points) <= 600
    assert points == sorted(points)
    assert points[0][0] == pytest.approx(points[0][1])
    curve.drop_after(50_000)
    assert curve.points[-1][0] <= 50_000


def test_the_curve_is_well_formed_and_lies_within_its_frame() -> None:
    svg = ElementTree.fromstring(curve_svg([(1, 2.0), (2, 1.0), (3, 1.5)], [(3, 4.0)]))
    line = svg.find("polyline")
    assert line is not None
    places = [tuple(map(float, place.split(","))) for place in line.attrib["points"].split()]
    assert all(0 <= x <= 560 and 0 <= y <= 190 for x, y in places)
    assert places[0][1] < places[2][1] < places[1][1]  # the lower the loss, the lower on the page
    assert "<circle" in curve_svg([(1, 2.0), (2, 2.0)], [(2, 2.0)])  # a flat curve
    assert curve_svg([(1, 2.0)], []) == ""


def test_no_notebook_means_no_ipython(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert notebook_output() is None
    assert "IPython" not in sys.modules

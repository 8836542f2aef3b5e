"""The learning rate is a pure function of the step."""

import pytest

from samecurve.core.config.section import Decay
from samecurve.core.planning.schedule import Schedule


@pytest.mark.parametrize(
    ("decay", "middle", "last"),
    [("constant", 1.0, 1.0), ("linear", 0.55, 0.1), ("cosine", 0.55, 0.1), ("wsd", 1.0, 0.1)],
)
def test_shapes(decay: Decay, middle: float, last: float) -> None:
    schedule = Schedule(peak=1.0, steps=111, warmup=10, decay=decay, final=0.1, cooldown=0.2)
    assert schedule.at(0) == pytest.approx(0.1)
    assert schedule.at(9) == schedule.at(10) == pytest.approx(1.0)
    assert schedule.at(60) == pytest.approx(middle)
    assert schedule.at(110) == pytest.approx(last)
    assert schedule.at(200) == pytest.approx(last)  # a run that is trained on beyond its schedule


def test_wsd_decays_only_in_its_cooldown() -> None:
    schedule = Schedule(peak=2.0, steps=101, decay="wsd", final=0.0, cooldown=0.5)
    assert [schedule.at(step) for step in (0, 50, 75, 100)] == pytest.approx([2.0, 2.0, 1.0, 0.0])


def test_a_tasks_own_schedule_is_not_asked_beyond_its_steps() -> None:
    """As where bench takes more steps than the run has."""
    schedule = Schedule(peak=2.0, steps=3, decay="task")
    assert [schedule.at(step, [0.5, 1.0, 0.25].__getitem__) for step in (0, 2, 9)] == [1, 0.5, 0.5]

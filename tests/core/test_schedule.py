"""The learning rate is a pure function of the step."""

import pytest

from samecurve.core.config import Decay
from samecurve.core.config.sections import Batch, ScheduleFields
from samecurve.core.determinism.data_order import Order
from samecurve.core.planning.schedule import Schedule, choose_schedule
from samecurve.errors import UserError


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


@pytest.mark.parametrize(
    ("decay", "rates"),
    [
        ("linear", [0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25]),
        ("constant", [0, 0.25, 0.5, 0.75, 1, 1, 1, 1]),
        ("wsd", [0, 0.25, 0.5, 0.75, 1, 1, 1, 0.5]),
        ("cosine", [0, 0.25, 0.5, 0.75, 1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5]),
    ],
)
def test_the_form_of_transformers_begins_at_nothing_and_ends_before_the_end(
    decay: Decay, rates: list[float]
) -> None:
    theirs = Schedule(
        peak=2.0, steps=8, warmup=4, decay=decay, final=0.0, cooldown=0.5, form="transformers"
    )
    assert [theirs.at(step) for step in range(8)] == pytest.approx([2 * rate for rate in rates])
    assert theirs.at(8) == theirs.at(20) == pytest.approx(2.0 if decay == "constant" else 0.0)


def test_the_form_of_a_run_is_said_and_refused_where_a_task_has_its_own_schedule() -> None:
    order = Order(seed=0, samples=100, global_batch_size=10)
    section = ScheduleFields(warmup="0.45ep", decay="linear", final=0.0, form="transformers")
    chosen = choose_schedule(section, "2ep", Batch(samples=10), order, lr=0.5)
    assert (chosen.value.steps, chosen.value.warmup) == (20, 5)
    assert chosen.reasons["lr"] == (
        "as configured; not scaled; schedule.form transformers: 0 in the first step, 0.0333 in the"
        " last"
    )
    own = ScheduleFields(warmup="0.45ep", decay="linear", final=0.0)
    assert choose_schedule(own, "2ep", Batch(samples=10), order, lr=0.5).reasons["lr"] == (
        "as configured; not scaled"
    )
    alone = ScheduleFields(form="transformers")
    with pytest.raises(UserError, match=r"which schedule\.form does not reach"):
        choose_schedule(alone, 20, Batch(samples=10), order, lr=0.5, by_task="its schedule")

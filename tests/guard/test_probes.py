"""Probes along a run: each part of one finds what no other part does, in the first probe that can
see it; and a probe leaves nothing behind.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from rank_runs import train_on_ranks, train_one_rank
from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.core.config.sections import Config
from samecurve.core.events import Event
from samecurve.core.planning.planner import plan
from samecurve.features.guard import SentinelRule, is_due, is_probed, next_probe
from samecurve.observe import read_events
from samecurve.tasks import Tasks, open_task
from tiny import MACHINE
from worlds import JobFailedError, Pool

HERE = Path(__file__).parent
GUARD = "samecurve.features.guard"
# what makes a part of a probe see nothing
BLIND: dict[str, list[tuple[str, Any]]] = {
    "again": [(f"{GUARD}.recomputation.judge", None)],
    "parts": [
        (f"{GUARD}.judge.Judge.error_of_means", None),
        (f"{GUARD}.judge.Judge.error_of_gradients", None),
    ],
    "rank": [(f"{GUARD}.judge.Judge.error_between_ranks", None)],
    "all": [(f"{GUARD}.torch_hooks.StepGuard._probe", None)],
    "write": [(f"{GUARD}.weights.Bits.written", [])],
}


def config_of(task: str, world: int, **train: Any) -> Config:
    values: dict[str, Any] = {
        "task": f"{HERE}/late_losses.py:{task}",
        "batch": {"samples": 8, "per_device": 4},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "schedule": {"decay": "constant"},
        "train": {"steps": 6, "precision": "f64", **train},
        "devices": {"use": f"cpu:{world}"},
    }
    return load_document(Document(values), Tasks()).config


def trained(
    pool: Pool, home: Path, task: str, world: int, *, blind: Any = None, **train: Any
) -> list[Event]:
    """The run's journal. blind: the part of the probes that train_blind() blinds"""
    config = config_of(task, world, **train)
    made = plan(config, MACHINE, open_task(config, "").facts())
    return train_on_ranks(pool, home, config, made, ask_in=blind)


def train_blind(index: int, group: Any, attempt: str, part: str) -> None:
    """One rank of a run in which a part of the probes sees nothing."""
    with ExitStack() as stack:
        for target, nothing in BLIND[part]:
            stack.enter_context(patch(target, lambda *_, nothing=nothing: nothing))
        train_one_rank(index, group, attempt)


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ("again", "in step 2 .* was computed again, and the gradient of"),
        ("parts", r"late_losses\.py:\d+: Tensor\.mean"),
        ("rank", r"the loss of samples .* is .* on rank 0, and .* on rank 1"),
        ("write", r"late_losses\.py:\d+: the loss changes the weight spare"),
    ],
)
def test_each_part_of_a_probe_finds_what_no_other_does(
    part: str, says: str, pool: Pool, tmp_path: Path
) -> None:
    task, world, train = part.capitalize(), 1 + (part == "rank"), {"exact": part == "again"}
    with pytest.raises(JobFailedError, match=says):
        trained(pool, tmp_path / "seen", task, world, **train)
    events = read_events(tmp_path / "seen/journal.jsonl")
    assert [event.step for event in events if event.kind == "step"] == [1]
    with patch("rank_runs.train_one_rank", train_blind):
        events = trained(pool, tmp_path / "blind", task, world, blind=part, **train)
    assert [event.step for event in events if event.kind == "step"] == [1, 2, 3, 4, 5, 6]


def test_what_a_trial_leaves_behind_is_told(pool: Pool, tmp_path: Path) -> None:
    says = r"has changed task\.calls, and it could not be put back"
    with (
        patch("rank_runs.train_one_rank", train_without_putting_back),
        pytest.raises(JobFailedError, match=says),
    ):
        trained(pool, tmp_path, "Counting", 1)


def train_without_putting_back(index: int, group: Any, attempt: str, _ask_in: None) -> None:
    target = "samecurve.torch_engine.users_code.side_effects.Attributes.put_back"
    with patch(target, lambda *_: None):
        train_one_rank(index, group, attempt)


@pytest.mark.parametrize("exact", [False, True])
def test_probes_change_no_number(*, exact: bool, pool: Pool, tmp_path: Path) -> None:
    """Counting counts the step's own calls alone."""
    probed = trained(pool, tmp_path / "probed", "Counting", 2, exact=exact)
    with patch("rank_runs.train_one_rank", train_blind):
        plain = trained(pool, tmp_path / "plain", "Counting", 2, blind="all", exact=exact)
    one, other = ([e.values["loss"] for e in run if e.kind == "step"] for run in (probed, plain))
    assert one == other


@pytest.mark.parametrize(("every", "first"), [(0, 0), (0, 37), (50, 3)])
def test_the_next_probe_is_the_next_step_that_is_probed(every: int, first: int) -> None:
    config = config_of("Plain", 1, steps=3000, eval_every=70)
    made = plan(config, MACHINE, open_task(config, "").facts())
    rule = SentinelRule(every, "stop") if every else None
    due = [s for s in range(3000) if is_probed(made, s, first) or is_due(rule, s, first)]
    found = [first]
    while found[-1] < 3000:
        found.append(next_probe(made, rule, found[-1]))
    assert found[1:-1] == [step for step in due if step > first]
    if not every:
        assert len(due) < 30

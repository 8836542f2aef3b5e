"""Loops that are not the plainest: each the same curve under every layout as written out by hand,
in float64, with torch alone.
"""

from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import loops
import numpy as np
import pytest
import torch
from torch import nn

from rank_runs import train_on_ranks
from samecurve.checkpoint.format import load as load_checkpoint
from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.core.config.sections import Config
from samecurve.core.determinism import Mean
from samecurve.core.events import REQUESTS, Event
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan
from samecurve.data.feed import Feed
from samecurve.errors import UserError
from samecurve.features.guard.split_check import SplitCheck, SplitVerdict
from samecurve.observe.event_lines import console_lines
from samecurve.observe.plan_text import banner
from samecurve.run.directory import Run
from samecurve.tasks import Tasks, open_task
from samecurve.torch_engine.engine import TorchEngine
from samecurve.torch_engine.optimizers.late_params import LateOptimizer, set_late
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.step import State
from samecurve.torch_engine.step.step_metrics import NamedMeans
from samecurve.torch_engine.strategies.threads import ThreadPeer, ThreadTeam
from samecurve.worker.rank_main import lr_factor
from samecurve_products.report.steps import Steps
from samecurve_products.trackers.metrics import plotted
from tiny import MACHINE
from worlds import JobFailedError, Pool

HERE = Path(__file__).parent
STEPS = 8
# name -> (devices, config sections)
LAYOUTS: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "single": (1, {"batch": {"accumulate": 3}}),
    "dp:2": (2, {"devices": {"strategy": "dp"}}),
    "ddp:2": (2, {"batch": {"accumulate": 2}}),
    "ddp:3": (3, {"devices": {"strategy": "ddp"}}),
    "fsdp:2": (2, {"devices": {"strategy": "fsdp"}}),
    "exact:2": (2, {"train": {"exact": True}}),
}
MOST_ALIKE = [  # in make test: one of processes whose ranks may lack samples, one of shards
    pytest.param(layout, marks=[] if layout in {"ddp:3", "fsdp:2"} else [pytest.mark.long])
    for layout in LAYOUTS
]


def config_of(task: str, **sections: dict[str, Any]) -> Config:
    values: dict[str, Any] = {
        "task": f"{HERE}/loops.py:{task}",
        "batch": {"samples": 10},
        "optimizer": {"name": "sgd", "lr": 0.3, "momentum": 0.9, "weight_decay": 0, "clip": 0.4},
        "schedule": {"decay": "constant"},
        "train": {"steps": STEPS, "precision": "f64"},
        "devices": {"use": "cpu"},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return load_document(Document(values), Tasks()).config


def laid_out(task: str, layout: str, **sections: dict[str, Any]) -> tuple[Config, Plan]:
    world, how = LAYOUTS[layout]
    merged = {name: {**how.get(name, {}), **sections.get(name, {})} for name in {*how, *sections}}
    merged["devices"] = {**merged.get("devices", {}), "use": f"cpu:{world}"}
    config = config_of(task, **merged)
    return config, plan(config, MACHINE, open_task(config, "").facts())


def trained(
    pool: Pool,
    home: Path,
    task: str,
    layout: str,
    *,
    resume: int | None = None,
    stop_at: int | None = None,
    **sections: dict[str, Any],
) -> list[Event]:
    """The run's journal. resume: from what was saved after this step."""
    config, made = laid_out(task, layout, **sections)
    return train_on_ranks(pool, home, config, made, resume=resume, stop_at=stop_at)


def of_steps(events: list[Event], name: str) -> list[Any]:
    return [event.values[name] for event in events if event.kind == "step"]


def by_hand(
    task: str,
    train: Callable[[nn.Module, int, int, dict[str, torch.Tensor]], list[float]],
    **sections: dict[str, Any],
) -> tuple[np.ndarray, nn.Module]:
    """What a plain loop gives for each step, from a run's initial values, and its model.

    train: (model, step, epoch, the step's rows) -> its numbers, the model moved on
    """
    engine, _ = engine_and_feed(config_of(task, **sections))
    model, made = engine.init().model, engine.plan
    numbers = []
    for step in range(STEPS):
        ids = made.order.ids(range(step, step + 1))[0]
        rows = {name: torch.from_numpy(array) for name, array in loops.Rows()[ids].items()}
        numbers.append(train(model, step, step // 3, rows))  # 23 samples in tens
    return np.array(numbers), model


@pytest.fixture(scope="module")
def annealed() -> np.ndarray:
    """Loss, gradient norm, and what is logged beside them, by step."""
    optimizer: list[torch.optim.Optimizer] = []

    def train(
        model: nn.Module, step: int, epoch: int, rows: dict[str, torch.Tensor]
    ) -> list[float]:
        if not optimizer:
            optimizer.append(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))
        out, weight = model(rows["x"])[:, 0], rows["weight"]
        penalty = (weight * out**2).sum() / weight.sum()
        loss = (weight * (out - rows["y"]) ** 2).sum() / weight.sum()
        loss = loss + min(1.0, step / 6) * 0.5**epoch * penalty
        optimizer[0].zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.4)
        optimizer[0].step()
        return [loss.item(), norm.item(), penalty.item(), out[out > 0].mean().item()]

    numbers, _ = by_hand("Annealed", train)
    assert (numbers[:, 1] > 0.4).any()  # it is clipped
    return numbers


def logged(events: list[Event]) -> np.ndarray:
    """As annealed()."""
    columns = [of_steps(events, "loss"), of_steps(events, "grad_norm")]
    means = of_steps(events, "metrics")
    columns += [[of_step[name] for of_step in means] for name in ("penalty", "above")]
    return np.array(columns, float).T


@pytest.mark.parametrize("layout", MOST_ALIKE)
def test_a_loss_may_follow_the_step_and_epoch_and_give_more_means(
    layout: str, annealed: np.ndarray, pool: Pool, tmp_path: Path
) -> None:
    """Clipped by torch's own formula. A tail of 3 samples leaves some ranks without any."""
    events = trained(pool, tmp_path, "Annealed", layout)
    np.testing.assert_allclose(logged(events), annealed, rtol=1e-12)


def test_it_follows_them_through_a_resume(annealed: np.ndarray, pool: Pool, tmp_path: Path) -> None:
    trained(pool, tmp_path, "Annealed", "ddp:2", stop_at=4)
    events = trained(pool, tmp_path, "Annealed", "single", resume=4)
    assert len(of_steps(events, "loss")) == STEPS
    np.testing.assert_allclose(logged(events), annealed, rtol=1e-12)


def engine_and_feed(config: Config) -> tuple[TorchEngine, Feed]:
    """On one device of this process."""
    task = open_task(config, "")
    made = plan(config, MACHINE, task.facts())
    engine = TorchEngine(task, made, config.optimizer, Comm(), [torch.device("cpu")])
    feed = Feed(made, made.layout.devices_of(0), task.train_data(), None, engine.stage, prefetch=0)
    return engine, feed


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is tried before the first step."""
    nothing = SplitVerdict(None, repeats=True, steady=frozenset())
    monkeypatch.setattr(SplitCheck, "run", lambda _: nothing)


def begun(engine: TorchEngine, feed: Feed) -> State:
    state = engine.init()
    engine.begin_training(state, feed.trial_rows())
    return state


def run_steps(engine: TorchEngine, feed: Feed) -> None:
    state = begun(engine, feed)
    for step, batch in feed:
        engine.step(state, batch, engine.plan.lr_at(step), [0] * len(REQUESTS))


@pytest.mark.usefixtures("untried")
def test_each_microbatch_gives_the_same_means() -> None:
    engine, feed = engine_and_feed(config_of("Forgetful"))
    says = "gives loss, penalty for one microbatch and above, loss, penalty for another"
    with pytest.raises(UserError, match=says):
        run_steps(engine, feed)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ('{"kl": Mean(1, 1)}', 'gives kl, but no "loss"'),
        ('{"loss": loss, "lr": Mean(1, 1)}', "gives 'lr', a name that"),
        ('{"loss": loss, "kl": 1.0}', 'no single Mean as "kl"'),
    ],
)
def test_other_means_are_refused_before_anything_starts(
    returned: str, says: str, tmp_path: Path
) -> None:
    source = (HERE / "loops.py").read_text() + (
        "\n\nclass Wrong(Base):\n    def loss(self, model, batch):\n"
        '        loss = Mean(model(batch["x"]).sum(), len(batch["x"]))\n'
        f"        return {returned}\n"
    )
    (tmp_path / "mine.py").write_text(source)
    config = config_of("Annealed").model_copy(update={"task": f"{tmp_path}/mine.py:Wrong"})
    with pytest.raises(UserError) as refused:
        run_steps(*engine_and_feed(config))
    assert says in str(refused.value)


def test_more_means_are_shown() -> None:
    """On the console, by trackers, in the report."""
    values = {"loss": 1.5, "grad_norm": 1.0, "lr": 0.1, "metrics": {"kl": 0.25, "bad": None}}
    values |= {"seconds": 1.0, "wait_seconds": 0.0, "samples_per_second": 1.0, "memory_bytes": 1}
    event = Event("step", 3, values)
    _, made = laid_out("Annealed", "single")
    assert "loss 1.5000  kl 0.2500  bad not finite  grad" in console_lines(event, made, HERE)[0]
    assert plotted(event)["train/kl"] == 0.25
    assert "train/bad" not in plotted(event)
    steps = Steps()
    steps.add(steps.rows_of([{"step": 1, "loss": 2.0}, {"step": 2, **values}], [0, 1]))
    assert steps.means == ["kl", "bad"]
    np.testing.assert_array_equal(steps.first("metrics/kl"), [np.nan, 0.25])


@pytest.fixture(scope="module")
def taught() -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Losses and the weights after them."""
    optimizer: list[torch.optim.Optimizer] = []

    def train(model: Any, step: int, epoch: int, rows: dict[str, torch.Tensor]) -> list[float]:
        del epoch
        if not optimizer:
            optimizer.append(torch.optim.SGD(model.student.parameters(), lr=0.3, momentum=0.9))
        out = model.student(rows["x"])
        with torch.no_grad():
            target = model.teacher(rows["x"]) + (rows["x"] @ model.average.T)[:, 0]
        loss = ((out - rows["y"]) ** 2 + 0.5 * (out - target) ** 2).mean()
        optimizer[0].zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.student.parameters(), 0.4)
        optimizer[0].step()
        with torch.no_grad():
            pairs = zip(model.teacher.parameters(), model.student.parameters(), strict=True)
            for follower, leader in pairs:
                follower.add_((leader - follower) / (step + 2))
            model.average += 0.1 * (model.student.head.weight - model.average)
        return [loss.item()]

    numbers, model = by_hand("Momentum", train)
    return numbers[:, 0], dict(model.state_dict())


@pytest.mark.parametrize("layout", MOST_ALIKE)
def test_a_teacher_follows_its_student_after_each_step(
    layout: str, taught: Any, pool: Pool, tmp_path: Path
) -> None:
    losses, weights = taught
    events = trained(pool, tmp_path, "Momentum", layout)
    np.testing.assert_allclose(of_steps(events, "loss"), losses, rtol=1e-12)
    arrays = load_checkpoint(Run(tmp_path).checkpoints / f"step-{STEPS:08d}").arrays
    for name, tensor in weights.items():
        np.testing.assert_allclose(arrays[f"model/{name}"], tensor.numpy(), rtol=0, atol=1e-12)


def test_it_follows_through_a_resume(taught: Any, pool: Pool, tmp_path: Path) -> None:
    trained(pool, tmp_path, "Momentum", "fsdp:2", stop_at=3)
    events = trained(pool, tmp_path, "Momentum", "dp:2", resume=3)
    np.testing.assert_allclose(of_steps(events, "loss"), taught[0], rtol=1e-12)


def test_what_after_step_draws_is_the_same_on_any_devices_and_after_a_resume(
    pool: Pool, tmp_path: Path
) -> None:
    one, ddp, fsdp = (
        of_steps(trained(pool, tmp_path / layout, "Restless", layout), "loss")
        for layout in ("single", "ddp:3", "fsdp:2")
    )
    calm = of_steps(trained(pool, tmp_path / "calm", "Momentum", "single"), "loss")
    assert max(map(abs, np.subtract(one, calm))) > 1e-3
    trained(pool, tmp_path / "moved", "Restless", "ddp:2", stop_at=4)
    moved = of_steps(trained(pool, tmp_path / "moved", "Restless", "fsdp:2", resume=4), "loss")
    for other in (ddp, fsdp, moved):
        np.testing.assert_allclose(other, one, rtol=1e-12)


def test_after_step_does_not_draw_from_a_generator_of_the_task() -> None:
    with pytest.raises(UserError, match=r"draws from task.noise, which no checkpoint holds"):
        run_steps(*engine_and_feed(config_of("Seeded")))


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("Aside", ""),
        ("TaughtAside", r"after_step\(\) changes self.teachers.slow.weight, which the loss reads"),
        ("HeadAside", "self.head.weight is no part of what model.. returns, so nobody trains it"),
    ],
)
def test_what_a_task_keeps_beside_its_model_is_neither_learnt_nor_changed(
    task: str, says: str
) -> None:
    """No checkpoint has it, and no optimizer."""
    engine, feed = engine_and_feed(config_of(task))
    if not says:
        run_steps(engine, feed)
        return
    with pytest.raises(UserError, match=says):
        run_steps(engine, feed)


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(("at", "by_data"), [(4, False), (3, True)])
def test_a_loss_that_writes_into_a_weight_is_told_at_that_step(*, at: int, by_data: bool) -> None:
    """In any step where it is written in place; `.data` leaves its trace in the bits alone, which
    are looked at in steps 1, 2, 4, 8 and so on.
    """
    engine, feed = engine_and_feed(config_of("Clipped", data={"at": at, "by_data": by_data}))
    state, batches = begun(engine, feed), iter(feed)
    for _, batch in islice(batches, at):
        engine.step(state, batch, 0.1, [0] * len(REQUESTS))
    _, batch = next(batches)
    with pytest.raises(UserError, match=r"loops\.py:\d+: the loss changes the weight 2\.weight"):
        engine.step(state, batch, 0.1, [0] * len(REQUESTS))


@pytest.mark.usefixtures("untried")
def test_a_loss_that_thaws_what_has_no_optimizer_is_told_at_that_step() -> None:
    engine, feed = engine_and_feed(config_of("Thawing"))
    state, batches = begun(engine, feed), iter(feed)
    for _, batch in islice(batches, 3):
        engine.step(state, batch, 0.1, [0] * len(REQUESTS))
    _, batch = next(batches)
    with pytest.raises(UserError, match=r"the loss thaws the weight 0\.weight"):
        engine.step(state, batch, 0.1, [0] * len(REQUESTS))


def test_a_layer_that_the_loss_freezes_until_a_step_trains_from_there(
    pool: Pool, tmp_path: Path
) -> None:
    def train(model: Any, step: int, epoch: int, rows: dict[str, torch.Tensor]) -> list[float]:
        if not optimizer:
            optimizer.append(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))
        total, weight = task.loss(model, rows, step, epoch)["loss"]
        optimizer[0].zero_grad()
        (total / weight).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.4)
        optimizer[0].step()
        return [(total / weight).item()]

    task, optimizer = loops.Unfreezing(), cast("list[torch.optim.Optimizer]", [])
    numbers, _ = by_hand("Unfreezing", train)
    events = trained(pool, tmp_path, "Unfreezing", "ddp:2")
    np.testing.assert_allclose(of_steps(events, "loss"), numbers[:, 0], rtol=1e-12)


def test_a_layer_without_a_shape_is_refused() -> None:
    with pytest.raises(UserError, match=r"0 is a LazyLinear, whose parameters get a shape"):
        engine_and_feed(config_of("Lazy"))


@pytest.mark.parametrize(("first", "then"), [("ddp:2", "single"), ("single", "fsdp:2")])
def test_what_a_task_keeps_in_attributes_goes_through_a_resume(
    first: str, then: str, pool: Pool, tmp_path: Path
) -> None:
    unbroken = of_steps(trained(pool, tmp_path / "one", "Remembering", "single"), "loss")
    plain = of_steps(trained(pool, tmp_path / "plain", "Annealed", "single"), "loss")
    assert max(map(abs, np.subtract(unbroken, plain))) > 1e-2
    trained(pool, tmp_path / "moved", "Remembering", first, stop_at=4)
    moved = of_steps(trained(pool, tmp_path / "moved", "Remembering", then, resume=4), "loss")
    np.testing.assert_allclose(moved, unbroken, rtol=1e-12)


def test_what_differs_between_ranks_and_enters_the_loss_is_refused(
    pool: Pool, tmp_path: Path
) -> None:
    says = r"the loss of samples .* on rank 1: self\.outputs is .*on rank 1"
    with pytest.raises(JobFailedError, match=says):
        trained(pool, tmp_path, "Ensemble", "ddp:2")


def test_it_is_not_called_after_an_update_that_is_left_out() -> None:
    engine, feed = engine_and_feed(config_of("Momentum", train={"non_finite": "skip"}))
    state = engine.init()
    before = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
    _, batch = next(iter(feed))
    for micro in (micro for round_ in batch.rounds for micro in round_ if micro):
        micro.arrays["x"].fill_(np.inf)
    engine.step(state, batch, 0.1, [0] * len(REQUESTS))
    assert all(torch.equal(before[name], now) for name, now in state.model.state_dict().items())


UNSCHEDULED = {"decay": "cosine"}  # the default: where a task schedules, the config says nothing


def scheduled(task: str) -> tuple[np.ndarray, list[float]]:
    """Losses and learning rates of a plain loop with the task's schedule."""
    rates: list[float] = []
    objects: list[Any] = []

    def train(model: Any, step: int, epoch: int, rows: dict[str, torch.Tensor]) -> list[float]:
        if not objects:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
            user = loops.Scheduled()
            objects.extend([optimizer, user.schedule(optimizer) if task == "Scheduled" else None])
        optimizer, scheduler = objects
        if scheduler is None:
            optimizer.param_groups[0]["lr"] = 0.3 * 0.5 ** (step // 3)
        rates.append(optimizer.param_groups[0]["lr"])
        loss = loops.Annealed().loss(model, rows, step, epoch)["loss"]
        optimizer.zero_grad()
        (loss.sum / loss.weight).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.4)
        optimizer.step()
        if scheduler:
            scheduler.step()
        return [loss.sum.item() / loss.weight.item()]

    numbers, _ = by_hand(task, train, schedule=UNSCHEDULED)
    return numbers[:, 0], rates


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")  # SequentialLR's own
@pytest.mark.parametrize("task", ["Scheduled", "Halved"])
def test_a_task_may_schedule_its_learning_rate(task: str, pool: Pool, tmp_path: Path) -> None:
    """By torch's schedulers, or a function of the step: also through a resume."""
    losses, rates = scheduled(task)
    assert len(set(rates)) > 2
    trained(pool, tmp_path, task, "ddp:2", stop_at=4, schedule=UNSCHEDULED)
    events = trained(pool, tmp_path, task, "single", resume=4, schedule=UNSCHEDULED)
    np.testing.assert_allclose(of_steps(events, "lr"), rates, rtol=1e-14)
    np.testing.assert_allclose(of_steps(events, "loss"), losses, rtol=1e-12)
    _, made = laid_out(task, "single", schedule=UNSCHEDULED)
    first = f"{rates[0] / 0.3:.4g}"
    assert f"times {task}.schedule(): {first} at step 0," in "\n".join(banner(made))


def plan_and_factor(config: Config) -> None:
    """As a run does before its first step."""
    task = open_task(config, "")
    lr_factor(task, plan(config, MACHINE, task.facts()))


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("Plateau", "ReduceLROnPlateau follows what is measured, and not the step"),
        ("Cycled", "OneCycleLR also changes momentum of the optimizer"),
        ("Short", "Tried to step 6 times. The specified number of total steps is 5"),
        ("Negative", "Negative.schedule() gives -2.5 at step 7"),
        ("Unasked", "Unasked.schedule() asks for epoch"),
        ("Lambda", "Lambda.optimizer() makes a scheduler, which no step would drive"),
    ],
)
def test_what_is_no_schedule_is_refused_before_the_first_step(task: str, says: str) -> None:
    config = config_of(task, schedule=UNSCHEDULED)
    with pytest.raises(UserError) as refused:
        plan_and_factor(config)
    assert says in str(refused.value)


def test_a_schedule_of_the_config_beside_the_tasks_is_refused() -> None:
    with pytest.raises(UserError, match=r"which schedule\.decay does not reach"):
        laid_out("Halved", "single")


ADVERSARIAL = {"name": "adamw", "lr": 0.02, "weight_decay": 0.1, "clip": 0.3}


def adversarial(task: str) -> np.ndarray:
    """Losses of critic and generator, the size of what is made, the norm of all gradients."""
    optimizers: list[torch.optim.Optimizer] = []

    def train(model: Any, step: int, epoch: int, rows: dict[str, torch.Tensor]) -> list[float]:
        del step, epoch
        if not optimizers:
            critic, generator = model.critic.parameters(), model.generator.parameters()
            if task == "TwoOptimizers":
                optimizers.append(torch.optim.Adam(critic, lr=0.02, betas=(0.5, 0.9)))
                optimizers.append(torch.optim.RMSprop(generator, lr=0.01))
            else:
                for part in (model.critic, model.generator):
                    matrices = [p for p in part.parameters() if p.ndim > 1]
                    biases = [p for p in part.parameters() if p.ndim == 1]
                    groups = [
                        {"params": matrices, "weight_decay": 0.1},
                        {"params": biases, "weight_decay": 0},
                    ]
                    optimizers.append(torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95)))
        soft, x = nn.functional.softplus, rows["x"]
        made = model.generator(x[:, 3:])
        critic_loss = (soft(-model.critic(x)) + soft(model.critic(made.detach()))).mean()
        model.zero_grad()
        torch.autograd.backward(critic_loss)
        first = nn.utils.clip_grad_norm_(model.critic.parameters(), 0.3)
        optimizers[0].step()
        made = model.generator(x[:, 3:])
        generator_loss = soft(-model.critic(made)).mean()
        model.zero_grad()
        torch.autograd.backward(generator_loss)
        second = nn.utils.clip_grad_norm_(model.generator.parameters(), 0.3)
        optimizers[1].step()
        size = (made**2).sum() / len(made)
        norm = torch.hypot(first, second)
        return [critic_loss.item(), generator_loss.item(), size.item(), norm.item()]

    numbers, _ = by_hand(task, train, optimizer=_fields(task))
    return numbers


def _fields(task: str) -> dict[str, Any]:
    if task == "TwoOptimizers":  # what the config would say to ours is refused beside them
        return {"name": "adamw", "lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "clip": 0.3}
    return ADVERSARIAL


def of_phases(events: list[Event]) -> np.ndarray:
    """As adversarial()."""
    means = of_steps(events, "metrics")
    named = [[of_step[name] for of_step in means] for name in ("generator", "generator.size")]
    return np.array([of_steps(events, "loss"), *named, of_steps(events, "grad_norm")]).T


@pytest.fixture(scope="module")
def contests() -> dict[str, np.ndarray]:
    return {task: adversarial(task) for task in ("Adversarial", "TwoOptimizers")}


@pytest.mark.parametrize(
    ("task", "layout"),
    [
        *(("Adversarial", layout) for layout in ("dp:2", "ddp:3", "fsdp:2")),
        ("TwoOptimizers", "exact:2"),
        *(
            pytest.param(task, layout, marks=pytest.mark.long)
            for task, layouts in (
                ("Adversarial", ("single", "ddp:2", "exact:2")),
                ("TwoOptimizers", ("single", "dp:2", "ddp:2", "ddp:3", "fsdp:2")),
            )
            for layout in layouts
        ),
    ],
)
def test_several_optimizers_move_their_parameters_in_turn(
    task: str, layout: str, contests: dict[str, np.ndarray], pool: Pool, tmp_path: Path
) -> None:
    events = trained(pool, tmp_path, task, layout, optimizer=_fields(task))
    np.testing.assert_allclose(of_phases(events), contests[task], rtol=1e-12)


@pytest.mark.parametrize("task", ["Adversarial", "TwoOptimizers"])
def test_they_go_on_through_a_resume(
    task: str, contests: dict[str, np.ndarray], pool: Pool, tmp_path: Path
) -> None:
    trained(pool, tmp_path, task, "fsdp:2", stop_at=3, optimizer=_fields(task))
    events = trained(pool, tmp_path, task, "single", resume=3, optimizer=_fields(task))
    np.testing.assert_allclose(of_phases(events), contests[task], rtol=1e-12)


def test_each_phase_draws_numbers_of_its_own() -> None:
    engine, feed = engine_and_feed(config_of("Noisy", optimizer=ADVERSARIAL))
    run_steps(engine, feed)
    user: Any = engine.task
    of_steps_and_phases = user.task.drawn[-2 * STEPS :]
    firsts = {float(drawn[0, 0]) for drawn in of_steps_and_phases}
    assert len(firsts) == 2 * STEPS


def test_a_checkpoint_sees_the_optimizer_that_a_phase_gets_later() -> None:
    """A phase gets another optimizer where its loss leaves a parameter out."""
    engine, _ = engine_and_feed(config_of("Adversarial", optimizer=ADVERSARIAL))
    state = engine.init()
    unused = state.updates[1].trained[0]
    set_late(state, {unused.name: 0}, state.updates)
    optimizers = [update.optimizer for update in state.updates]
    assert isinstance(optimizers[1], LateOptimizer)
    for update, optimizer in zip(state.updates, optimizers, strict=True):
        for param in update.trained:
            whole, own = state.optimizer.state_of(param), optimizer.state_of(param)
            assert {id(tensor) for tensor in whole.values()} == {*map(id, own.values())}


@pytest.mark.parametrize(
    ("phases", "says"),
    [
        ('{"critic": "critic.*"}', "generator.0.weight belongs to no phase"),
        ('{"critic": "*", "generator": "generator.*"}', "belongs to critic and generator"),
        ('{"critic": "*", "generator": "gen.*"}', "generator (gen.*) has no parameter"),
        ('("critic", "generator")', "several updates in turn within a step"),
    ],
)
def test_phases_hold_each_parameter_once(phases: str, says: str, tmp_path: Path) -> None:
    source = (HERE / "loops.py").read_text()
    (tmp_path / "mine.py").write_text(
        f"{source}\n\nclass Mine(Adversarial):\n    phases = {phases}"
    )
    config = config_of("Adversarial").model_copy(update={"task": f"{tmp_path}/mine.py:Mine"})
    with pytest.raises(UserError) as refused:
        open_task(config, "").facts()
    assert says in str(refused.value)


def test_the_plan_names_the_phases() -> None:
    _, made = laid_out("Adversarial", "single", optimizer=ADVERSARIAL)
    said = "phases critic (65 parameters), then generator (66 parameters): each with its own"
    assert said in "\n".join(banner(made))


class RankOfThreads:
    """What NamedMeans asks of a Comm, between threads."""

    def __init__(self, peer: ThreadPeer) -> None:
        self.peer, self.group = peer, object()
        self.rank, self.world_size = peer.rank, peer.world_size

    def all_reduced(self, values: torch.Tensor) -> torch.Tensor:
        return self.peer.all_reduced(values)


@pytest.mark.parametrize(
    ("by_rank", "agreed"),
    [
        ((None, ("kl", "spread")), ("kl", "spread")),
        ((None, None), ()),
        (((), ()), ()),
        ((("kl",), ()), None),
    ],
)
def test_a_rank_without_a_microbatch_learns_the_names(by_rank: Any, agreed: Any) -> None:
    team = ThreadTeam(2)

    def job(rank: int) -> tuple[str, ...]:
        means = NamedMeans()
        if by_rank[rank] is not None:
            means.in_order(dict.fromkeys(("loss", *by_rank[rank]), Mean(1.0, 1)))
        comm: Any = RankOfThreads(team.peers[rank])
        means.agree(comm, torch.device("cpu"))
        return means.names

    jobs = [partial(job, rank) for rank in range(2)]
    try:
        if agreed is None:
            with pytest.raises(UserError, match="gives loss for one microbatch and kl, loss for"):
                team.run(jobs)
        else:
            assert team.run(jobs) == [agreed, agreed]
    finally:
        team.close()

"""Models as people write them, under every strategy, beside a plain loop over whole batches."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from models import WIDTH
from torch import nn

from one_curve import check_one_curve
from rank_runs import train_on_ranks
from samecurve.checkpoint.format import load
from samecurve.core.config.sections import Config
from samecurve.core.planning.planner import plan
from samecurve.errors import UserError
from samecurve.features.norm_sync.batch_norm import synchronise_batch_norms
from samecurve.observe import read_events
from samecurve.run.directory import Run
from samecurve.run.directory.attempt import Attempt, Requests
from samecurve.tasks import open_task
from samecurve.torch_engine.model import coupling_layers
from samecurve.torch_engine.model.model_builder import FirstValues
from samecurve.torch_engine.model.model_setup import cast_weights
from samecurve.torch_engine.model.one_device_view import ONE_DEVICE_VIEW
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.randomness import MicroBatchContext
from samecurve.torch_engine.randomness.draw_sites import DrawSites
from samecurve.worker.context import RankContext
from samecurve.worker.join import join_warm
from samecurve.worker.rank_main import train_rank
from tiny import MACHINE, config_of
from worlds import Pool

HERE = Path(__file__).parent
STEPS = 6  # two epochs

SETTINGS: dict[str, dict[str, Any]] = {  # of train, by kind
    "half frozen": {"norm_sync": True},
    "rare norm": {"norm_sync": True},
}
Result = dict[str, Any]  # losses, and the last weights by name


def config_for(kind: str, layout: str = "single:1", **train: Any) -> Config:
    """layout: strategy:devices, or strategy:devices/accumulation; "once": weights are gathered once
    a step.
    """
    layout, once, _ = layout.partition(" once")
    strategy, _, count = layout.partition(":")
    devices, _, accumulate = count.partition("/")
    batch = {"samples": 10, "accumulate": int(accumulate or 1)}
    if train.get("exact"):
        batch = {"samples": 10, "per_device": 3}
    return config_of(
        {
            "task": f"{HERE}/models.py:Task",
            "model": {"kind": kind},
            "batch": batch,
            "optimizer": {"lr": 1e-2, "clip": 0.0},
            "train": {
                "steps": STEPS,
                "eval_every": 3,
                "precision": "f64",
                **SETTINGS.get(kind, {}),
                **train,
            },
            "devices": {
                "use": f"cpu:{devices}",
                "strategy": strategy,
                "gather": "step" if once else "auto",
                "preflight": 0,
            },
        }
    )


def trained(pool: Any, home: Path, config: Config) -> Result:
    made = plan(config, MACHINE, open_task(config, "").facts())
    run = Run(home)
    for directory in (run.home, run.checkpoints, run.logs):
        directory.mkdir(parents=True, exist_ok=True)
    run.write(config, made)
    pool.run(made.world_size, train_one, str(home))
    events = list(read_events(run.journal))
    losses = [event.values["loss"] for event in events if event.kind == "step"]
    evaluated = [event.values["loss"] for event in events if event.kind == "evaluated"]
    arrays = load(sorted(run.checkpoints.glob("step-*"))[-1]).arrays
    result = {"losses": losses, "evaluated": evaluated}
    return result | {n: arrays[n].copy() for n in arrays if n.startswith("model/")}


def train_one(index: int, group: Any, home: str) -> None:
    context = RankContext.read_warm(Attempt("test", home).to_json(), index)
    task = open_task(context.config, "")
    engine: Any = join_warm(context.plan, index, group).make_engine(task, context.config.optimizer)
    train_rank(context, engine, task, Requests(None))


class InProcess:
    """A pool of one rank, which is this process."""

    def run(self, world: int, function: Any, *arguments: Any) -> None:
        assert world == 1
        function(0, None, *arguments)


def plain_loop(kind: str) -> Result:
    """What anybody would write for one device. Gradients are zeroed, not dropped, once a parameter
    has had one.
    """
    config = config_for(kind)
    task = open_task(config, "")
    made = plan(config, MACHINE, task.facts())
    with torch.random.fork_rng():
        torch.manual_seed(made.fixed.seed)
        model = cast_weights(task.model(), "f64")
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decay = config.optimizer.weight_decay
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": decay},
            {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
    )
    losses, evaluated = [], []
    for step, ids in enumerate(made.order.ids(range(made.steps))):
        for group in optimizer.param_groups:
            group["lr"] = made.lr_at(step)
        for parameter in named.values():
            parameter.grad = torch.zeros_like(parameter) if optimizer.state[parameter] else None
        model.train()
        for name, part in model.named_modules():
            if name.startswith(("norms", "frozen")):
                part.eval()
        total, weight = task.loss(model, rows(task.train_data()[ids]))
        (total / weight).backward()
        optimizer.step()
        losses.append(total.item() / weight)
        if (step + 1) % 3 == 0:
            model.eval()
            held_out: Any = task.eval_data()
            total, weight = task.loss(model, rows(held_out[np.arange(25)]))
            evaluated.append(total.item() / weight)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {f"model/{name}": tensor.detach() for name, tensor in tensors.items()}
    return {"losses": losses, "evaluated": evaluated} | {
        n: (torch.view_as_real(t) if t.is_complex() else t).numpy() for n, t in values.items()
    }


def rows(arrays: Any) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def assert_same(found: Result, expected: Result) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-12, err_msg=name)


LAYOUTS = ["single:1/3", "dp:2", "ddp:2/2", "fsdp:2/2", "fsdp:2/3 once", "hsdp:4", "hsdp:4/2 once"]
KINDS = [
    "method",
    "dict",
    "read",
    "read in block",
    "scalar",
    "containers",
    "reentrant",
    "seldom",
    "mixture",
    "outer experts",
    "skips",
    "asks world",
    "fourier",
    "penalised",
    "late",
    "chunked",
    "handed on",
    "sampling",
]
HARD_FOR_FSDP = (  # a weight is read, used again or left out elsewhere than in its block's forward
    *("read", "read in block", "scalar", "containers", "reentrant", "mixture", "asks world"),
    *("late", "chunked", "handed on", "sampling"),
)
IN_SHORT = {  # the others: make test-long
    *((kind, "fsdp:2/2") for kind in HARD_FOR_FSDP),
    *((kind, "fsdp:2/3 once") for kind in ("seldom", "skips", "penalised")),
    *(("reentrant", "ddp:2/2"), ("mixture", "dp:2"), ("mixture", "hsdp:4/2 once")),
    *(("late", "ddp:2/2"), ("dict", "ddp:2/2")),
}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=() if (kind, layout) in IN_SHORT else pytest.mark.long)
        for kind in KINDS
        for layout in LAYOUTS
    ],
)
def test_one_curve(kind: str, layout: str, pool: Pool, tmp_path: Path) -> None:
    assert_same(trained(pool, tmp_path, config_for(kind, layout)), plain_loop(kind))


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("Task", "adamw"),
        *(
            pytest.param(task, name, marks=pytest.mark.long)
            for task, name in [
                ("Own", "adamw"),
                ("Phased", "adamw"),
                *(("Task", name) for name in ("sgd", "muon", "adafactor")),
            ]
        ),
    ],
)
def test_parameters_that_are_not_used_yet_are_left_as_they_are(
    task: str, name: str, pool: Pool, tmp_path: Path
) -> None:
    """In runs that go on elsewhere before the first use of a layer, and after it, too; with the
    state of each optimizer, whose weight decay is large.
    """
    config = config_for("late").model_copy(update={"task": f"{HERE}/models.py:{task}"})
    optimizer = {"name": name, "lr": 1e-2, "clip": 0.3}
    if task != "Own":
        optimizer["weight_decay"] = 0.5
    config = config.model_copy(update={"optimizer": config.optimizer.model_validate(optimizer)})
    check_one_curve(config, ["single..fsdp:2..dp:2"], pool, tmp_path, steps=STEPS, near=1e-11)


def test_what_the_loss_does_not_use_is_said_once_and_keeps_its_bits(
    pool: Pool, tmp_path: Path
) -> None:
    """The watch ends with the first epoch (step 3), and the run goes on elsewhere after step 2."""
    home = tmp_path / "run"
    for layout, resume, stop_at in (("single:1", None, 2), ("ddp:2", 2, 4), ("fsdp:2", 4, None)):
        config = config_for("late", layout, save_every=1, keep=0)
        made = plan(config, MACHINE, open_task(config, "").facts())
        events = train_on_ranks(pool, home, config, made, resume=resume, stop_at=stop_at)
    said = [(event.step, event.values["text"]) for event in events if event.kind == "warned"]
    assert [step for step, _ in said] == [3]
    assert "the loss does not use pooler.weight, pooler.bias: they stay as they are" in said[0][1]
    saved = [load(home / "checkpoints" / f"step-{step:08d}").arrays for step in (2, 3, 6)]
    first, third, last = ({name: arrays[name].copy() for name in arrays} for arrays in saved)
    late = [{name: int(one[name]) for name in one if "/late/" in name} for one in (first, last)]
    names = [
        f"loop/late/{layer}.{kind}" for layer in ("rare", "pooler") for kind in ("weight", "bias")
    ]
    assert late[0] == dict.fromkeys(names, 0)
    for name, value in first.items():
        if "pooler" in name:
            np.testing.assert_array_equal(last[name], value)
    assert (third["model/rare.weight"] != first["model/rare.weight"]).all()
    assert last["optimizer/step"] == 6
    assert last["optimizer/step/late/1"] == 4


def test_layers_skipped_at_random_are_one_curve(pool: Pool, tmp_path: Path) -> None:
    kind = "layer drop"
    alone = trained(InProcess(), tmp_path / "alone", config_for(kind))
    assert_same(trained(pool, tmp_path / "fsdp", config_for(kind, "fsdp:2/2")), alone)


def test_a_task_s_code_sees_no_other_process() -> None:
    reduce = dist.all_reduce
    ONE_DEVICE_VIEW.acquire()
    try:
        assert (dist.is_initialized(), dist.get_world_size(), dist.get_rank()) == (False, 1, 0)
        with pytest.raises(UserError, match=r"calls torch.distributed.all_reduce\(\), which needs"):
            dist.all_reduce(torch.ones(1))
    finally:
        ONE_DEVICE_VIEW.release()
    assert dist.all_reduce is reduce


@pytest.mark.parametrize(
    ("kind", "layout", "train"),
    [
        ("seldom", "ddp:2", {"exact": True}),
        ("late", "ddp:2", {"exact": True}),
        ("rare norm", "ddp:4", {}),  # all of the pool
        ("method", "fsdp:2", {"recompute": "block"}),
        *(
            pytest.param(kind, layout, train, marks=pytest.mark.long)
            for kind in ("method", "read", "dict", "scalar", "containers", "mixture")
            for layout, train in (
                ("ddp:2", {"exact": True}),
                ("dp:2", {"exact": True}),
                ("ddp:2/2", {"recompute": "block"}),
                ("fsdp:2/2", {"recompute": "block"}),
                ("fsdp:2/2", {"recompute": "selective"}),
                ("ddp:2", {"compile": True}),
                ("fsdp:2", {"compile": True}),
            )
            if kind not in {"dict", "mixture"} or "recompute" not in train  # "dict": no blocks
        ),
    ],
)
def test_one_curve_when_exact_computed_again_or_compiled(
    kind: str, layout: str, train: dict[str, Any], pool: Pool, tmp_path: Path
) -> None:
    assert_same(trained(pool, tmp_path, config_for(kind, layout, **train)), plain_loop(kind))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("frozen", "ddp:3"),
        ("half frozen", "ddp:3"),
        ("backbones", "fsdp:2/2"),
        ("compiled", "ddp:2/2"),
        pytest.param("frozen", "fsdp:2/2", marks=pytest.mark.long),
        pytest.param("backbones", "dp:2", marks=pytest.mark.long),
        pytest.param("compiled", "fsdp:2/2", marks=pytest.mark.long),
        pytest.param("compiled", "dp:2", marks=pytest.mark.long),
    ],
)
def test_modes_and_compiled_parts_are_as_their_author_has_them(
    kind: str, layout: str, pool: Pool, tmp_path: Path
) -> None:
    """Norms in eval mode stay so and are not synchronised, what from_pretrained() gave is trained
    (with an assertion in the model), and no name tells that a part is compiled.
    """
    found = trained(pool, tmp_path, config_for(kind, layout))
    assert not [name for name in found if "_orig_mod" in name]
    assert_same(found, plain_loop(kind))


def test_the_plan_says_which_modules_are_in_training() -> None:
    facts = open_task(config_for("frozen"), "").facts()
    assert facts.coupled == ()
    assert facts.features["eval_modes"]["kept_in_eval"] == ("norms.made", "norms.kept")
    facts = open_task(config_for("half frozen"), "").facts()
    assert facts.coupled == ("BatchNorm1d free",)
    config = config_for("backbones")
    facts = open_task(config, "").facts()
    assert plan(config, MACHINE, facts).reasons["modes"] == (
        "frozen stays in eval mode, as model() has it; trained goes into training:"
        " from_pretrained() gives it in eval mode"
    )


def test_what_a_norm_in_eval_mode_lacks_is_said() -> None:
    norm = nn.BatchNorm1d(WIDTH, track_running_stats=False).eval()
    assert coupling_layers(norm) == ("BatchNorm1d",)
    with pytest.raises(UserError, match="BatchNorm1d is in eval mode and has no running"):
        synchronise_batch_norms(norm, Comm(), MicroBatchContext(torch.device("cpu"), DrawSites()))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("parallel", r"Task\.model\(\) returns DataParallel.*\n.*--strategy \(ddp, fsdp"),
        ("parallel part", r"Task\.model\(\) has body as DataParallel"),
        ("ddp", r"process group.*\n.*the bare module on no device"),
        ("cuda", r"(CUDA enabled|NVIDIA driver).*\n.*--devices and --strategy say"),
    ],
)
def test_a_model_that_is_laid_out_already_is_refused(kind: str, says: str) -> None:
    if kind == "cuda" and torch.cuda.is_available():
        pytest.skip("a GPU is there, so .cuda() works, and the model is taken from it")
    with pytest.raises(UserError, match=f"(?s){says}"):
        open_task(config_for(kind), "").facts()


def test_a_model_in_half_precision_is_trained_in_the_configs(tmp_path: Path) -> None:
    """Its values are those of its author, which are the ones that a plain loop widens too."""
    assert_same(trained(InProcess(), tmp_path, config_for("half")), plain_loop("half"))


class Sums:
    """A task whose model computes while it is built, as BYOL's does."""

    init_module = None

    def model(self) -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("mean", torch.randn(1_000_000).mean())
        return model

    def initial(self, *_: object) -> None: ...


def test_first_values_do_not_follow_the_number_of_threads() -> None:
    before, task = torch.get_num_threads(), cast("Any", Sums())
    means = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            means.append(FirstValues(task, 0, lambda _: None).build().mean)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*means)  # type: ignore[arg-type]


class Kept(Sums):
    """A task that makes its model in the first call, and gives it again."""

    kept: nn.Module | None = None

    def model(self) -> nn.Module:
        self.kept = self.kept or nn.Linear(2, 2)
        return self.kept


def test_a_model_that_an_earlier_call_made_is_refused() -> None:
    with pytest.raises(UserError, match=r"earlier call of model\(\) made.*\n.*anew each time"):
        FirstValues(cast("Any", Kept()), 0, lambda _: None).build()


@pytest.mark.parametrize(
    "layout",
    [
        *("single:1/3", "dp:3", "ddp:3", "ddp:2/2", "fsdp:2/2"),
        pytest.param("hsdp:4", marks=pytest.mark.long),
    ],
)
def test_what_moves_once_a_step_does_so_whatever_the_microbatches(
    layout: str, pool: Pool, tmp_path: Path
) -> None:
    """The tail of an epoch has 5 samples: of microbatches of 4, three devices have 1, 1 and 0."""
    assert_same(trained(pool, tmp_path, config_for("spectral", layout)), plain_loop("spectral"))


def test_what_moves_once_a_step_is_not_computed_again(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"buffer count and 4 more moves.*computed again"):
        trained(InProcess(), tmp_path, config_for("spectral", recompute="block"))

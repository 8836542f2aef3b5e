"""The split check: losses that don't add up are refused before the first step, with cause and line,
on one device by accumulation and on two ranks; what adds up is not.
"""

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import library_models
import numpy as np
import pytest
import torch
import torch.distributed as dist
import uneven_losses
from torch import nn
from uneven_losses import LOSSES, MODELS

from samecurve.core.config.sections import Config
from samecurve.core.determinism.sample_keys import RowKeys
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan
from samecurve.core.protocols import MicroBatch, Task
from samecurve.data.feed import Feed
from samecurve.errors import UserError
from samecurve.tasks import open_task
from samecurve.torch_engine.engine import TorchEngine
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.users_code import kind_of, shown_path
from samecurve.torch_engine.users_code.side_effects import Attributes
from tiny import MACHINE, config_of
from worlds import Pool

FILE = Path(uneven_losses.__file__)
REFUSED = {  # kind -> what its error says
    "permuted": "torch.randperm draws numbers that follow no sample",
    "nodes": "F.dropout draws numbers that follow no sample",
    "numpys": "np.random.rand draws numbers that follow no sample",
    "pythons": "random.random draws numbers that follow no sample",
    "own_generator": "self.rng.normal draws numbers that follow no sample",
    "mean_for_sum": "that is their mean, 1/5 of their sum. F.cross_entropy takes it",
    "mean_of_tokens_times_rows": "Tensor.div divides within the microbatch",
    "weighted_mean_times_rows": "F.cross_entropy divides within the microbatch",
    "weight_left_out": "gives weight 1 for 5 samples as for 1 and 4 of them",
    "weight_of_pairs": "gives weight 4 for 5 samples, of which 1 and 4 give 0 and 3",
    "contrastive": "Tensor.matmul compares each sample with each other",
    "balance": "Tensor.mean takes a statistic over the samples of the microbatch",
    "softmax_over_batch": "F.softmax makes the numbers of a sample depend on the other samples",
    "penalty": "once for each microbatch",
    "counted_by_attribute": "attribute model.seen is changed in each forward pass",
    "late_counter": "attribute model.seen is changed in each forward pass",
    "neighbours": "Tensor.roll makes the numbers of a sample depend on",
    "norm_by_hand": "Tensor.mean takes a statistic over the samples",
    "running_mean": "changes buffer centre by the samples that it sees",
    "running_mean_by_data": "a parameter with a phase of its own, whose loss is 0.5 * (mean -"
    " target).square().sum() (docs/task-recipes.md). A queue of earlier batches (MoCo): a"
    " parameter with a phase that replaces",  # DINO's centre
    "sequence_first": "F.layer_norm makes the numbers of a sample depend on",
    "batch_scale": "Tensor.max takes a statistic over the samples",
    "counted_by_list": "attribute model.losses is changed in each forward pass",
    "counted_by_key": "attribute model.log['train.calls'] is changed in each forward pass",
    "late_penalty": "the loss at step 3 gives the sum",
    "zero_gate": "Tensor.mean lets samples see each other: the loss adds up, and its",
    "logged_mean": '"accuracy", logged beside the loss, gives weight 1 for 5 samples',
    "scaled_backward": "Scaled.backward takes part in the backward pass",
    "hooked": "a hook of a tensor takes part in the backward pass",
    "clamped": "a hook of head.weight takes part in the backward pass",
    "accumulated": "a hook of head.weight is called after each backward pass",
    "coupled_in_float32": "Tensor.mean takes a statistic over the samples",
    "unlike_views_of_tokens": "torch.stack([view_1, view_2], 1).flatten(0, 1)",
    "max_norm": "the loss changes the weight table.weight",
    "clipped_weights": "the loss changes the weight inner.weight",
    "pruned": "the loss changes the weight head.weight",
    "straight_through": "Tensor.mean lets samples see each other: the loss adds up, and its",
}


# counters turn after 50 microbatches; what is logged moves nothing; what is written into weights is
# the same twice, and lost under fsdp only
SAME_AT_FIRST = {"late_counter", "counted_by_key", "counted_by_list", "logged_mean"}
SAME_AT_FIRST |= {"max_norm", "clipped_weights", "pruned"}


def config_for(kind: str, **sections: Any) -> Config:
    """5 samples at once, in two microbatches."""
    values: dict[str, Any] = {
        "task": f"{FILE}:Uneven",
        "data": {"loss": kind},
        "batch": {"samples": 10, "accumulate": 2},
        "train": {"precision": "f64", "steps": 4, **sections.pop("train", {})},
        "optimizer": {"lr": 1e-2},
        "devices": {"use": "cpu", **sections.pop("devices", {})},
    }
    return config_of({**values, **sections})


@contextmanager
def opened(config: Config, group: dist.ProcessGroup | None = None) -> Iterator[TorchEngine]:
    task, made = planned(config)
    comm = Comm(group)
    engine = TorchEngine(task, made, config.optimizer, comm, [torch.device("cpu")])
    try:
        yield engine
    finally:
        engine.close()


def planned(config: Config) -> tuple[Task, Plan]:
    """Without what is found while a task is described."""
    task = open_task(config, "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("samecurve.tasks.adapter.torch_facts.try_loss", lambda *_: None)
        return task, plan(config, MACHINE, task.facts())


def feed_of(engine: TorchEngine) -> Feed[Any]:
    places = engine.plan.layout.devices_of(engine.comm.rank)
    return Feed(engine.plan, places, engine.task.train_data(), None, engine.stage, prefetch=0)


def said_of(config: Config, group: dist.ProcessGroup | None = None, **how: bool) -> str:
    """What the check says; '': nothing."""
    with opened(config, group) as engine:
        state = engine.init()
        rows = feed_of(engine).trial_rows()
        try:
            engine.begin_training(state, rows, **how)
            return "\n".join(map(str, engine.notes))
        except UserError as error:
            return str(error)


def losses_of(config: Config) -> list[float]:
    """Of each step, trained without the check."""
    with opened(config) as engine:
        state, losses = engine.init(), []
        for _, batch in feed_of(engine):
            state, metrics = engine.step(state, batch, 1e-2, [0] * 4)
            losses.append(metrics.read().loss)
    return losses


def marked_line(kind: str) -> int | None:
    """The line of a loss, or of its model, that has the comment `# here`."""
    source: Any = MODELS.get(kind) or LOSSES.get(kind) or uneven_losses.Uneven.loss
    lines, first = inspect.getsourcelines(source)
    marked = [number for number, line in enumerate(lines, first) if "# here" in line]
    return marked[0] if marked else None


ALIKE = {  # found as another kind is, which make test has: another function, another place
    *("nodes", "pythons", "own_generator", "mean_of_tokens_times_rows", "weight_of_pairs"),
    *("balance", "norm_by_hand", "softmax_over_batch", "sequence_first", "batch_scale"),
    *("counted_by_list", "accumulated"),
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.long] if kind in ALIKE else []) for kind in REFUSED],
)
def test_what_does_not_add_up_is_refused_with_its_line(kind: str) -> None:
    """By accumulation on one device."""
    says = said_of(config_for(kind))
    assert REFUSED[kind] in says
    line = marked_line(kind)
    assert f"{FILE.name}:{line or ''}" in says.partition(": ")[0]
    assert "remedy: " in says


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind == "contrastive" else [pytest.mark.long])
        for kind in REFUSED
        if kind not in SAME_AT_FIRST
    ],
)
def test_without_the_check_it_trains_another_curve(kind: str) -> None:
    """What is refused is wrong: a look at these losses themselves, of which one is in make test."""
    one, other = (
        losses_of(config_for(kind, batch={"samples": 10, "accumulate": rounds}))
        for rounds in (1, 2)
    )
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 1e-6


def test_the_compiler_changes_no_blame() -> None:
    """Once it is imported, it wraps the functions that draw."""
    importlib.import_module("torch._dynamo")
    for kind in ("nodes", "permuted"):
        says = said_of(config_for(kind))
        assert REFUSED[kind] in says
        assert f"{FILE.name}:{marked_line(kind)}: " in says


def check_all(_index: int, group: dist.ProcessGroup, strategy: str, every: int) -> dict[str, str]:
    """What this rank's check says of every kind, or of every third."""
    devices = {"use": f"cpu:{dist.get_world_size(group)}", "strategy": strategy}
    hooked = {"clamped", "accumulated", "masked"} if strategy == "fsdp" else set()
    return {
        kind: said_of(config_for(kind, batch={"samples": 10}, devices=devices), group)
        for kind in [*REFUSED, *SOUND][::every]
        if kind not in hooked  # refused as the model is laid out
    }


SOUND = (
    "plain",
    "annealed",
    "step_buffer",
    "step_buffer_by_data",
    "logged",
    "cached",
    "logging",
    "signed",
    "offset",
    "reversed",
    "masked",
    "late_draw",
    "two_views",
    "many_views",
    "views_of_tokens",
    "pairs_of_rows",
    "padded_nodes",
)


@pytest.mark.parametrize(
    ("strategy", "every"),
    [
        pytest.param("fsdp", 3, marks=pytest.mark.long),
        pytest.param("fsdp", 1, marks=pytest.mark.long),
        pytest.param("ddp", 1, marks=pytest.mark.long),
    ],
)
def test_two_ranks_say_the_same_of_all_of_them(strategy: str, every: int, pool: Pool) -> None:
    one, other = pool.run(2, check_all, strategy, every)
    assert one == other
    assert {kind: one[kind] for kind in SOUND if kind in one} == dict.fromkeys(
        [kind for kind in SOUND if kind in one], ""
    )
    assert [kind for kind in one if REFUSED.get(kind, "") not in one[kind]] == []


def init_refused(_index: int, group: dist.ProcessGroup, kind: str) -> str:
    """What the engine says as it lays out a model in shards."""
    config = config_for(kind, devices={"use": "cpu:2", "strategy": "fsdp"}, batch={"samples": 10})
    with opened(config, group) as engine, pytest.raises(UserError) as refused:
        engine.init()
    return str(refused.value)


def test_hooks_of_weights_are_refused_under_fsdp_which_would_not_call_them(pool: Pool) -> None:
    """Each rank would train without the mask."""
    one, other = pool.run(2, init_refused, "masked")
    assert one == other
    assert one.startswith("model: fsdp: head.weight has a hook, which would not be called")


def test_a_model_that_asks_how_it_is_sharded_is_compared_with_one_device(pool: Pool) -> None:
    """Each sharded loss adds up."""
    one, other = pool.run(2, said_under_fsdp, "asks_how_it_is_sharded")
    assert one == other
    assert "model: the model computes something else under fsdp than on one device" in one


def test_an_error_in_a_trial_spoils_no_later_gradient(pool: Pool) -> None:
    """Those that came after it were zero, and the model was refused."""
    assert pool.run(2, said_under_fsdp, "fails_once") == ["", ""]


def test_a_model_that_is_too_large_to_compare_is_said(pool: Pool) -> None:
    for said in pool.run(2, said_of_a_large_model):
        assert "fsdp was not compared with one device: the whole model is too large" in said


def said_of_a_large_model(index: int, group: dist.ProcessGroup) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("samecurve.features.guard.one_device._LARGEST", 1)
        return said_under_fsdp(index, group, "plain")


def said_under_fsdp(_index: int, group: dist.ProcessGroup, kind: str) -> str:
    devices = {"use": "cpu:2", "strategy": "fsdp"}
    return said_of(config_for(kind, batch={"samples": 10}, devices=devices), group)


@pytest.mark.parametrize(
    "precision",
    ["f64", *(pytest.param(other, marks=pytest.mark.long) for other in ("f32", "bf16", "f16"))],
)
def test_what_adds_up_is_not_refused(precision: str) -> None:
    for kind in SOUND:
        assert said_of(config_for(kind, train={"precision": precision})) == "", kind


@pytest.mark.parametrize(
    "kind",
    [
        *("late_draw", "many_views", "padded_nodes"),
        *(
            pytest.param(kind, marks=pytest.mark.long)
            for kind in ("two_views", "views_of_tokens", "pairs_of_rows", "seeded")
        ),
    ],
)
def test_what_was_learnt_before_the_first_step_is_served(kind: str) -> None:
    """Draws at later steps only; several rows for each sample, in either order. By samples or by
    the step, as from the start.
    """
    curves = []
    for rounds in (1, 2, 3):
        sections: Any = {"batch": {"samples": 10, "accumulate": rounds}}
        if kind == "seeded":
            sections["task"] = f"{FILE}:BatchLosses"
        with opened(config_for(kind, **sections)) as engine:
            state, losses = engine.init(), []
            np.random.seed(rounds)
            engine.begin_training(state, feed_of(engine).trial_rows(5))
            for _, batch in feed_of(engine):
                state, metrics = engine.step(state, batch, 1e-2, [0] * 4)
                losses.append(metrics.read().loss)
        curves.append(losses)
    assert curves[1] == pytest.approx(curves[0], rel=1e-12)
    assert curves[2] == pytest.approx(curves[0], rel=1e-12)


def test_the_check_leaves_nothing_behind() -> None:
    """Weights, buffers, attributes, generators and modes are as before."""
    with opened(config_for("step_buffer")) as engine:
        state = engine.init()
        model, task = state.model, engine.task
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        modes = [module.training for module in model.modules()]
        generator = torch.get_rng_state()
        names = sorted(vars(model)), sorted(vars(getattr(task, "task")))  # noqa: B009
        engine.begin_training(state, feed_of(engine).trial_rows(5))
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name])
        assert torch.equal(generator, torch.get_rng_state())
        assert modes == [module.training for module in model.modules()]
        assert names == (sorted(vars(model)), sorted(vars(getattr(task, "task"))))  # noqa: B009


def test_rounding_of_float32_in_an_f64_run_is_said_and_not_refused() -> None:
    says = said_of(config_for("float32_inside"))
    line = marked_line_of('logits = model(batch["x"]).float()')
    assert says.startswith(f"{shown_path(str(FILE))}:{line}: Tensor.float computes in float32")
    assert "The task keeps" not in says
    says = said_of(config_for("float32_inside", task=f"{FILE}:Taught"))
    assert "The task keeps self.teacher.weight and 1 more in float32: what model() returns" in says


def test_a_loss_that_takes_no_float64_is_judged_in_float32() -> None:
    says = said_of(config_for("little_mean", train={"precision": "f32"}))
    assert "Tensor.mean divides within the microbatch" in says


def test_one_microbatch_on_one_device_trains_with_a_line() -> None:
    """What is coupled; numbers that don't repeat are refused there too."""
    whole = {"batch": {"samples": 10}}
    line = said_of(config_for("contrastive", **whole))
    assert "One microbatch on one device trains it as it is; the result will not carry over" in line
    assert "remedy" in said_of(config_for("contrastive", **whole), as_if_split=True)
    assert "remedy" in said_of(config_for("own_generator", **whole))


def test_what_is_allowed_by_name_trains_with_a_line() -> None:
    for kind in ("contrastive", "own_generator"):
        line = said_of(config_for(kind, train={"allow_coupled": True}))
        assert line.endswith("Trained all the same (train.allow_coupled)")
        assert REFUSED[kind] in line


def marked_line_of(text: str) -> int:
    lines = FILE.read_text().splitlines()
    return 1 + next(number for number, line in enumerate(lines) if text in line)


def test_features_are_tried_by_the_row_and_the_batch_loss_is_free() -> None:
    whole_batch = {"task": f"{FILE}:Features"}
    assert said_of(config_for("sound", **whole_batch)) == ""
    says = said_of(config_for("centred", **whole_batch))
    assert "Tensor.mean takes a statistic over the samples" in says
    assert "features(), added up, gives the sum" in says
    assert f"{FILE.name}:{marked_line_of('# centre')}: " in says


@pytest.mark.parametrize(("micro", "seed"), [(1, 0), (5, 0), (5, 3)])
def test_a_sample_with_nothing_to_count_has_no_weight(micro: int, seed: int) -> None:
    """Every 13th picture has no object: the check looks for it, and at it alone. With seed 3 it
    stands among others in each part of the microbatch.
    """
    task: Any = {"task": f"{FILE}:Detector", "batch": {"samples": 10, "accumulate": 10 // micro}}
    task["train"] = {"seed": seed}
    says = said_of(config_for("at_least_one", **task))
    assert "weights don't add up" in says
    assert "A sample with nothing to count has weight 0: no .clamp(min=1)" in says
    line = marked_line_of("positives.clamp")
    assert says.startswith(f"{FILE}:{line}") or f"{FILE.name}:{line}: " in says
    assert "nan for 1 of them" in said_of(config_for("divided", **task))
    assert said_of(config_for("counted", **task)) == ""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Kept", "after_step() depends on attribute task.kept, which holds something of the last"),
        ("HandedOn", "the loss of phase second depends on attribute task.last"),
    ],
)
def test_what_is_kept_of_a_microbatch_is_not_read_elsewhere(name: str, says: str) -> None:
    assert says in said_of(config_for("plain", task=f"{FILE}:{name}"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("NinthCall", "closure variable each.is_due.calls is changed in each forward pass"),
        ("Cycled", "the loss takes the next item of class variable Cycled.factors in each call"),
        ("Gathered", "global variable keeping_losses.BANK"),
        ("RateByLoss", "schedule() depends on attribute task.last, which holds something of the"),
        ("LateLayer", "the first forward pass makes the weight late.weight: it has no optimizer"),
        ("LateBuffer", ""),
    ],
)
def test_what_lasts_outside_of_attributes_is_named(name: str, says: str) -> None:
    text = said_of(config_for("plain", task=f"{FILE.with_name('keeping_losses.py')}:{name}"))
    assert says in text
    assert bool(text) == bool(says)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("sound", ""),
        ("seeded", ""),
        ("drawn", "every device takes batch_loss() by itself: torch.rand draws numbers"),
        ("counted", "batch_loss() changes from call to call: attribute task.calls is changed"),
        ("penalty", "batch_loss() uses head.weight of the model itself, whose gradient"),
    ],
)
def test_every_device_takes_the_same_batch_loss(kind: str, says: str) -> None:
    text = said_of(config_for(kind, task=f"{FILE}:BatchLosses"))
    assert says in text
    assert bool(text) == bool(says)
    alone = {"batch": {"samples": 10}}
    assert ("remedy" in said_of(config_for(kind, task=f"{FILE}:BatchLosses", **alone))) == bool(
        says
    )


def test_a_part_that_can_not_be_computed_is_told() -> None:
    says = said_of(config_for("even_only", batch={"samples": 16, "accumulate": 2}))
    assert "the loss can be computed for 8 samples at once, but not for fewer of them" in says


LIBRARY = f"{Path(library_models.__file__)}:Library"
ROUNDED_INSIDE = {"GPTNeoX", "Llama", "Qwen2", "Mistral", "Mixtral", "Bloom"}  # angles, biases
QUICK = ("Bert", "GPT2", "ConvNext", "lstm", "experts", "spectral", "convolutions")


def library(name: str, **train: Any) -> Config:
    # ResNet's BatchNorm is coupled, as the plan knows
    values = {"precision": "f32", "steps": 2, "allow_coupled": name == "ResNet", **train}
    return config_of(
        {
            "task": LIBRARY,
            "model": {"name": name},
            "batch": {"samples": 16, "accumulate": 2},
            "train": values,
            "devices": {"use": "cpu"},
        }
    )


@pytest.mark.parametrize("name", QUICK)
def test_models_of_libraries_pass_as_they_come(name: str) -> None:
    """In training, with the dropout that they call themselves."""
    assert said_of(library(name)) == ""


@pytest.mark.long
@pytest.mark.parametrize("precision", ["f64", "f32", "bf16", "f16"])
@pytest.mark.parametrize("name", library_models.MODELS)
def test_models_of_libraries_pass_in_every_format(name: str, precision: str) -> None:
    said = said_of(library(name, precision=precision))
    rounds = precision == "f64" and name in ROUNDED_INSIDE
    assert ("computes in float32 in an f64 run" in said) == rounds
    assert rounds or not said


@pytest.mark.long
@pytest.mark.parametrize("option", ["recompute", "compile"])
@pytest.mark.parametrize("name", ["Bert", "GPT2", "torch_encoder", "ViT"])
def test_models_of_libraries_pass_recomputed_and_compiled(name: str, option: str) -> None:
    chosen: dict[str, Any] = {"recompute": {"recompute": "block"}, "compile": {"compile": True}}
    assert said_of(library(name, **chosen[option])) == ""


class _Table(dict[str, str]):
    """As a library holds its models: each imported when it is asked for."""

    def __getitem__(self, name: str) -> str:
        raise ImportError(name)

    def values(self) -> Any:
        return [self[name] for name in self]


def test_what_a_library_holds_is_not_looked_into() -> None:
    """A table of modules that are imported as they are asked for; packages of another place."""
    model = nn.Linear(2, 2)
    model.table = _Table(one="a module")  # type: ignore[assignment]
    attributes = Attributes(model, object())
    assert attributes.changed() == {}
    attributes.put_back()
    assert kind_of("/home/me/.local/lib/python3.11/site-packages/other/models.py") == "library"
    assert kind_of("/home/me/models.py") == "users"


@pytest.mark.parametrize("precision", ["f64", "f32", "bf16"])
def test_numbers_of_a_batch_come_in_the_format_of_the_weights(precision: str) -> None:
    """So that no task converts them; whole numbers stay as they are."""
    wide = torch.float64 if precision == "f64" else torch.float32
    arrays = {
        "float64": (np.ones(2), wide),
        "float32": (np.ones(2, np.float32), wide),
        "float16": (np.ones(2, np.float16), wide),
        "complex64": (np.ones(2, np.complex64), wide.to_complex()),
        "uint8": (np.ones(2, np.uint8), torch.uint8),
    }
    with opened(config_for("plain", train={"precision": precision})) as engine:
        rows = MicroBatch(
            {name: array for name, (array, _) in arrays.items()},
            keys=RowKeys(seed=0, epoch=0, step=0, ids=np.arange(2)),
        )
        (((staged,),)) = engine.stage([(rows,)], 1)
        assert staged
        assert {name: tensor.dtype for name, tensor in staged.arrays.items()} == {
            name: dtype for name, (_, dtype) in arrays.items()
        }

"""A tiny run on a pool's ranks, through the program's own parts: plan, feed, engine, store, journal
and the loop.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from samecurve.checkpoint import read_manifest
from samecurve.checkpoint.format import load
from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document as load_config
from samecurve.core.config.sections import Config
from samecurve.core.determinism import Mean
from samecurve.core.determinism.data_order import Ids
from samecurve.core.evaluation import Metric
from samecurve.core.events import Event
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.fixed import Fixed
from samecurve.core.planning.machine import Machine
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan as make_plan
from samecurve.core.protocols import Arrays, Engine, MicroBatch, Rank, Round, Sample, Source
from samecurve.data import IGNORED
from samecurve.observe import read_events
from samecurve.run.directory import Run
from samecurve.run.directory.attempt import Attempt, Requests
from samecurve.tasks import Tasks
from samecurve.tasks.adapter.torch_adapter import TorchAdapter
from samecurve.torch_engine.engine import TorchEngine
from samecurve.torch_engine.process_group import Comm
from samecurve.worker.context import RankContext
from samecurve.worker.join import join_warm
from samecurve.worker.rank_main import train_rank
from samecurve_products.text.language.torch_task import TorchLanguage

FACTS = Facts.of(
    samples=100,
    eval_samples=10,
    tokens_per_sample=1,
    params=4,
    trainable=4,
    blocks=0,
    bytes_per_sample=None,
    flops_per_sample=None,
    coupled=(),
    fingerprint="",
)
MACHINE = Machine(devices=(), links=(), host_bytes=8 << 30, cores=4)


def step_event(step: int, loss: float | None) -> Event:
    """What a run of small steps writes of one of them."""
    values = {
        "loss": loss,
        "seconds": 0.01,
        "wait_seconds": 0.0,
        "lr": 1e-3,
        "samples_per_second": 100.0,
        "memory_bytes": 1 << 20,
        "grad_norm": 1.0,
    }
    return Event("step", step, values)


def tiny_values(corpus: Path, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """A config's values: two layers, sixteen tokens a sample; sections replace some of them."""
    values: dict[str, Any] = {
        "model": {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "kv_heads": 2,
            "intermediate_size": 48,
            "max_seq_len": 16,
        },
        "data": {"source": str(corpus), "validation": 0.1},
        "batch": {"samples": 10},
        "optimizer": {"lr": 3e-3, "clip": 0.5},
        "schedule": {"warmup": 5},
        "train": {"steps": 50, "precision": "f64"},
        "devices": {"use": "cpu"},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return values


def config_of(values: Mapping[str, Any]) -> Config:
    return load_config(Document(dict(values)), Tasks()).config


class Sources:
    """`keep` samples of a source, each with its id, some labels of each left out, as many as its id
    says.
    """

    def __init__(self, inner: Source, keep: int) -> None:
        self.inner, self.keep = inner, keep

    def __len__(self) -> int:
        return min(self.keep, len(self.inner))

    def __getitem__(self, ids: Ids) -> Mapping[str, Any]:
        rows = {**self.inner[ids], "id": ids}
        length = rows["labels"].shape[1]
        cut = length - (ids * 7919 % (length - 2))
        rows["labels"] = np.where(
            np.arange(length)[None, :] < cut[:, None], rows["labels"], IGNORED
        )
        return rows


def ragged(base: Any, fault: str) -> Any:
    """The language task of an engine on 23 samples of ragged token counts.

    fault: 'mean of means' plants that.
    """

    class Ragged(base):  # type: ignore[misc]
        def train_data(self) -> Source:
            return Sources(super().train_data(), 23)

        def loss(self, model: Any, batch: Arrays) -> Mean:
            loss: Mean = super().loss(model, batch)
            return Mean(loss.sum / loss.weight, 1) if fault == "mean of means" else loss

    return Ragged


CLASSES = 4  # into which counting() sorts tokens


def counting(base: Any, fault: str) -> Any:
    """ragged(), whose evaluation counts pairs of classes and adds up an array, and which draws."""

    class Counting(ragged(base, fault)):  # type: ignore[misc]
        metric_names = ()  # learnt from a row, with their shapes

        def metrics(self, model: Any, batch: Arrays) -> Mapping[str, Mean]:
            tokens, labels = batch["tokens"], batch["labels"]
            real = labels != IGNORED
            of_token = [(tokens % CLASSES == kind) & real for kind in range(CLASSES)]
            of_label = [(labels % CLASSES == kind) & real for kind in range(CLASSES)]
            if isinstance(tokens, torch.Tensor):
                stack: Any = torch.stack
            else:
                import jax.numpy as jnp

                stack = jnp.stack
            pairs = stack([stack([(a & b).sum() for b in of_label]) for a in of_token])
            ids = stack([(tokens * a).sum() / 3 for a in of_token])
            return {**super().metrics(model, batch), "pairs": Mean(pairs, 1), "ids": Mean(ids, 1)}

        def summarize(self, totals: Mapping[str, Mean]) -> Mapping[str, Metric]:
            pairs = totals["pairs"].sum
            assert pairs.dtype == np.int64
            share = pairs / pairs.sum(axis=1, keepdims=True)
            arrays = {"pairs": pairs, "share": share.tolist(), "ids": totals["ids"].sum}
            return {**super().summarize(totals), "diagonal": float(np.trace(share)), **arrays}

        def sample(self, model: Any, seed: int) -> Sequence[Sample]:
            del model, seed
            grey = np.arange(15, dtype=np.uint8).reshape(3, 5)
            return ["a text", np.stack([grey] * 3, axis=-1)[:, ::-1], grey]

    return Counting


def with_test_data(base: Any, fault: str) -> Any:
    """ragged(), whose test data are those that are evaluated."""

    class Tested(ragged(base, fault)):  # type: ignore[misc]
        def test_data(self) -> Source | None:
            held_out: Source | None = self.eval_data()
            return held_out

    return Tested


def ragged_task(config: Config, cache: Path, fault: str = "", kind: Any = ragged) -> Any:
    if config.engine == "torch":
        return TorchAdapter(kind(TorchLanguage, fault), config, cache)
    from samecurve.tasks.adapter.jax_adapter import JaxAdapter
    from samecurve_products.text.language.jax_task import JaxLanguage

    return JaxAdapter(kind(JaxLanguage, fault), config, cache)


@dataclass(frozen=True)
class TinyRun:
    """What a rank is to train. `values` of the config; `home`: the run directory."""

    home: Path
    values: Mapping[str, Any]
    cache: Path
    fault: str = ""  # planted: see train_tiny() and ragged()
    resume: Path | None = None  # a checkpoint
    stop_at: int | None = None  # the step
    device: str = "cpu"  # where every rank computes
    kind: Any = ragged  # what makes the task


@dataclass
class Outcome:
    """losses, norms: by step, from the journal.

    ids: what this rank trained on, step by step. arrays: the last checkpoint's. hashes: of the
    state, by step (exact).
    """

    losses: list[float]
    norms: list[float]
    ids: list[list[int]]
    arrays: dict[str, Any]
    plan: Plan
    evaluated: list[dict[str, Any]]
    hashes: dict[int, str]


def recorded(engine: Any) -> list[list[int]]:
    """What the engine is given to train on from now on, by step: the ids that are not dropped.

    They are taken out of what it sees.
    """
    ids_by_step: list[list[int]] = []
    stage = engine.stage

    def without_ids(microbatch: MicroBatch) -> MicroBatch:
        arrays = {name: array for name, array in microbatch.arrays.items() if name != "id"}
        return replace(microbatch, arrays=arrays)

    def noting(rounds: Sequence[Round], of: int) -> Any:
        present = [microbatch for one in rounds for microbatch in one if microbatch]
        if not present or "id" in present[0].arrays:  # not an evaluation's
            real = [microbatch for microbatch in present if microbatch.real]
            ids_by_step.append([int(i) for microbatch in real for i in microbatch.arrays["id"]])
        without = [
            tuple(microbatch and without_ids(microbatch) for microbatch in one) for one in rounds
        ]
        return stage(without, of)

    engine.stage = noting
    return ids_by_step


def train_tiny(index: int, group: dist.ProcessGroup, tiny: TinyRun) -> Outcome:
    """One rank's part.

    The world is the group's (dp, jax: as devices.use says, in a group of one).
    """
    config = config_of(tiny.values)
    task = ragged_task(config, tiny.cache, tiny.fault, tiny.kind)
    processes = dist.get_world_size(group)
    alone = config.devices.strategy == "dp" or config.engine == "jax"
    plan = _tiny_plan(tiny, config, task, index, None if alone else processes)
    run = Run(tiny.home)
    for directory in (run.home, run.checkpoints, run.logs):
        directory.mkdir(parents=True, exist_ok=True)
    dist.barrier(group)
    comm = Comm() if alone or plan.layout.backend == "none" else Comm(group)
    engine: Engine
    if config.engine == "jax":
        engine = join_warm(plan, index, group).make_engine(task, config.optimizer)
    else:
        devices = [torch.device(tiny.device)] * len(plan.layout.devices_of(index))
        if devices[0].type == "cuda":  # as worker/join.py does: an earlier run has left its own
            torch.cuda.set_device(devices[0])
        engine = TorchEngine(task, plan, config.optimizer, comm, devices)
    if tiny.fault in {"mean of means", "another order"}:  # which the guard would refuse
        engine.begin_training = lambda *_rows, **_options: None  # type: ignore[method-assign]
    if tiny.fault == "own loss":
        _judge_by_first_rank(engine, comm)
    ids = recorded(engine)
    resume = str(tiny.resume) if tiny.resume else None
    attempt = Attempt("test", str(tiny.home), resume, tiny.stop_at)
    rank = Rank(index, index, processes)
    train_rank(RankContext(attempt, run, plan, config, rank), engine, task, Requests(None))
    dist.barrier(group)
    events = read_events(run.journal)
    steps = [event.values for event in events if event.kind == "step"]
    last = sorted(run.checkpoints.glob("step-*"))[-1]
    arrays = {name: array.copy() for name, array in load(last).arrays.items()} if index == 0 else {}
    return Outcome(
        losses=[step["loss"] for step in steps],
        norms=[step["grad_norm"] for step in steps],
        ids=ids,
        arrays=arrays,
        plan=plan,
        evaluated=[event.values for event in events if event.kind == "evaluated"],
        hashes={event.step: event.values["hash"] for event in events if "hash" in event.values},
    )


def _judge_by_first_rank(engine: Any, comm: Comm) -> None:
    """Plants that an evaluation is of the first rank's share alone."""
    evaluate, add = engine.evaluate, comm.all_reduce

    def of_first(values: torch.Tensor) -> Any:
        comm.broadcast([values], engine.device)
        return lambda: values

    def evaluated(*arguments: Any) -> Any:
        comm.all_reduce = of_first  # type: ignore[method-assign]
        try:
            return evaluate(*arguments)
        finally:
            comm.all_reduce = add  # type: ignore[method-assign]

    engine.evaluate = evaluated


def _tiny_plan(tiny: TinyRun, config: Config, task: Any, index: int, world: int | None) -> Plan:
    """This rank's plan, with the fault that is planted in it. world: None: as devices.use says."""
    if world is not None:
        devices = config.devices.model_copy(update={"use": f"cpu:{world}"})
        config = config.model_copy(update={"devices": devices})
    fixed = Fixed.from_manifest(read_manifest(tiny.resume)) if tiny.resume else None
    plan = make_plan(config, MACHINE, task.facts(), fixed)
    if tiny.fault == "another order" and index == 1:
        plan = replace(plan, fixed=replace(plan.fixed, seed=plan.fixed.seed + 1))
    if tiny.fault == "offload":  # which plan() refuses for CPU ranks: it would only shift memory
        plan = replace(plan, features={**plan.features, "offload": True})
    return plan


def train_counting(
    index: int, group: dist.ProcessGroup, home: Path, values: Mapping[str, Any], cache: Path
) -> Outcome:
    return train_tiny(index, group, TinyRun(home, values, cache, kind=counting))

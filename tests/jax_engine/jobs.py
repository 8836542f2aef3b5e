"""What a warm rank does with jax for the tests beside it."""

import os
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.core.config.sections import Config
from samecurve.core.events import REQUESTS
from samecurve.core.planning.machine import Device
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan as make_plan
from samecurve.core.protocols import Rank
from samecurve.core.system.cache import cache_home
from samecurve.data.feed import Feed
from samecurve.errors import UserError
from samecurve.probe import probe
from samecurve.run.directory import Run
from samecurve.run.directory.attempt import Attempt
from samecurve.tasks import Tasks, open_task
from samecurve.worker.context import RankContext
from samecurve.worker.join import join_warm
from samecurve.worker.preflight import Deadline
from tiny import MACHINE


def config_of(values: Mapping[str, Any]) -> Config:
    return load_document(Document(dict(values)), Tasks()).config


def opened(values: Mapping[str, Any]) -> tuple[Any, Plan, Any, Feed]:
    """Engine, plan, state and feed of a config, on this process's devices."""
    config = config_of(values)
    task = open_task(config, str(cache_home()))
    plan = make_plan(
        config, MACHINE if config.devices.use.startswith("cpu") else probe(), task.facts()
    )
    engine = join_warm(plan, 0, None).make_engine(task, config.optimizer)
    return (
        engine,
        plan,
        engine.init(),
        Feed(
            plan,
            plan.layout.devices_of(0),
            task.train_data(),
            {"eval": task.eval_data()},
            engine.stage,
            prefetch=0,
        ),
    )


def programs(_index: int, _group: Any, values: Mapping[str, Any]) -> dict[str, int]:
    """How many collectives of each kind the compiled step has."""
    engine, _, state, feed = opened(values)
    text = str(engine.compiled_step(state, next(iter(feed))[1]).as_text())
    return {
        kind: len(re.findall(rf"\b{kind}(?:-start)?\(", text))
        for kind in (
            "all-reduce",
            "all-gather",
            "reduce-scatter",
            "all-to-all",
            "collective-permute",
        )
    }


def shown(
    _index: int, _group: Any, values: Mapping[str, Any]
) -> tuple[list[Any], dict[str, float], float]:
    """A model's samples, its evaluation, and the share of its weights that the first device holds
    while it is sampled.
    """
    import jax
    from flax import nnx

    engine, _, state, feed = opened(values)
    sample, shares = engine.task.sample, []

    def looked(model: Any, seed: int) -> Any:
        arrays = jax.tree.leaves(nnx.state(model, nnx.Param))
        held = sum(array.addressable_data(0).nbytes for array in arrays)
        shares.append(held / sum(array.nbytes for array in arrays))
        return sample(model, seed)

    engine.task.sample = looked
    samples = list(engine.sample(state, 0))
    metrics = engine.task.summarize(engine.evaluate(state, feed.evaluation()))
    return samples, metrics, shares[0]


def evaluation(_index: int, _group: Any, values: Mapping[str, Any]) -> list[bool]:
    """Whether all rounds of an evaluation before each round were done when it was queued."""
    import jax

    engine, _, state, feed = opened(values)
    right, done = engine._evaluation._measure, list[bool]()
    queued: list[tuple[int, Any]] = []

    def measure(params: Any, microbatch: Any, when: Any) -> Any:
        before = [sums for device, sums in queued if device == microbatch.local_device]
        done.append(all(array.is_ready() for array in jax.tree.leaves(before)))
        measured = right(params, microbatch, when)
        queued.append((microbatch.local_device, measured.sums))
        return measured

    engine._evaluation._measure = measure
    engine.evaluate(state, feed.evaluation())
    return done


def compilations(_index: int, _group: Any, values: Mapping[str, Any]) -> list[int]:
    """Programs compiled in each step of a run."""
    import jax

    counts: list[int] = []

    def count(event: str, duration_secs: float, **_: Any) -> None:
        del duration_secs
        if event == "/jax/core/compile/backend_compile_duration" and counts:
            counts[-1] += 1

    jax.monitoring.register_event_duration_secs_listener(count)
    engine, plan, state, feed = opened(values)
    for step, batch in feed:
        counts.append(0)
        state, stats = engine.step(state, batch, plan.lr_at(step), [0] * len(REQUESTS))
        stats.read()
    return counts


def failure(_index: int, _group: Any, values: Mapping[str, Any]) -> tuple[str, str]:
    """Cause and remedy of what the first step of a task comes to; empty: it is trained."""
    try:
        engine, plan, state, feed = opened(values)
        step, batch = next(iter(feed))
        engine.step(state, batch, plan.lr_at(step), [0] * len(REQUESTS))
    except UserError as error:
        return error.cause, error.remedy
    return "", ""


def trained(
    _index: int, _group: Any, values: Mapping[str, Any]
) -> tuple[list[float], dict[str, float], dict[str, Any], tuple[str, ...]]:
    """Losses, evaluation, arrays and warnings of a run."""
    engine, plan, state, feed = opened(values)
    losses = []
    for step, batch in feed:
        state, stats = engine.step(state, batch, plan.lr_at(step), [0] * len(REQUESTS))
        losses.append(stats.read().loss)
    metrics = engine.task.summarize(engine.evaluate(state, feed.evaluation()))
    return (
        losses,
        metrics,
        {piece.name: piece.buffer for piece in engine.gather(state)},
        plan.warnings,
    )


def before_and_after(
    _index: int, _group: Any, values: Mapping[str, Any]
) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """The notes of a run, and the arrays of its start and of its end."""
    engine, plan, state, feed = opened(values)
    first = {piece.name: piece.buffer for piece in engine.gather(state)}
    for step, batch in feed:
        state, stats = engine.step(state, batch, plan.lr_at(step), [0] * len(REQUESTS))
        stats.read()
    last = {piece.name: piece.buffer for piece in engine.gather(state)}
    return engine.notes, first, last


def conjugates(_index: int, _group: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The gradient of |w z - 1|^2 at a complex w by jax.grad, by pairs, and by finite differences;
    and a sum of complex leaves over devices.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, PartitionSpec

    from samecurve.jax_engine.complex_pairs import join, psum, split

    opened(values)  # sets jax up: float64, devices
    w, z = jnp.array([0.3 + 0.7j, -1.1 + 0.2j]), jnp.array([1.5 - 0.5j, 0.4 + 2.0j])

    def loss(w: Any) -> Any:
        return jnp.sum(jnp.abs(w * z - 1) ** 2)

    def slope(step: complex) -> Any:
        return np.array(
            [
                (loss(w.at[k].add(1e-6 * step)) - loss(w.at[k].add(-1e-6 * step))) / 2e-6
                for k in range(2)
            ]
        )

    raw = jax.grad(loss)(w)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    tree = {"c": jnp.array([1 + 2j, 3 - 4j]), "r": jnp.array([5.0, 6.0])}
    added = jax.shard_map(
        lambda leaves: psum(leaves, "data"),
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(tree)
    return {
        "raw": np.asarray(raw),
        "pairs": np.asarray(jax.grad(lambda pair: loss(join(pair)))(split(w))),
        "x": slope(1),
        "y": slope(1j),
        "sum": np.asarray(added["c"]),
        "real": np.asarray(added["r"]),
    }


def silent(index: int, group: Any, values: Mapping[str, Any], home: str, coordinator: str) -> None:
    """Rank 1 never comes to the first collective. coordinator: for jax's processes."""
    config = config_of(values)
    task = open_task(config, str(cache_home()))
    plan = make_plan(
        config, replace(MACHINE, started=2) if config.engine == "jax" else MACHINE, task.facts()
    )
    if config.engine == "jax":
        from samecurve.worker.join import join

        engine = join(plan, Rank(index, index, 2), None, coordinator).make_engine(
            task, config.optimizer
        )
    else:
        engine = join_warm(plan, index, group).make_engine(task, config.optimizer)
    if index:
        time.sleep(60)
        os._exit(3)
    run = Run(Path(home))
    run.logs.mkdir(parents=True)
    attempt, rank = Attempt("test", home), Rank(index, index, 2)
    context = RankContext(attempt, run, plan, config, rank)
    with Deadline(2, "a first collective", context, speaks=False):
        engine.preflight()


def stepped(_index: int, _group: Any, values: Mapping[str, Any]) -> list[dict[str, float]]:
    """What each step of a run is logged with."""
    engine, plan, state, feed = opened(values)
    numbers = []
    for step, batch in feed:
        state, stats = engine.step(state, batch, plan.lr_at(step), [0] * len(REQUESTS))
        metrics = stats.read()
        numbers.append({"loss": metrics.loss, "norm": metrics.grad_norm, **metrics.means})
    return numbers


def split_check(_index: int, _group: Any, values: Mapping[str, Any]) -> str:
    """What it says of a task; '': nothing."""
    engine, _, state, feed = opened(values)
    try:
        engine.begin_training(state, feed.trial_rows(4))
        return "".join(map(str, engine.notes))
    except UserError as error:
        return str(error)


def platforms_of_gpus(_index: int, _group: Any, values: Mapping[str, Any]) -> tuple[Any, ...]:
    """Those that jax may start in a run on GPUs after one on the CPU: where the user names none,
    cuda, and cuda beside the CPU.
    """
    import jax

    from samecurve.jax_engine import runtime

    _, made, _, _ = opened(values)
    gpu = Device(kind="cuda", index=0, name="NVIDIA H100", memory=80 << 30)
    on_gpus = replace(made, layout=replace(made.layout, devices=(gpu,) * made.num_devices))
    seen = []
    for platforms in ("", "cuda", "cuda,cpu"):
        runtime.configure(on_gpus, 0, "", platforms=platforms)
        seen.append(jax.config.jax_platforms)  # type: ignore[attr-defined]
    return tuple(seen)

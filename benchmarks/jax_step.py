"""Seconds a step of engine jax, beside a hand-written jit loop of the same model, data and
optimizer, alternating in one process.

Models: two language models and two of task vision (cssm gated), a small one each, whose time is
overhead, and a larger one, whose time is arithmetic.

The raw loop is a careful script's: one jitted shard_map with donated state, whole batches (no vmap
over rows), a mean over all tokens, optax's clip and AdamW, batches gathered and sent ahead by a
thread, the loss of each step read one step late. Prints each side's median, the ratio, and how busy
other programs kept the machine. The compiled programs by themselves are compared too, step by step
in turn, which noise moves less; writes benchmarks/results/jax-step-<machine>.json. Run: python -m
benchmarks.jax_step [--devices cpu:2]
"""

import argparse
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.common import UNASKED, timed
from benchmarks.page import publish
from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.core.config.sections import Config
from samecurve.core.planning.plan import Plan
from samecurve.core.planning.planner import plan
from samecurve.data import IGNORED
from samecurve.data.feed import Feed
from samecurve.probe import cpu_name, probe
from samecurve.tasks import Tasks, open_task
from samecurve.worker.join import join_warm

ALTERNATIONS, WARM = 5, 5
_LANGUAGE = {"data": {"source": "text.txt", "eval_samples": 0}}
_IMAGES = {"task": "vision", "data": {"source": "images.npz", "validation": 0.0}}
SIZES: dict[str, tuple[dict[str, Any], int, int]] = {  # config, batch, steps
    "small": (  # its time is overhead
        _LANGUAGE
        | {"model": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "max_seq_len": 16}},
        8,
        150,
    ),
    "tiny": (  # its time is arithmetic
        _LANGUAGE
        | {
            "model": {
                "hidden_size": 128,
                "num_layers": 4,
                "num_heads": 4,
                "kv_heads": 2,
                "intermediate_size": 512,
                "max_seq_len": 128,
                "tie_embeddings": True,
            }
        },
        16,
        30,
    ),
    "gated, small": (
        _IMAGES | {"model": {"cssm": "gated", "width": 16, "depth": 1, "patch": 4}},
        8,
        150,
    ),
    "gated": (
        _IMAGES | {"model": {"cssm": "gated", "width": 32, "depth": 4, "patch": 2}},
        32,
        30,
    ),
}
Columns = tuple[Any, Any]  # what a model reads, and its labels


def setting(home: Path, size: str, devices: str) -> tuple[Config, Any, Plan]:
    values, batch, steps = SIZES[size]
    (home / "text.txt").write_text("".join(f"{i} squared is {i * i}\n" for i in range(40_000)))
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (2000, 32, 32), np.uint8)
    np.savez(home / "images.npz", images=pixels, labels=np.arange(2000) % 2)
    values = {
        **values,
        "engine": "jax",
        "data": {**values["data"], "source": str(home / values["data"]["source"])},
        "batch": {"samples": batch},
        "train": {"steps": steps},
        "devices": {"use": devices},
    }
    config = load_document(Document(values), Tasks()).config
    task: Any = open_task(config, str(home / "cache"))
    return config, task, plan(config, probe(), task.facts())


def columns_of(rows: dict[str, Any]) -> Columns:
    """A batch as a script for this task sends it."""
    inputs = rows["pixels"] if "pixels" in rows else rows["tokens"].astype(np.int32)
    return inputs, rows["labels"].astype(np.int32)


def raw_step(
    model: Any, fields: Any, mesh: Any, read: Callable[[Any], Any]
) -> tuple[Callable[[], Any], Callable[..., Any]]:
    """A function that makes an initial state, and the compiled step.

    The step is (state, inputs, labels, lr) -> (state, loss).

    read: inputs as sent -> as the model takes them
    """
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec

    graph, params = nnx.split(model)
    params = jax.tree.map(np.asarray, params)
    chain = optax.chain(
        optax.clip_by_global_norm(fields.clip),
        optax.scale_by_adam(*fields.betas, fields.eps),
        optax.add_decayed_weights(
            fields.weight_decay, mask=lambda tree: jax.tree.map(lambda p: p.ndim >= 2, tree)
        ),
    )

    def step(state: Any, inputs: Any, labels: Any, lr: Any) -> Any:
        params, moments = state

        def total(params: Any) -> Any:
            logits = nnx.merge(graph, params)(read(inputs))
            real = labels != IGNORED
            return (
                jnp.where(
                    real,
                    optax.softmax_cross_entropy_with_integer_labels(
                        logits, jnp.where(real, labels, 0)
                    ),
                    0,
                ).sum(),
                real.sum(),
            )

        (loss, count), gradients = jax.value_and_grad(total, has_aux=True)(params)
        loss, count, gradients = jax.lax.psum((loss, count, gradients), "data")
        directions, moments = chain.update(
            jax.tree.map(lambda g: g / count, gradients), moments, params
        )
        return (jax.tree.map(lambda p, d: p - lr * d, params, directions), moments), loss / count

    by_device, alike = PartitionSpec("data"), PartitionSpec()
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(alike, by_device, by_device, alike),
        out_specs=(alike, alike),
        check_vma=False,
    )
    return lambda: jax.device_put(
        (params, chain.init(params)), NamedSharding(mesh, alike)
    ), jax.jit(mapped, donate_argnums=0)


def reader(task: Any) -> Callable[[Any], Any]:
    """How a script makes a batch into what the model takes: pixels are normalised, of mean and
    deviation.
    """
    images = getattr(task.task, "format", None)
    if images is None:
        return lambda tokens: tokens
    mean, std = images.mean[0], images.std[0]
    return lambda pixels: (pixels.astype(np.float32) / 255 - mean) / std


def batches(task: Any, made: Plan, place: Any) -> Iterator[tuple[Any, Any]]:
    """Batches that a thread gathers and sends two steps ahead."""
    import jax

    data, ready = task.train_data(), queue.Queue[Any](2)

    def work() -> None:
        for ids in made.order.ids(range(made.steps)):
            ready.put(jax.device_put(columns_of(data[ids]), place))
        ready.put(None)

    threading.Thread(target=work, daemon=True).start()
    while (item := ready.get()) is not None:
        yield item


def raw(task: Any, made: Plan, mesh: Any, state: Any, step: Callable[..., Any]) -> float:
    from jax.sharding import NamedSharding, PartitionSpec

    times, owed = [], None
    for number, (inputs, labels) in enumerate(
        batches(task, made, NamedSharding(mesh, PartitionSpec("data")))
    ):
        state, loss = step(state, inputs, labels, np.float32(made.lr_at(number)))
        if owed is not None:
            float(owed)
            times.append(time.perf_counter())
        owed = loss
    return statistics.median(b - a for a, b in pairwise(times[WARM:]))


def programs(
    engine: Any, task: Any, made: Plan, mesh: Any, peer: tuple[Any, Callable[..., Any]]
) -> float:
    """Median ratio of one compiled step to the other, run in turn on the same rows.

    peer: the other one's state and step.
    """
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    batch = next(
        iter(
            Feed(made, made.layout.devices_of(0), task.train_data(), None, engine.stage, prefetch=0)
        )
    )[1]
    inputs, labels = next(batches(task, made, NamedSharding(mesh, PartitionSpec("data"))))
    state, step = peer
    own, ratios = engine.init(), []
    for number in range(made.steps):
        began = time.perf_counter()
        own, stats = engine.step(own, batch, made.lr_at(number), UNASKED)
        stats.read()
        between = time.perf_counter()
        state, _ = jax.block_until_ready(
            step(state, inputs, labels, np.float32(made.lr_at(number)))
        )
        ratios.append((between - began) / (time.perf_counter() - between))
    return statistics.median(ratios[WARM:])


def measure(size: str, devices: str, home: Path) -> dict[str, Any]:
    from jax.sharding import Mesh

    from samecurve.jax_engine.model import open_model
    from samecurve.jax_engine.runtime import devices_of

    config, task, made = setting(home, size, devices)
    engine: Any = join_warm(made, 0, None).make_engine(task, config.optimizer)
    mesh = Mesh(np.array(devices_of(made)), ("data",))
    found: dict[str, list[float]] = {"samecurve": [], "raw": []}
    flax_model, _ = open_model(task, made.compute.precision, made.fixed.seed)
    model = flax_model.merge(engine.init()["params"])
    begin, step = raw_step(model, config.optimizer, mesh, reader(task))
    busy = []
    for _ in range(ALTERNATIONS):
        psutil.cpu_percent()
        found["samecurve"].append(timed(engine, task, made, home, 1 + WARM))
        found["raw"].append(raw(task, made, mesh, begin(), step))
        busy.append(
            psutil.cpu_percent() - psutil.Process().cpu_percent() / (psutil.cpu_count() or 1)
        )
    ratios = [a / b for a, b in zip(found["samecurve"], found["raw"], strict=True)]
    return {
        "programs_ratio": programs(engine, task, made, mesh, (begin(), step)),
        "devices": [device.name for device in made.layout.devices],
        "seconds": found,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "other_programs_percent": [round(max(0.0, b), 1) for b in busy],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--devices", default="all" if probe().devices else "cpu:2")
    devices = parser.parse_args().devices
    with tempfile.TemporaryDirectory() as scratch:
        result = {size: measure(size, devices, Path(scratch)) for size in SIZES}
    name = (
        probe().devices[0].name if probe().devices and not devices.startswith("cpu") else cpu_name()
    )
    publish("jax-step", result, machine=name)


if __name__ == "__main__":
    main()

"""docs/benchmarks.md, made from benchmarks/results/*.json: every figure on it was measured, and is
in one of those files. Run: python -m benchmarks.page
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, paired

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
Result = Mapping[str, Any]

_HEAD = """# Benchmarks

Made by `python -m benchmarks.page` from `benchmarks/results/`; nothing is written by hand here.
Each table comes from one run in which the sides took turns on the same machine, so its ratios hold
better than its absolute times, which are of small shared machines. `n` is the number of turns;
medians are shown.
The others come with the extra `bench` (`pip install -e '.[bench]'`)."""

_PUBLISHED = """\
Predictions of `samecurve plan --machine`, not measurements: `benchmarks/published.py`. Nothing of
ours ran on these machines. The assumed MFU is the largest part of the error; with the MFU fitted at
a family's first row, the others show what the model of the collectives adds: 2 to 10 % too fast at
128 to 512 devices, since stragglers, contention for the GPU and NCCL's later algorithms are not in
it."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(
        f"| {' | '.join(cells)} |" for cells in (head, ["---", *["---:"] * (len(head) - 1)], *rows)
    )


def overhead(found: Result) -> str:
    raw = found["seconds"]["raw"]
    rows = []
    for name, times in found["seconds"].items():
        beyond = (
            ["", ""]
            if name == "raw"
            else [
                f"{found['added_seconds'][name] * 1e6:+.0f}",
                _span([(a - b) * 1e6 for a, b in zip(times, raw, strict=True)], "+.0f"),
            ]
        )
        rows.append([name, f"{statistics.median(times) * 1e6:.0f}", *beyond])
    return f"n = {len(raw)}, {found['steps']} steps each, batch {found['batch']}.\n\n" + table(
        ["trainer", "\N{MICRO SIGN}s a step", "beyond the raw loop", "least and most"], rows
    )


def ddp(found: Result) -> str:
    rows = [
        [
            name,
            f"{found['tokens_per_step'] / statistics.median(times):.0f}",
            f"{found['of_plain'][name]:.3f}",
            _span(
                [b / a for a, b in zip(times, found["seconds"]["plain ddp"], strict=True)], ".3f"
            ),
        ]
        for name, times in found["seconds"].items()
    ]
    return (
        f"n = {len(found['seconds']['plain ddp'])}, {found['steps']} steps each, {found['world']}"
        " ranks of one thread.\n\n"
        + table(["trainer", "tokens/s", "of plain DDP", "least and most"], rows)
    )


def hf(found: Result) -> str:
    trainer = found["seconds"]["hf trainer"]
    rows = []
    for name, times in found["seconds"].items():
        each = [b / a for a, b in zip(times, trainer, strict=True)]
        rate = found["tokens_per_step"] / statistics.median(times)
        rows.append(
            [name, f"{rate:.0f}", f"{found['of_hf_trainer'][name]:.3f}", _span(each, ".3f")]
        )
    return (
        f"n = {len(trainer)}, {found['steps']} steps each, {found['parameters'] / 1e6:.1f}M"
        f" parameters, {found['world']} ranks of one thread.\n\n"
        + table(["trainer", "tokens/s", "of HF Trainer", "least and most"], rows)
    )


def start(found: Result) -> str:
    rows = [
        [name, f"{statistics.median(times):.2f}", _span(times, ".2f")]
        for name, times in found["seconds"].items()
    ]
    beside = ", ".join(f"{name}: {ratio:.2f}" for name, ratio in found["ratios"].items())
    return f"n = {len(found['seconds']['python'])}. {beside}.\n\n" + table(
        ["command", "seconds to its end", "least and most"], rows
    )


def threads(found: Result) -> str:
    rows = [
        [case, *(f"{statistics.median(times) * 1e3:.1f}" for times in sides.values())]
        for case, sides in found["seconds"].items()
    ]
    return table(["ms a step", *found["settings"]], rows)


def checkpoint(found: Result) -> str:
    ours = found["seconds_lost"]["samecurve"]
    rows = [
        [
            name,
            f"{statistics.median(times):.2f}",
            _span(times, ".2f"),
            f"{paired(times, ours, lambda a, b: a - b):+.2f}" if name != "samecurve" else "",
        ]
        for name, times in found["seconds_lost"].items()
    ]
    return f"n = {len(ours)}; {found['bytes'] / 1e6:.0f} MB.\n\n" + table(
        ["saver", "seconds lost", "least and most", "more than ours"], rows
    )


def data(found: Result) -> str:
    rows = [
        [
            case,
            *(f"{statistics.median(times):.0f}" for times in sides.values()),
            f"{paired(sides['feed'], sides['DataLoader'], lambda a, b: a / b):.2f}",
        ]
        for case, sides in found["batches_per_second"].items()
    ]
    return table(
        ["decoding, workers", "feed, batches/s", "DataLoader, batches/s", "feed beside it"], rows
    )


def exact(found: Result) -> str:
    rows = [
        [
            f"{world}, {mode.replace('slots', 'microbatches')}",  # as result files call them
            f"{statistics.median(times) * 1e3:.0f}",
            f"{paired(of['seconds']['exact'], times, lambda a, b: a / b):.3f}",
            f"{of['peak_bytes'][mode] / 2**20:.0f}",
        ]
        for world, of in found["worlds"].items()
        for mode, times in of["seconds"].items()
    ]
    return table(["ranks, mode", "ms a step", "exact beside it", "MiB at most"], rows)


def jax_step(found: Result) -> str:
    rows = [
        [
            size,
            *(f"{statistics.median(times) * 1e3:.2f}" for times in found[size]["seconds"].values()),
            f"{found[size]['ratio']:.3f}",
        ]
        for size in ("small", "tiny")
    ]
    return table(["model", "ours, ms a step", "raw optax loop, ms", "ours beside it"], rows)


def dropout(found: Result) -> str:
    rows = [
        [
            f"{row['model']}, {row['threads']} thread{'s' if row['threads'] > 1 else ''}",
            *(f"{ratio:.3f}" for ratio in row["keyed_over"].values()),
        ]
        for row in found["rows"]
    ]
    return table(
        ["model", "beside none", "beside one fixed mask", "beside torch's own dropout"], rows
    )


def strategies(found: Result) -> str:
    rows = [
        [
            name,
            f"{statistics.median(times) * 1e3:.1f}",
            f"{paired(times, found['seconds']['ddp'], lambda a, b: a / b):.2f}",
            f"{max(found['memory_bytes'][name]) / 2**20:.0f}",
        ]
        for name, times in found["seconds"].items()
    ]
    return f"{found['config']} on {found['devices']}.\n\n" + table(
        ["strategy", "ms a step", "beside ddp", "MiB at most"], rows
    )


def batch_loss(found: Result) -> str:
    times = [
        [name, f"{statistics.median(took) * 1e3:.1f}", f"{found['over_whole'][name]:.2f}"]
        for name, took in found["seconds"].items()
    ]
    gradients = {name: f"{times:.3f}" for name, times in found["temperature_gradient"].items()}
    ways = [
        [name, f"{difference:.1e}", gradients.get(name, "")]
        for name, difference in found["loss_differences"].items()
    ]
    head = f"n = {len(found['seconds']['ours, 1 round'])}, batch {found['batch']}."
    time_table = table(["step", "ms of the processor", "beside plain torch, whole"], times)
    way_head = [f"{found['rounds']} microbatches", "loss, from the whole batch's"]
    way_table = table([*way_head, "temperature's gradient, times the whole's"], ways)
    return f"{head}\n\n{time_table}\n\n{way_table}"


def curves(found: Result) -> str:
    """Spreads in nats, a column for each cause, and what else was looked at with all of them."""
    summary = found["summary"]
    causes = [name for name in summary if name != "one batch"]
    rows = []
    for side, version in found["trainers"].items():
        other = summary["all"][side]["steps_with_other_samples"]
        rows.append(
            [
                f"{side} {version}",
                *(f"{summary[name][side]['spread']:.1g}" for name in causes),
                f"{summary['all'][side]['held_out_spread']:.1g}",
                "0, by construction" if other is None else f"{other} of {found['steps']}",
            ]
        )
    head = ["trainer", *causes, "all: held-out loss at the end", "all: steps with other samples"]
    return table(head, rows)


def published(found: Sequence[Result]) -> str:
    rows = [
        [
            row["family"],
            row["machine"],
            f"{row['tokens']:.0f}",
            f"{row['assumed']['tokens']:.0f}",
            f"{row['assumed']['ratio']:.2f}",
            (
                f"(MFU {row['fitted']['mfu']:.3f})"
                if row["fitted"]["here"]
                else f"{row['fitted']['ratio']:.2f}"
            ),
            row["source"],
        ]
        for row in found
    ]
    head = [
        "set-up",
        "machine",
        "published, tokens/s a device",
        f"predicted at MFU {found[0]['assumed']['mfu']:g}",
        "predicted / published",
        "with the MFU that fits the family's first row",
        "source",
    ]
    return table(head, rows)


def _span(values: Sequence[float], form: str) -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


KINDS: dict[str, tuple[str, str, Callable[[Result], str]]] = {
    "curves": (
        "The loss curve on 1, 2 and 4 ranks",
        (
            "A convolutional reader of 33,000 parameters, microbatches of 6, a batch of 24 on any"
            " number of ranks by gradient accumulation; every trainer as its own documentation"
            " advises (`benchmarks/curves_sides.py`), from the same first weights. Given is the"
            " largest difference between a trainer's three lines at any of 60 steps, in nats: with"
            " all causes (the picture), with none, which shows that nothing else parts them, and"
            " with each alone. Ragged lines: Lightning averages a mean for each microbatch; the"
            " others divide once by the number of tokens. A short tail: samples are repeated until"
            " all ranks have as many, and Lightning divides an incomplete accumulation by its full"
            " number. Dropout: masks come from each rank's own generator. Samecurve does none of"
            " these. `benchmarks/curves.py`.\n\n"
            "![Loss curves of four trainers on 1, 2 and 4 ranks](curves.png)"
        ),
        curves,
    ),
    "overhead": (
        "What a trainer adds to a step",
        (
            "A model of 1,732 parameters on one CPU thread, so that a step is mostly what the"
            " trainer does. The raw loop clips and logs alike. Below zero: less than the raw loop,"
            " whose `torch.optim` and `clip_grad_norm_` cost more than the same kernels called by"
            " themselves. `benchmarks/overhead.py`."
        ),
        overhead,
    ),
    "ddp": (
        "Two CPU ranks",
        (
            "A GPT of 10.7M parameters, the same batches, clipping and optimizer, gradients over"
            " Gloo. All of them run DistributedDataParallel, and one turn differs from another by a"
            " tenth: this shows no order among them. static_graph and 5 MiB buckets: the plain loop"
            " with these, which ours does not use. `benchmarks/ddp.py`."
        ),
        ddp,
    ),
    "hf": (
        "A Llama of the transformers library on two CPU ranks",
        (
            "The library's model, the same random tokens, clipping and optimizer, gradients over"
            " Gloo, logged every step. On a GPU the same command takes 1B (and 8B with LoRA and"
            " recompute) beside HF Trainer and Accelerate; that form is unmeasured on GPU."
            " `benchmarks/hf.py`."
        ),
        hf,
    ),
    "start": (
        "From a command to its end",
        (
            "Two steps of a perceptron. Samecurve also plans, checks that the loss can be split,"
            " evaluates and saves a checkpoint; the others run a plain script that does none of it."
            " `benchmarks/start.py`."
        ),
        start,
    ),
    "threads": (
        "Idle threads",
        (
            "A small and a larger transformer on two threads, on a quiet machine and beside as many"
            " computing programs as it has cores. Spin: libgomp's default; sleep:"
            " `OMP_WAIT_POLICY=passive`; soon: what samecurve sets unless you do,"
            " `GOMP_SPINCOUNT=3000`. `benchmarks/threads.py`."
        ),
        threads,
    ),
    "checkpoint": (
        "What a save costs training",
        (
            "Seconds added to the save's own call and the five steps after it. Ours also hashes"
            " every array, writes a manifest and publishes by a rename after a sync."
            " `benchmarks/checkpoint.py`."
        ),
        checkpoint,
    ),
    "data": ("Reading data", "`benchmarks/data.py`.", data),
    "batch-loss": (
        "A loss over the whole batch",
        (
            "A contrastive loss with a learned temperature, on one CPU thread; plain torch takes"
            " the batch at once. Accumulated features: as open_clip's train.py does with"
            " --accum-freq; cached gradients: as GradCache and sentence-transformers' cached losses"
            " do. `benchmarks/batch_loss.py`."
        ),
        batch_loss,
    ),
    "exact": (
        "The same bits on any number of devices",
        (
            "`--exact` beside the ordinary mode in the same microbatches, and as it is otherwise."
            " `benchmarks/exact.py`."
        ),
        exact,
    ),
    "dropout": (
        "Dropout whose masks follow the sample",
        "Time of a forward and backward pass with it, as a ratio. `benchmarks/dropout.py`.",
        dropout,
    ),
    "jax-step": ("A step with JAX", "`benchmarks/jax_step.py`.", jax_step),
    "strategies": ("Strategies beside each other", "`benchmarks/strategies.py`.", strategies),
}


def page_text() -> str:
    parts = [_HEAD]
    for kind, (head, introduction, rows) in KINDS.items():
        files = sorted(RESULTS.glob(f"{kind}-*.json"))
        if files:
            parts += [f"## {head}", introduction]
        for path in files:
            result = _read(path)
            parts += [_measured_on(result, path.stem.removeprefix(f"{kind}-")), rows(result)]
    predictions = published(json.loads((RESULTS / "published.json").read_text()))
    parts += ["## `plan --machine` beside what others published", _PUBLISHED, predictions]
    return "\n\n".join(parts) + "\n"


def _read(path: Path) -> Result:
    """Results of before the program was called Samecurve name it otherwise."""
    result: Result = json.loads(path.read_text().replace('"lockstep"', '"samecurve"'))
    return result


def _measured_on(found: Result, name: str) -> str:
    versions = found.get("versions") or {
        library: found[library] for library in ("torch", "jax") if library in found
    }
    cores = f", {found['cores']} cores" if "cores" in found else ""
    return (
        f"{found.get('machine', name)}{cores}; Python {found['python']},"
        f" {', '.join(f'{library} {version}' for library, version in versions.items())}:"
    )


if __name__ == "__main__":
    PAGE.write_text(page_text())
    print(PAGE)

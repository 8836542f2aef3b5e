"""Make docs/benchmarks.md from the result files in benchmarks/results.

Every figure on the page was measured, and is in one of those files. Run: python -m benchmarks.page
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, paired, write

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
Result = Mapping[str, Any]

_HEAD = """\
# Benchmarks

This page compares Samecurve with plain PyTorch and JAX loops and with other trainers: loss \
curves, time of a step, start, saving, reading data. Read it to see what Samecurve costs or \
saves, and how that was measured. To measure your own model on your own devices, use [`samecurve \
bench`](bench.md).

Each section names its script. To repeat a measurement, install the other trainers and run the \
script; it prints its table and writes a result file. Then make this page again:

```
$ pip install -e '.[bench]'
$ python -m benchmarks.start  # needs a checkout
$ python -m benchmarks.page  # needs a checkout
```

How to read the tables:

- The sides of one table took turns in one run on one machine. The machines are small and shared, \
so ratios are more reliable than absolute times.
- A figure is the median over `n` turns. "least and most" is the range over the turns.
- A difference or a ratio is taken within each turn, and its median is shown. So two columns of \
times don't subtract or divide to a third column.
- `python -m benchmarks.page` makes the page from `benchmarks/results/`; nothing is written by \
hand."""

_PUBLISHED = """\
This table compares predictions of [`samecurve plan \
--machine`](plan.md#a-machine-one-doesnt-have) with throughput that others have published. \
Nothing of ours ran on these machines. The assumed MFU causes most of the error. In the column \
before the last, the MFU is fitted to the first row of each family, so its other rows show the \
error of the model of the collectives alone: predictions are 2 to 10 % too fast at 128 to 512 \
devices. That model leaves out stragglers, contention for the GPU, and NCCL's later algorithms. \
Script: `benchmarks/published.py`."""


@dataclass(frozen=True)
class Section:
    """A section of the page: a title, an introduction, and tables of its result files."""

    title: str
    introduction: str
    tables: Callable[[Result], str]


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
    """Seconds of each command. A turn in which a command failed is None and is left out."""
    done = {
        name: [seconds for seconds in times if seconds is not None]
        for name, times in found["seconds"].items()
    }
    rows = [
        [name, f"{statistics.median(times):.2f}", _span(times, ".2f")]
        for name, times in done.items()
        if times
    ]
    beside = ", ".join(f"{name}: {ratio:.2f}" for name, ratio in found["ratios"].items() if ratio)
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
    return table(["ranks or layout, mode", "ms a step", "exact beside it", "MiB at most"], rows)


def sentinel(found: Result) -> str:
    rows = []
    for layout, of in found["layouts"].items():
        plain, checked = of["seconds"]["plain"], of["seconds"]["checked"]
        by_clock, by_processor = (
            statistics.median(pair[kind] for pair in checked)
            / statistics.median(pair[kind] for pair in plain)
            - 1
            for kind in (0, 1)
        )
        step = statistics.median(clock for clock, _ in plain)
        share = 1 / of["rounds"]
        rows.append(
            [
                layout,
                f"{step * 1e3:.0f}",
                f"{by_clock:.3f}",
                f"{by_processor:.3f}",
                f"{share:.3f}",
                f"{len(plain)}",
            ]
        )
    head = ["layout", "ms a step", "a check, of a step", "of its CPU time", "1/rounds", "n"]
    return table(head, rows)


def exact_cost(found: Result) -> str:
    rows = [
        [
            name,
            f"{statistics.median(of['seconds']['whole batches']) * 1e3:.1f}",
            f"{of['ratio']:.3f}",
            _span(
                [
                    a / b
                    for a, b in zip(
                        of["seconds"]["exact"], of["seconds"]["whole batches"], strict=True
                    )
                ],
                ".2f",
            ),
            f"{of['flops_per_sample'] * of['microbatch'] / of['least_work']:.2f}",
        ]
        for name, of in found["models"].items()
    ]
    head = ["model, microbatch", "ms a step", "exact beside it", "least and most", "work"]
    return table(head, rows)


def jax_step(found: Result) -> str:
    rows = [
        [
            size,
            *(f"{statistics.median(times) * 1e3:.2f}" for times in found[size]["seconds"].values()),
            f"{found[size]['ratio']:.3f}",
        ]
        for size in ("small", "tiny", "gated, small", "gated")
        if size in found
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
    """Differences in nats, a column for each cause, and two further checks with all causes."""
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


def web_page(found: Result) -> str:
    rows = [
        [
            f"{int(steps):,}",
            f"{row['journal_bytes'] / 1e6:.1f}",
            f"{row['read_seconds']:.1f}",
            f"{row['ready_seconds']:.2f}",
            f"{row['bytes'] / 1e3:.0f}",
            f"{row['server_cpu_seconds'] * 1e3:.0f}",
            f"{row['server_bytes'] / 2**20:.0f}",
        ]
        for steps, row in found["runs"].items()
    ]
    head = ["steps", "journal, MB", "read once, s", "page ready, s", "page, kB"]
    watched = found["watched"]
    return (
        table([*head, "server's CPU, ms", "server's memory, MiB"], rows)
        + f"\n\n{watched['tabs']} tabs watched the longer run go on for {watched['seconds']:.0f}"
        f" s: {watched['requests'] / watched['seconds']:.0f} requests a second, an answer in"
        f" {watched['answer_ms_median']:.0f} ms (99 of 100 in {watched['answer_ms_99']:.0f} ms),"
        f" {watched['server_cpu_share']:.0%} of one core, at most"
        f" {watched['server_bytes'] / 2**20:.0f} MiB. The server starts in"
        f" {found['start_seconds']:.1f} s."
    )


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


SECTIONS = {
    "curves": Section(
        "The loss curve on 1, 2 and 4 ranks",
        "How much does the loss curve change with the number of ranks? The model is a convolutional"
        " reader of 33,000 parameters. The batch is 24 samples on any number of ranks, in"
        " microbatches of 6 with gradient accumulation. Every trainer starts from the same weights"
        " and is set up as its own documentation advises (`benchmarks/curves_sides.py`). Script:"
        " `benchmarks/curves.py`.\n\n"
        "![Loss curves of four trainers on 1, 2 and 4 ranks](curves.png)\n\n"
        "The table shows the largest difference, in nats, between a trainer's three curves at any"
        " of 60 steps. The column `all` has all causes of a difference, as in the picture. `none of"
        " them` has no cause, and shows that there is no further one. The other columns have one"
        " cause each:\n\n"
        "- **Ragged lines**: Lightning averages one mean for each microbatch. The others divide"
        " once by the number of tokens.\n"
        "- **A short tail**: the other trainers repeat samples until all ranks have the same"
        " number. Lightning also divides an incomplete accumulation by its full number of"
        " microbatches.\n"
        "- **Dropout**: their masks come from a generator of each rank.\n\n"
        "Samecurve does none of these.",
        curves,
    ),
    "overhead": Section(
        "What a trainer adds to a step",
        "How much time does a trainer add to each step? The model has 1,732 parameters and runs on"
        " one CPU thread, so most of a step is the trainer's own work. The raw loop clips gradients"
        " and logs as the trainers do. A figure below zero means less time than the raw loop, whose"
        " `torch.optim` and `clip_grad_norm_` cost more than direct calls of the same kernels."
        " Script: `benchmarks/overhead.py`.",
        overhead,
    ),
    "ddp": Section(
        "Two CPU ranks",
        "How fast is distributed data parallel training? All sides train a GPT of 10.7M parameters"
        " over Gloo, on the same batches, with the same clipping and optimizer; all but Samecurve"
        " with DistributedDataParallel. One turn differs from another by a tenth, so this table"
        " does not rank the trainers. `static_graph` and `5 MiB buckets` are the plain loop with"
        " these settings. Script: `benchmarks/ddp.py`.",
        ddp,
    ),
    "hf": Section(
        "A Llama of the transformers library on two CPU ranks",
        "How fast is a model of the transformers library? All sides train the library's model on"
        " the same random tokens over Gloo, with the same clipping and optimizer, and log every"
        " step. On a GPU the same command compares a model of 1B parameters (and 8B with LoRA and"
        " recompute) with HF Trainer and Accelerate; that form is unmeasured on GPU. Script:"
        " `benchmarks/hf.py`.",
        hf,
    ),
    "start": Section(
        "From a command to its end",
        "How long does a short run take in all? Every command trains a perceptron for two steps."
        " Samecurve also plans, checks that the loss can be split, evaluates, and saves a"
        " checkpoint. The others run a plain script that does none of these. Script:"
        " `benchmarks/start.py`.",
        start,
    ),
    "threads": Section(
        "Idle threads",
        "How should OpenMP threads wait for work? A small and a larger transformer train on two"
        " threads: on a quiet machine, and on a busy one that runs as many other computing programs"
        " as it has cores. `spin` is the default of libgomp. `sleep` is `OMP_WAIT_POLICY=passive`."
        " `soon` is `GOMP_SPINCOUNT=3000`, which Samecurve sets unless you set it yourself. Script:"
        " `benchmarks/threads.py`.",
        threads,
    ),
    "checkpoint": Section(
        "What a save costs training",
        "How much training time does a checkpoint cost? The table shows the seconds that a save"
        " adds to its own call and to the next five steps. Samecurve also hashes every array,"
        " writes a manifest, and publishes the checkpoint by a rename after a sync. Script:"
        " `benchmarks/checkpoint.py`.",
        checkpoint,
    ),
    "data": Section(
        "Reading data",
        "How many batches a second does Samecurve's feed deliver, compared with PyTorch's"
        " `DataLoader`? Samples are cheap (`light`) or expensive (`heavy`) to decode. Script:"
        " `benchmarks/data.py`.",
        data,
    ),
    "batch-loss": Section(
        "A loss over the whole batch",
        "What does a contrastive loss cost if the batch does not fit at once? The loss has a"
        " learned temperature and runs on one CPU thread. Plain torch takes the whole batch at"
        " once. `accumulated features` is the method of open_clip's train.py with --accum-freq;"
        " `cached gradients` is the method of GradCache and of the cached losses of"
        " sentence-transformers. The first table shows the time, the second one whether the result"
        " is that of the whole batch. Script: `benchmarks/batch_loss.py`.",
        batch_loss,
    ),
    "exact": Section(
        "The same bits on any number of devices",
        "What does [`--exact`](exact.md) cost? The table compares it with the ordinary mode in the"
        " same microbatches, and with the ordinary mode as it is. Script: `benchmarks/exact.py`.",
        exact,
    ),
    "cost-of-exact": Section(
        "What `train.exact: auto` takes",
        "What does `--exact` cost where a [plan](exact.md#what-auto-asks-for) chooses it by itself?"
        " One CPU rank of one thread trains each model in whole batches, and exactly in eight"
        " microbatches. `work` is that of a microbatch, beside the least that `auto` asks for: from"
        " 1 on a run is exact. Script: `benchmarks/exact_cost.py`.",
        exact_cost,
    ),
    "compiled-cost-of-exact": Section(
        "What `train.exact: auto` takes, compiled",
        "The same with `--compile` on both sides. Script: `benchmarks/exact_cost.py --compile`.",
        exact_cost,
    ),
    "jax-cost-of-exact": Section(
        "What `train.exact: auto` takes, with JAX",
        "The same with `engine: jax` on one CPU device, in CPU seconds of the whole process: both"
        " sides compute with the same 16 threads. Script: `benchmarks/exact_cost.py --engine jax`.",
        exact_cost,
    ),
    "sentinel": Section(
        "A check of the sentinel",
        "What does a check of [`train.sentinel`](sentinel.md) cost? A GPT of 10M parameters in f32,"
        " in 8 microbatches, CPU ranks of one thread each; steps with a check and without take"
        " turns. A check computes one microbatch again. Script: `benchmarks/sentinel.py`.",
        sentinel,
    ),
    "dropout": Section(
        "Dropout whose masks follow the sample",
        "What do dropout masks cost that depend on the sample, not on the device? Each figure is"
        " the time of a forward and backward pass with such masks, divided by the time of the"
        " alternative. Script: `benchmarks/dropout.py`.",
        dropout,
    ),
    "jax-step": Section(
        "A step with JAX",
        "How fast is a step with `engine: jax`, compared with a plain loop with optax? Script:"
        " `benchmarks/jax_step.py`.",
        jax_step,
    ),
    "web-page": Section(
        "The web page",
        "How fast does [`samecurve ui`](ui.md) open a long run? A journal is read once, by a"
        " process beside the server; then the page is opened in Chromium on the same machine."
        " Script: `benchmarks/web_page.py`.",
        web_page,
    ),
    "strategies": Section(
        "Strategies compared",
        "How fast is a step under each strategy? Script: `benchmarks/strategies.py`.",
        strategies,
    ),
}


def publish(kind: str, result: Result, *, machine: str | None = None, is_kept: bool = True) -> None:
    """Print the table of a result and, if the result is kept, write its file.

    machine: the name of the machine; None: the device that comes first here.
    """
    print(SECTIONS[kind].tables(result))
    if is_kept:
        print(write(kind, result, machine))


def page_text() -> str:
    parts = [_HEAD]
    for kind, section in SECTIONS.items():
        files = sorted(RESULTS.glob(f"{kind}-*.json"))
        if files:
            parts += [f"## {section.title}", section.introduction]
        for path in files:
            result = _read(path)
            measured_on = _measured_on(result, path.stem.removeprefix(f"{kind}-"))
            parts += [measured_on, section.tables(result)]
    predictions = published(json.loads((RESULTS / "published.json").read_text()))
    parts += ["## `plan --machine` beside what others published", _PUBLISHED, predictions]
    return "\n\n".join(parts) + "\n"


def _read(path: Path) -> Result:
    """Read a result. Old files have the former name of the program."""
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

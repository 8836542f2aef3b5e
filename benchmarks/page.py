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

This page says what Samecurve costs or saves beside plain PyTorch and JAX loops and beside other \
trainers. To measure your own model on your own devices, use [`samecurve bench`](bench.md).

Each section names its script. To repeat a measurement, install the other trainers and run the \
script: it prints its table and writes a result file. The last command makes this page from the \
result files:

```
$ pip install -e '.[bench]'
$ python -m benchmarks.start  # needs a checkout
$ python -m benchmarks.page  # needs a checkout
```

- The sides of a table took turns in one run on a small, shared machine. Ratios are more reliable \
than times.
- A figure is the median over `n` turns; "least and most" is their range. Differences and ratios \
are taken within each turn, so two columns of times don't divide to a third."""

_PUBLISHED = """\
[`samecurve plan --machine`](plan.md) predicts throughput. This table compares predictions with \
figures that others have published; nothing of ours ran on these machines. The assumed MFU causes \
most of the error. The last ratio fits the MFU to the first row of each family, so the other rows \
show the error of the model of collectives: predictions are 2 to 10 % too fast at 128 to 512 \
devices. Script: `benchmarks/published.py`."""

_SMALLER = """\
Each of these was measured once or in a few turns on the CPU, and has no result file.

| what | result |
| --- | ---: |
| `--compile`, forward and backward of `models/tiny.yaml`, one thread | 0.87 of the time |
| the language head that holds [some rows of logits](speed.md#the-loss), 16,000 words | 0.684 of \
the time; 249 instead of 549 MB |
| fsdp beside ddp on two ranks, 26M parameters | 277 instead of 440 MiB |
| the same with 65M parameters | 597 instead of 1050 MiB |
| `--balance measured`, one of two ranks three times slower | 16.7 instead of 31.3 s |
| `--compress bf16`, `fp16`, `powersgd`: largest relative difference of a loss in 60 steps | \
3.9e-5, 1.3e-5, 3.1e-2 |
| jax, two steps of a small decoder: first start, then from the cache | 8.4 s, 5.9 s |"""

_ON_GPU = """\
The scripts for one GPU exist; nobody has run them yet:

```
python -m benchmarks.gpu                             # needs a GPU: the 124M model
python -m benchmarks.gpu --config models/large.yaml  # needs a GPU: 1B
python -m benchmarks.golden                          # needs a GPU: only the golden losses
```

Samecurve, a plain loop like nanoGPT's, HF Trainer and Accelerate train the same model in turn, in \
bf16 with compile. The script prints tokens per second, MFU, memory, and where the time of a step \
went. `--micro 8` limits the microbatch of every side. `--sides samecurve,samecurve-fp8` compares \
eight bits. A side that fails is left out with its reason.

Before that, ten small configs are trained for six steps each, and their losses are compared with \
the golden losses of `benchmarks/golden.json` (`--no-golden` leaves this out)."""


@dataclass(frozen=True)
class Section:
    """A section of the page: a title, an introduction, and tables of its result files.

    short: what the page shows instead of the tables
    shown_in: the kind whose section has these figures too; then they have no section of their own
    """

    title: str
    introduction: str
    tables: Callable[[Result], str]
    short: Callable[[Result], str] | None = None
    shown_in: str = ""


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
    rows = []
    for world, of in found["worlds"].items():
        seconds, peak = of["seconds"], of["peak_bytes"]
        others = [mode for mode in seconds if mode != "exact"]
        ratios = [paired(seconds["exact"], seconds[mode], lambda a, b: a / b) for mode in others]
        rows.append(
            [
                world,
                f"{statistics.median(seconds['exact']) * 1e3:.0f}",
                *(f"{ratio:.3f}" for ratio in ratios),
                *(f"{peak[mode] / 2**20:.0f}" for mode in ("exact", *others)),
            ]
        )
    modes = [mode.replace("slots", "microbatches") for mode in others]  # as result files call them
    head = ["layout", "exact, ms a step", *(f"beside {mode}" for mode in modes)]
    return table([*head, "MiB at most", *(f"MiB, {mode}" for mode in modes)], rows)


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
            _span(_exact_over_whole(of), ".2f"),
            _work(of),
        ]
        for name, of in found["models"].items()
    ]
    head = ["model, microbatch", "ms a step", "exact beside it", "least and most", "work"]
    return table(head, rows)


def exact_cost_of_all(found: Result) -> str:
    """The ratios of each model, with columns for the compiled runs and for engine jax."""
    variants = {
        label: _read(path)["models"]
        for label, kind in (("compiled", "compiled-cost-of-exact"), ("JAX", "jax-cost-of-exact"))
        for path in RESULTS.glob(f"{kind}-*.json")
    }
    rows = [
        [
            name,
            f"{of['ratio']:.3f}",
            _span(_exact_over_whole(of), ".2f"),
            _work(of),
            *(
                f"{models[name]['ratio']:.3f} ({_work(models[name])})" if name in models else ""
                for models in variants.values()
            ),
        ]
        for name, of in found["models"].items()
    ]
    head = ["model, microbatch", "exact beside whole batches", "least and most", "work"]
    return table([*head, *variants], rows)


def _exact_over_whole(of: Result) -> list[float]:
    seconds = of["seconds"]
    return [a / b for a, b in zip(seconds["exact"], seconds["whole batches"], strict=True)]


def _work(of: Result) -> str:
    """The work of a microbatch, as a multiple of the least that `auto` asks for."""
    return f"{of['flops_per_sample'] * of['microbatch'] / of['least_work']:.2f}"


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


def jax_step_range(found: Result) -> str:
    of_sizes = [of for of in found.values() if isinstance(of, Mapping) and "ratio" in of]
    ratios = _span([of["ratio"] for of in of_sizes], ".3f")
    return f"{ratios} times the plain loop, over {len(of_sizes)} models."


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


def dropout_range(found: Result) -> str:
    none, native = (
        _span([row["keyed_over"][side] for row in found["rows"]], ".3f")
        for side in ("none", "native")
    )
    return f"{native} times torch's own dropout; {none} times no dropout."


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
        + f"\n\n{watched['tabs']} tabs watched the longer run for {watched['seconds']:.0f}"
        f" s: {watched['requests'] / watched['seconds']:.0f} requests a second, an answer in"
        f" {watched['answer_ms_median']:.0f} ms (99 of 100 in {watched['answer_ms_99']:.0f} ms),"
        f" {watched['server_cpu_share']:.0%} of one core, at most"
        f" {watched['server_bytes'] / 2**20:.0f} MiB. The server starts in"
        f" {found['start_seconds']:.1f} s."
    )


def web_page_times(found: Result) -> str:
    texts = [
        f"{int(steps):,} steps: {row['journal_bytes'] / 1e6:.1f} MB of journal, read once in"
        f" {row['read_seconds']:.1f} s, then a page in {row['ready_seconds']:.2f} s"
        for steps, row in found["runs"].items()
    ]
    watched = found["watched"]
    return (
        f"{'; '.join(texts)}. With {watched['tabs']} tabs open the server took"
        f" {watched['server_cpu_share']:.0%} of one core and"
        f" {watched['server_bytes'] / 2**20:.0f} MiB."
    )


def published(found: Sequence[Result]) -> str:
    sources = list(dict.fromkeys(row["source"].partition(", ")[0] for row in found))
    rows = []
    for row in found:
        file, _, place = row["source"].partition(", ")
        number = f"[{sources.index(file) + 1}]"
        rows.append(
            [
                row["family"],
                row["machine"],
                f"{row['tokens']:.0f}",
                f"{row['assumed']['ratio']:.2f}",
                (
                    f"(MFU {row['fitted']['mfu']:.3f})"
                    if row["fitted"]["here"]
                    else f"{row['fitted']['ratio']:.2f}"
                ),
                f"{number}, {place}" if place else number,
            ]
        )
    head = [
        "set-up",
        "machine",
        "published, tokens/s a device",
        f"predicted at MFU {found[0]['assumed']['mfu']:g} / published",
        "with the fitted MFU",
        "source",
    ]
    files = [f"[{number}] {source}" for number, source in enumerate(sources, 1)]
    return f"{table(head, rows)}\n\nSources: {'; '.join(files)}."


def _span(values: Sequence[float], form: str) -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


SECTIONS = {
    "curves": Section(
        "The loss curve on 1, 2 and 4 ranks",
        "How much does the loss curve change with the number of ranks? A convolutional reader of"
        " 33,000 parameters, 24 samples a step on any number of ranks, in microbatches of 6. Every"
        " trainer starts from the same weights and is set up as its own documentation advises"
        " (`benchmarks/curves_sides.py`). Script: `benchmarks/curves.py`.\n\n"
        "![Loss curves of four trainers on 1, 2 and 4 ranks](curves.png)\n\n"
        "The table shows the largest difference, in nats, between a trainer's three curves at any"
        " of 60 steps: with all causes (the picture), with none, and with one cause at a time:\n\n"
        "- **Ragged lines**: Lightning averages one mean for each microbatch.\n"
        "- **A short tail**: the other trainers repeat samples until all ranks have the same"
        " number.\n"
        "- **Dropout**: the other trainers' masks come from a generator of each rank.",
        curves,
    ),
    "overhead": Section(
        "What a trainer adds to a step",
        "A model of 1,732 parameters on one CPU thread, so most of a step is the trainer's own"
        " work. The raw loop clips and logs as the trainers do. Below zero means faster than the"
        " raw loop, which calls `torch.optim` and `clip_grad_norm_`; Samecurve calls the same"
        " kernels directly. Script: `benchmarks/overhead.py`.",
        overhead,
    ),
    "ddp": Section(
        "Two CPU ranks",
        "A GPT of 10.7M parameters over Gloo, on the same batches; all but Samecurve with"
        " DistributedDataParallel. `static_graph` and `5 MiB buckets` are settings of the plain"
        " loop. Turns differ by a tenth, so this table does not rank the trainers. Script:"
        " `benchmarks/ddp.py`.",
        ddp,
    ),
    "hf": Section(
        "A Llama of the transformers library on two CPU ranks",
        "All sides train the library's model on the same random tokens over Gloo, and log every"
        " step. On a GPU the same script compares 1B and 8B models; that is unmeasured. Script:"
        " `benchmarks/hf.py`.",
        hf,
    ),
    "start": Section(
        "From a command to its end",
        "Every command trains a perceptron for two steps. Samecurve also plans, checks that the"
        " loss can be split, evaluates, and saves a checkpoint; the others run a plain script."
        " Script: `benchmarks/start.py`.",
        start,
    ),
    "threads": Section(
        "Idle threads",
        "How should OpenMP threads wait for work? Two transformers train on two threads, on a quiet"
        " machine and on one whose cores are busy with other programs. `spin` is libgomp's default,"
        " `sleep` is `OMP_WAIT_POLICY=passive`. `soon` is `GOMP_SPINCOUNT=3000`, which Samecurve"
        " sets unless you set it. Script: `benchmarks/threads.py`.",
        threads,
    ),
    "checkpoint": Section(
        "What a save costs training",
        "The seconds that a save adds to its own call and to the next five steps. Samecurve also"
        " hashes every array, writes a manifest, and publishes the checkpoint by a rename after a"
        " sync. Script: `benchmarks/checkpoint.py`.",
        checkpoint,
    ),
    "data": Section(
        "Reading data",
        "Samecurve's feed beside PyTorch's `DataLoader`, with samples that are cheap (`light`) or"
        " expensive (`heavy`) to decode. Script: `benchmarks/data.py`.",
        data,
    ),
    "batch-loss": Section(
        "A loss over the whole batch",
        "What does a contrastive loss cost if the batch does not fit at once, and is it still the"
        " loss of the whole batch? One CPU thread. `cached gradients` is the method of GradCache,"
        " `accumulated features` that of open_clip's --accum-freq. Script:"
        " `benchmarks/batch_loss.py`.",
        batch_loss,
    ),
    "exact": Section(
        "The same bits on any number of devices",
        "[`--exact`](exact.md) beside the ordinary mode, in the same microbatches and as it is."
        " Script: `benchmarks/exact.py`.",
        exact,
    ),
    "cost-of-exact": Section(
        "What `train.exact: auto` takes",
        "What does `--exact` cost where a plan [chooses it by itself](exact.md)? One CPU rank of"
        " one thread trains each model in whole batches, and exactly in eight microbatches. `work`"
        " is that of a microbatch, beside the least that `auto` asks for: from 1 on a run is exact."
        " The last columns have the ratio, and the work, with `--compile` and with `engine: jax`"
        " (in CPU seconds). Script: `benchmarks/exact_cost.py`, `--compile`, `--engine jax`.",
        exact_cost,
        short=exact_cost_of_all,
    ),
    "compiled-cost-of-exact": Section(
        "What `train.exact: auto` takes, compiled",
        "",
        exact_cost,
        shown_in="cost-of-exact",
    ),
    "jax-cost-of-exact": Section(
        "What `train.exact: auto` takes, with JAX",
        "",
        exact_cost,
        shown_in="cost-of-exact",
    ),
    "sentinel": Section(
        "A check of the sentinel",
        "A check of `train.sentinel` computes one microbatch again. A GPT of 10M parameters in f32,"
        " in 8 microbatches, CPU ranks of one thread; steps with and without a check take turns."
        " Script: `benchmarks/sentinel.py`.",
        sentinel,
    ),
    "dropout": Section(
        "Dropout whose masks follow the sample",
        "Forward and backward of two models, on one and two threads. Script:"
        " `benchmarks/dropout.py`.",
        dropout,
        short=dropout_range,
    ),
    "jax-step": Section(
        "A step with JAX",
        "`engine: jax` beside a plain loop with optax. Script: `benchmarks/jax_step.py`.",
        jax_step,
        short=jax_step_range,
    ),
    "web-page": Section(
        "The web page",
        "How fast does [`samecurve ui`](ui.md) open a long run? Script: `benchmarks/web_page.py`.",
        web_page,
        short=web_page_times,
    ),
    "strategies": Section(
        "Strategies compared",
        "A step under each strategy. Script: `benchmarks/strategies.py`.",
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
    results = {
        kind: {path.stem: _read(path) for path in sorted(RESULTS.glob(f"{kind}-*.json"))}
        for kind, section in SECTIONS.items()
        if not section.shown_in
    }
    usual = max(
        (found for files in results.values() for found in files.values()),
        key=lambda found: len(found.get("versions", ())),
    )
    parts = [f"{_HEAD}\n- Unless a table says otherwise: {_measured_on(usual)}."]
    for kind, files in results.items():
        if files:
            parts += [f"## {SECTIONS[kind].title}", SECTIONS[kind].introduction]
        for found in files.values():
            if len(files) > 1 or not _is_like(found, usual):
                parts.append(f"{_measured_on(found)}:")
            section = SECTIONS[kind]
            parts.append((section.short or section.tables)(found))
    predictions = published(json.loads((RESULTS / "published.json").read_text()))
    parts += ["## Smaller measurements", _SMALLER]
    parts += ["## `plan --machine` beside what others published", _PUBLISHED, predictions]
    parts += ["## On a GPU", _ON_GPU]
    return "\n\n".join(parts) + "\n"


def _read(path: Path) -> Result:
    """Read a result. Old files have the former name of the program."""
    result: Result = json.loads(path.read_text().replace('"lockstep"', '"samecurve"'))
    return result


def _versions(found: Result) -> Mapping[str, str]:
    return found.get("versions") or {
        library: found[library] for library in ("torch", "jax") if library in found
    }


def _is_like(found: Result, usual: Result) -> bool:
    """Whether a result was measured on the machine and with the libraries of another one."""
    is_same_machine = all(found.get(key) == usual[key] for key in ("machine", "cores", "python"))
    return is_same_machine and _versions(found).items() <= _versions(usual).items()


def _measured_on(found: Result) -> str:
    versions = ", ".join(f"{library} {version}" for library, version in _versions(found).items())
    cores = f", {found['cores']} cores" if "cores" in found else ""
    return f"{found['machine']}{cores}; Python {found['python']}, {versions}"


if __name__ == "__main__":
    PAGE.write_text(page_text())
    print(PAGE)

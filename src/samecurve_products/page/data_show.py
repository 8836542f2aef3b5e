"""The data that a config's task will read, as blocks of a page: `samecurve data show` and the page
Data.
"""

import base64
import io
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.run.describe import check_installed
from samecurve.run.preconditions import check_before_facts
from samecurve.seam import Config, UserError, cache_home, counted, probe
from samecurve_products.preview.about import LeftOut
from samecurve_products.preview.open_data import Preview, Split, preview
from samecurve_products.preview.parts import Curves, Picture, Sample, Value
from samecurve_products.preview.statistics import MOST_SECONDS, ArrayStatistics, Statistics
from samecurve_products.preview.text_parts import Text
from samecurve_products.report.blocks import (
    COLOURS,
    Bar,
    Block,
    Span,
    bars,
    cards,
    chart,
    heading,
    pictures,
    spans,
    table,
    text,
)
from samecurve_products.report.blocks import Line as ChartLine

_WORDS: dict[Split, str] = {"train": "training", "eval": "evaluation", "test": "test"}
_MOST_PICTURES, _MOST_PIXELS = 8, 256  # of the page; of a picture's longer side
_BINS = 12  # of a histogram
_WIDE = 20  # times the lowest length: bins are then of equal ratios
_MOST_BARS = 40  # classes that are drawn
_DIGITS = 6  # of a curve's number


def data_blocks(config: Config, *, split: Split = "train", samples: int = 4) -> list[Block]:
    """The blocks of what the task of a config will read.

    samples: how many of the run's first samples are shown

    UserError: the data can't be read, or has no such split.
    """
    check_installed(config)
    shown = preview(
        config,
        cache_home(),
        split=split,
        count=samples,
        global_batch_size=_global_batch_size(config),
    )
    return [
        _cards(shown),
        *_sample_blocks(shown),
        *_bucket_blocks(shown),
        *_length_blocks(shown.statistics),
        *_class_blocks(shown.statistics),
        *_left_out_blocks(shown),
        *_array_blocks(shown.statistics, _WORDS[split]),
        *_line_blocks(shown.about.lines),
    ]


def _global_batch_size(config: Config) -> int | None:
    """Samples of a step; None: they follow from devices that this machine does not have."""
    batch = config.batch
    if batch.samples is not None:
        return batch.samples
    try:
        layout = check_before_facts(config, probe(), can_measure=True)
    except UserError:
        return None
    return (batch.per_device or 1) * (batch.accumulate or 1) * layout.num_devices


def _cards(shown: Preview) -> Block:
    items = [(f"{_WORDS[name]} samples", f"{n:,}", "") for name, n in shown.counts.items()]
    batch = shown.global_batch_size
    if batch is not None:
        sizes = [each.samples for each in shown.about.buckets] or [shown.counts["train"]]
        steps = sum(-(-size // batch) for size in sizes)
        items.append(("steps an epoch", f"{steps:,}", f"of {counted(batch, 'sample')}"))
    about = shown.about
    if about.tokens is not None:
        note = ""
        if about.loss_tokens is not None:
            share = about.loss_tokens / max(1, about.tokens)
            note = f"{about.loss_tokens:,} ({share:.1%}) count in the loss"
        items.append(("tokens an epoch", f"{about.tokens:,}", note))
    return cards(items)


def _bucket_blocks(shown: Preview) -> list[Block]:
    """Each bucket of the training samples, with its steps; nothing where there is one alone."""
    buckets, batch = shown.about.buckets, shown.global_batch_size
    if len(buckets) < 2:
        return []
    rows = [
        [
            each.name,
            f"{each.pictures:,}",
            f"{each.samples:,}",
            "" if batch is None else f"{-(-each.samples // batch):,}",
        ]
        for each in buckets
    ]
    note = "All samples of a step are of one bucket, so the last step of each bucket may be short."
    head = ["bucket", "pictures", "samples an epoch", "steps an epoch"]
    return [heading("Buckets"), table(head, rows, numbers=True), text(note, "quiet")]


def _sample_blocks(shown: Preview) -> list[Block]:
    blocks = [heading("First samples"), text(_order_words(shown), "quiet")]
    values = _value_table(shown)
    if values:
        blocks.append(values)
    items = [
        _picture(sample, part, shown.samples)
        for sample in shown.samples
        for part in sample.of(Picture)
    ]
    if items:
        blocks.append(pictures(items[:_MOST_PICTURES]))
    if len(items) > _MOST_PICTURES:
        blocks.append(text(f"Pictures that are not shown: {len(items) - _MOST_PICTURES}.", "quiet"))
    for sample in shown.samples:
        blocks += [_spans(sample, part) for part in sample.of(Text)]
        blocks += [_chart(sample, part) for part in sample.of(Curves)]
    return blocks


def _order_words(shown: Preview) -> str:
    count = len(shown.samples)
    if shown.split != "train":
        words = f"The first {counted(count, 'sample')} of the {_WORDS[shown.split]} data, in order"
    elif shown.of_step is None and shown.about.buckets:
        words = (
            f"{counted(count, 'sample')} of one bucket (seed {shown.seed}); which of them step 1"
            " has follows from the devices, which this machine lacks"
        )
    elif shown.of_step is None:
        words = (
            f"The first {counted(count, 'sample')} that the run reads (seed {shown.seed}); how"
            " many of them step 1 has follows from the devices, which this machine lacks"
        )
    else:
        of_step = shown.of_step
        of_first = min(count, of_step)
        first = "The first" if of_first == 1 else f"The first {of_first}"
        which = f"{first} of the {of_step}" if of_first < of_step else f"The {of_step}"
        words = f"{which} samples of step 1 (seed {shown.seed})"
        if of_first < count:
            words += f", and {count - of_first} of the steps behind it"
    if shown.laid_by_length:
        words += "; a step lays its samples out by their lengths, so that microbatches are even"
    how = "as the model is given them" if shown.are_model_inputs else "as they are read"
    return f"{words}. Arrays are shown {how}."


def _name(sample: Sample) -> str:
    return f"sample {sample.id:,}"


def _value_table(shown: Preview) -> Block | None:
    """A row for each sample, with what one cell can tell of its arrays; None: there is nothing."""
    columns = list(
        dict.fromkeys(part.name for sample in shown.samples for part in sample.of(Value))
    )
    steps = len({sample.step for sample in shown.samples}) > 1
    if not columns:
        return None
    rows = []
    for sample in shown.samples:
        texts = {part.name: part.text for part in sample.of(Value)}
        row = [_name(sample), *([str(sample.step)] if steps else [])]
        rows.append([*row, *(texts.get(column, "") for column in columns)])
    head = ["", *(["step"] if steps else []), *columns]
    return table(head, rows)


def _picture(sample: Sample, part: Picture, samples: Sequence[Sample]) -> tuple[str, str]:
    """A picture's caption and source."""
    values = [f"{value.name} {value.text}" for value in sample.of(Value)[:2]]
    name = [part.name] if len(samples[0].of(Picture)) > 1 else []
    caption = "\n".join([", ".join([_name(sample), *name, *values]), part.form])
    return caption, f"data:image/png;base64,{_png(part.pixels)}"


def _png(pixels: NDArray[np.uint8]) -> str:
    """A PNG of at most 256 pixels a side, in base64."""
    from PIL import Image  # late: only data with pictures needs it

    image = Image.fromarray(np.ascontiguousarray(pixels))
    image.thumbnail((_MOST_PIXELS, _MOST_PIXELS))
    file = io.BytesIO()
    image.save(file, format="PNG")
    return base64.b64encode(file.getvalue()).decode("ascii")


def _span_lines(shown: Text) -> list[list[Span]]:
    """The pieces of a text, line by line, with what is trained on."""
    lines: list[list[Span]] = [[]]
    for piece in shown.pieces:
        for number, line in enumerate(piece.text.split("\n")):
            if number:
                lines.append([])
            if line and piece.trained is None:
                lines[-1].append((line, None))
            elif line:
                lines[-1].append((line, "loss" if piece.trained else "quiet"))
    return lines


def _spans(sample: Sample, shown: Text) -> Block:
    words = [f"{_name(sample)}, {shown.name}: {counted(shown.tokens, 'token')}"]
    if shown.follows:
        words[0] += " and the one behind"
    if shown.documents > 1:
        words.append(counted(shown.documents, "document"))
    if shown.trained is not None:
        words.append(f"{shown.trained:,} trained on")
    if shown.padding:
        words.append(f"{shown.padding:,} of padding")
    if shown.more:
        words.append(f"{shown.more:,} not shown")
    return spans(_span_lines(shown), ", ".join(words))


def _chart(sample: Sample, curves: Curves) -> Block:
    """Channels over time."""
    values = [value.text for value in sample.of(Value) if value.name in {"label", "class"}]
    notes = [f"every {curves.every}th time step"] if curves.every > 1 else []
    notes += [f"{counted(curves.more, 'channel')} more"] if curves.more else []
    lines: list[ChartLine] = [
        {
            "label": label,
            "x": list(range(0, len(line) * curves.every, curves.every)),
            "y": _numbers(line),
            "colour": number % COLOURS,
            "dash": number // COLOURS,
            "width": 1,
        }
        for number, (label, line) in enumerate(zip(curves.labels, curves.values, strict=True))
    ]
    return chart(
        f"sample-{sample.id}-{curves.name}",
        ", ".join([_name(sample), *values]),
        lines,
        y={"format": "number", "label": curves.name},
        x={"kind": "own", "label": "time step"},
        note="; ".join(notes),
    )


def _numbers(values: NDArray[Any]) -> list[float | None]:
    """Numbers as JSON has them: none that is not finite."""
    wide = (float(value) for value in values)
    return [float(f"{v:.{_DIGITS}g}") if math.isfinite(v) else None for v in wide]


def _extent(statistics: Statistics, *, has_all: bool) -> str:
    if has_all:
        return "of all"
    slow = f" in {MOST_SECONDS:.0f} s" if statistics.seconds >= MOST_SECONDS else ""
    return f"of {statistics.read:,} of {statistics.samples:,} samples, spread over the data{slow}"


def _length_blocks(statistics: Statistics) -> list[Block]:
    """Lowest, median and highest length, and a histogram."""
    lengths = statistics.lengths
    if lengths is None or not len(lengths):
        return []
    extent = _extent(statistics, has_all=statistics.all_lengths)
    low, median, high = (int(n) for n in np.percentile(lengths, (0, 50, 100), method="lower"))
    limits = {"lowest": low, "median": median, "highest": high}
    noun = statistics.lengths_of
    rows = [_bar(label, f"{noun}s", count) for label, count in _histogram(lengths)]
    return [
        heading(f"Tokens of a {noun}"),
        cards([(title, f"{length:,}", "") for title, length in limits.items()]),
        bars("lengths", f"{noun}s by their tokens", rows, form="count", note=extent),
    ]


def _histogram(lengths: NDArray[np.int64]) -> list[tuple[str, int]]:
    """Counts of lengths: of each one, where they are few, or else of intervals."""
    values, counts = np.unique(lengths, return_counts=True)
    if len(values) <= _BINS:
        return [(f"{value:,}", int(n)) for value, n in zip(values, counts, strict=True)]
    low, high = int(values[0]), int(values[-1])
    space = np.geomspace if high > _WIDE * low > 0 else np.linspace
    edges = np.unique(space(low, high + 1, _BINS + 1).round().astype(np.int64))
    counts, _ = np.histogram(lengths, edges)
    labels = [
        f"{begin:,}" if end - begin == 1 else f"{begin:,} to {end - 1:,}"
        for begin, end in pairwise(edges)
    ]
    return list(zip(labels, counts.tolist(), strict=True))


def _bar(label: str, what: str, count: int) -> Bar:
    return Bar(label, [(what, int(count), 0)])


def _class_blocks(statistics: Statistics) -> list[Block]:
    if not statistics.classes:
        return []
    shown = statistics.classes[:_MOST_BARS]
    note = _extent(statistics, has_all=statistics.all_classes)
    if len(statistics.classes) > len(shown):
        note += f"; {len(statistics.classes) - len(shown)} classes more are not shown"
    rows = [_bar(name, "samples", count) for name, count in shown]
    title = f"{len(statistics.classes)} classes"
    blocks = [heading("Classes"), bars("classes", title, rows, form="count", note=note)]
    missing = [name for name, count in statistics.classes if not count]
    if missing:
        blocks.append(text(f"No sample here of {', '.join(missing[:_MOST_BARS])}.", "warn"))
    return blocks


def _left_out_blocks(shown: Preview) -> list[Block]:
    """Rows that are left out or cut, with the reason and the first places."""
    left_out = shown.about.left_out
    if left_out is None:
        return []
    title = heading("Left out or cut")
    if not left_out:
        return [title, text("Nothing. What can't be read is refused, with its place.")]
    rows = [[f"{each.rows:,}", each.reason, _places(each)] for each in left_out]
    return [title, table(["rows", "why", "where"], rows)]


def _places(left_out: LeftOut) -> str:
    more = [*left_out.places, "..."] if 0 < len(left_out.places) < left_out.rows else []
    return ", ".join(more or left_out.places)


def _array_blocks(statistics: Statistics, what: str) -> list[Block]:
    rows = [
        [array.name, array.dtype, _shape(array), _limit(array.low), _limit(array.high)]
        for array in statistics.arrays
    ]
    head = ["array", "type", "shape", "lowest", "highest"]
    blocks = [heading(f"Arrays of a {what} sample"), table(head, rows)]
    if statistics.read < statistics.samples:
        extent = f"Lowest and highest {_extent(statistics, has_all=False)}."
        blocks.append(text(extent, "quiet"))
    broken = [
        f"{array.name} has {array.not_finite:,}" for array in statistics.arrays if array.not_finite
    ]
    if broken:
        blocks.append(text(f"Numbers that are not finite: {', '.join(broken)}.", "bad"))
    return blocks


def _shape(array: ArrayStatistics) -> str:
    if array.shape is None:
        return "of several shapes"
    return " x ".join(map(str, array.shape)) or "one number"


def _limit(number: float | None) -> str:
    return "" if number is None else f"{number:.6g}"


def _line_blocks(lines: Sequence[str]) -> list[Block]:
    return [heading("What was read"), *map(text, lines)] if lines else []

"""What a config's task will read, as blocks of a page: `samecurve data show` and the page Data."""

import base64
import io
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.config.sections import Config
from samecurve.core.planning.planner import check_before_facts
from samecurve.core.system.cache import cache_home
from samecurve.errors import UserError
from samecurve.probe import probe
from samecurve.run.describe import check_installed
from samecurve.tasks.preview.open_data import Preview, Split, preview
from samecurve.tasks.preview.parts import Curves, Picture, Sample, Value
from samecurve.tasks.preview.statistics import MOST_SECONDS, ArrayStatistics, Statistics
from samecurve.tasks.preview.text_parts import Text
from samecurve.units import counted

# Any: blocks are JSON, of many forms (report/blocks.py)
Block = dict[str, Any]

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
    items: list[dict[str, str]] = []
    for name, count in shown.counts.items():
        items.append({"title": f"{_WORDS[name]} samples", "value": f"{count:,}"})
    batch = shown.global_batch_size
    if batch is not None:
        steps = -(-shown.counts["train"] // batch)
        items.append(
            {
                "title": "steps an epoch",
                "value": f"{steps:,}",
                "note": f"of {counted(batch, 'sample')}",
            }
        )
    about = shown.about
    if about.tokens is not None:
        card = {"title": "tokens an epoch", "value": f"{about.tokens:,}"}
        if about.loss_tokens is not None:
            share = about.loss_tokens / max(1, about.tokens)
            card["note"] = f"{about.loss_tokens:,} ({share:.1%}) count in the loss"
        items.append(card)
    return {"type": "cards", "items": items}


def _sample_blocks(shown: Preview) -> list[Block]:
    blocks: list[Block] = [{"type": "heading", "level": 2, "text": "First samples"}]
    blocks.append({"type": "text", "tone": "quiet", "text": _order_words(shown)})
    values = _value_table(shown)
    if values:
        blocks.append(values)
    pictures = [
        _picture(sample, part, shown.samples)
        for sample in shown.samples
        for part in sample.of(Picture)
    ]
    if pictures:
        blocks.append({"type": "pictures", "items": pictures[:_MOST_PICTURES], "size": "small"})
        more = len(pictures) - _MOST_PICTURES
        if more > 0:
            text = f"{counted(more, 'picture')} more {'is' if more == 1 else 'are'} not shown."
            blocks.append({"type": "text", "tone": "quiet", "text": text})
    for sample in shown.samples:
        blocks += [_spans(sample, part) for part in sample.of(Text)]
        blocks += [_chart(sample, part) for part in sample.of(Curves)]
    return blocks


def _order_words(shown: Preview) -> str:
    count = len(shown.samples)
    if shown.split != "train":
        words = f"The first {counted(count, 'sample')} of the {_WORDS[shown.split]} data, in order"
    elif shown.global_batch_size is None:
        words = (
            f"The first {counted(count, 'sample')} that the run reads (seed {shown.seed}); how"
            " many of them step 1 has follows from the devices, which this machine lacks"
        )
    else:
        of_first = min(count, shown.global_batch_size)
        of_step = min(shown.global_batch_size, shown.counts["train"])
        first = "The first" if of_first == 1 else f"The first {of_first}"
        which = f"{first} of the {of_step}" if of_first < of_step else f"The {of_step}"
        words = f"{which} samples of step 1 (seed {shown.seed})"
        if of_first < count:
            words += f", and {count - of_first} of the steps behind it"
    if shown.laid_by_length:
        words += "; a step lays its samples out by their lengths, so that microbatches are even"
    how = "as the model is given them" if shown.is_as_given else "as they are read"
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
    return {"type": "table", "head": head, "rows": rows}


def _picture(sample: Sample, part: Picture, samples: Sequence[Sample]) -> Block:
    values = [f"{value.name} {value.text}" for value in sample.of(Value)[:2]]
    name = [part.name] if len(samples[0].of(Picture)) > 1 else []
    caption = "\n".join([", ".join([_name(sample), *name, *values]), part.form])
    return {"caption": caption, "src": f"data:image/png;base64,{_png(part.pixels)}"}


def _png(pixels: NDArray[np.uint8]) -> str:
    """A PNG of at most 256 pixels a side, in base64."""
    from PIL import Image  # late: only data with pictures needs it

    image = Image.fromarray(np.ascontiguousarray(pixels))
    image.thumbnail((_MOST_PIXELS, _MOST_PIXELS))
    file = io.BytesIO()
    image.save(file, format="PNG")
    return base64.b64encode(file.getvalue()).decode("ascii")


def _spans(sample: Sample, text: Text) -> Block:
    """A text, line by line, with what is trained on."""
    lines: list[list[dict[str, str]]] = [[]]
    for piece in text.pieces:
        tone = {} if piece.trained is None else {"tone": "loss" if piece.trained else "quiet"}
        for number, line in enumerate(piece.text.split("\n")):
            if number:
                lines.append([])
            if line:
                lines[-1].append({"text": line, **tone})
    words = [f"{_name(sample)}, {text.name}: {counted(text.tokens, 'token')}"]
    if text.follows:
        words[0] += " and the one behind"
    if text.documents > 1:
        words.append(counted(text.documents, "document"))
    if text.trained is not None:
        words.append(f"{text.trained:,} trained on")
    if text.padding:
        words.append(f"{text.padding:,} of padding")
    if text.more:
        words.append(f"{text.more:,} not shown")
    return {"type": "spans", "lines": lines, "caption": ", ".join(words)}


def _chart(sample: Sample, curves: Curves) -> Block:
    """Channels over time."""
    values = [value.text for value in sample.of(Value) if value.name in {"label", "class"}]
    notes = [f"every {curves.every}th time step"] if curves.every > 1 else []
    notes += [f"{counted(curves.more, 'channel')} more"] if curves.more else []
    block = {
        "type": "chart",
        "name": f"sample-{sample.id}-{curves.name}",
        "title": ", ".join([_name(sample), *values]),
        "x": {"kind": "own", "label": "time step"},
        "y": {"format": "number", "label": curves.name},
        "lines": [
            {
                "label": label,
                "x": list(range(0, len(line) * curves.every, curves.every)),
                "y": _numbers(line),
                "colour": number,
                "width": 1,
            }
            for number, (label, line) in enumerate(zip(curves.labels, curves.values, strict=True))
        ],
    }
    return {**block, "note": "; ".join(notes)} if notes else block


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
    cards = {"lowest": low, "median": median, "highest": high}
    noun = statistics.lengths_of
    return [
        {"type": "heading", "level": 2, "text": f"Tokens of a {noun}"},
        {"type": "cards", "items": [{"title": k, "value": f"{v:,}"} for k, v in cards.items()]},
        {
            "type": "bars",
            "name": "lengths",
            "title": f"{noun}s by their tokens",
            "note": extent,
            "format": "count",
            "rows": [_bar(label, f"{noun}s", count) for label, count in _histogram(lengths)],
        },
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


def _bar(label: str, what: str, count: int) -> Block:
    return {"label": label, "parts": [{"label": what, "value": int(count), "colour": 0}]}


def _class_blocks(statistics: Statistics) -> list[Block]:
    if not statistics.classes:
        return []
    shown = statistics.classes[:_MOST_BARS]
    note = _extent(statistics, has_all=statistics.all_classes)
    if len(statistics.classes) > len(shown):
        note += f"; {len(statistics.classes) - len(shown)} classes more are not shown"
    bars = [_bar(name, "samples", count) for name, count in shown]
    missing = [name for name, count in statistics.classes if not count]
    blocks: list[Block] = [
        {"type": "heading", "level": 2, "text": "Classes"},
        {
            "type": "bars",
            "name": "classes",
            "title": f"{len(statistics.classes)} classes",
            "note": note,
            "format": "count",
            "rows": bars,
        },
    ]
    if missing:
        text = f"No sample here of {', '.join(missing[:_MOST_BARS])}."
        blocks.append({"type": "text", "tone": "warn", "text": text})
    return blocks


def _left_out_blocks(shown: Preview) -> list[Block]:
    """Rows that are left out or cut, with the reason and the first places."""
    left_out = shown.about.left_out
    if left_out is None:
        return []
    heading: Block = {"type": "heading", "level": 2, "text": "Left out or cut"}
    if not left_out:
        text = "Nothing. What can't be read is refused, with its place."
        return [heading, {"type": "text", "text": text}]
    rows = [
        [
            f"{each.rows:,}",
            each.reason,
            ", ".join(each.places) + (", ..." if len(each.places) < each.rows else "")
            if each.places
            else "",
        ]
        for each in left_out
    ]
    return [heading, {"type": "table", "head": ["rows", "why", "where"], "rows": rows}]


def _array_blocks(statistics: Statistics, what: str) -> list[Block]:
    rows = [
        [array.name, array.dtype, _shape(array), _limit(array.low), _limit(array.high)]
        for array in statistics.arrays
    ]
    blocks: list[Block] = [
        {"type": "heading", "level": 2, "text": f"Arrays of a {what} sample"},
        {"type": "table", "head": ["array", "type", "shape", "lowest", "highest"], "rows": rows},
    ]
    if statistics.read < statistics.samples:
        extent = f"Lowest and highest {_extent(statistics, has_all=False)}."
        blocks.append({"type": "text", "tone": "quiet", "text": extent})
    broken = [
        f"{array.name} has {array.not_finite:,}" for array in statistics.arrays if array.not_finite
    ]
    if broken:
        text = f"Numbers that are not finite: {', '.join(broken)}."
        blocks.append({"type": "text", "tone": "bad", "text": text})
    return blocks


def _shape(array: ArrayStatistics) -> str:
    if array.shape is None:
        return "of unlike length"
    return " x ".join(map(str, array.shape)) or "one number"


def _limit(number: float | None) -> str:
    return "" if number is None else f"{number:.6g}"


def _line_blocks(lines: Sequence[str]) -> list[Block]:
    if not lines:
        return []
    heading = {"type": "heading", "level": 2, "text": "What was read"}
    return [heading, *({"type": "text", "text": line} for line in lines)]

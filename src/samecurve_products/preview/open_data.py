"""Open a task's data, and read its first samples in the order in which a run sees them.

The order is that of core/determinism: a pure function of the seed. So the samples are those of the
run's first step, on whatever devices it will train.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from samecurve.core.bucket_order import BucketOrder
from samecurve.core.determinism.data_order import Order
from samecurve.core.determinism.sample_keys import HELD_OUT, RowKeys
from samecurve.core.evaluation import CLASS_WEIGHT
from samecurve.seam import Config, Ids, UserError
from samecurve.tasks import open_task
from samecurve.tasks.adapter import TaskAdapter
from samecurve.tasks.adapter.returned import Columns
from samecurve.tasks.adapter.rows import Rows
from samecurve_products.preview.about import AboutData
from samecurve_products.preview.parts import Part, Sample, Value, parts_of
from samecurve_products.preview.statistics import Statistics, statistics_of
from samecurve_products.preview.text_parts import PADDING_MASK, token_columns
from samecurve_products.text_files.tokenizer import LibraryTokenizer

Split = Literal["train", "eval", "test"]

_NOTE = "data "  # before lines about the data among the notes of facts()
_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Preview:
    """The data that a task will read.

    counts: samples of each split that is there. split: the one whose samples are shown
    global_batch_size: None: it follows from devices that are not known
    of_step: samples of step 1; None: not known
    samples: in the order of the run. laid_by_length: a step lays its samples out by their lengths
    are_model_inputs: whether the arrays are as the model is given them; False: as they are read
    """

    counts: Mapping[Split, int]
    split: Split
    seed: int
    global_batch_size: int | None
    of_step: int | None
    samples: list[Sample]
    laid_by_length: bool
    are_model_inputs: bool
    about: AboutData
    statistics: Statistics


def preview(
    config: Config, cache: Path, *, split: Split, count: int, global_batch_size: int | None
) -> Preview:
    """Open the task of a config and read what a page shows of its data.

    count: samples that are shown

    UserError: the data can't be read, or has no such split.
    """
    adapter = open_task(config, cache)
    about = about_data(adapter)
    splits = _splits(adapter, about)
    if split not in splits:
        raise UserError(
            f"the task has no data for {split}", f"--split {' or '.join(splits)}", "--split"
        )
    rows = splits[split]
    seed = config.train.seed
    ids = first_ids(rows, seed, count, split, global_batch_size)
    arrays = rows.read(ids, 0)
    of_statistics = token_columns(arrays, about.decode)
    if rows.by_microbatch:
        arrays = _with_padding_mask(rows, arrays, ids, about)
    keys = RowKeys(seed, 0 if split == "train" else HELD_OUT, 0, ids)
    inputs = None if about.sources else _model_inputs(adapter, arrays, keys, about)
    return Preview(
        counts={name: len(each) for name, each in splits.items()},
        split=split,
        seed=seed,
        global_batch_size=global_batch_size,
        of_step=_samples_of_step(splits["train"], seed, global_batch_size),
        samples=_samples(inputs or arrays, ids, about, global_batch_size, split),
        laid_by_length=split == "train" and rows.lengths is not None and not adapter.whole_batch,
        are_model_inputs=inputs is not None,
        about=about,
        statistics=statistics_of(rows, of_statistics, about),
    )


def _splits(adapter: TaskAdapter, about: AboutData) -> dict[Split, Rows]:
    """The splits that the task has, as a reader sees them."""
    rows: dict[Split, Rows | None] = {
        "train": adapter.train_data(),
        "eval": adapter.eval_data(),
        "test": adapter.test_data(),
    }
    shown = {name: Rows(each, "about_data()", None) for name, each in about.sources.items()}
    return {name: shown.get(name, each) for name, each in rows.items() if each is not None}


def first_ids(
    rows: Rows, seed: int, count: int, split: Split, global_batch_size: int | None = None
) -> Ids:
    """The ids of the first samples: of a run's first steps, or of an evaluation.

    Of samples in buckets those of the first step alone, which are of one bucket; the order of the
    steps follows from the batch.
    """
    count = min(count, len(rows))
    sizes = rows.bucket_sizes
    if split != "train":  # held-out data is read in its own order
        return np.arange(min(count, *sizes[:1]) if sizes else count)
    if sizes:
        batch = global_batch_size or count
        return BucketOrder(len(rows), batch, seed, bucket_sizes=sizes).ids(range(1))[0][:count]
    return Order(len(rows), count, seed).ids(range(1))[0]


def _samples_of_step(rows: Rows, seed: int, global_batch_size: int | None) -> int | None:
    """The samples of a run's first step; None: they follow from devices that are not known."""
    if global_batch_size is None:
        return None
    if not rows.bucket_sizes:
        return min(global_batch_size, len(rows))
    return len(first_ids(rows, seed, global_batch_size, "train", global_batch_size))


def _with_padding_mask(rows: Rows, arrays: Columns, ids: Ids, about: AboutData) -> Columns:
    """The arrays, with one that says which tokens are no padding, where none of them does.

    A sample that is read alone has no padding.
    """
    columns = token_columns(arrays, about.decode)
    if columns is None or columns.real is not None or arrays[columns.tokens].ndim != 2:
        return arrays
    widths = [
        rows.read(ids[place : place + 1], 0)[columns.tokens].shape[1] for place in range(len(ids))
    ]
    real = np.arange(arrays[columns.tokens].shape[1]) < np.array(widths)[:, None]
    return {**arrays, PADDING_MASK: real}


def _model_inputs(
    adapter: TaskAdapter, arrays: Columns, keys: RowKeys, about: AboutData
) -> dict[str, Any] | None:
    """The arrays as the model is given them; None: that is not known."""
    if adapter.engine != "torch":  # jax traces a loss row by row
        return None
    from samecurve_products.preview.model_inputs import labels_of_loss, model_inputs

    inputs = model_inputs(adapter, arrays, keys, held_out=keys.epoch == HELD_OUT)
    if inputs is not None and about.labels_of is not None:
        inputs["labels"] = labels_of_loss(about.labels_of, arrays, keys)
    return inputs


def _samples(
    arrays: Columns, ids: Ids, about: AboutData, global_batch_size: int | None, split: Split
) -> list[Sample]:
    columns = token_columns(arrays, about.decode)
    beside = about.beside_rows[split](ids) if split in about.beside_rows else {}
    samples = []
    for place, number in enumerate(ids.tolist()):
        step = None
        if split == "train" and global_batch_size is not None:
            step = place // global_batch_size + 1
        row = {name: array[place] for name, array in arrays.items()}
        parts: list[Part] = [Value(name, texts[place]) for name, texts in beside.items()]
        samples.append(Sample(number, step, [*parts, *parts_of(row, columns, about)]))
    return samples


def about_data(adapter: TaskAdapter) -> AboutData:
    """The facts that an opened task gives of its data."""
    own = getattr(adapter.task, "about_data", None)
    if adapter.is_ours and own is not None:
        about = own()
        assert isinstance(about, AboutData)
        return about
    facts = adapter.own_facts
    lines = [str(note).removeprefix(_NOTE) for note in facts.get("notes", ())]
    reference = facts.get("reference", {})
    names = [key.removeprefix(CLASS_WEIGHT) for key in reference if key.startswith(CLASS_WEIGHT)]
    tokenizer = adapter.assets().get(_TOKENIZER)
    decode = None
    if tokenizer is not None:
        decode = partial(LibraryTokenizer(tokenizer).decode, special=True)
    return AboutData(decode=decode, classes=names, lines=lines)

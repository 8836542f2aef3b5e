"""The timeseries task without its model: windows, their split by subject, what a run keeps.

No engine is imported here; the model is in torch_task.py.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from samecurve.core.system.cache import keep_texts
from samecurve.seam import Mean, Source, UserError, counted
from samecurve_products.sensors.prepared import Prepared, prepare_windows, stamp_windows
from samecurve_products.sensors.sections import TimeSeriesData, TimeSeriesModel
from samecurve_products.sensors.windows import (
    ChannelRows,
    Normalization,
    Numbers,
    WindowRows,
    Windows,
    split_subjects,
)
from samecurve_products.task_parts.classification import (
    read_confusion,
    summarize_classes,
    weigh_classes,
)

if TYPE_CHECKING:  # a run does not show its data
    from samecurve_products.preview.about import AboutData

FORMAT = "windows.json"  # among a run's assets
_SHOWN = 12  # channels named in a line
WINDOW_PREFIX = "window_"  # before the metrics of whole windows, in mode flatten


@dataclass(frozen=True, kw_only=True)
class WindowFormat:
    """Properties of the windows that a model is given."""

    channels: Sequence[str]
    classes: Sequence[str]  # by number
    length: int  # time steps
    normalization: Normalization
    class_weights: Sequence[float]  # by number, in the loss

    @classmethod
    def read(cls, file: Path) -> "WindowFormat":
        """Read a run's file. UserError: the file is not one that a run keeps."""
        try:
            values = dict(json.loads(file.read_text()))
            of_channels = values.pop("normalization")
            normalization = Normalization(
                tuple(of_channels["mean"]), tuple(of_channels["deviation"])
            )
            return cls(normalization=normalization, **values)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{file} can't be read as the windows of a run: {error}",
                f"the file assets/{FORMAT} of a run of task timeseries",
                "data.like_run",
            ) from None

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class TimeSeriesTask:
    """All of the timeseries task but its model.

    model, data: the config's sections
    cache: where the arrays of files are kept
    assets: the files that a run has kept, where its model is only used and needs no data
    """

    data_stamp = staticmethod(stamp_windows)

    @staticmethod
    def other_data(source: str, assets: Path, reference: Mapping[str, float]) -> Mapping[str, Any]:
        """Config values that make `eval -d SOURCE` read all of a source like the run's data."""
        del reference
        kept = WindowFormat.read(assets / FORMAT)
        weights = dict(zip(kept.classes, kept.class_weights, strict=True))
        return {
            "data.source": source,
            "data.like_run": str((assets / FORMAT).resolve()),
            "model.class_weights": weights,
        }

    def __init__(
        self,
        model: TimeSeriesModel,
        data: TimeSeriesData,
        cache: Path,
        assets: Path | None = None,
    ) -> None:
        self.fields, self.data = model, data
        self._cache, self._kept = cache, assets

    @cached_property
    def prepared(self) -> Prepared:
        return prepare_windows(self.data, self._cache)

    @cached_property
    def format(self) -> WindowFormat:
        """The windows' format. UserError: weights name unknown classes, or a file is unfit."""
        if self._kept is not None:
            return WindowFormat.read(self._kept / FORMAT)
        if self.data.like_run is not None:
            return WindowFormat.read(Path(self.data.like_run))
        windows, (ids, _) = self.prepared.windows, self._split
        counts = np.bincount(windows.train.labels[ids], minlength=len(windows.classes))
        return WindowFormat(
            channels=list(windows.channels),
            classes=list(windows.classes),
            length=windows.train.values.shape[2],
            normalization=Normalization.of(windows.train.values[ids]),
            class_weights=weigh_classes(
                self.fields.class_weights, windows.classes, counts.tolist()
            ),
        )

    @property
    def model_channels(self) -> int:
        """The number of channels in a row that the model is given."""
        return len(self.format.channels) if self.data.mode == "joint" else 1

    @cached_property
    def _split(self) -> tuple[Numbers, list[int]]:
        """Ids of the training windows, and the subjects held out for validation."""
        train = self.prepared.windows.train
        if train.subjects is None and self.data.validation:
            raise UserError(
                "the data names no subjects, and validation holds out whole subjects: windows of"
                " one person in training and in validation would make the score too good",
                "an array or a column `subject`; or --set data.validation=0, without an evaluation",
                "data.validation",
            )
        subjects = np.zeros(len(train), np.int64) if train.subjects is None else train.subjects
        return split_subjects(subjects, self.data.validation)

    def train_data(self) -> Source:
        if self.data.like_run is not None:
            return self._whole(self._all_windows)
        train, (ids, _) = self.prepared.windows.train, self._split
        if self.data.mode == "flatten":
            return ChannelRows(train, ids, self.format.normalization)
        return self._whole(train, ids)

    def eval_data(self) -> Source | None:
        """Windows of the held-out subjects. In mode flatten rows are whole windows here too."""
        if self.data.like_run is not None or not self._split[1]:
            return None
        train = self.prepared.windows.train
        return self._whole(train, np.setdiff1d(np.arange(len(train)), self._split[0]))

    def test_data(self) -> Source | None:
        """Windows that influence no choice in training; None: the source has no test split."""
        test = self.prepared.windows.test
        if self.data.like_run is not None or test is None:
            return None
        return self._whole(test)

    def _whole(self, windows: Windows, ids: Numbers | None = None) -> Source:
        """Rows of whole windows. ids: the windows that become rows; None: all."""
        ids = np.arange(len(windows)) if ids is None else ids
        return WindowRows(windows, ids, self.format.normalization, self.data.mode)

    @cached_property
    def _all_windows(self) -> Windows:
        """Windows of both splits, with the run's numbers for their classes.

        UserError: the windows differ from the run's in shape or classes.
        """
        source, kept = self.prepared.windows, self.format
        splits = [split for split in (source.train, source.test) if split is not None]
        shape = splits[0].values.shape[1:]
        if shape != (len(kept.channels), kept.length):
            raise UserError(
                f"windows of {shape[0]} channels x {shape[1]} time steps; the run's are of"
                f" {len(kept.channels)} x {kept.length}",
                "windows cut and ordered as those that the run was trained on",
                "data.source",
            )
        unknown = [name for name in source.classes if name not in kept.classes]
        if unknown:
            raise UserError(
                f"class {unknown[0]} is none of the run's: {', '.join(kept.classes)}",
                "labels of the same names",
                "data.source",
            )
        numbers = np.array([list(kept.classes).index(name) for name in source.classes])
        known = [split.subjects for split in splits if split.subjects is not None]
        return Windows(
            values=np.concatenate([split.values for split in splits]),
            labels=numbers[np.concatenate([split.labels for split in splits])],
            subjects=np.concatenate(known) if len(known) == len(splits) else None,
        )

    def fingerprint(self) -> str:
        normalization = hashlib.sha256(self.format.to_json().encode()).hexdigest()[:16]
        split = "all"
        if self.data.like_run is None:
            split = ",".join(map(str, self._split[1])) or "none held out"
        return f"{self.prepared.sha256}/{self.data.mode}/{split}/{normalization}"

    def summarize(self, totals: Mapping[str, Mean]) -> dict[str, Any]:
        """Metrics of samples; in mode flatten also of whole windows, where they were measured."""
        shown = summarize_classes(totals)
        whole = totals.get(f"{WINDOW_PREFIX}confusion")
        if whole is None or not np.asarray(whole.sum).any():
            return shown
        of_windows = read_confusion(np.asarray(whole.sum))
        return {**shown, **{f"{WINDOW_PREFIX}{name}": of_windows[name] for name in of_windows}}

    def assets(self) -> Mapping[str, Path]:
        """Files that a run keeps: the properties of the model's windows."""
        folder = self._cache / "timeseries" / "formats"
        return keep_texts(folder, {FORMAT: self.format.to_json()})

    def about_data(self) -> "AboutData":
        """The facts of the windows that `samecurve data show` prints."""
        from samecurve_products.preview.about import AboutData

        kept = self.format
        return AboutData(
            classes=kept.classes,
            channels=kept.channels if self.data.mode in {"joint", "flatten"} else (),
            lines=[line.removeprefix("data ") for line in self.notes()],
            left_out=(),
        )

    def notes(self) -> list[str]:
        """Lines for the user about the data that is trained on."""
        source, kept = self.prepared.windows, self.format
        lines = [
            f"data {self.prepared.place}: windows of {len(kept.channels)} channels x"
            f" {kept.length} time steps, {len(kept.classes)} classes",
            f"data channels: {_named(kept.channels)}",
        ]
        if self.data.source is None:
            lines.insert(0, "data no data.source: a synthetic set, made once in the cache")
        if self.data.like_run is not None:
            return [*lines, f"data {len(self._all_windows)} windows, read as {self.data.like_run}"]
        ids, held_out = self._split
        parts = [f"{_count_windows(source.train.part(ids))} to train on"]
        if held_out:
            rest = np.setdiff1d(np.arange(len(source.train)), ids)
            names = ", ".join(map(str, held_out))
            parts.append(f"{_count_windows(source.train.part(rest))} held out ({names})")
        if source.test is not None:
            parts.append(f"{_count_windows(source.test)} to test on")
        counts = np.bincount(source.train.labels[ids], minlength=len(kept.classes))
        pairs = list(zip(kept.classes, counts, strict=True))
        named = ", ".join(f"{name} {count}" for name, count in pairs)
        lines += [f"data {'; '.join(parts)}", f"data trained on, by class: {named}"]
        without = ", ".join(name for name, count in pairs if not count)
        if without:
            lines.append(f"data no window to train on of {without}: the model can't learn it")
        if self.fields.class_weights != "none":
            weights = zip(kept.classes, kept.class_weights, strict=True)
            shown = ", ".join(f"{name} {weight:.4g}" for name, weight in weights)
            lines.append(f"loss weights of classes: {shown}")
        return lines


def _named(channels: Sequence[str]) -> str:
    """The names of the channels, the first of them where there are many."""
    more = len(channels) - _SHOWN
    return ", ".join(channels[:_SHOWN]) + (f", and {more} more" if more > 0 else "")


def _count_windows(windows: Windows) -> str:
    count = counted(len(windows), "window")
    if windows.subjects is None:
        return count
    return f"{count} of {counted(len(np.unique(windows.subjects)), 'subject')}"

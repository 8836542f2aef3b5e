"""Windows of sensor channels: arrays, their split by subject, and the rows that a model is given.

Labels are classes. Training, validation and test share no subject. Means and deviations for the
normalization are those of the training windows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.determinism.sample_keys import row_keys
from samecurve.seam import Ids, UserError
from samecurve_products.sensors.sections import Mode

Numbers = NDArray[np.int64]
_SPLIT_STREAM = 0x7375626A  # apart from the keys of samples
_SHOWN = 20  # names in a line


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Windows with their labels.

    values: float32 [windows, channels, time], as they were measured. labels: class numbers.
    subjects: who wore the sensors; None: not known.
    """

    values: NDArray[np.float32]
    labels: Numbers
    subjects: Numbers | None

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, ids: Ids) -> "Windows":
        subjects = None if self.subjects is None else self.subjects[ids]
        return Windows(values=self.values[ids], labels=self.labels[ids], subjects=subjects)


@dataclass(frozen=True, kw_only=True)
class WindowSet:
    """The windows of a source. test: None without a test split. channels, classes: their names."""

    train: Windows
    test: Windows | None
    channels: Sequence[str]
    classes: Sequence[str]

    @classmethod
    def of(
        cls, splits: Sequence[Windows], channels: Sequence[str], classes: Sequence[str]
    ) -> "WindowSet":
        """splits: the training windows, and perhaps the test windows."""
        test = splits[1] if len(splits) > 1 else None
        return cls(train=splits[0], test=test, channels=channels, classes=classes)


def number_labels(
    labels: Sequence[NDArray[Any]], classes: Sequence[str] | None, where: str
) -> tuple[list[str], list[Numbers]]:
    """The names of the classes, and for each split the class numbers of its windows.

    labels: numbers, or names
    classes: the names in the order of their numbers; None: the labels that occur, sorted

    UserError: a label is of no class, or there is one class only.
    """
    present = sorted(np.unique(np.concatenate(labels)).tolist(), key=_order)
    values: list[Any] = present
    if classes is not None:
        values = list(classes) if isinstance(present[0], str) else list(range(len(classes)))
    names = [str(value) for value in present] if classes is None else list(classes)
    unknown = [value for value in present if value not in values]
    if unknown:
        raise UserError(
            f"label {unknown[0]} is none of the {len(names)} classes: {', '.join(names[:_SHOWN])}",
            f"a name, or a number from 0 to {len(names) - 1}",
            where,
        )
    if len(names) < 2:
        raise UserError(
            f"all labels are {names[0]}: there is nothing to tell apart",
            "windows of two classes or more",
            where,
        )
    number = {value: index for index, value in enumerate(values)}
    return names, [np.array([number[v] for v in part.tolist()], np.int64) for part in labels]


def _order(label: int | str) -> tuple[int, str]:
    """A sort key: numbers by their value (2 before 10, also as text), names after them."""
    if isinstance(label, int) or label.lstrip("-").isdecimal():
        return int(label), ""
    return 1 << 62, label


def check_apart(splits: Sequence[Windows], where: Callable[[int], str]) -> None:
    """Check that no subject is in both splits, where the subjects are known.

    splits: the training windows, and perhaps the test windows
    where: the place of a test window in the source, for the error

    UserError: a subject is in both.
    """
    train, test = splits[0].subjects, splits[-1].subjects
    if len(splits) < 2 or train is None or test is None:
        return
    both = np.flatnonzero(np.isin(test, train))
    if len(both):
        raise UserError(
            f"subject {test[both[0]]} is in the test split and in the training split",
            "each subject in one of them: a test on people that were trained on says little",
            where(int(both[0])),
        )


@dataclass(frozen=True)
class Normalization:
    """Mean and deviation of each channel over all training windows and their time steps."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    @classmethod
    def of(cls, values: NDArray[np.float32]) -> "Normalization":
        """Measure values [windows, channels, time]. A constant channel gets deviation 1."""
        means, deviations = [], []
        for channel in range(values.shape[1]):
            wide = values[:, channel].astype(np.float64)
            means.append(float(wide.mean()))
            deviations.append(float(wide.std()) or 1.0)
        return cls(tuple(means), tuple(deviations))

    def __call__(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Normalize element by element: a row's result does not depend on the other rows."""
        mean, deviation = (
            np.array(numbers, np.float32)[None, :, None] for numbers in (self.mean, self.deviation)
        )
        normal: NDArray[np.float32] = (values - mean) / deviation
        return normal


def split_subjects(subjects: Numbers, share: float) -> tuple[Numbers, list[int]]:
    """Ids of the training windows, and the subjects that are held out.

    share: of subjects to hold out; at least one subject is held out, and one is trained on. The
    choice follows from the subjects' numbers alone.

    UserError: there is one subject only.
    """
    present = np.unique(subjects)
    if not share:
        return np.arange(len(subjects)), []
    if len(present) < 2:
        raise UserError(
            f"all {len(subjects)} windows are of subject {present[0]}: none can be held out",
            "--set data.validation=0 trains on all of them; or data of more subjects",
            "data.validation",
        )
    order = present[np.argsort(row_keys(_SPLIT_STREAM, 0, present))]
    count = min(max(1, round(share * len(present))), len(present) - 1)
    held_out = sorted(int(subject) for subject in order[:count])
    return np.flatnonzero(~np.isin(subjects, held_out)), held_out


class WindowRows:
    """Rows of whole windows: `x` float32 [channels of the mode, time], `label`, `subject` if known.

    ids: the windows that become rows
    """

    def __init__(
        self, windows: Windows, ids: Ids, normalization: Normalization, mode: Mode
    ) -> None:
        self._windows, self._ids = windows, ids
        self._normalization, self._mode = normalization, mode

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, ids: Ids) -> Mapping[str, Any]:
        windows = self._windows.part(self._ids[np.asarray(ids)])
        row = {"x": select_channels(self._normalization(windows.values), self._mode)}
        return {**row, **_columns(windows)}


class ChannelRows:
    """Rows of single channels: `x` float32 [1, time], `label`, `subject`, `window` (its number).

    Row i is channel i % channels of window i // channels.
    """

    def __init__(self, windows: Windows, ids: Ids, normalization: Normalization) -> None:
        self._windows, self._ids, self._normalization = windows, ids, normalization
        self._channels = int(windows.values.shape[1])

    def __len__(self) -> int:
        return int(len(self._ids) * self._channels)

    def __getitem__(self, ids: Ids) -> Mapping[str, Any]:
        places, channels = np.divmod(np.asarray(ids), self._channels)
        windows = self._windows.part(self._ids[places])
        values = self._normalization(windows.values)
        own = np.take_along_axis(values, channels[:, None, None], axis=1)
        return {"x": own, "window": places.astype(np.int64), **_columns(windows)}


def select_channels(values: NDArray[np.float32], mode: Mode) -> NDArray[np.float32]:
    """The channels of the windows that a model of this mode is given.

    In mode flatten windows stay whole; their channels are separated in the model's batch.
    """
    if mode == "first":
        return values[:, :1]
    if mode != "average":
        return values
    total = np.zeros(values[:, :1].shape, np.float32)
    # one channel after another: the same bits for any number of rows
    for channel in range(values.shape[1]):
        total = total + values[:, channel : channel + 1]
    return total / np.float32(values.shape[1])


def _columns(windows: Windows) -> dict[str, Numbers]:
    columns = {"label": windows.labels}
    if windows.subjects is not None:
        columns["subject"] = windows.subjects
    return columns

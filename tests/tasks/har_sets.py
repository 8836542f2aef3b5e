"""Small sets of windows in the layout of UCI HAR, written number by number as the real set's files
are, and by no code of the program.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

CHANNELS = [
    f"{signal}_{axis}" for signal in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"
]
CLASSES = ("WALKING", "WALKING_UPSTAIRS", "WALKING_DOWNSTAIRS", "SITTING", "STANDING", "LAYING")
SUBJECTS = {"train": (1, 3, 5, 6, 7), "test": (2, 4)}
LENGTH, EACH = 16, 9  # time steps; windows of a subject
Value = Callable[[int, int, int, int], float]  # label, subject, channel, time step


def as_text(value: float) -> str:
    """16 characters: a mantissa of seven digits, an exponent of three."""
    mantissa, exponent = f"{value:.7e}".split("e")
    return f"{mantissa}e{exponent[0]}{int(exponent[1:]):03d}".rjust(16)


def wave(label: int, subject: int, channel: int, step: int) -> float:
    """Of a height and a pace that follow from the label, not quite alike for each subject."""
    pace = 0.4 * label + 0.03 * subject
    return float(np.sin(pace * step + channel) * (1 + 0.3 * label) + 0.1 * (label - 3) + channel)


def write_har(
    home: Path, value: Value = wave, subjects: Mapping[str, tuple[int, ...]] = SUBJECTS
) -> Path:
    """Labels of a subject's windows go round, beginning at the subject's number: unlike shares."""
    home.mkdir(parents=True, exist_ok=True)
    lines = [f"{number} {name}\n" for number, name in enumerate(CLASSES, 1)]
    (home / "activity_labels.txt").write_text("".join(lines))
    for split, people in subjects.items():
        folder = home / split / "Inertial Signals"
        folder.mkdir(parents=True)
        windows = [(person, 1 + (person + i * i) % 6, i) for person in people for i in range(EACH)]
        for name, column in (("subject", 0), ("y", 1)):
            text = "".join(f"{window[column]}\n" for window in windows)
            (home / split / f"{name}_{split}.txt").write_text(text)
        for number, channel in enumerate(CHANNELS):
            rows = [
                "".join(
                    as_text(value(label, person, number, step + 5 * place))
                    for step in range(LENGTH)
                )
                for person, label, place in windows
            ]
            (folder / f"{channel}_{split}.txt").write_text("\n".join(rows) + "\n")
    return home

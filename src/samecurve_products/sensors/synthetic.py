"""A synthetic set of walking and resting people in the layout of UCI HAR: no download is needed.

A phone at the waist, 50 times a second: x up, y to the side, z forward. Walking is periodic with a
step's frequency and its harmonics, and sways to the side with every second step; stairs change
pace, force, shape and lean. Resting shows in gravity's direction and in small sways. Subjects
differ in pace, force, posture and in how the phone sits. Each recording is a pure function of
(subject, activity).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from samecurve.core.system import directory_made_once
from samecurve.seam import UserError, explain_os_error
from samecurve_products.sensors.har_files import CHANNELS, LABELS, SIGNALS

VERSION = 2  # of what is written
ACTIVITIES = ("WALKING", "WALKING_UPSTAIRS", "WALKING_DOWNSTAIRS", "SITTING", "STANDING", "LAYING")
SUBJECTS = range(1, 31)
TEST_SUBJECTS = frozenset({2, 4, 9, 10, 12, 13, 18, 20, 24})
WINDOW, HERTZ = 128, 50
WINDOWS_EACH = 10  # of each activity of each subject; each overlaps the next by half
_STREAM = 0x686172
_NOISE = (0.006, 0.012)  # of the sensors: g, and radians a second

_SHIFTS = (0.0, 0.6, 1.4)  # of the harmonics of a step

Signal = NDArray[np.float64]


@dataclass(frozen=True)
class _Gait:
    """How an activity moves the waist."""

    steps: float  # a second
    upward: tuple[float, float, float]  # g, at a step's frequency, its double and its triple
    forward: float  # g
    sideward: float  # g, at half a step's frequency
    turning: float  # radians a second, likewise
    lean: float  # radians forward


@dataclass(frozen=True)
class _Rest:
    """How a posture lies to gravity, and how it sways."""

    lean: float  # radians: 0 is upright
    spread: float  # of the lean, between subjects
    hertz: float  # of the sway
    sway: float  # radians


_GAITS = {
    "WALKING": _Gait(
        steps=1.90, upward=(0.24, 0.10, 0.03), forward=0.12, sideward=0.09, turning=0.50, lean=0.03
    ),
    "WALKING_UPSTAIRS": _Gait(
        steps=1.58, upward=(0.19, 0.03, 0.07), forward=0.18, sideward=0.11, turning=0.62, lean=0.12
    ),
    "WALKING_DOWNSTAIRS": _Gait(
        steps=2.02, upward=(0.29, 0.17, 0.10), forward=0.14, sideward=0.10, turning=0.46, lean=-0.05
    ),
}
_RESTS = {
    "SITTING": _Rest(lean=0.26, spread=0.10, hertz=0.28, sway=0.004),
    "STANDING": _Rest(lean=0.05, spread=0.06, hertz=0.55, sway=0.016),
    "LAYING": _Rest(lean=1.50, spread=0.12, hertz=0.24, sway=0.006),
}


@dataclass(frozen=True)
class _Subject:
    pace: float  # factor of the steps
    force: float  # factor of all accelerations
    shape: Signal  # phases of the harmonics, [3]
    turn: Signal  # orientation of the phone, a rotation [3, 3]
    lean: float  # difference of a posture's lean, in units of its spread


def write_files(home: Path, windows_each: int = WINDOWS_EACH) -> None:
    """Write the set into an empty directory: 30 subjects, 9 of them in the test split."""
    lines = (f"{number} {name}\n" for number, name in enumerate(ACTIVITIES, 1))
    (home / LABELS).write_text("".join(lines))
    for split in ("train", "test"):
        subjects = [one for one in SUBJECTS if (one in TEST_SUBJECTS) == (split == "test")]
        _write_split(home / split, split, subjects, windows_each)


def write_set(home: Path) -> list[str]:
    """Write the set into a new directory, whole or not at all. Returns lines for the user.

    UserError: the directory is not empty.
    """
    if home.exists() and not (home.is_dir() and not any(home.iterdir())):
        raise UserError(
            f"{home} is there already", "a new directory, or an empty one", "--synthetic"
        )
    try:
        with directory_made_once(home) as scratch:
            write_files(scratch)
    except OSError as error:
        raise UserError(*explain_os_error(error, home, "write it again"), "--synthetic") from error
    each = len(ACTIVITIES) * WINDOWS_EACH
    test = len(TEST_SUBJECTS)
    train = len(SUBJECTS) - test
    return [
        f"train  {train * each} windows of {train} subjects",
        f"test   {test * each} windows of {test} others",
        f"each   {len(CHANNELS)} channels x {WINDOW} time steps, {HERTZ} a second;"
        f" {len(ACTIVITIES)} classes",
    ]


def record(subject: int, activity: str, samples: int) -> Signal:
    """Readings of the nine channels during an activity: [channels, samples]."""
    random = np.random.default_rng((_STREAM, subject, ACTIVITIES.index(activity)))
    person = _subject(subject)
    if activity in _GAITS:
        body, turning, gravity = _walk(_GAITS[activity], person, samples, random)
    else:
        body, turning, gravity = _rest(_RESTS[activity], person, samples, random)
    acceleration, rotation = (
        random.standard_normal((3, samples)) * deviation for deviation in _NOISE
    )
    body = person.turn @ body + acceleration
    turning = person.turn @ turning + rotation
    return np.concatenate([body, turning, body + person.turn @ gravity])


def _subject(number: int) -> _Subject:
    random = np.random.default_rng((_STREAM, number))
    return _Subject(
        pace=1 + 0.05 * random.standard_normal(),
        force=float(np.exp(0.16 * random.standard_normal())),
        shape=0.35 * random.standard_normal(3),
        turn=_rotation(0.06 * random.standard_normal(3)),
        lean=random.standard_normal(),
    )


def _walk(
    gait: _Gait, person: _Subject, samples: int, random: np.random.Generator
) -> tuple[Signal, Signal, Signal]:
    """The body's acceleration, the body's turning, and gravity: [3, samples] each."""
    # the pace wanders by a few percent
    wander = np.cumsum(random.standard_normal(samples)) * 0.004
    pace = gait.steps * person.pace * (1 + 0.03 * random.standard_normal() + wander)
    phase = 2 * np.pi * (np.cumsum(pace) / HERTZ + random.uniform(0, 2))
    force = person.force * (1 + 0.06 * random.standard_normal())
    shifts = np.array(_SHIFTS) + person.shape
    upward = np.zeros(samples)
    for order, (amplitude, shift) in enumerate(zip(gait.upward, shifts, strict=True), 1):
        upward += amplitude * np.cos(order * phase + shift)
    sideward = gait.sideward * np.sin(phase / 2 + person.shape[0])
    forward = gait.forward * np.sin(phase + 0.9 + person.shape[1])
    body = force * np.stack([upward, sideward, forward])
    turning = force * np.stack(
        [
            gait.turning * np.cos(phase / 2 + person.shape[0]),
            0.5 * gait.turning * np.sin(phase + person.shape[2]),
            0.4 * gait.turning * np.cos(phase / 2 + 1.1),
        ]
    )
    lean = gait.lean + 0.05 * person.lean + 0.02 * random.standard_normal()
    return body, turning, _gravity(np.full(samples, lean))


def _rest(
    rest: _Rest, person: _Subject, samples: int, random: np.random.Generator
) -> tuple[Signal, Signal, Signal]:
    """Signals of a resting person, as _walk() returns them. A swaying body turns gravity too."""
    time = np.arange(samples) / HERTZ
    sway = rest.sway * np.exp(0.25 * random.standard_normal())
    rate = 2 * np.pi * rest.hertz * (1 + 0.1 * random.standard_normal())
    phases = random.uniform(0, 2 * np.pi, 2)
    lean = rest.lean + rest.spread * person.lean + 0.03 * random.standard_normal()
    leaning = lean + sway * np.sin(rate * time + phases[0])
    body = np.zeros((3, samples))
    body[1] = 0.5 * sway * np.sin(1.3 * rate * time + phases[1])
    turning = np.zeros((3, samples))
    turning[1] = sway * rate * np.cos(rate * time + phases[0])
    return body, turning, _gravity(leaning)


def _gravity(lean: Signal) -> Signal:
    """Gravity in g, [3, samples]: at rest the sensor reads 1 upward."""
    return np.stack([np.cos(lean), np.zeros(len(lean)), np.sin(lean)])


def _rotation(angles: Signal) -> Signal:
    """The matrix [3, 3] of a rotation about x, then y, then z."""
    whole = np.eye(3)
    for axis, angle in enumerate(angles):
        first, second = [other for other in range(3) if other != axis]
        turn = np.eye(3)
        turn[first, first] = turn[second, second] = np.cos(angle)
        turn[first, second], turn[second, first] = -np.sin(angle), np.sin(angle)
        whole = turn @ whole
    return whole


def _windows(subject: int, activity: str, count: int) -> Iterator[Signal]:
    """Windows [channels, WINDOW] that overlap by half."""
    recording = record(subject, activity, WINDOW // 2 * (count + 1))
    for number in range(count):
        begin = number * WINDOW // 2
        yield recording[:, begin : begin + WINDOW]


def _write_split(folder: Path, split: str, subjects: list[int], windows_each: int) -> None:
    (folder / SIGNALS).mkdir(parents=True)
    labels, owners, windows = [], [], []
    for subject in subjects:
        for label, activity in enumerate(ACTIVITIES, 1):
            windows += list(_windows(subject, activity, windows_each))
            labels += [label] * windows_each
            owners += [subject] * windows_each
    for name, numbers in (("y", labels), ("subject", owners)):
        text = "".join(f"{number}\n" for number in numbers)
        (folder / f"{name}_{split}.txt").write_text(text)
    for index, channel in enumerate(CHANNELS):
        lines = "".join(as_line(window[index]) for window in windows)
        (folder / SIGNALS / f"{channel}_{split}.txt").write_text(lines)


def as_line(values: Signal) -> str:
    """A line with one channel of a window, formatted as in the real set.

    A value has 16 characters, with an exponent of three digits.
    """
    text = (" % .7e" * len(values)) % tuple(values)
    return text.replace("e-", "e-0").replace("e+", "e+0") + "\n"

"""Windows of sensors: the real set's format byte for byte, bad data named by its line, people that
are on one side of a split alone, numbers that follow from what is trained on.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from har_sets import CHANNELS, CLASSES, EACH, LENGTH, SUBJECTS, as_text, wave, write_har

from commands import refused, samecurve
from samecurve.errors import UserError
from samecurve_products.sensors.har_files import read_har
from samecurve_products.sensors.prepared import prepare_windows, stamp_windows
from samecurve_products.sensors.sections import TimeSeriesData, TimeSeriesModel
from samecurve_products.sensors.synthetic import as_line, write_files
from samecurve_products.sensors.task import TimeSeriesTask

# the beginning of a file of the real set, to the byte
REAL = (
    b"  1.8085150e-004  1.0138560e-002  9.2755740e-003  5.0658970e-003  1.0810250e-002"
    b"  4.0453970e-003\n  1.0938760e-003  4.5498670e-003  2.8785050e-003  2.2472610e-003"
    b"  3.3047150e-003  2.4161230e-003\n -3.5311660e-003  5.2858420e-004 -1.0000000e+000"
    b"  0.0000000e+000  1.0123000e+002 -4.2353640e-003\n"
)
NUMBERS = [
    [1.8085150e-4, 1.0138560e-2, 9.2755740e-3, 5.0658970e-3, 1.0810250e-2, 4.0453970e-3],
    [1.0938760e-3, 4.5498670e-3, 2.8785050e-3, 2.2472610e-3, 3.3047150e-3, 2.4161230e-3],
    [-3.5311660e-3, 5.2858420e-4, -1.0, 0.0, 101.23, -4.2353640e-3],
]


def task_of(source: Path | None, cache: Path, **data: Any) -> TimeSeriesTask:
    fields = TimeSeriesData(source=str(source) if source else None, **data)
    return TimeSeriesTask(TimeSeriesModel(), fields, cache)


def every(rows: Any) -> dict[str, np.ndarray[Any, Any]]:
    return dict(rows[np.arange(len(rows))])


def test_the_real_set_s_bytes_are_read_and_written(tmp_path: Path) -> None:
    home = write_har(tmp_path, subjects={"train": (1,), "test": (2,)})
    folder = home / "test"
    for channel in CHANNELS:
        (folder / f"Inertial Signals/{channel}_test.txt").write_bytes(REAL)
    (folder / "y_test.txt").write_bytes(b"5\n1\n6\n")
    (folder / "subject_test.txt").write_bytes(b"2\n2\n24\n")
    alone = read_har(folder)
    assert alone.train.values.shape == (3, 9, 6)
    numbers = np.array(NUMBERS, np.float32)
    for number in range(9):
        np.testing.assert_array_equal(alone.train.values[:, number], numbers)
    assert alone.train.labels.tolist() == [4, 0, 5]
    assert alone.train.subjects is not None
    assert alone.train.subjects.tolist() == [2, 2, 24]
    assert (alone.test, alone.classes) == (None, list(CLASSES))
    assert "".join(map(as_line, np.array(NUMBERS))).encode() == REAL
    assert "".join(map(as_text, NUMBERS[2])).encode() + b"\n" == REAL.splitlines(True)[2]


def test_channels_labels_and_subjects_are_where_they_belong(tmp_path: Path) -> None:
    windows = read_har(write_har(tmp_path))
    assert windows.test is not None
    for split, part in (("train", windows.train), ("test", windows.test)):
        assert part.subjects is not None
        assert sorted(set(part.subjects.tolist())) == list(SUBJECTS[split])
        for window in range(0, len(part), 7):
            label, person = int(part.labels[window]) + 1, int(part.subjects[window])
            shown = [
                [wave(label, person, channel, step + 5 * (window % EACH)) for step in range(LENGTH)]
                for channel in range(9)
            ]
            np.testing.assert_allclose(part.values[window], shown, rtol=2e-6, atol=1e-7)


def _replace(path: str, line: int, new: str) -> Callable[[Path], None]:
    def edit(home: Path) -> None:
        lines = (home / path).read_text().splitlines()
        lines[line - 1] = new
        (home / path).write_text("\n".join(lines) + "\n")

    return edit


SIGNAL = "train/Inertial Signals/body_gyro_y_train.txt"
ROW = as_text(0.5) * LENGTH


@pytest.mark.parametrize(
    ("edit", "says", "where"),
    [
        (lambda home: (home / SIGNAL).unlink(), f"the data lacks the file {SIGNAL}", SIGNAL),
        (_replace(SIGNAL, 7, ROW[:-16]), "this window has 15 values, and others have 16", ":7"),
        (
            _replace(SIGNAL, 3, ROW[16:] + "             NaN"),
            "value 16 of this window is nan",
            ":3",
        ),
        (
            _replace(SIGNAL, 3, ROW[16:] + "   1.0e+999     "),
            "value 16 of this window is inf",
            ":3",
        ),
        (_replace(SIGNAL, 4, ROW[:-3] + "x01"), "could not convert string to float", ":4"),
        (
            _replace(SIGNAL, 45, ""),
            "body_gyro_y_train.txt has 44 lines, and y_train.txt has 45",
            "",
        ),
        (_replace("test/y_test.txt", 2, "7"), "label 7 is outside of 1..6", "test/y_test.txt:2"),
        (_replace("train/y_train.txt", 9, "0"), "label 0 is outside of 1..6", "y_train.txt:9"),
        (_replace("train/y_train.txt", 9, "two"), "'two' where a whole number belongs", ":9"),
        (lambda home: (home / "test/y_test.txt").write_text(""), "y_test.txt is empty", "y_test"),
        (
            _replace("test/subject_test.txt", 12, "5"),
            "subject 5 is in the test split and in the training split",
            "test/subject_test.txt:12",
        ),
        (_replace("activity_labels.txt", 3, "4 RUN"), "'4 RUN' where class 3 is named", ".txt:3"),
        (lambda home: (home / "activity_labels.txt").unlink(), "lacks the file activity_", ""),
        (lambda home: (home / SIGNAL).write_bytes(b"\x00\n\xff\xfe"), "is no plain text", ":2"),
    ],
)
def test_bad_data_is_named_by_file_and_line(
    edit: Callable[[Path], None], says: str, where: str, tmp_path: Path
) -> None:
    home = write_har(tmp_path)
    edit(home)
    with pytest.raises(UserError) as caught:
        read_har(home)
    assert says in caught.value.cause
    assert str(home) in str(caught.value.where)
    assert str(caught.value.where).endswith(where) or not where.startswith(":")
    assert where in str(caught.value.where)


def test_a_split_without_names_and_a_set_further_in(tmp_path: Path) -> None:
    home = write_har(tmp_path / "outer/UCI HAR")
    with pytest.raises(UserError, match="lacks the file activity_labels") as further_in:
        read_har(tmp_path / "outer")
    assert further_in.value.remedy == f"-d '{home}'"
    (home / "activity_labels.txt").unlink()
    with pytest.raises(UserError, match="lacks the file activity_labels") as alone:
        read_har(home / "train")
    assert "whole directory" in alone.value.remedy


def test_a_run_on_bad_data_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = write_har(tmp_path / "har")
    (home / SIGNAL).unlink()
    said = refused(
        *(monkeypatch, capsys, "plan", "--set", "task=timeseries", "--global-batch", "8"),
        *("-d", "har", "--devices", "cpu:2"),
        cwd=tmp_path,
    )
    assert re.search(rf"error: .*har/{SIGNAL}: the data lacks the file {SIGNAL}", said)
    assert [path.name for path in tmp_path.iterdir()] == ["har"]


def test_validation_is_by_subject_and_normalisation_from_what_is_trained_on(
    tmp_path: Path, cache: Path
) -> None:
    """Held-out people and the test split have values far off: they must not be looked at."""
    home = write_har(tmp_path / "plain")
    task = task_of(home, cache, validation=0.4)
    train, held, test = (
        every(rows) for rows in (task.train_data(), task.eval_data(), task.test_data())
    )
    people = [set(rows["subject"].tolist()) for rows in (train, held, test)]
    assert people[0] | people[1] == set(SUBJECTS["train"])
    assert not people[0] & people[1]
    assert len(people[1]) == 2
    assert people[2] == set(SUBJECTS["test"])
    held_out = people[1] | people[2]
    np.testing.assert_allclose(train["x"].mean((0, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(train["x"].std((0, 2)), 1, atol=1e-5)
    far = write_har(tmp_path / "far", lambda *at: wave(*at) + (1000 if at[1] in held_out else 0))
    other = task_of(far, cache, validation=0.4)
    assert other.format.normalization == task.format.normalization
    np.testing.assert_array_equal(every(other.train_data())["x"], train["x"])
    assert every(other.test_data())["x"].min() > 100
    assert other.fingerprint() != task.fingerprint()


def test_samples_of_each_mode(tmp_path: Path, cache: Path) -> None:
    home = write_har(tmp_path)
    rows = {
        mode: every(task_of(home, cache, mode=mode).train_data())
        for mode in ("joint", "flatten", "average", "first")
    }
    joint = rows["joint"]["x"]
    windows = len(joint)
    assert rows["joint"]["x"].shape == (windows, 9, LENGTH)
    flat = rows["flatten"]
    np.testing.assert_array_equal(flat["x"].reshape(windows, 9, LENGTH), joint)
    assert flat["window"].tolist() == np.repeat(np.arange(windows), 9).tolist()
    for name in ("label", "subject"):
        assert flat[name].tolist() == np.repeat(rows["joint"][name], 9).tolist()
    np.testing.assert_allclose(rows["average"]["x"], joint.mean(1, keepdims=True), atol=1e-6)
    np.testing.assert_array_equal(rows["first"]["x"], joint[:, :1])
    held = task_of(home, cache, mode="flatten").eval_data()
    assert every(held)["x"].shape[1:] == (9, LENGTH)  # whole windows
    alone = [every_one[None] for every_one in rows["average"]["x"][:5]]
    source = task_of(home, cache, mode="average").train_data()
    for place, row in enumerate(alone):
        np.testing.assert_array_equal(source[np.array([place])]["x"], row)


def test_npz_and_csv_are_the_same_windows(tmp_path: Path, cache: Path) -> None:
    windows = read_har(write_har(tmp_path / "har"))
    assert windows.test is not None
    subjects = {"train": windows.train.subjects, "test": windows.test.subjects}
    np.savez(
        tmp_path / "w.npz",
        x=windows.train.values,
        label=windows.train.labels,
        subject=np.asarray(subjects["train"]),
        channels=CHANNELS,
        classes=CLASSES,
        x_test=windows.test.values,
        label_test=windows.test.labels,
        subject_test=np.asarray(subjects["test"]),
    )
    lines = [f"split,window,label,subject,{','.join(CHANNELS)}"]
    for split, part in (("train", windows.train), ("test", windows.test)):
        for number, values in enumerate(part.values):
            name = CLASSES[part.labels[number]]
            head = f"{split},{split}-{number},{name},{np.asarray(subjects[split])[number]}"
            lines += [f"{head},{','.join(map(repr, map(float, step)))}" for step in values.T]
    (tmp_path / "w.csv").write_text("\n".join(lines) + "\n")
    reference = task_of(tmp_path / "har", cache)
    names = list(reference.format.classes)
    for name in ("w.npz", "w.csv"):
        task = task_of(tmp_path / name, cache)
        for method in ("train_data", "eval_data", "test_data"):
            here, there = every(getattr(task, method)()), every(getattr(reference, method)())
            np.testing.assert_array_equal(here["x"], there["x"])
            np.testing.assert_array_equal(here["subject"], there["subject"])
            labels = [names.index(task.format.classes[label]) for label in here["label"]]
            assert labels == there["label"].tolist()


def _csv(*lines: str) -> str:
    return "\n".join(["window,label,subject,a,b", *lines]) + "\n"


@pytest.mark.parametrize(
    ("text", "says", "line"),
    [
        ("window,subject,a\n1,1,2\n", "the columns are window, subject, a", 1),
        (_csv("0,x,1,1,2", "0,x,1,3"), "this line has 4 columns, and the header 5", 3),
        (_csv("0,x,1,1,2", "0,x,1,3,nan"), "column b has 'nan'", 3),
        (_csv("0,x,1,1,2", "1,y,1,1,2", "0,x,1,3,4"), "window 0 goes on here", 4),
        (_csv("0,x,1,1,2", "0,y,1,3,4"), "window 0 has label 'y' here", 3),
        (_csv("0,x,1,1,2", "0,x,1,1,2", "1,y,2,3,4"), "window 1 has 1 time steps, and window 0", 4),
        (_csv("0,x,1,1,2", "1,x,2,1,2"), "all labels are x", None),
        (_csv("0,x,me,1,2"), "subject 'me' is no whole number", 2),
        (_csv("0,x,1,1,\x00"), "column b has '\\x00'", 2),
        ("\udcff\udcfe", "the columns are", 1),
        (_csv(f"0,x,1,1,{'9' * 200_000}"), "this line is no CSV: field larger than", 2),
    ],
)
def test_bad_csv_is_named_by_its_line(
    text: str, says: str, line: int | None, tmp_path: Path, cache: Path
) -> None:
    file = tmp_path / "w.csv"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError) as caught:
        prepare_windows(TimeSeriesData(source=str(file)), cache)
    assert says in caught.value.cause
    assert caught.value.where == (f"{file}:{line}" if line else str(file))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"label": None}, "w.npz has no array label; it has subject, x"),
        ({"x": np.zeros((4, 5))}, "x has shape (4, 5) and type float64"),
        ({"label": np.zeros(3, np.int64)}, "label has shape (3,), type int64; x has 4 windows"),
        ({"classes": np.array(["a"])}, "label 1 is none of the 1 classes: a"),
        ({"x": np.full((4, 2, 3), np.nan)}, "x has nan in window 0, channel 0, time step 0"),
        (
            {"x_test": np.zeros((1, 2, 3)), "label_test": np.zeros(1, int), "subject_test": [2]},
            "subject 2 is in the test split and in the training split",
        ),
        ({"x_test": np.zeros((1, 2, 3)), "label_test": np.zeros(1, int)}, "subject_test is not"),
    ],
)
def test_bad_arrays_are_named(
    change: dict[str, Any], says: str, tmp_path: Path, cache: Path
) -> None:
    arrays = {
        "x": np.zeros((4, 2, 3)),
        "label": np.array([0, 1, 0, 1]),
        "subject": np.array([1, 1, 2, 2]),
        **change,
    }
    np.savez(tmp_path / "w.npz", **{name: a for name, a in arrays.items() if a is not None})
    with pytest.raises(UserError) as caught:
        prepare_windows(TimeSeriesData(source=str(tmp_path / "w.npz")), cache)
    assert says in caught.value.cause
    assert str(tmp_path / "w.npz") in str(caught.value.where)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"no archive", "can't be read as an .npz file"), (b"\x93NUMPY", "can't be read as an .npz")],
)
def test_what_is_no_archive_is_named(
    content: bytes, says: str, tmp_path: Path, cache: Path
) -> None:
    (tmp_path / "w.npz").write_bytes(content)
    with pytest.raises(UserError, match=says):
        prepare_windows(TimeSeriesData(source=str(tmp_path / "w.npz")), cache)


def test_classes_that_are_numbers_are_in_their_order(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "w.csv").write_text(_csv("0,10,1,1,2", "1,9,2,3,4", "2,-1,2,3,4"))
    prepared = prepare_windows(TimeSeriesData(source=str(tmp_path / "w.csv")), cache)
    assert list(prepared.windows.classes) == ["-1", "9", "10"]
    assert prepared.windows.train.labels.tolist() == [2, 1, 0]


def test_nobody_s_windows_can_t_be_split_by_subject(tmp_path: Path, cache: Path) -> None:
    np.savez(tmp_path / "w.npz", x=np.ones((4, 2, 3)), label=[0, 1, 0, 1])
    with pytest.raises(UserError, match="the data names no subjects"):
        task_of(tmp_path / "w.npz", cache).train_data()
    task = task_of(tmp_path / "w.npz", cache, validation=0.0)
    assert (len(task.train_data()), task.eval_data(), task.test_data()) == (4, None, None)
    one = write_har(tmp_path / "har", subjects={"train": (3,), "test": (2,)})
    with pytest.raises(UserError, match="all 9 windows are of subject 3"):
        task_of(one, cache).train_data()


def test_a_changed_file_is_read_anew(tmp_path: Path, cache: Path) -> None:
    home = write_har(tmp_path)
    data = TimeSeriesData(source=str(home))
    before, stamp = prepare_windows(data, cache), stamp_windows(data)
    assert prepare_windows(data, tmp_path / "other").sha256 == before.sha256
    _replace(SIGNAL, 7, ROW)(home)
    assert stamp_windows(data) != stamp
    after = prepare_windows(data, cache)
    assert after.sha256 != before.sha256
    np.testing.assert_array_equal(after.windows.train.values[6, 4], np.full(LENGTH, 0.5))


def test_the_synthetic_set_is_in_the_real_one_s_layout(tmp_path: Path) -> None:
    """Few windows of each; other people in the test split; the same numbers each time."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_files(tmp_path / name, windows_each=1)
    windows = read_har(tmp_path / "one")
    assert windows.test is not None
    assert windows.train.values.shape == (21 * 6, 9, 128)
    assert windows.test.values.shape == (9 * 6, 9, 128)
    assert list(windows.classes) == list(CLASSES)
    again = read_har(tmp_path / "two")
    np.testing.assert_array_equal(windows.train.values, again.train.values)
    line = (
        (tmp_path / "one/train/Inertial Signals/total_acc_x_train.txt").read_text().split("\n")[0]
    )
    assert re.fullmatch(r"( [ -]\d\.\d{7}e[+-]\d{3}){128}", line)
    gravity = windows.train.values[:, 6:].mean(2)  # at rest of length 1
    at_rest = windows.train.labels >= 3
    np.testing.assert_allclose(np.linalg.norm(gravity[at_rest], axis=1), 1, atol=0.01)


def test_the_verb_writes_a_set_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = samecurve("data", "har", "--synthetic", "har", cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "wrote  har; samecurve train -f models/har.yaml -d har"
    assert len(read_har(tmp_path / "har" / "test").train) == 540
    said = refused(monkeypatch, capsys, "data", "har", "--synthetic", "har", cwd=tmp_path)
    assert "har is there already" in said


def test_an_order_of_axes_that_is_in_doubt_is_asked_for(tmp_path: Path, cache: Path) -> None:
    """[windows, time, channels] was read as 50 channels of 3 time steps."""
    file = tmp_path / "w.npz"
    x = np.random.default_rng(0).normal(size=(6, 50, 3)).astype(np.float32)
    label = [0, 1] * 3
    np.savez(file, x=x, label=label)
    with pytest.raises(UserError, match="50 channels of 3 time steps") as error:
        prepare_windows(TimeSeriesData(source=str(file)), cache)
    assert "--set data.order=time_first" in error.value.remedy
    turned = prepare_windows(TimeSeriesData(source=str(file), order="time_first"), cache).windows
    assert turned.train.values.tolist() == x.transpose(0, 2, 1).tolist()
    kept = prepare_windows(TimeSeriesData(source=str(file), order="channels_first"), cache).windows
    assert kept.train.values.shape == (6, 50, 3)
    np.savez(file, x=x, label=label, channels=[f"c{i}" for i in range(50)])  # leaves no doubt
    assert len(prepare_windows(TimeSeriesData(source=str(file)), cache).windows.channels) == 50


def test_a_clock_is_no_channel_and_the_plan_names_the_channels(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "w.csv"
    file.write_text(
        "window,label,Timestamp,time,a,b\n0,x,100,0,1,2\n0,x,101,1,3,4\n1,y,102,0,5,6\n1,y,103,1,7,8\n"
    )
    assert prepare_windows(TimeSeriesData(source=str(file)), cache).windows.channels == ["a", "b"]
    assert "data channels: a, b" in task_of(file, cache, validation=0.0).notes()


def test_recordings_of_another_form_are_told_which_files_work(tmp_path: Path, cache: Path) -> None:
    """Six channels, no subjects, no test set: .npz and .csv files take them, as the remedy says."""
    home = write_har(tmp_path)
    for file in home.rglob("body_acc_*"):
        file.unlink()
    with pytest.raises(UserError, match="UCI HAR layout") as refused_:
        prepare_windows(TimeSeriesData(source=str(home)), cache)
    assert "one .npz or .csv file: -d FILE" in refused_.value.remedy
    values, labels = np.random.default_rng(0).normal(size=(12, 6, 16)), np.arange(12) % 3
    np.savez(tmp_path / "own.npz", x=values.astype(np.float32), label=labels)
    lines = ["window,label,a,b,c,d,e,f"]
    for window, label in enumerate(labels):
        lines += [f"{window},{label},{','.join(map(str, row))}" for row in values[window].T]
    (tmp_path / "own.csv").write_text("\n".join(lines) + "\n")
    for name in ("own.npz", "own.csv"):
        prepared = prepare_windows(TimeSeriesData(source=str(tmp_path / name)), cache)
        train = prepared.windows.train
        assert (train.values.shape, prepared.windows.test) == ((12, 6, 16), None)
        assert train.subjects is None

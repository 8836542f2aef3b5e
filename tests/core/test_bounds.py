"""Input of any size ends soon: what is too large is refused by name, nothing is made of it."""

import os
from pathlib import Path

import pytest

from samecurve.core.config.document import parse_document, parse_setting, read_document
from samecurve.core.config.loading import load_document
from samecurve.core.planning.batch import BatchSplit, check_count
from samecurve.errors import UserError
from samecurve.tasks import Tasks


@pytest.mark.parametrize(
    "setting",
    [
        "batch.samples=1000000000000000",
        "batch.accumulate=1000000000000000",
        "model.num_layers=1000000000",
        "model.hidden_size=1000000000000",
        "train.steps=1000000000000000000",
        "train.steps=99999999999999ep",
        "train.seed=99999999999999999999999999",
        "data.workers=1000000000",
        "data.prefetch=1000000000000",
        "devices.threads=1000000000",
        "devices.preflight=100000000000000000",
        "track.sensors_every=100000000000",
        pytest.param(f"devices.memory={'9' * 400}GiB", id="400 digits of bytes"),
        pytest.param(f"train.seed={'9' * 5000}", id="5000 digits"),
    ],
)
def test_what_no_machine_has_is_refused(setting: str) -> None:
    with pytest.raises(UserError):
        read(setting)


def read(setting: str) -> None:
    """A config with --set."""
    document = parse_document("batch: {samples: 8}", "c.yaml")
    key, value = parse_setting(setting)
    document.set(key, value, "--set")
    load_document(document, Tasks())


def test_more_microbatches_than_one_waits_for_are_refused() -> None:
    check_count(BatchSplit(global_batch_size=1 << 20, micro_batch_size=2, num_devices=1))
    with pytest.raises(UserError, match="has 1073741824 of them"):
        check_count(BatchSplit(global_batch_size=1 << 31, micro_batch_size=2, num_devices=1))


def test_a_long_row_of_digits_is_read_at_once() -> None:
    """The pattern of numbers tried each cut of them: a megabyte took hours."""
    value = parse_document(f"task: {'1' * 500_000}x", "c.yaml").value["task"]
    assert value == "1" * 500_000 + "x"
    texts = {"1.5": 1.5, "-1e3": -1000.0, ".5": 0.5, "1.": 1.0, "1_0.5": 10.5, "5.e1": 50.0}
    for text, number in texts.items():
        assert parse_document(f"a: {text}", "c.yaml").value["a"] == number
    for text in ("1.2.3", "+_1", "e5", "1e", "."):
        assert parse_document(f"a: {text}", "c.yaml").value["a"] == text


def test_a_config_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="more than 1048576 bytes"):
        read_document(Path("/dev/zero"))
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(UserError, match="no ordinary file"):
        read_document(tmp_path / "config.yaml", regular=True)

"""Functions that llamafactory.yaml names."""

from collections.abc import Callable, Mapping
from typing import Any

from samecurve_products.convert.foreign_config import ForeignConfig

# conditions on a field's value, and conversions of one, by their names in the table
FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    "count_or_none": lambda value: value is None or isinstance(value, int),  # a rank
    "bits": lambda value: f"{value}bit",  # 4 -> '4bit'
    "names": lambda value: [name.strip() for name in value.split(",")],  # a text with commas
    "wandb": lambda value: bool({"wandb", "all"} & set(_trackers(value))),  # W&B is told
    "tensorboard": lambda value: "tensorboard" in _trackers(value),  # TensorBoard is told
    "mlflow": lambda value: "mlflow" in _trackers(value),  # MLflow is told
    "trackio": lambda value: "trackio" in _trackers(value),  # trackio is told
    "nobody": lambda value: set(_trackers(value)) <= {"none"},  # no tracker is told
}


def twice_the_rank(foreign: ForeignConfig) -> float:
    """The adapter's alpha where the file has none."""
    rank = foreign.value("lora_rank", 8)
    assert isinstance(rank, int)
    return 2.0 * rank


def keep_dataset(foreign: ForeignConfig) -> None:
    """Write the names of the data sets, which are refused, into our config."""
    foreign.keep_refused("data.source", str(foreign.value("dataset", "")))


def packs(foreign: ForeignConfig) -> bool:
    """Whether the stage packs where no field says so: pre-training does."""
    return foreign.value("packing") is None and foreign.value("stage") == "pt"


def interval(value: object) -> object:
    """The interval that a strategy of evaluation means."""
    word = str(value).lower()
    return {"epoch": "1ep", "no": 0}.get(word, word)


def _trackers(value: object) -> list[object]:
    reports = "none" if value is None else value
    return reports if isinstance(reports, list) else [reports]

"""Functions that llamafactory.yaml names."""

from samecurve.convert.foreign_config import ForeignConfig


def count_or_none(value: object) -> bool:
    """Whether a rank is an integer, or left out."""
    return value is None or isinstance(value, int)


def twice_the_rank(foreign: ForeignConfig) -> float:
    """The adapter's alpha where the file has none."""
    rank = foreign.value("lora_rank", 8)
    assert isinstance(rank, int)
    return 2.0 * rank


def bits(value: object) -> str:
    """4 -> '4bit'."""
    return f"{value}bit"


def names(value: str) -> list[str]:
    """The names in a text with commas."""
    return [name.strip() for name in value.split(",")]


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


def wandb(value: object) -> bool:
    """Whether W&B is told."""
    return "wandb" in _trackers(value) or "all" in _trackers(value)


def tensorboard(value: object) -> bool:
    """Whether TensorBoard is told."""
    return "tensorboard" in _trackers(value)


def nobody(value: object) -> bool:
    """Whether no tracker is told."""
    return set(_trackers(value)) <= {"none"}

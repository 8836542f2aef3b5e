"""Section, the base class of every part of the config, and the types of the config's values.

Sections are frozen, refuse unknown keys and never guess what a value means. Words from a fixed list
are compared without regard to case. Types are words from a fixed list, values that have several
spellings, and the metric by which an evaluation is the best one or a run ends early.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, cast, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    field_validator,
)

from samecurve.units import parse_bytes

Precision = Literal["f32", "bf16", "f16", "f64"]
Decay = Literal["constant", "linear", "cosine", "wsd"]
ScheduleForm = Literal["samecurve", "transformers"]
MINUTES_PATTERN = r"^\d+(\.\d+)?min$"
EPOCHS_PATTERN = r"^\d+(\.\d+)?ep$"
SIZE_PATTERN = r"^\d+(\.\d+)?\s*[KMGTP]?i?B$"
# limits far above any real run, so that numbers made from these values stay computable
MOST_STEPS = 10**12
MOST_EPOCHS = 10**6
MOST_SAMPLES = 1 << 31  # of a step
MOST_SECONDS = 10**7
MOST_PROCESSES = 1 << 12
MOST_LAYERS = 1 << 12

NumSamples = Annotated[int, Field(gt=0, le=MOST_SAMPLES)]
Seconds = Annotated[int, Field(ge=0, le=MOST_SECONDS)]


def _duration(value: object) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_STEPS:
        return value
    if isinstance(value, str) and re.fullmatch(EPOCHS_PATTERN, value, re.ASCII):
        if float(value.removesuffix("ep")) > MOST_EPOCHS:
            raise ValueError(f"must be at most {MOST_EPOCHS}ep")
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value > MOST_STEPS:
        raise ValueError(f"must be at most {MOST_STEPS}")
    raise ValueError("must be a number of steps (500) or of epochs (2ep)")


_DURATION_SCHEMA = {
    "anyOf": [
        {"type": "integer", "minimum": 0, "maximum": MOST_STEPS},
        {"type": "string", "pattern": EPOCHS_PATTERN},
    ]
}
Duration = Annotated[
    int | str, PlainValidator(_duration), Field(json_schema_extra=cast("Any", _DURATION_SCHEMA))
]


def epochs_of(duration: int | str) -> float | None:
    """'2ep' -> 2.0; a number of steps -> None."""
    return float(duration.removesuffix("ep")) if isinstance(duration, str) else None


def _duration_or_minutes(value: object) -> int | str:
    if not isinstance(value, str) or not re.fullmatch(MINUTES_PATTERN, value, re.ASCII):
        try:
            return _duration(value)
        except ValueError as error:
            raise ValueError(str(error).replace("(2ep)", "(2ep), or minutes (10min)")) from None
    if not 0 < float(value.removesuffix("min")) * 60 <= MOST_SECONDS:
        raise ValueError(f"must be more than 0 and at most {MOST_SECONDS // 60}min")
    return value


_WITH_MINUTES_SCHEMA = {
    "anyOf": [*_DURATION_SCHEMA["anyOf"], {"type": "string", "pattern": MINUTES_PATTERN}]
}
DurationOrMinutes = Annotated[
    int | str,
    PlainValidator(_duration_or_minutes),
    Field(json_schema_extra=cast("Any", _WITH_MINUTES_SCHEMA)),
]


def seconds_of(duration: int | str) -> float | None:
    """'10min' -> 600.0; steps or epochs -> None."""
    if not isinstance(duration, str) or not duration.endswith("min"):
        return None
    return 60 * float(duration.removesuffix("min"))


def _size(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str):
        return parse_bytes(value)
    raise ValueError("must be a number of bytes, or a size such as 40GiB or 80GB")


_SIZE_SCHEMA = {
    "anyOf": [
        {"type": "integer", "exclusiveMinimum": 0},
        {"type": "string", "pattern": SIZE_PATTERN},
    ]
}
Size = Annotated[int, PlainValidator(_size), Field(json_schema_extra=cast("Any", _SIZE_SCHEMA))]


Mode = Literal["min", "max"]


@dataclass(frozen=True)
class MetricGoal:
    """A metric, and whether less or more of it is better."""

    metric: str = "loss"
    mode: Mode = "min"

    def is_better(self, value: float | None, than: float | None, by: float = 0.0) -> bool:
        """Whether `value` is better than `than` by more than `by`.

        value None: not finite. than None: not finite, or not known yet.
        """
        if value is None:
            return False
        if than is None:
            return True
        return (than - value if self.mode == "min" else value - than) > by


class Section(BaseModel):
    """A part of the config. Fields named in `kept_defaults` have a default that settle_defaults()
    chooses: a run that goes on keeps the value that it began with.

    The text below a field describes it in the JSON Schema and in the table of keys.
    """

    kept_defaults: ClassVar[tuple[str, ...]] = ()
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        defer_build=True,
        use_attribute_docstrings=True,
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Join the lines of each field's description."""
        for field in cls.model_fields.values():
            if field.description:
                field.description = " ".join(field.description.split())

    @field_validator("*", mode="before")
    @classmethod
    def _word_as_it_is_written(cls, value: Any, info: ValidationInfo) -> Any:
        """Spell a word as the field does: NCCL -> nccl."""
        if not isinstance(value, str) or info.field_name is None:
            return value
        words = list(words_of(cls.model_fields[info.field_name].annotation))
        alike = [word for word in words if word.casefold() == value.casefold()]
        if value in words or len(alike) != 1:
            return value
        return alike[0]

    def settle_defaults(self, train: "Section") -> "Section":
        """The section with the defaults that follow from the `train` section."""
        del train
        return self

    def with_values(self, **values: Any) -> Self:
        """A copy with other values, unchecked. A mapping changes values of a section within."""
        sections = {
            name: getattr(self, name).with_values(**value)
            for name, value in values.items()
            if isinstance(value, dict) and isinstance(getattr(self, name), Section)
        }
        return self.model_copy(update={**values, **sections})

    def changed(self, *names: str) -> list[str]:
        """The fields, of these, whose values are not their defaults."""
        fields = type(self).model_fields
        return [name for name in names if getattr(self, name) != fields[name].get_default()]


def words_of(annotation: Any) -> Iterator[str]:
    """The words that a field's type lists."""
    if get_origin(annotation) is Literal:
        yield from (word for word in get_args(annotation) if isinstance(word, str))
        return
    for inner in get_args(annotation):
        yield from words_of(inner)


def flatten(section: BaseModel, prefix: str = "") -> dict[str, Any]:
    """A config as dotted keys and plain values."""
    result: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            result |= flatten(value, f"{prefix}{name}.")
        elif isinstance(value, tuple | list) and any(isinstance(item, BaseModel) for item in value):
            result[prefix + name] = [_plain(item) for item in value]
        else:
            result[prefix + name] = value
    return result | {prefix + name: value for name, value in (section.model_extra or {}).items()}


def _plain(item: Any) -> Any:
    """An item of a list, as a config file has it."""
    if isinstance(item, BaseModel):
        return item.model_dump(mode="json", exclude_defaults=True)
    return item

"""Section: the base class of every part of the config.

Sections are frozen, refuse unknown keys and never guess what a value means. Words from a fixed list
are compared without regard to case.
"""

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _word_as_it_is_written(cls, value: Any, info: ValidationInfo) -> Any:
        """Spell a word as the field does: NCCL -> nccl."""
        if not isinstance(value, str) or info.field_name is None:
            return value
        words = list(_words(cls.model_fields[info.field_name].annotation))
        alike = [word for word in words if word.casefold() == value.casefold()]
        if value in words or len(alike) != 1:
            return value
        return alike[0]

    def changed(self, *names: str) -> list[str]:
        """The fields, of these, whose values are not their defaults."""
        fields = type(self).model_fields
        return [name for name in names if getattr(self, name) != fields[name].get_default()]


def _words(annotation: Any) -> Iterator[str]:
    """The words that a field's type lists."""
    if get_origin(annotation) is Literal:
        yield from (word for word in get_args(annotation) if isinstance(word, str))
        return
    for inner in get_args(annotation):
        yield from _words(inner)


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

"""The layers of a model that an adapter is for.

A task says which layers there are (Candidates), and which words stand for several of them. Names
and patterns are the same everywhere: a name is the end of a layer's whole name, from a dot on.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from samecurve.seam import UserError, suggest
from samecurve_products.lora.sections import AdapterSection

ALL = "all-linear"
_WHERE = "model.adapter.target"
_PLAIN = re.compile(r"[\w.-]+")  # a name, and no pattern


@dataclass(frozen=True)
class Candidates:
    """The layers of one model that an adapter could be for."""

    model: str  # name of its class
    layers: Mapping[str, nn.Module]  # by whole name, in the model's order
    groups: Mapping[str, Sequence[str]]  # a word -> whole names
    noun: str  # what a layer is, and where: "linear layer within this model's blocks"


def target_layers(candidates: Candidates, adapter: AdapterSection) -> list[str]:
    """Whole names of the layers that the adapter is for, in the model's order.

    UserError: a target names no layer.
    """
    layers = candidates.layers
    if not layers:
        raise UserError(
            f"{candidates.model} has no linear layers that an adapter could be for",
            "leave model.adapter out",
            "model.adapter",
        )
    names = dict(_named(candidates, adapter.target))
    short = sorted({short_name(name) for name in layers})
    groups = [word for word, found in candidates.groups.items() if found]
    words = ", ".join([*groups, f"or some of {', '.join(short)}"])
    for word, found in names.items():
        if not found:
            raise UserError(
                f"{_WHERE} {word} names no {candidates.noun}", suggest(word, short) or words, _WHERE
            )
    if not names:
        raise UserError(f"{_WHERE} is an empty list: nothing would be trained", words, _WHERE)
    chosen = {name for found in names.values() for name in found}
    return [name for name in layers if name in chosen]


def _named(
    candidates: Candidates, target: str | Sequence[str]
) -> Iterator[tuple[str, Sequence[str]]]:
    """Each word or pattern of a target, with the layers that it names."""
    layers = candidates.layers
    if isinstance(target, str) and not _PLAIN.fullmatch(target):
        pattern = _compiled(target)  # of a whole name, as in peft
        yield target, [name for name in layers if pattern.fullmatch(name)]
        return
    for word in [target] if isinstance(target, str) else target:
        if word in candidates.groups:
            yield word, candidates.groups[word]
        else:
            yield word, [name for name in layers if f".{name}".endswith(f".{word}")]


def _compiled(pattern: str) -> re.Pattern[str]:
    """UserError: it is no regular expression."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(
            f"{_WHERE} {pattern} is no regular expression: {error}",
            "a pattern such as .*\\.(q|v)_proj, or a list of names",
            _WHERE,
        ) from None


def short_name(name: str) -> str:
    """The end of a layer's name that says what it is: to_q, to_out.0."""
    parts = name.split(".")
    return ".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:])

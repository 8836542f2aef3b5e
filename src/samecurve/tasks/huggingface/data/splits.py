"""The splits of a source, found by the names of its files: train, validation, test, and others.

The names are those under which hubs and libraries leave data sets: `train.jsonl`,
`data/test-00000-of-00001.parquet`, `validation/part-0.parquet`, `val.bin`.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Literal, TypeVar

from samecurve.errors import UserError

Role = Literal["train", "validation", "test"]  # what a split is used for

ALL = "all"  # data.split: whatever the names
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval", "evaluation"),
    "test": ("test", "testing"),
}
_BY_WORD = {word: name for name, words in _WORDS.items() for word in words}
_SHARD = re.compile(r"(?P<name>\w+(?:\.\w+)*)-\d{5}-of-\d{5}\..*")  # as hubs name shards
_BESIDE = ("readme", "license", "licence")  # text that is no part of the data

Item = TypeVar("Item")


def canonical_split(name: str) -> str:
    """The split's one name: dev -> validation. Other names stay."""
    return _BY_WORD.get(name.lower(), name)


def split_in_name(path: PurePath) -> str | None:
    """The split that a file's path below its source names; None: it names none."""
    shard = _SHARD.fullmatch(path.name)
    if shard is not None:
        return canonical_split(shard["name"])
    for part in path.parts:  # a directory before the file's own name
        words = re.split(r"[^a-z]+", part.lower())
        named = next((_BY_WORD[word] for word in words if word in _BY_WORD), None)
        if named is not None:
            return named
    return None


def are_splits(paths: Sequence[PurePath], *, hold_rows: bool) -> bool:
    """Whether the names of a source's files tell splits apart.

    Among files of text, `test.md` may be a page like the others: each of them must name a split.
    """
    if hold_rows:
        return any(split_in_name(path) in _WORDS for path in paths)
    pages = [path for path in paths if not path.name.lower().startswith(_BESIDE)]
    return bool(pages) and all(split_in_name(path) in _WORDS for path in pages)


def choose_splits(
    by_split: Mapping[str | None, Sequence[Item]], wanted: str, source: str
) -> dict[Role, list[Item]]:
    """The files of a source by what they are used for.

    by_split: the files of each split; under None those that name no split, which are trained on
    where no other is. UserError: there is no such split.
    """
    name = canonical_split(wanted)
    train = by_split.get(name, [])
    if not train and name == "train":
        train = by_split.get(None, [])
    if not train:
        there = [split for split in by_split if split is not None]
        raise UserError(
            f"{source} has no split {wanted}; it has {', '.join(there) or 'none'}",
            f"data.split={there[0]}, or data.split={ALL} to train on all of it"
            if there
            else "leave data.split out",
            "data.split",
        )
    chosen: dict[Role, list[Item]] = {"train": list(train)}
    others: tuple[Role, ...] = ("validation", "test")
    for role in others:
        if role != name and by_split.get(role):
            chosen[role] = list(by_split[role])
    return chosen


def describe_splits(
    chosen: Mapping[Role, Sequence[object]],
    by_split: Mapping[str | None, Sequence[object]],
    wanted: str,
    source: str,
) -> str:
    """A line for the user: what each split of a source is used for."""
    used = {"validation": "validation is evaluated on", "test": "test is measured at the end"}
    name = canonical_split(wanted)
    parts = [
        f"trained on the split {name}" if by_split.get(name) else "trained on what is no split"
    ]
    parts += [used[role] for role in chosen if role != "train"]
    unused = [
        "files that name no split" if split is None else split
        for split, files in by_split.items()
        if files and split not in {name, *chosen} and files != chosen["train"]
    ]
    parts += [f"not read: {', '.join(unused)}"] if unused else []
    return f"{source}: {'; '.join(parts)} (data.split={ALL}: trained on all of them)"

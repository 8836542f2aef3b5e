"""The splits of a source, found by the names of its files: train, validation, test, and others.

The names are those under which hubs and libraries leave data sets: `train.jsonl`,
`data/test-00000-of-00001.parquet`, `validation/part-0.parquet`, `val.bin`.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Generic, Literal, TypeVar

from samecurve.core.config.sections import ALL, TRAIN
from samecurve.errors import UserError
from samecurve.tasks.text import STANDARD_LIBRARY, files_below, files_of_source

Role = Literal["train", "validation", "test"]  # what a split is used for

_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval", "evaluation"),
    "test": ("test", "testing"),
}
_BY_WORD = {word: name for name, words in _WORDS.items() for word in words}
_SHARD = re.compile(r"(?P<name>\w+(?:\.\w+)*)-\d{5}-of-\d{5}\..*")  # as hubs name shards
_BESIDE = ("readme", "license", "licence")  # text that is no part of the data

Item = TypeVar("Item")


@dataclass(frozen=True)
class SourceSplits(Generic[Item]):
    """The files of a source by what they are used for.

    files: `train` is always there. line: for the user, what each split is used for; "" where the
    source has no splits.
    """

    files: Mapping[Role, Sequence[Item]]
    line: str = ""


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


def paths_by_split(source: str, split: str, rows: tuple[str, ...]) -> dict[str | None, list[Path]]:
    """The files that a source names, by split; all of them under None where no name tells splits.

    rows: how the names of files of rows end. If a directory has such files, its other files (a
    README) are left out. Files of one split that a glob matches are meant as they are.
    """
    root = Path(source).expanduser()
    if source != STANDARD_LIBRARY and root.is_dir():
        files = files_below(root)
        of_rows = [path for path in files if has_suffix(path, rows)]
        if not of_rows and split != ALL:  # `train.json` and `test.json`, beside a README
            named = [path for path in files if split_in_name(path.relative_to(root)) is not None]
            of_rows = [path for path in named if has_suffix(path, (".json",))]
        return _group(of_rows or files, root, split, hold_rows=bool(of_rows))
    files = files_of_source(source)
    if len(files) < 2 or source == STANDARD_LIBRARY:
        return {None: files}
    root = Path(os.path.commonpath([file.parent for file in files]))
    hold_rows = all(has_suffix(path, (*rows, ".json")) for path in files)
    by_split = _group(files, root, split, hold_rows=hold_rows)
    if len(by_split) == 1 and split == TRAIN:
        return {None: next(iter(by_split.values()))}
    return by_split


def _group(
    paths: Sequence[Path], root: Path, split: str, *, hold_rows: bool
) -> dict[str | None, list[Path]]:
    below = [path.relative_to(root) for path in paths]
    if split == ALL or (split == TRAIN and not are_splits(below, hold_rows=hold_rows)):
        return {None: list(paths)}
    by_split: dict[str | None, list[Path]] = {}
    for path, name in zip(paths, below, strict=True):
        by_split.setdefault(split_in_name(name), []).append(path)
    return by_split


def has_suffix(path: Path, suffixes: Iterable[str]) -> bool:
    return path.name.lower().endswith(tuple(suffixes))


def use_splits(
    by_split: Mapping[str | None, Sequence[Item]], split: str, source: str
) -> SourceSplits[Item]:
    """Choose what each split of a source is used for. UserError: there is no such split.

    by_split: the files of each split; under None those that name no split, which are trained on
    where no other is. split: the one to train on
    """
    if set(by_split) == {None}:
        return SourceSplits({"train": list(dict.fromkeys(by_split[None]))})
    name = canonical_split(split)
    train = by_split.get(name) or (by_split.get(None) if name == "train" else None)
    if not train:
        there = [split for split in by_split if split is not None]
        raise UserError(
            f"{source} has no split {split}; it has {', '.join(there) or 'none'}",
            _remedy_of_missing_split(by_split),
            "data.split",
        )
    chosen: dict[Role, Sequence[Item]] = {"train": train}
    others: tuple[Role, ...] = ("validation", "test")
    chosen |= {role: by_split[role] for role in others if role != name and by_split.get(role)}
    line = _describe(chosen, by_split, name, source) if len(by_split) > 1 else ""
    return SourceSplits({role: list(dict.fromkeys(files)) for role, files in chosen.items()}, line)


def _remedy_of_missing_split(by_split: Mapping[str | None, Sequence[object]]) -> str:
    """The remedy: a split to train on, never one that is kept for a measurement."""
    if by_split.get(TRAIN) or by_split.get(None):
        there = TRAIN
    else:
        others = [split for split in by_split if split not in (None, "validation", "test")]
        if not others:
            return (
                f"a data.source with a split to train on, or data.split={ALL} to train on all of"
                " this one"
            )
        there = others[0]
    return f"data.split={there}, or data.split={ALL} to train on all of it"


def _describe(
    chosen: Mapping[Role, Sequence[object]],
    by_split: Mapping[str | None, Sequence[object]],
    name: str,
    source: str,
) -> str:
    """A line for the user: what each split of a source is used for. name: trained on"""
    used = {"validation": "validation is evaluated on", "test": "test is measured at the end"}
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


def check_split_is_somewhere(sources: Sequence[SourceSplits[Item]], split: str) -> None:
    """UserError: the config names a split to train on, and no source has splits."""
    if split in (TRAIN, ALL) or any(source.line for source in sources):
        return
    raise UserError(
        f"data.split is {split}, and no source has splits: no file's name says train, validation or"
        " test below a directory or among the matches of a glob",
        "leave data.split out; or name the directory that holds the splits",
        "data.split",
    )

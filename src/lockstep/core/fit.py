"""Whether a checkpoint's arrays are those of a model: the same question, and the same words, under each engine."""

from collections.abc import Collection, Mapping, Sequence

from lockstep.core.protocols import Saved
from lockstep.errors import RunError, UserError


def check_fit(saved: Saved, wanted: Mapping[str, tuple[int, ...]], optional: Collection[str]) -> None:
    """wanted: canonical names and whole shapes. optional: names that either side may lack. UserError: the rest does not fit."""
    missing = [name for name, shape in wanted.items() if name not in saved.arrays and name not in optional and 0 not in shape]  # what is empty is in no file
    extra = [name for name in saved.arrays if name not in wanted and name not in optional]
    if missing or extra:
        cause = "; ".join(f"{word} {_some(names)}" for word, names in (("missing", missing), ("unknown", extra)) if names)
        raise UserError(f"{saved.path} does not fit this model: {cause}", "the same model and optimizer as it was saved with, or another --save-dir", saved.path)
    for name, shape in wanted.items():
        if name in saved.arrays and saved.arrays.shape(name) != shape:
            raise UserError(f"{name} has shape {saved.arrays.shape(name)} in {saved.path}, {shape} in this model", "the same model as it was saved with", saved.path)


def check_finite(names: Sequence[str]) -> None:
    """names: arrays with a value that is not. RunError: there are any; they are not saved."""
    if names:
        raise RunError(f"not saved: not finite any more are {_some(names)}", "--resume RUN with a smaller --lr goes on from its last save")


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"

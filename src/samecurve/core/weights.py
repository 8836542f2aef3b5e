"""Arrays of a model, the same under each engine: their initial values, their digests, and whether a
checkpoint's arrays are those of the model.

Initial values are a pure function of (seed, parameter name, shape): equal under every strategy,
world and engine. Two states are equal to the last bit if, and only if, their digests are.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samecurve.core.protocols import Checkpoint, Initial
from samecurve.errors import RunError, UserError
from samecurve.units import counted, some

_SHOWN = 4  # names in a message
AVERAGE = "ema/"  # before the names of a moving average of the weights
# Before the name of a parameter that the first step of a run did not use: 0 while no step has used
# the parameter, else the number of its group (torch_engine/optimizers/late_params.py).
LATE = "loop/late/"


def check_fit(
    saved: Checkpoint, wanted: Mapping[str, tuple[int, ...]], optional: Collection[str]
) -> None:
    """UserError: the checkpoint's arrays are not the model's.

    wanted: canonical names and whole shapes.
    optional: names that either side may lack.
    """
    missing = [
        name
        for name, shape in wanted.items()
        if name not in saved.arrays and name not in optional and 0 not in shape
    ]  # what is empty is in no file
    extra = [name for name in saved.arrays if name not in wanted and name not in optional]
    if missing or extra:
        cause = "; ".join(
            f"{word} {some(names, _SHOWN)}"
            for word, names in (("missing", missing), ("unknown", extra))
            if names
        )
        raise UserError(
            f"{saved.path} does not fit this model: {cause}",
            "the same model and optimizer as it was saved with, or another --save-dir",
            saved.path,
        )
    for name, shape in wanted.items():
        if name in saved.arrays and saved.arrays.shape(name) != shape:
            raise UserError(
                f"{name} has shape {saved.arrays.shape(name)} in {saved.path}, {shape} in this"
                " model",
                "the same model as it was saved with",
                saved.path,
            )


def check_weights(
    weights: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
    optional: Collection[str],
    source: str,
    where: str = "--init-from",
) -> None:
    """UserError: weights, without the rest of a state, are not the model's; all that does not fit.

    weights, wanted: canonical names and whole shapes.
    optional: buffers, which may keep the values that the model gave them.
    """
    wrong = {
        "missing": [
            name
            for name, shape in wanted.items()
            if name not in weights and name not in optional and 0 not in shape
        ],
        "unexpected": [name for name in weights if name not in wanted],
        "of another shape": [
            f"{name} {list(weights[name])}, here {list(shape)}"
            for name, shape in wanted.items()
            if name in weights and weights[name] != shape
        ],
    }
    if any(wrong.values()):
        cause = "; ".join(
            f"{len(names)} {word} ({some(names, _SHOWN)})" for word, names in wrong.items() if names
        )
        raise UserError(
            f"{source} does not fit this model: {cause}",
            "the model.* fields of the model that these weights are of, or other weights",
            where,
        )


def check_finite(names: Sequence[str]) -> None:
    """names: arrays with a value that is not. RunError: there are any; they are not saved."""
    if names:
        raise RunError(
            f"not saved: not finite any more are {some(names, _SHOWN)}",
            "--resume RUN with a smaller --lr goes on from its last save",
        )


DIGEST_BYTES = 16  # of a SHA-256: enough that no two arrays ever meet


def digest(array: NDArray[Any]) -> bytes:
    """The digest of an array's values, type and shape."""
    sha256 = hashlib.sha256(f"{array.dtype.str} {array.shape}".encode())
    sha256.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return sha256.digest()[:DIGEST_BYTES]


def combined(digests: Mapping[str, str]) -> str:
    """The digest of all arrays of a state, whatever the order in which they were hashed."""
    lines = [f"{name} {of_array}" for name, of_array in sorted(digests.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def values(seed: int, name: str, shape: tuple[int, ...], initial: Initial) -> NDArray[np.float32]:
    """Drawn by numpy in float32 (and only widened from there).

    UserError: dimension 0 has not as many equal parts as there are means.
    """
    mean = _means(name, shape, initial.mean)
    if initial.std == 0:
        return np.broadcast_to(mean, shape).copy()
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64DXSM(int.from_bytes(key[:16], "little")))
    normal = generator.standard_normal(shape, dtype=np.float32)
    return normal * np.float32(initial.std) + mean


def _means(
    name: str, shape: tuple[int, ...], mean: float | tuple[float, ...]
) -> NDArray[np.float32]:
    """What a parameter's values lie around, in a shape that broadcasts to its own."""
    if not isinstance(mean, tuple):
        return np.asarray(mean, np.float32)
    if not (shape and mean) or shape[0] % len(mean):
        raise UserError(
            f"Initial of {name} has {counted(len(mean), 'mean')}, its shape is {shape}",
            "one mean, or one for each equal part of dimension 0",
            "task",
        )
    by_row = np.repeat(np.asarray(mean, np.float32), shape[0] // len(mean))
    return by_row.reshape(-1, *[1] * (len(shape) - 1))

"""A run's model with the weights of its newest checkpoint. Nothing is trained."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samecurve.run.weights.base_arrays import base_weights, on_base
from samecurve.run.weights.base_files import Base
from samecurve.run.weights.opened_checkpoint import (
    OpenedCheckpoint,
    best_checkpoint,
    open_checkpoint,
)

if TYPE_CHECKING:
    from samecurve.core.protocols import StoredArrays


def load(run: Any, *, best: bool = False, trust: bool = False) -> Any:
    """The model of a run with its weights, in eval mode.

    A torch.nn.Module; a flax.nnx.Module for a user task that jax trained.

    run: a run directory (its newest whole checkpoint is taken), one checkpoint, or what
        samecurve.train() returned

    best: of a run, the checkpoint whose evaluation was the best, in place of the newest

    trust: run the code that the run's config names, though it came with the run or lies outside of
        the working directory

    Warns of a damaged checkpoint passed over.
    """
    path = Path(getattr(run, "directory", run))
    if best:
        path = best_checkpoint(path, "samecurve.load")
    checkpoint = open_checkpoint(path, "samecurve.load", trust=trust)
    for note in checkpoint.notes:
        warnings.warn(note, stacklevel=2)
    return trained_model(checkpoint)


def trained_model(checkpoint: OpenedCheckpoint) -> Any:
    """The model with the checkpoint's weights, in eval mode.

    UserError: the frozen base beneath them has changed.
    """
    digest = checkpoint.weights.base_digest
    if digest is None:
        return checkpoint.task.load(checkpoint.weights)
    weights: StoredArrays = checkpoint.weights
    if base := Base.kept_by(checkpoint.run):
        base.check_unchanged()
    if below := base_weights(checkpoint.run, checkpoint.task, checkpoint.config):
        weights = on_base(checkpoint.weights, below.arrays)
    seed = int(checkpoint.manifest["fixed"]["seed"])
    return checkpoint.task.load_on_base(weights, seed, digest, str(checkpoint.path))

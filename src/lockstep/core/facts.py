"""What plan() must know of a task: obtained without allocating the model, in a subprocess (launch/describe.py)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.core.order import Anchor


@dataclass(frozen=True)
class Facts:
    """What there is to train, and on what.

    samples, eval_samples: training samples, and held-out samples that an evaluation reads. tokens_per_sample: 1 where
    there are none. params, trainable: scalars. blocks: repeated layers. bytes_per_sample: activations kept for the
    backward pass of one sample, in 4-byte numbers; None unknown. flops_per_sample: forward and backward; None unknown.
    coupled: what mixes the samples of a batch (BatchNorm), so that a split would change the result.
    fingerprint: of the data. formulas: how the figures were made. reference: figures of the data to hold losses against.
    """

    samples: int
    eval_samples: int
    tokens_per_sample: int
    params: int
    trainable: int
    blocks: int
    bytes_per_sample: int | None
    flops_per_sample: float | None
    coupled: tuple[str, ...]
    fingerprint: str
    formulas: Mapping[str, str] = field(default_factory=dict)
    reference: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Fixed:
    """What a run's first plan fixed for good; copied into every checkpoint. batch None: to be decided anew (--new-batch)."""

    batch: int | None
    slot: int
    seed: int
    samples: int
    fingerprint: str
    threads: int
    anchor: Anchor = Anchor()

"""What plan() must know of a task: obtained without allocating the model, in a subprocess
(run/describe.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from samecurve.core.config.sections import Config
from samecurve.core.determinism.data_order import Anchor
from samecurve.core.planning.machine import Machine


@dataclass(frozen=True, kw_only=True)
class UserOptimizerFacts:
    """What a task's own optimizer is.

    name: its class; by: what returns it. elementwise: the task says that each number is updated by
    itself. takes_lr: it is given the config's learning rate. scales: of that one, by its groups.
    slots: arrays of a parameter's shape that it keeps for each; None unknown.
    """

    name: str
    by: str
    elementwise: bool
    takes_lr: bool
    scales: tuple[float, ...]
    num_states: int | None

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "UserOptimizerFacts":
        return cls(**{**value, "scales": tuple(value["scales"])})


@dataclass(frozen=True)
class Speed:
    """Seconds of a device's forward and backward: of a slot, whatever its size (what launching its
    operations takes), and of each sample in it. By hand: of a sample, in any unit.
    """

    seconds_per_microbatch: float
    seconds_per_sample: float


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """devices: in the plan's order; none: they are alike.

    rest: seconds of a step beside forward and backward. origin: when and how they were measured;
    '': given by hand.
    """

    devices: tuple[Speed, ...] = ()
    rest: float = 0.0
    origin: str = ""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Speeds":
        devices = tuple(Speed(**device) for device in value["devices"])
        return cls(devices=devices, rest=value["rest"], origin=value["origin"])


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What there is to train, and on what.

    samples, eval_samples: training samples, and held-out samples that an evaluation reads.
    tokens_per_sample: 1 where there are none. params, trainable: scalars. blocks: repeated layers.
    bytes_per_sample: activations kept for the backward pass of one sample, in 4-byte numbers; None
    unknown; recompute_bytes: the same where some are computed again, by train.recompute. scratch:
    numbers held while a slot is computed, however large it is, by kind of device. block_params:
    scalars of the largest of the blocks; inside: names of the arrays within blocks; rounded: of
    those whose values autocast rounds anyway, so that fsdp gathers them in two bytes under bf16 and
    f16; frozen: those that are not trained. flops_per_sample: forward and backward; None unknown.
    coupled: what mixes the samples of a batch (BatchNorm), so that a split would change the result.
    keyed, unkeyed: layers whose random masks follow the sample, and those whose masks are drawn by
    the device. arrays: what there is of the model to be given values, by a checkpoint's names
    (complex ones as pairs); buffers: those of them that may be left as they are; aliases: other
    names of the same arrays (tied weights). fits: samples that were seen to fit in flight
    (--probe-batch); None: not tried. speeds: of the devices (devices.balance: measured); None: not
    measured. groups: what optimizer.groups makes of the parameters, in words. own: the optimizer
    that the task brings. fingerprint: of the data. formulas: how the figures were made. reference:
    figures of the data to hold losses against.
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
    block_params: int = 0
    block_arrays: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    recompute_bytes: Mapping[str, int] = field(default_factory=dict)
    scratch: Mapping[str, int] = field(default_factory=dict)
    keyed_dropout: tuple[str, ...] = ()
    unkeyed_dropout: tuple[str, ...] = ()
    largest_tried: int | None = None
    arrays: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    formulas: Mapping[str, str] = field(default_factory=dict)
    reference: Mapping[str, float] = field(default_factory=dict)
    groups: tuple[str, ...] = ()
    user_optimizer: UserOptimizerFacts | None = None
    speeds: Speeds | None = None


Measure = Callable[
    [Config, Machine, Facts], Facts
]  # facts, and what the plan is to know of the devices


_FIXED_ON_DISK = {
    "global_batch_size": "batch",
    "micro_batch_size": "slot",
    "computed_on": "made_on",
}


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """What a run's first plan fixed for good; copied into every checkpoint.

    global_batch_size None: to be decided anew (--new-batch). computed_on: engine and kind of
    device.
    """

    global_batch_size: int | None
    micro_batch_size: int
    seed: int
    samples: int
    fingerprint: str
    threads: int
    anchor: Anchor = Anchor()
    computed_on: str = ""

    def to_json(self) -> dict[str, Any]:
        """As manifest.json and plan.json hold it: their keys are public, and older than our names."""
        return {_FIXED_ON_DISK.get(name, name): value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Fixed":
        names = {key: name for name, key in _FIXED_ON_DISK.items()}
        fields = {names.get(key, key): item for key, item in value.items()}
        return cls(**{**fields, "anchor": Anchor(**value["anchor"])})

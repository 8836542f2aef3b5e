"""Facts: all that plan() must know of a task and its model.

They are obtained without allocating the model, in a subprocess (run/describe.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from samecurve.core.config.sections import Config
from samecurve.core.feature_list import fact_keys, split_facts
from samecurve.core.planning.machine import Machine


@dataclass(frozen=True, kw_only=True)
class UserOptimizerFacts:
    """The optimizer that a task brings itself."""

    name: str  # its class
    by: str  # what returns it
    elementwise: bool  # the task says that each number is updated by itself
    takes_lr: bool  # it is given the config's learning rate
    scales: tuple[float, ...]  # learning rates of its groups, relative to the config's
    num_states: int | None  # arrays of a parameter's shape kept for each; None: not known

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "UserOptimizerFacts":
        return cls(**{**value, "scales": tuple(value["scales"])})


@dataclass(frozen=True)
class Speed:
    """Seconds of a device's forward and backward pass; where the config gives speeds, any unit."""

    seconds_per_microbatch: float  # whatever its size: the cost of launching its operations
    seconds_per_sample: float


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """The speeds of the devices."""

    devices: tuple[Speed, ...] = ()  # in the plan's order; empty: they are alike
    rest: float = 0.0  # seconds of a step besides forward and backward
    origin: str = ""  # when and how speeds were measured; '': the config gives them


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """The data of a task. A plan keeps them."""

    samples: int  # for training
    eval_samples: int  # held-out ones that an evaluation reads
    tokens_per_sample: int  # 1 where there are none
    reference: Mapping[str, float] = field(default_factory=dict)  # numbers to compare losses with
    test_samples: int = 0  # of test data, by which nothing is chosen, measured once at the end
    # samples of each bucket, of the data "train", "eval" and "test" whose rows lie in buckets
    buckets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DescribedArrays:
    """The arrays of a model."""

    # shapes by their names in a checkpoint (complex arrays as pairs)
    arrays: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()  # arrays that need not be given initial values
    aliases: Mapping[str, str] = field(default_factory=dict)  # tied weights: other names
    frozen: tuple[str, ...] = ()  # arrays that are not trained
    frozen_base: bool = False  # frozen arrays are kept elsewhere: checkpoints leave them out
    block_arrays: tuple[str, ...] = ()  # names of the arrays within blocks
    # arrays whose values autocast rounds anyway: fsdp gathers them in two bytes under bf16 and f16
    rounded: tuple[str, ...] = ()
    # frozen scalars, and bytes of packed arrays, of each block that could lie in host memory
    frozen_block_params: tuple[int, ...] = ()
    frozen_block_packed: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Activations:
    """What the backward pass keeps, and what the loss holds, beside bytes_per_sample."""

    # bytes_per_sample where some activations are computed again, by the name of the way
    recompute_bytes: Mapping[str, int] = field(default_factory=dict)
    # the same under bf16 and f16, for `none` too; a setting that is left out was not counted
    autocast_bytes: Mapping[str, int] = field(default_factory=dict)
    # the bytes on GPUs, by precision and way, where GPUs compute by kernels that keep
    # more than those of CPUs
    gpu_bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    # share of these bytes that the block being run again takes, by way; 0 to 1
    rerun_share: Mapping[str, float] = field(default_factory=dict)
    # logits of a token, where the loss computes those of some tokens at a time; 0: it does not
    chunked_logits: int = 0
    head_gradient: int = 0  # numbers that such a loss holds beside, however many the tokens
    autocast_scratch: int = 0  # numbers more under bf16 and f16


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """Frozen arrays of one byte a number, whatever the precision; no count has them."""

    packed: tuple[str, ...] = ()
    block_packed: int = 0  # bytes of packed arrays in the largest block
    unpacked: int = 0  # numbers of the largest packed array, once unpacked for its product
    # the part of the model that computes in bf16 and f16 only, in words; '': there is none
    narrow_only: str = ""


@dataclass(frozen=True, kw_only=True)
class Repeatability:
    """Whether, and how cheaply, a step can have the same bits on any devices."""

    # what the same bits would refuse in the first step, tried where the plan may choose it
    not_same_bits: str = ""
    # operations that the loss calls and that have no deterministic kernel on GPUs, each perhaps
    # with its place
    nondeterministic: tuple[str, ...] = ()
    # calls of torch in a forward pass of the loss, views apart, and the convolutions among them;
    # 0: not counted
    operations: int = 0
    convolutions: int = 0


@dataclass(frozen=True, kw_only=True)
class UpdateFacts:
    """What a task says of its updates."""

    user_optimizer: UserOptimizerFacts | None = None  # the task's own
    schedule: str = ""  # the task's own learning-rate schedule, in words; '': none
    hidden_matrices: tuple[str, ...] = ()  # of hidden layers, which muon updates; frozen ones too
    groups: tuple[str, ...] = ()  # what optimizer.groups makes of the parameters, in words


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured before the run. None: it was not."""

    largest_tried: int | None = None  # samples that fitted in flight (--probe-batch)
    speeds: Speeds | None = None  # of the devices


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Counts and names of the model, of its data and of what the task does."""

    data: DataFacts
    fingerprint: str  # of the data
    params: int  # scalars
    trainable: int  # scalars
    blocks: int  # repeated layers
    # activations kept for the backward pass of one sample, in 4-byte numbers; None: not known
    bytes_per_sample: int | None
    flops_per_sample: float | None  # forward and backward; None: not known
    # layers that mix a batch's samples (BatchNorm), so that a split changes the result
    coupled: tuple[str, ...]
    model: DescribedArrays = DescribedArrays()
    activations: Activations = Activations()
    quantized: Quantized = Quantized()
    repeats: Repeatability = Repeatability()
    updates: UpdateFacts = UpdateFacts()
    measured: Measured = Measured()
    # what features that the task brings must know of it, by the feature's name and by key
    features: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    block_params: int = 0  # scalars of the largest block
    # settings that freeze the model and train an adapter -> scalars of that adapter
    adapters: Mapping[str, int] = field(default_factory=dict)
    flops_unknown: str = ""  # why flops_per_sample is None, where that is known
    library_bytes: int = 0  # of host memory that the task's own libraries take, beside the engine's
    keyed_dropout: tuple[str, ...] = ()  # layers whose random masks follow the sample
    formulas: Mapping[str, str] = field(default_factory=dict)  # how the numbers here came about
    notes: tuple[str, ...] = ()  # what else the task says of its model and data, a line each

    @classmethod
    def keys(cls) -> set[str]:
        """The names under which a task tells its facts."""
        own = {part.name for part in fields(cls)} - _PARTS.keys() - {"features"}
        return own | fact_keys() | {key.name for kind in _PARTS.values() for key in fields(kind)}

    @classmethod
    def of(cls, **values: Any) -> "Facts":
        """The facts, told by key whatever part they belong to."""
        rest, features = split_facts(values)
        parts = {part: kind(**_take(rest, kind)) for part, kind in _PARTS.items()}
        return cls(**parts, **rest, features=features)

    def to_json(self) -> dict[str, Any]:
        """The facts by key, whatever part they belong to."""
        values = asdict(self)
        for part in _PARTS:
            values |= values.pop(part)
        for own in values.pop("features").values():
            values |= own
        return values

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Facts":
        """The facts, with each number as it was written: plan.json shows them."""
        values = {
            key: tuple(item) if isinstance(item, list) else item for key, item in value.items()
        }
        if value["user_optimizer"]:
            values["user_optimizer"] = UserOptimizerFacts.from_json(value["user_optimizer"])
        for key in ("arrays", "buckets"):
            values[key] = {name: tuple(sizes) for name, sizes in value[key].items()}
        return cls.of(**values)

    def having(self, **values: Any) -> "Facts":
        """The facts with other values, told by key whatever part they belong to."""
        rest, features = split_facts(values)
        parts = {}
        for part, kind in _PARTS.items():
            own = _take(rest, kind)
            if own:
                parts[part] = replace(getattr(self, part), **own)
        merged = {name: {**self.features.get(name, {}), **own} for name, own in features.items()}
        return replace(self, **parts, **rest, features={**self.features, **merged})


_PARTS: Mapping[str, Any] = {
    "data": DataFacts,
    "model": DescribedArrays,
    "activations": Activations,
    "quantized": Quantized,
    "repeats": Repeatability,
    "updates": UpdateFacts,
    "measured": Measured,
}


def _take(values: dict[str, Any], kind: Any) -> dict[str, Any]:
    """Take the fields of a part out of values."""
    return {key.name: values.pop(key.name) for key in fields(kind) if key.name in values}


# takes a config, a machine and facts; gives the facts with what was measured before the run
Measure = Callable[[Config, Machine, Facts], Facts]

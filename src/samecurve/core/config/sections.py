"""The config: one frozen tree, one schema, whether it came from a file, flags or --set.

A task brings its own `model` and `data` fields through a registry, so that this room knows no task
and no engine. FreeModel and FreeData are those of a task that declares none: any fields.
"""

import math
from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    model_validator,
)

from samecurve.core.config import (
    MOST_PROCESSES,
    Decay,
    Duration,
    NumSamples,
    ScheduleForm,
    Seconds,
    Section,
    Size,
)
from samecurve.core.config.param_groups import ParamGroup, ParamRules
from samecurve.core.config.train_section import Train
from samecurve.core.feature_list import listed_optimizers, spec_of
from samecurve.core.strategies import STRATEGY_NAMES, strategy_help

if TYPE_CHECKING:
    StrategyChoice = str
    OptimizerName = str
else:
    StrategyChoice = Literal[("auto", *STRATEGY_NAMES)]  # read from the rows of core/strategies.py
    OptimizerName = Literal[("adamw", "sgd", *listed_optimizers())]


class Batch(Section):
    """How much data one optimizer step consumes."""

    samples: NumSamples | None = None
    """over all devices, whatever their number; the plan chooses microbatch size and accumulation
    steps"""
    per_device: NumSamples | None = None
    """on each device, each accumulation step; with `samples`: the most a device takes at once; with
    train.exact: the size of a microbatch"""
    accumulate: NumSamples | None = None
    """accumulation steps before one optimizer step; with `samples`: how many to cut it into"""

    @model_validator(mode="after")
    def _one_way(self) -> "Batch":
        if self.samples is None and self.per_device is None:
            raise ValueError(
                "give `samples` (over all devices) or `per_device` (with `accumulate`)"
            )
        if self.samples is not None and self.per_device is not None and self.accumulate is not None:
            raise ValueError(
                "`samples`, `per_device` and `accumulate` together fix the number of devices; leave"
                " one out"
            )
        return self


class Optimizer(Section):
    """How the weights move. Weight decay reaches matrices only (not norms and biases)."""

    name: OptimizerName = "adamw"
    lr: PositiveFloat = 3e-4
    """peak learning rate, before schedule.scale_lr; adafactor: a share of each parameter's root
    mean square, its authors' is 0.01"""
    weight_decay: NonNegativeFloat = 0.1
    """decoupled, but added to the gradient for sgd; on matrices only"""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95), strict=False
    )
    """adamw, adamw8bit, muon's adamw: decay of the two moments"""
    eps: PositiveFloat = 1e-8
    """as betas: added to the root of the second moment"""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """sgd; muon, whose default is 0.95"""
    clip: NonNegativeFloat = 1.0
    """largest norm of the whole gradient; 0: not clipped"""
    groups: tuple[ParamGroup, ...] = Field((), strict=False)
    """parameters, by name, that are trained otherwise or not at all"""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_its_own(cls, values: Any) -> Any:
        """Values that the optimizer's authors take, where the config gives none."""
        spec = spec_of(str(values.get("name")).lower()) if isinstance(values, dict) else None
        return {**spec.defaults, **values} if spec else values

    @model_validator(mode="after")
    def _groups_may_choose(self) -> "Optimizer":
        chosen = [group for group in self.groups if group.optimizer is not None]
        if not chosen:
            return self
        spec = spec_of(self.name)
        own = ("adamw", self.name) if spec and spec.takes_groups else ()
        for group in chosen:
            if group.optimizer not in own:
                names = [name for name in listed_optimizers() if spec_of(name).takes_groups]
                wanted = group.optimizer if group.optimizer in names else " or ".join(names)
                raise ValueError(
                    f"groups: {group.match!r} has optimizer {group.optimizer}, which is for"
                    f" optimizer.name {wanted}, not {self.name}: leave it out"
                )
        return self

    @property
    def rules(self) -> ParamRules:
        return ParamRules(self.groups, self.weight_decay)


class ScheduleFields(Section):
    """The learning rate over the run."""

    warmup: Duration = 0
    """steps or epochs from 0 to the peak"""
    decay: Decay = "cosine"
    """wsd: constant, then linear over the last `cooldown`"""
    final: Annotated[float, Field(ge=0, le=1)] = 0.1
    """share of the peak left at the end"""
    cooldown: Annotated[float, Field(ge=0, le=1)] = 0.2
    """wsd: share of the steps after warm-up in which it decays"""
    form: ScheduleForm = "samecurve"
    """samecurve: a warm-up of n begins with 1/n of the peak, and the run's last step takes `final`;
    transformers: the rates of its get_scheduler(): a warm-up begins with 0, and the last step takes
    what comes one step before `final`"""
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """scale lr by batch / base_batch"""
    base_batch: PositiveInt | None = None
    """the batch that lr was found for; with per_device: one device's share of a step if not
    given"""


def _in_lower_case(value: object) -> object:
    """The value in lower case: `ALL` and `CPU:2` mean what `all` and `cpu:2` mean."""
    return value.lower() if isinstance(value, str) else value


class Devices(Section):
    """Where it runs."""

    use: Annotated[str, BeforeValidator(_in_lower_case)] = "auto"
    """auto, all, cpu, cpu:4, or indices: 0,1. auto: all GPUs; without a GPU one CPU rank, or for an
    exact run with batch.samples one for each core that has a microbatch"""
    strategy: StrategyChoice = Field("auto", description=strategy_help())
    shards: PositiveInt | None = None
    """hsdp: devices that share one copy of the model; the largest proper divisor of their number if
    not given"""
    reshard: bool = True
    """fsdp, hsdp with engine torch: let go of a block's gathered weights after its forward pass
    (less memory), or keep them until backward (less traffic)"""
    gather: Literal["auto", "round", "step"] = "auto"
    """fsdp, hsdp with engine torch: a step of several rounds gathers weights and sums gradients in
    each round, or once a step, with whole weights and gradients on each device; auto: once a step
    where memory is known to suffice"""
    memory: Size | None = None
    """bytes of each device to plan with at most (40GiB), where not all of it is this run's"""
    threads: Annotated[int, Field(gt=0, le=MOST_PROCESSES)] | None = None
    """engine torch on CPU ranks: threads of each inside an operation. If not given, the cores are
    shared out among the ranks; with train.exact it is 1"""
    sync: Literal["auto", "cpu", "gloo", "nccl"] = "auto"
    """cpu (gloo): gradients through host memory; nccl: between GPUs"""
    preflight: Seconds = 60
    """seconds in which a first collective over all devices must end, before anything is trained; 0:
    not tried"""
    max_restarts: NonNegativeInt = 0
    """how often the ranks are started again, from the last save, after a failure that another start
    may end"""
    hang_floor: Seconds = 60
    """seconds of silence of a rank that are never taken for a hang; 0: ranks are not watched"""
    launcher: Literal["direct", "elastic", "spawn"] = "direct"
    """this program starts the ranks (direct); elastic and spawn are other names of direct, from
    when torch's agent could start them"""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """of the rendezvous; 0: any free one"""


def _off(value: object) -> object:
    """The word `off`, which YAML reads as false."""
    return "off" if value is False else value


class Track(Section):
    """Sensor readings and trackers (TensorBoard, W&B, MLflow, trackio). They change no result."""

    sensors_every: Seconds = 5
    """seconds between readings of utilisation, memory, power and temperature of each device; 0:
    never"""
    tensorboard: bool = False
    """also for TensorBoard, in logs/tensorboard of the run (the extra `tensorboard`)"""
    wandb: Annotated[Literal["off", "offline", "online"], BeforeValidator(_off)] = "off"
    """also for W&B, in logs/wandb of the run and, online, at its server (the extra `wandb`)"""
    wandb_project: str = "samecurve"
    """the project at W&B"""
    mlflow: bool = False
    """also for MLflow, in logs/mlflow of the run or where MLFLOW_TRACKING_URI says (the extra
    `mlflow`)"""
    trackio: bool = False
    """also for trackio, in logs/trackio of the run or where trackio's variables say (the extra
    `trackio`)"""
    experiment: str = "samecurve"
    """the experiment at MLflow, and the project at trackio"""
    others: list[str] = []
    """trackers that installed packages bring, by name"""
    store_patience: Seconds = 3600
    """with --save-dir s3://: seconds for which the store may fail before the run saves, stops and
    fails; 0: as long as it takes"""


ALL = "all"  # data.split: whatever the names of the files
TRAIN = "train"  # data.split, if it is not given
SplitName = Annotated[
    str,
    Field(
        min_length=1,
        description=(
            "the split to train on, where the names of a source's files tell splits apart"
            " (train.jsonl, data/test-*.parquet); validation is then evaluated on, and test"
            " measured at the end; all: train on every file"
        ),
    ),
]


class DataSection(Section):
    """The fields of every task's data section.

    indifferent: fields that change no sample. in_fingerprint: fields that change samples only in
    ways that the fingerprint of the data shows; a run that goes on is judged by that alone.
    """

    indifferent: ClassVar[tuple[str, ...]] = ("prefetch", "workers")
    in_fingerprint: ClassVar[tuple[str, ...]] = ()
    prefetch: Annotated[int, Field(ge=0, le=10_000)] = 2
    """steps prepared ahead by a background thread; same batches as 0"""
    workers: Annotated[int, Field(ge=0, le=MOST_PROCESSES)] = 0
    """processes for each device that read samples, where decoding them takes long; same batches as
    0"""


class Config(Section):
    """The whole config. `model` and `data` are the task's own fields; features bring others.

    features: those whose keys the config may have (rows of core/feature_list.py)
    """

    features: ClassVar[tuple[Any, ...]] = ()
    task: str
    engine: Literal["torch", "jax"] = "torch"
    """same results; jax: one process drives all of a host's devices"""
    model: SerializeAsAny[Section]
    data: SerializeAsAny[DataSection]
    batch: Batch
    optimizer: Optimizer = Optimizer()
    schedule: ScheduleFields = ScheduleFields()
    train: Train = Train()
    devices: Devices = Devices()
    track: Track = Track()

    @property
    def named_features(self) -> list[Any]:
        """The features of which the config has a value that is no default."""
        return [row for row in self.features if row.is_named(vars(getattr(self, row.section)))]

    def names(self, key: str) -> bool:
        """Whether the config has a value of a feature's key that is no default."""
        return any(key in row.keys for row in self.named_features)

    def excluding(self, key: str) -> list[str]:
        """The keys of the config that have a value which rules out another key."""
        rows = [row for row in self.named_features if key in row.load().excludes]
        return [name for row in rows for name in row.keys]

    @property
    def compiles_blocks(self) -> bool:
        """Whether engine torch is to compile the model's blocks."""
        return any(row.load().compiles_blocks for row in self.named_features)

    @property
    def fixes_devices(self) -> bool:
        """Whether it has values that are of certain devices."""
        return any(row.fixes_devices for row in self.named_features)

    def with_bits(self, *, same: bool) -> Self:
        """The config of a run that has the same bits on any devices, or need not."""
        return self.with_values(train={"exact": same})

    def without_features(self, is_left_out: Callable[[Any], bool]) -> Self:
        """The config without some features. is_left_out: says it of a Feature"""
        rows = [row for row in self.named_features if is_left_out(row.load())]
        defaults = [{row.section: dict(row.defaults)} for row in rows]
        return reduce(lambda config, values: config.with_values(**values), defaults, self)

    def with_settled_defaults(self) -> Self:
        """The config with the defaults of `model` that follow from `train`."""
        model = self.model.settle_defaults(self.train)
        return self if model is self.model else self.with_values(model=model)


def check_finite(value: Any) -> None:
    """ValueError: a number within dicts and lists is infinite, or no number."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("should be finite numbers")
    inner: list[Any] = []
    if isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, list):
        inner = value
    for item in inner:
        check_finite(item)


class FreeModel(Section):
    """The `model` section of a class that declares none."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _plain(self) -> "FreeModel":
        check_finite(self.model_extra)
        return self


class FreeData(DataSection):
    """The `data` section of a class that declares none."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _plain(self) -> "FreeData":
        check_finite(self.model_extra)
        return self


def section_argument(section: Section) -> Section | dict[str, Any]:
    """A section as a task's class gets it: a declared one as it is, a free one as a dict."""
    if isinstance(section, FreeModel | FreeData):
        return dict(section.model_extra or {})
    return section

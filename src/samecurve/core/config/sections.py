"""The config: one frozen tree, one schema, whether it came from a file, flags or --set.

A task brings its own `model` and `data` fields through a registry, so that this room knows no task
and no engine.
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    model_validator,
)

from samecurve.core.config.param_groups import ParamGroup, ParamRules
from samecurve.core.config.section import Section
from samecurve.core.config.values import (
    MOST_PROCESSES,
    Balance,
    Duration,
    NumSamples,
    Seconds,
    Size,
)
from samecurve.core.planning.metric_goal import MetricGoal
from samecurve.core.planning.schedule import Decay
from samecurve.core.planning.strategies import STRATEGY_NAMES

Precision = Literal["f32", "bf16", "f16", "f64"]
Recompute = Literal["none", "block", "selective"]
Compress = Literal["none", "bf16", "fp16", "powersgd"]
if TYPE_CHECKING:
    StrategyChoice = str
else:
    StrategyChoice = Literal[("auto", *STRATEGY_NAMES)]  # the planner's rows say which there are


def epochs_of(duration: int | str) -> float | None:
    """'2ep' -> 2.0; a number of steps -> None."""
    return float(duration.removesuffix("ep")) if isinstance(duration, str) else None


class Batch(Section):
    """How much data one optimizer step consumes."""

    samples: NumSamples | None = Field(
        None,
        description=(
            "over all devices, whatever their number; the plan chooses microbatch size and"
            " accumulation steps"
        ),
    )
    per_device: NumSamples | None = Field(
        None,
        description=(
            "on each device, each accumulation step; with `samples`: the most a device takes at"
            " once; with train.exact: the size of a microbatch"
        ),
    )
    accumulate: NumSamples | None = Field(
        None,
        description=(
            "accumulation steps before one optimizer step; with `samples`: how many to cut it into"
        ),
    )

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

    name: Literal["adamw", "sgd", "adafactor", "muon", "adamw8bit"] = "adamw"
    lr: PositiveFloat = Field(
        3e-4,
        description=(
            "peak learning rate, before schedule.scale_lr; adafactor: a share of each parameter's"
            " root mean square, its authors' is 0.01"
        ),
    )
    weight_decay: NonNegativeFloat = Field(
        0.1, description="decoupled, but added to the gradient for sgd; on matrices only"
    )
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95),
        strict=False,
        description="adamw, adamw8bit, muon's adamw: decay of the two moments",
    )
    eps: PositiveFloat = Field(1e-8, description="as betas: added to the root of the second moment")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.9, description="sgd; muon, whose default is 0.95"
    )
    clip: NonNegativeFloat = Field(
        1.0, description="largest norm of the whole gradient; 0: not clipped"
    )
    groups: tuple[ParamGroup, ...] = Field(
        (),
        strict=False,
        description="parameters, by name, that are trained otherwise or not at all",
    )

    @model_validator(mode="before")
    @classmethod
    def _momentum_of_muon(cls, values: Any) -> Any:
        """The default that its authors have."""
        if isinstance(values, dict) and str(values.get("name")).lower() == "muon":
            return {"momentum": 0.95, **values}
        return values

    @model_validator(mode="after")
    def _groups_of_muon(self) -> "Optimizer":
        for group in self.groups:
            if group.optimizer is not None and self.name != "muon":
                raise ValueError(
                    f"groups: {group.match!r} has optimizer {group.optimizer}, which is for"
                    f" optimizer.name muon, not {self.name}: leave it out"
                )
        return self

    @property
    def rules(self) -> ParamRules:
        return ParamRules(self.groups, self.weight_decay)


class ScheduleFields(Section):
    """The learning rate over the run."""

    warmup: Duration = Field(0, description="steps or epochs from 0 to the peak")
    decay: Decay = Field(
        "cosine", description="wsd: constant, then linear over the last `cooldown`"
    )
    final: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1, description="share of the peak left at the end"
    )
    cooldown: Annotated[float, Field(ge=0, le=1)] = Field(
        0.2, description="wsd: share of the steps after warm-up in which it decays"
    )
    scale_lr: Literal["none", "linear", "sqrt"] = Field(
        "none", description="scale lr by batch / base_batch"
    )
    base_batch: PositiveInt | None = Field(
        None,
        description=(
            "the batch that lr was found for; with per_device: one device's share of a step if not"
            " given"
        ),
    )


class EarlyStop(Section):
    """Ends a run whose evaluations get no better."""

    metric: str = Field("loss", description="of the evaluation; loss, or one that the task gives")
    mode: Literal["min", "max"] | None = Field(
        None, description="whether less or more of it is better; of loss: min"
    )
    patience: PositiveInt = Field(5, description="evaluations in a row without a better one")
    min_delta: NonNegativeFloat = Field(0.0, description="by how much better it must be to count")

    @model_validator(mode="after")
    def _mode_is_known(self) -> "EarlyStop":
        _check_mode("metric", "mode", self.metric, self.mode)
        return self

    @property
    def goal(self) -> MetricGoal:
        return MetricGoal(self.metric, self.mode or "min")


def _check_mode(metric_key: str, mode_key: str, metric: str, mode: str | None) -> None:
    """ValueError: nothing says which way the metric gets better."""
    if mode is None and metric != "loss":
        raise ValueError(
            f"{metric_key} {metric} needs {mode_key}: max if more of it is better (accuracy, f1),"
            " min if less"
        )


class Train(Section):
    """How long, how exactly, and what is written when. 0: never (a run always saves at its end)."""

    steps: Duration = Field(1000, description="optimizer steps, or epochs (2ep)")
    precision: Precision = Field(
        "f32", description="bf16, f16: products in two bytes, weights in f32; f16 scales its loss"
    )
    amp: bool = Field(
        False,
        description=(
            "with precision f32 and engine torch: on GPUs bf16 instead, or f16 where one has no"
            " bf16; on CPUs f32 (--no-amp: everywhere)"
        ),
    )
    seed: NonNegativeInt = Field(0, description="of initial values and of the data order")
    log_every: PositiveInt = Field(
        10, description="steps between console lines; the journal has every step"
    )
    eval_every: Duration = Field(
        0, description="steps or epochs between evaluations; one more at the end"
    )
    save_every: Duration = Field(
        0, description="steps or epochs between checkpoints; one more at the end"
    )
    sample_every: Duration = Field(
        0,
        description="steps or epochs between samples of what the model makes; one more at the end",
    )
    keep: NonNegativeInt = Field(
        3,
        description=(
            "newest checkpoints kept, beside the best; 0: all. An evaluation that improves on all"
            " before is saved too, where save_every is given"
        ),
    )
    best_metric: str = Field(
        "loss",
        description=(
            "of the evaluation: by it one checkpoint is the best; loss, or one that the task gives"
        ),
    )
    best_mode: Literal["min", "max"] | None = Field(
        None, description="whether less or more of best_metric is better; of loss: min"
    )
    early_stop: EarlyStop | None = Field(
        None,
        description=(
            "metric, mode, patience, min_delta: end the run once evaluations get no better, at the"
            " same step on any devices"
        ),
    )
    ema: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description=(
            "decay of a moving average of the weights (0.999), which is what is evaluated, sampled"
            " and exported; 0: none"
        ),
    )
    recompute: Recompute = Field(
        "none",
        description=(
            "block: keep only each block's input and run it again in backward; selective: keep"
            " attention and every second matrix product (engine jax: each), run the rest again;"
            " same results, less memory"
        ),
    )
    norm_sync: bool = Field(
        False, description="BatchNorm over the whole step's samples, on whatever devices they are"
    )
    allow_coupled: bool = Field(
        False,
        description=(
            "train what mixes the samples of a batch, does not add up over samples or draws"
            " numbers that follow no sample, although results then depend on the devices"
        ),
    )
    compile: bool = Field(
        False,
        description=(
            "engine torch: torch.compile of each repeated block; faster steps, slower first ones;"
            " same results up to rounding"
        ),
    )
    float8: bool = Field(
        False,
        description=(
            "with precision bf16, on GPUs that have it: products of the blocks' linear layers in"
            " eight bits (torchao); changes results"
        ),
    )
    exact: bool = Field(
        False,
        description=(
            "the same bits on any number of devices: each microbatch's gradient by itself, all"
            " added along one tree; single, dp, ddp"
        ),
    )
    hash_every: NonNegativeInt = Field(
        100,
        description=(
            "exact: steps between hashes of parameters and optimizer state in the journal; one more"
            " at the end"
        ),
    )
    non_finite: Literal["stop", "skip"] = Field(
        "stop",
        description=(
            "a gradient that is not finite: stop, or skip the step on every rank and count it"
        ),
    )

    @model_validator(mode="after")
    def _best_mode_is_known(self) -> "Train":
        _check_mode("best_metric", "best_mode", self.best_metric, self.best_mode)
        return self

    @property
    def goal(self) -> MetricGoal:
        """By which a checkpoint is the best."""
        return MetricGoal(self.best_metric, self.best_mode or "min")


def _in_lower_case(value: object) -> object:
    """`ALL`, `CPU:2`."""
    return value.lower() if isinstance(value, str) else value


class Devices(Section):
    """Where it runs."""

    use: Annotated[str, BeforeValidator(_in_lower_case)] = Field(
        "auto", description="auto, all, cpu, cpu:4, or indices: 0,1"
    )
    strategy: StrategyChoice = Field(
        "auto",
        description=(
            "dp: one process for all devices; ddp: a process a device; fsdp: the model sharded;"
            " hsdp: sharded in groups, replicated across them. jax has single, dp, fsdp"
        ),
    )
    shards: PositiveInt | None = Field(
        None,
        description=(
            "hsdp: devices that share one copy of the model; the largest proper divisor of their"
            " number if not given"
        ),
    )
    reshard: bool = Field(
        True,
        description=(
            "fsdp, hsdp with engine torch: let go of a block's gathered weights after its forward"
            " pass (less memory), or keep them until backward (less traffic)"
        ),
    )
    offload: bool = Field(
        False, description="fsdp, hsdp: weights, gradients and optimizer in host memory"
    )
    compress: Compress = Field(
        "none", description="ddp: what gradients are reduced as; changes results"
    )
    balance: Balance = Field(
        "even",
        description=(
            "dp, ddp with engine torch: as many microbatches for each device, or by its measured"
            " speed, or by relative speeds given here; same results"
        ),
    )
    memory: Size | None = Field(
        None,
        description=(
            "bytes of each device to plan with at most (40GiB), where not all of it is this run's"
        ),
    )
    threads: Annotated[int, Field(gt=0, le=MOST_PROCESSES)] | None = Field(
        None,
        description=(
            "engine torch on CPU ranks: threads of each; the cores shared out if not given, 1 with"
            " train.exact"
        ),
    )
    sync: Literal["auto", "cpu", "gloo", "nccl"] = Field(
        "auto", description="cpu (gloo): gradients through host memory; nccl: between GPUs"
    )
    preflight: Seconds = Field(
        60,
        description=(
            "seconds in which a first collective over all devices must end, before anything is"
            " trained; 0: not tried"
        ),
    )
    max_restarts: NonNegativeInt = Field(
        0,
        description=(
            "how often the ranks are started again, from the last save, after a failure that"
            " another start may end"
        ),
    )
    hang_floor: Seconds = Field(
        60,
        description=(
            "seconds of silence of a rank that are never taken for a hang; 0: ranks are not watched"
        ),
    )
    launcher: Literal["direct", "elastic", "spawn"] = Field(
        "direct",
        description=(
            "what starts the ranks: this program, torch's elastic agent, or torch.multiprocessing;"
            " same results, direct starts soonest"
        ),
    )
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        0, description="of the rendezvous; 0: any free one"
    )


def _off(value: object) -> object:
    """`wandb: off` is what YAML calls a no."""
    return "off" if value is False else value


class Track(Section):
    """What is read beside the losses, and who else is told of them. Changes no result."""

    sensors_every: Seconds = Field(
        5,
        description=(
            "seconds between readings of utilisation, memory, power and temperature of each device;"
            " 0: never"
        ),
    )
    tensorboard: bool = Field(
        False,
        description=(
            "also for TensorBoard, in logs/tensorboard of the run (the extra `tensorboard`)"
        ),
    )
    wandb: Annotated[Literal["off", "offline", "online"], BeforeValidator(_off)] = Field(
        "off",
        description=(
            "also for W&B, in logs/wandb of the run and, online, at its server (the extra `wandb`)"
        ),
    )
    wandb_project: str = Field("samecurve", description="the project at W&B")


class DataSection(Section):
    """What every task's data section has. Fields named in `indifferent` change no sample."""

    indifferent: ClassVar[tuple[str, ...]] = ("prefetch", "workers")
    prefetch: Annotated[int, Field(ge=0, le=10_000)] = Field(
        2, description="steps prepared ahead by a background thread; same batches as 0"
    )
    workers: Annotated[int, Field(ge=0, le=MOST_PROCESSES)] = Field(
        0,
        description=(
            "processes for each device that read samples, where decoding them takes long; same"
            " batches as 0"
        ),
    )


class Config(Section):
    """The whole config. `model` and `data` are the task's own fields."""

    task: str
    engine: Literal["torch", "jax"] = Field(
        "torch", description="same results; jax: one process drives all of a host's devices"
    )
    model: SerializeAsAny[Section]
    data: SerializeAsAny[DataSection]
    batch: Batch
    optimizer: Optimizer = Optimizer()
    schedule: ScheduleFields = ScheduleFields()
    train: Train = Train()
    devices: Devices = Devices()
    track: Track = Track()

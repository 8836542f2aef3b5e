"""The section `train`: how long, with which bits, what is written when, and what ends it early."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt, model_validator

from samecurve.core.config import (
    Duration,
    DurationOrMinutes,
    MetricGoal,
    Precision,
    Section,
)


def check_mode(metric_key: str, mode_key: str, metric: str, mode: str | None) -> None:
    """ValueError: nothing says which way the metric gets better."""
    if mode is None and metric != "loss":
        raise ValueError(
            f"{metric_key} {metric} needs {mode_key}: max if more of it is better (accuracy, f1),"
            " min if less"
        )


# keys that decide no curve, or that a resume compares in another way (keeps_bits_of())
NOT_COMPARED = {"save_every", "exact"}
EXACT_DEVICES = (8, 4, 2)  # the first that costs little is what train.exact: auto takes


class Train(Section):
    """How long, with which bits, what is written when. 0: never (a run always saves at its end)."""

    steps: Duration = 1000
    """optimizer steps, or epochs (2ep)"""
    precision: Precision = "f32"
    """bf16, f16: products in two bytes, weights in f32; f16 scales its loss"""
    amp: bool = False
    """with precision f32 and engine torch: on GPUs bf16 instead, or f16 where one has no bf16; on
    CPUs f32 (--no-amp: everywhere)"""
    seed: NonNegativeInt = 0
    """of initial values and of the data order"""
    log_every: PositiveInt = 10
    """steps between console lines; the journal has every step"""
    eval_every: Duration = 0
    """steps or epochs between evaluations; one more at the end"""
    save_every: DurationOrMinutes = "10min"
    """steps, epochs or minutes (10min) between checkpoints; one more at the end. By minutes it
    saves more rarely where a save takes longer than 1 % of them"""
    sample_every: Duration = 0
    """steps or epochs between samples of what the model makes; one more at the end"""
    keep: NonNegativeInt = 3
    """newest checkpoints kept, beside the best; 0: all. An evaluation that improves on all before
    is saved too, where save_every is in steps or epochs"""
    best_metric: str = "loss"
    """of the evaluation: by it one checkpoint is the best; loss, or one that the task gives"""
    best_mode: Literal["min", "max"] | None = None
    """whether less or more of best_metric is better; of loss: min"""
    allow_coupled: bool = False
    """train what mixes the samples of a batch, does not add up over samples or draws numbers that
    follow no sample, although results then depend on the devices"""
    exact: Literal["auto", True, False] = "auto"
    """the same bits on any number of devices: each microbatch's gradient by itself, all added along
    one tree. auto: on CPU ranks, where nothing stands in its way and a microbatch is enough work;
    the plan says so, and a run keeps what it began with"""
    exact_devices: PositiveInt | None = None
    """exact: how many devices can share a step: it is cut into as many microbatches, where
    batch.per_device does not give their size. If not given: 8; with exact auto the most of 8, 4 and
    2 whose microbatches are enough work"""
    hash_every: NonNegativeInt = 100
    """exact: steps between hashes of parameters and optimizer state in the journal; one more at the
    end"""
    non_finite: Literal["stop", "skip"] = "stop"
    """a gradient that is not finite: stop, or skip the step on every rank and count it"""

    @model_validator(mode="after")
    def _best_mode_is_known(self) -> "Train":
        check_mode("best_metric", "best_mode", self.best_metric, self.best_mode)
        return self

    @property
    def asks_same_bits(self) -> bool:
        """Whether a run is to have the same bits on any devices; where a plan chooses: no."""
        return self.exact is True

    @property
    def plan_chooses_bits(self) -> bool:
        """Whether a run's first plan chooses if it has the same bits on any devices."""
        return not isinstance(self.exact, bool)

    @property
    def may_have_same_bits(self) -> bool:
        return self.exact is not False

    def keeps_bits_of(self, before: "Train") -> bool:
        """Whether a run that began with `before` may go on with this. Runs that are older than
        `auto` had false by default.
        """
        if self.plan_chooses_bits:
            return not before.asks_same_bits
        return self.exact == before.exact

    @property
    def goal(self) -> MetricGoal:
        """The metric by which a checkpoint is the best."""
        return MetricGoal(self.best_metric, self.best_mode or "min")

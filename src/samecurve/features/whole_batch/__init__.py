"""A loss over the whole batch: batch_loss() of the features of all samples of a step.

batch_loss_step.py and jax_engine/batch_loss.py compute it.
"""

from dataclasses import dataclass

from samecurve.core.config import Section
from samecurve.core.config.sections import Config as Config
from samecurve.core.feature import Feature, Planned
from samecurve.core.planning import Decision
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.memory import BatchSizes, MemoryOptions, MemoryTerm
from samecurve.units import counted


@dataclass(frozen=True)
class WholeBatchFacts:
    """The loss of the task."""

    whole_batch: bool = False  # whether it is one of the whole batch's features
    feature_bytes: int | None = None  # of one sample's features; None: not known, or no such loss


class WholeBatch(Feature[Section, bool]):
    """The feature. A task brings it."""

    order = 400
    facts = WholeBatchFacts
    members = {
        "features": (
            "features(self, model, batch[, step][, epoch][, phase]) -> {name: tensor with one row"
            " a sample}: with batch_loss() in place of loss(); all that a loss over the whole batch"
            " looks at, labels too"
        ),
        "batch_loss": (
            "batch_loss(self, features[, step][, epoch][, phase]) -> samecurve.Mean: the loss of"
            " the whole batch, whose features of all devices are in the samples' order; or, as"
            " loss() may, with others by name"
        ),
    }
    value = bool
    plan_off = False
    is_in_each_plan = True
    banner = {"loss": "loss "}
    sees_whole_batch = True
    goes_twice = "batch_loss() would compute the features of each microbatch twice"
    hooks = ("torch",)

    def decide(self, planned: Planned) -> Decision[bool | None]:
        split = planned.split
        batch, rounds = counted(split.global_batch_size, "sample"), split.accumulation_steps
        cost = "one round, so each sample is computed once"
        if rounds > 1:
            cost = (
                f"{rounds} rounds: each sample goes forward twice, once for its features and once"
                " for its gradient, about a third more time"
            )
        reason = f"batch_loss(), over the features of all {batch} on every device; {cost}"
        return Decision(True, {"loss": reason})

    def memory_of_step(
        self, options: MemoryOptions, facts: Facts, sizes: BatchSizes, _shards: int
    ) -> MemoryTerm | None:
        """The features of the batch; None: their size is not known."""
        each, samples = self.facts_of(facts).feature_bytes, sizes.global_batch_size
        if not each:
            return None
        each *= 2 if options.precision == "f64" else 1
        formula = (
            f"3 x {samples} samples x {each} B: of the whole batch, as sent, and their"
            " gradients; without what batch_loss() computes of them"
        )
        return MemoryTerm("features", 3 * samples * each, formula)


FEATURE = WholeBatch()

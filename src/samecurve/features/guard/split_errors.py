"""The split check's errors: why a loss does not add up over samples, and what its author can do.

Each function turns a finding (split_check) and the evidence about it into a cause, a remedy and a
line of the user's code. Where the evidence supports several causes, the most specific one is told.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from samecurve.core.determinism import RETURN_MEAN
from samecurve.errors import UserError
from samecurve.features.guard.additivity import (
    Finding,
    Trial,
    number_text,
    relative_difference,
    samples_text,
)

ALLOW = "--set train.allow_coupled=true trains it all the same"
_WHOLE_BATCH = (
    "features(self, model, batch) -> {name: one row a sample} and batch_loss(self, features) in"
    " place of loss: taken over the whole batch, on whatever devices it is"
)
_SAMPLE_KEYED = (
    "samecurve.rng(batch) in the loss, whose numbers follow the sample; or draw them in the data,"
    " from np.random.default_rng((seed, id))"
)
_VIEWS = (
    "where a forward pass takes several views of each sample and draws random numbers: the views of"
    " a sample side by side, torch.stack([view_1, view_2], 1).flatten(0, 1), whose results"
    " .unflatten(0, (-1, 2)) takes apart; else "
)
# functions of torch that return a mean by default, beside those whose names end in "_loss"
_LOSSES = frozenset({
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cross_entropy",
    "kl_div",
})  # fmt: skip
_DIVISIONS = frozenset({"div", "__truediv__", "true_divide", "div_", "mean"})


class Place(NamedTuple):
    """A call of torch in the forward pass, or a function of the user's that backward calls.

    function: the function's name as people write it: F.cross_entropy, Tensor.mean; of the user's
        GradScaled.backward, "a hook of head.weight"
    where: file:line, in the user's code where possible
    how: what the call does to the samples. "reduced": its result is one number or table for all
        samples, which does not add up; "pairs": it compares each sample with each other; "rows": a
        sample's row of the result depends on the other samples; "added": it adds a term that does
        not depend on the samples; "": not known
    is_number: whether the result is a single number
    """

    function: str
    where: str
    how: Literal["reduced", "pairs", "rows", "added", ""] = ""
    is_number: bool = False


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything that is known about a loss that does not add up.

    ids: the ids of the samples that were tried
    singles: the loss of each of the first samples alone
    pairs: the loss of two samples together, by their positions in singles
    place: the call of torch that is most likely the cause
    draws: calls that drew random numbers which do not follow the samples
    backward: the user's function that takes part in the backward pass
    state: what the forward pass changes and depends on, in words, as "attribute net.steps"
    state_at: file:line that changes it
    loss_at: file:line at which the user's loss begins
    what: the subject of the error's sentence
    has_views: whether numbers were drawn for several rows of each sample
    """

    ids: Sequence[int] = ()
    singles: Sequence[Trial] = ()
    pairs: Mapping[tuple[int, int], Trial] = field(default_factory=dict)
    place: Place | None = None
    draws: Sequence[Place] = ()
    backward: Place | None = None
    state: str = ""
    state_at: str = ""
    loss_at: str = ""
    what: str = "the loss"
    has_views: bool = False


def explain(finding: Finding, evidence: Evidence, *, rounded: float) -> UserError:
    """The error for a finding.

    rounded: the relative difference that rounding can cause
    """
    if finding.kind == "repeat":
        return _explain_repeat(finding, evidence)
    if finding.kind == "gradient":
        return _explain_gradient(finding, evidence)
    where = evidence.place.where if evidence.place else evidence.loss_at
    if finding.kind in {"weight", "unweighted"}:
        remedy = (
            "weight is how much was counted, and grows with the samples: len(x) samples,"
            " (labels != -100).sum() tokens; sum is the loss added over the same. A sample with"
            " nothing to count has weight 0: no .clamp(min=1), no max(n, 1)"
        )
        return UserError(
            f"{evidence.what} {finding.text}", f"return Mean(sum, weight): {remedy}", where
        )
    if finding.kind == "mean":
        by = f". {evidence.place.function} takes it" if evidence.place else ""
        return UserError(f"{evidence.what} {finding.text}{by}", RETURN_MEAN, where)
    once = _counted_once(evidence, rounded)
    if finding.kind == "coupled" and once is not None:
        return _explain_once(once, evidence, where)
    return _explain_coupled(finding, evidence, where, rounded)


def _explain_gradient(finding: Finding, evidence: Evidence) -> UserError:
    cause, by = f"{evidence.what} {finding.text}", evidence.backward or evidence.place
    if evidence.backward:
        cause = f"{evidence.backward.function} takes part in the backward pass: {cause}"
    elif evidence.place:
        cause = f"{evidence.place.function} lets samples see each other: {cause}"
    return UserError(
        cause,
        "a backward pass that treats each sample by itself, and is linear in the gradient that it"
        " is given: one that divides by the number of samples, by a norm or by a largest value of"
        " the microbatch is not, nor is .detach() of a statistic over it. Clipping whole gradients"
        f" is optimizer.clip; for a loss over the batch: {_WHOLE_BATCH}; {ALLOW}",
        by.where if by else evidence.loss_at,
    )


def _explain_repeat(finding: Finding, evidence: Evidence) -> UserError:
    if evidence.draws:
        return explain_draws(evidence.draws, f"{evidence.what} {finding.text}")
    if evidence.state:
        return explain_state(evidence, f"{evidence.what} {finding.text}")
    return UserError(
        f"{evidence.what} {finding.text}, and neither a generator of torch, numpy or Python nor an"
        " attribute of the model or the task has changed between the two",
        "take out what else the loss depends on: a variable of a module, a class or a function, a"
        " clock, a file, a cache",
        evidence.loss_at or "task",
    )


def explain_draws(draws: Sequence[Place], cause: str = "") -> UserError:
    """The error for random numbers that do not follow the samples.

    draws: at least one
    cause: what was observed; '': nothing but the draws
    """
    first = draws[0]
    more = f" (and {len(draws) - 1} more such calls)" if len(draws) > 1 else ""
    observed = cause or "the loss depends on random numbers"
    return UserError(
        f"{observed}: {first.function} draws numbers that follow no sample{more}, so each device"
        " and each microbatch would draw others",
        _SAMPLE_KEYED,
        first.where,
    )


def explain_state(evidence: Evidence, cause: str) -> UserError:
    """The error for a loss that depends on how many microbatches were computed before it."""
    return UserError(
        f"{cause}: {evidence.state} is changed in each forward pass and the loss depends on it, so"
        " it depends on how many microbatches a device has computed",
        "def loss(self, model, batch, step) is given the step, the same on every device; what is"
        " learnt from samples belongs in parameters, or changes in after_step(self, model, step)",
        evidence.state_at or evidence.loss_at,
    )


Deed = Literal["buffer", "late", "written", "thawed", "made", "moved", "kept", "hook", "rank"]
# what a loss does beside computing: the cause, with names, and the remedy
_DEEDS: Mapping[Deed, tuple[str, str]] = {
    "buffer": (
        "the forward pass changes buffer {name} by the samples that it sees, so its value depends"
        " on how a batch is split over devices and microbatches",
        "what follows from the weights: change the buffer in after_step(self, model, step), not in"
        " forward. A running mean over the batch (DINO's centre, a codebook): a parameter with a"
        " phase of its own, whose loss is 0.5 * (mean - target).square().sum()"
        " (docs/task-recipes.md). A queue of earlier batches (MoCo): a parameter with a phase"
        " that replaces its oldest rows (docs/task-recipes.md, examples/moco.py)."
        " Statistics of a norm: GroupNorm or LayerNorm, or nn.BatchNorm"
        f" with train.norm_sync; {ALLOW}",
    ),
    "late": (
        "the forward pass changes buffer {name} in this step, and did not in the first one: in each"
        " forward pass, of which a step has several, and on each device by itself",
        "change the buffer in after_step(self, model, step); what is only computed once (a mask),"
        " in model() or in the first step",
    ),
    "written": (
        "the loss changes {name} while it is computed, so each device and each"
        " microbatch changes its own, and under fsdp the change is lost",
        "after_step(self, model, step) for what follows an update (weight clipping, pruning, a"
        " teacher's average: docs/task-members.md). nn.Embedding(max_norm=m): no max_norm,"
        " and embedding.weight.renorm_(2, 0, m) in after_step",
    ),
    "thawed": (
        "the loss thaws the weight {name}, which was frozen when the run began: it has no"
        " optimizer, so it would never be trained",
        "leave it trainable in model(), and in the loss freeze it until its step:"
        " parameter.requires_grad_(step >= first); or two runs, the second with --init-from",
    ),
    "made": (
        "the first forward pass makes the weight {name}: it has no optimizer, so it would never be"
        " trained",
        "make its layer in model(), or in the __init__() of its module",
    ),
    "moved": (
        "the loss takes the next item of {name} in each call, so it depends on how many"
        " microbatches a device has computed, and no checkpoint holds how far the iterator is",
        "def loss(self, model, batch, step) is given the step: compute the item from it, as in"
        " weights[step % len(weights)]",
    ),
    "kept": (  # an attribute that something else reads
        "{reader} depends on {name}, which holds something of the last microbatch that a"
        " device has computed: of other samples on another number of devices",
        "use what follows from the weights and the step; for a statistic of the whole batch,"
        " features(self, model, batch) and batch_loss(self, features), which see all of it",
    ),
    "hook": (  # on a parameter's accumulated gradient
        "{name} is called after each backward pass, on the gradient that one device has summed so"
        " far",
        "parameter.register_hook for what is linear in each microbatch's gradient (a mask, a"
        " factor); clipping of whole gradients is optimizer.clip; what changes weights belongs"
        " into the optimizer or after_step(self, model, step)",
    ),
    "rank": (  # another loss on another rank
        "{name}",
        "the loss may depend on the weights, the sample and the step alone. Look for what it reads"
        " beside them: the rank, a clock, a file, a global, a closure, a cache, and what an earlier"
        " microbatch has left in them. If there is none, a device may compute wrong:"
        " --set train.sentinel=50 finds it (docs/guarantees.md)",
    ),
}


def explain_deed(deed: Deed, where: str, **names: str) -> UserError:
    """The error for what a loss may not do.

    where: file:line at which the loss does it, or begins. names: those in the words above
    """
    cause, remedy = _DEEDS[deed]
    return UserError(cause.format(**names), remedy, where)


def explain_sharded(strategy: str, finding: Finding) -> UserError:
    """The error for a model that computes something else under a strategy than on one device."""
    what = (
        f"its gradient: under {strategy}, and on one device, it"
        if finding.kind == "gradient"
        else (f"the loss: on one device, and under {strategy}, it")
    )
    return UserError(
        f"the model computes something else under {strategy} than on one device, {what}"
        f" {finding.text}",
        "--strategy ddp; or take out of the model's code what asks how it is trained"
        " (torch.distributed.is_initialized, the type of a parameter)",
        "model",
    )


def explain_failure(whole: Trial, failed: UserError) -> UserError:
    """The error for a loss that can be computed for all samples, but not for some of them."""
    return UserError(
        f"the loss can be computed for {samples_text(whole.samples)} at once, but not for fewer of"
        f" them: {failed.cause}",
        "a loss that takes any number of samples: devices and microbatches divide a batch, and the"
        f" last one of an epoch may be short; {ALLOW}",
        failed.where,
    )


def _counted_once(evidence: Evidence, rounded: float) -> float | None:
    """The number that each microbatch adds once, whatever its samples; None: there is none."""
    excess = {
        pair: sum(evidence.singles[number].sum for number in pair) - trial.sum
        for pair, trial in evidence.pairs.items()
    }
    if len(excess) < 3:
        return None
    first, *others = excess.values()
    scale = max(abs(trial.sum) for trial in [*evidence.singles, *evidence.pairs.values()])
    close = max(1e-3 * abs(first), 4 * rounded * scale)
    if abs(first) > 8 * rounded * scale and all(abs(other - first) <= close for other in others):
        return first
    return None


def _explain_once(once: float, evidence: Evidence, where: str) -> UserError:
    at = f" ({evidence.place.function})" if evidence.place else ""
    return UserError(
        f"{evidence.what} counts {number_text(once)} once for each microbatch, however many samples"
        f" the microbatch has{at}: with n microbatches it counts n times",
        "what does not depend on the samples (a penalty on the weights) times the microbatch's"
        " weight: Mean(total + penalty * len(x), len(x)); divided by the whole weight it counts"
        " once",
        where,
    )


def _explain_coupled(finding: Finding, evidence: Evidence, where: str, rounded: float) -> UserError:
    """The error for samples that see each other, with the call that lets them first."""
    pair = _who_sees_whom(evidence, rounded)
    cause = f"{evidence.what} {finding.text}{pair}"
    place = evidence.place
    if place is None or not place.how:
        by = f"{place.function}: " if place else ""
        views = _VIEWS if evidence.has_views else ""
        remedy = f"{views}a loss that is a sum over samples; or {_WHOLE_BATCH}; {ALLOW}"
        return UserError(f"{by}{cause}", remedy, where)
    name = place.function.rpartition(".")[2]
    divides = name.endswith("_loss") or name in _LOSSES | _DIVISIONS
    if place.how == "reduced" and place.is_number and divides:
        return UserError(
            f"{place.function} divides within the microbatch: {cause}",
            f"leave the division to the program: {RETURN_MEAN}",
            where,
        )
    what, remedy = _WORDS[place.how]
    if evidence.has_views:
        remedy = f"{_VIEWS}{remedy}"
    return UserError(f"{place.function} {what}: {cause}", f"{remedy}; {ALLOW}", where)


_WORDS = {
    "reduced": (
        "takes a statistic over the samples of the microbatch",
        "for a norm: one that treats each sample by itself (GroupNorm, LayerNorm), or"
        f" nn.BatchNorm with train.norm_sync; for a loss over the batch (balance, contrast):"
        f" {_WHOLE_BATCH}",
    ),
    "pairs": ("compares each sample with each other of the microbatch", _WHOLE_BATCH),
    "rows": (
        "makes the numbers of a sample depend on the other samples",
        "let each sample's row follow from its own (a softmax or a norm over the batch's dimension,"
        " a permutation of the batch and dimensions in another order don't); for a loss over the"
        f" batch: {_WHOLE_BATCH}",
    ),
    "added": (
        "adds what does not depend on the samples",
        "times the microbatch's weight: Mean(total + penalty * len(x), len(x))",
    ),
}


def _who_sees_whom(evidence: Evidence, rounded: float) -> str:
    """A sentence about the two samples that change each other most; '': there is none."""
    largest, sentence = 4 * rounded, ""
    for (i, j), trial in evidence.pairs.items():
        alone = [evidence.singles[i].sum, evidence.singles[j].sum]
        off = relative_difference([trial.sum], alone)
        if off > largest:
            largest = off
            sentence = (
                f". Samples {evidence.ids[i]} and {evidence.ids[j]} see each other: alone they give"
                f" {number_text(alone[0])} and {number_text(alone[1])}, together"
                f" {number_text(trial.sum)}"
            )
    return sentence

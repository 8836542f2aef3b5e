"""Which kernel computes attention under engine jax: cuDNN's fused one, or one that keeps scores."""

from dataclasses import dataclass

from samecurve.core.config import Section
from samecurve.core.feature import Feature, Planned
from samecurve.core.planning import Decision
from samecurve.core.planning.compute import Compute
from samecurve.core.planning.layout import Layout
from samecurve.errors import SAME_BITS

# of cuDNN's kernel, as jax checks them
_LARGEST_HEAD, _HEADS_OF = 128, 8
_LEAST_CAPABILITY = 8  # of the GPU
_NARROW = ("bf16", "f16")


@dataclass(frozen=True)
class AttentionFacts:
    """The attention of the model."""

    # numbers of a head that engine jax may fuse into one kernel; None: there is none
    attention_head: int | None = None


class FusedAttention(Feature[Section, bool]):
    """The feature. A model brings it that has attention of ours."""

    facts = AttentionFacts
    value = bool
    plan_off = False
    is_in_each_plan = True
    hooks = ("jax",)

    def decide(self, planned: Planned) -> Decision[bool | None]:
        layout, compute = planned.layout, planned.compute
        if layout.engine != "jax":
            return Decision(None)
        head = self.facts_of(planned.facts).attention_head
        lacking = _lacking(head, layout, compute)
        if lacking:
            reason = f"keeps its scores for the backward pass: {lacking}"
            return Decision(None, {"attention": reason})
        reason = (
            f"cuDNN's fused kernel ({compute.precision}, heads of {head}); memory is planned as"
            " if scores were kept. --dtype f32 leaves the kernel out"
        )
        return Decision(True, {"attention": reason})


def _lacking(head: int, layout: Layout, compute: Compute) -> str:
    """What the fused kernel needs and does not get; '': nothing."""
    needs = "cuDNN's fused kernel is for"
    if any(device.kind != "cuda" for device in layout.devices):
        return f"{needs} NVIDIA GPUs"
    old = [device for device in layout.devices if _is_old(device.capability)]
    if old:
        return f"{needs} GPUs from compute capability {_LEAST_CAPABILITY}.0 on, not {old[0].name}"
    if compute.precision not in _NARROW:
        return f"{needs} bf16 and f16, not {compute.precision}"
    if compute.deterministic:
        return f"{SAME_BITS} keeps to kernels whose bits were compared"
    if head > _LARGEST_HEAD or head % _HEADS_OF:
        return f"{needs} heads of a multiple of {_HEADS_OF} up to {_LARGEST_HEAD}, not {head}"
    return ""


def _is_old(capability: str) -> bool:
    major = capability.partition(".")[0]
    return major.isdecimal() and int(major) < _LEAST_CAPABILITY


FEATURE = FusedAttention()

"""Bytes that one device holds while training, term by term, each with its formula.

Source of the model-state terms: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 3.1. Activations: the task's own
count of what its backward pass keeps (Facts.bytes_per_sample), scaled by the width of the compute type.
"""

from dataclasses import dataclass

from lockstep.core.config import Config, Precision
from lockstep.core.facts import Facts

# Under autocast matrix inputs are kept in 2 bytes, norms and the residual stream in 4: between 0.5 and 1 of f32, taken at 0.75.
_ACTIVATION_SHARE: dict[Precision, float] = {"f64": 2.0, "f32": 1.0, "bf16": 0.75, "f16": 0.75}
_RESERVED = {"cpu": 400 << 20, "cuda": 800 << 20}  # the process itself: libraries, context, allocator slack
USABLE = 0.9  # share of a device's memory that is planned with


@dataclass(frozen=True)
class Term:
    name: str
    bytes: int
    formula: str


def itemsize(precision: Precision) -> int:
    """Bytes of a weight: mixed precisions keep theirs in float32."""
    return 8 if precision == "f64" else 4


def state_terms(config: Config, facts: Facts, kind: str) -> list[Term]:
    """What is held whatever the micro-batch, with the whole model on each device (single, ddp)."""
    width = itemsize(config.train.precision)
    moments = 2 if config.optimizer.name == "adamw" else 1
    return [
        Term("weights", facts.params * width, f"{facts.params} x {width} B"),
        Term("gradients", facts.trainable * width, f"{facts.trainable} x {width} B"),
        Term("optimizer", facts.trainable * width * moments, f"{facts.trainable} x {width} B x {moments} ({config.optimizer.name})"),
        Term("process", _RESERVED[kind], "libraries and context"),
    ]


def sample_bytes(config: Config, facts: Facts) -> int | None:
    """Activations of one sample in flight."""
    if facts.bytes_per_sample is None:
        return None
    return max(1, int(facts.bytes_per_sample * _ACTIVATION_SHARE[config.train.precision]))


def activation_term(config: Config, facts: Facts, micro: int) -> Term | None:
    each = sample_bytes(config, facts)
    if each is None:
        return None
    return Term("activations", micro * each, f"{micro} samples x {each} B; {facts.formulas.get('bytes_per_sample', '')}".rstrip("; "))

"""Bytes that one device holds while training, term by term, each with its formula.

Source of the model-state terms: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 3.1.
Activations: the task's own count of what its backward pass keeps (Facts.bytes_per_sample), scaled
by the width of the compute type.
"""

from dataclasses import dataclass

from samecurve.core.config.sections import Config, Precision
from samecurve.core.planning.facts import Facts

# Under autocast matrix inputs are kept in 2 bytes, norms and the residual stream in 4: between 0.5
# and 1 of f32, taken at 0.75.
_ACTIVATION_SHARE: dict[Precision, float] = {"f64": 2.0, "f32": 1.0, "bf16": 0.75, "f16": 0.75}
_RESERVED = {
    "cpu": 400 << 20,
    "cuda": 800 << 20,
}  # the process itself: libraries, context, allocator slack
USABLE = 0.9  # share of a device's memory that is planned with
_LOGITS = {
    "cpu": 1 << 22,
    "cuda": 1 << 26,
}  # numbers of a chunk of logits: few enough for a CPU's cache, enough to keep a GPU busy
_LOGIT_ROWS = (
    64,
    8192,
)  # of a chunk, at least and at most: a two-byte gradient summed over more might overflow


def logit_rows(vocab: int, kind: str) -> int:
    """Rows whose logits are held at once (torch_engine/layers/cross_entropy.py)."""
    least, most = _LOGIT_ROWS
    return min(most, max(least, _LOGITS[kind] // vocab))


@dataclass(frozen=True, kw_only=True)
class MemoryTerm:
    name: str
    bytes: int
    formula: str


def itemsize(precision: Precision) -> int:
    """Bytes of a weight: mixed precisions keep theirs in float32."""
    return 8 if precision == "f64" else 4


def num_optimizer_states(config: Config, facts: Facts) -> tuple[int, str]:
    """Arrays of its shape that the optimizer keeps for each parameter, and whose figure that is."""
    if not facts.user_optimizer:
        return (2 if config.optimizer.name == "adamw" else 1), config.optimizer.name
    return (
        facts.user_optimizer.num_states or 0,
        (
            facts.user_optimizer.name
            if facts.user_optimizer.num_states is not None
            else f"{facts.user_optimizer.name}: not known, so not counted"
        ),
    )


def state_terms(
    config: Config, facts: Facts, kind: str, shards: int, together: int = 1
) -> list[MemoryTerm]:
    """What is held whatever the micro-batch.

    together: devices of one process on a CPU, which share what that needs itself. shards: devices
    among which one copy of the model is shared out (1: each holds the whole).
    """
    width = itemsize(config.train.precision)
    moments, optimizer = num_optimizer_states(config, facts)
    over = f" / {shards} shards" if shards > 1 else ""
    held = [
        MemoryTerm(
            name="weights",
            bytes=-(-facts.params * width // shards),
            formula=f"{facts.params} x {width} B{over}",
        ),
        MemoryTerm(
            name="gradients",
            bytes=-(-facts.trainable * width // shards),
            formula=f"{facts.trainable} x {width} B{over}",
        ),
        MemoryTerm(
            name="optimizer",
            bytes=-(-facts.trainable * width * moments // shards),
            formula=f"{facts.trainable} x {width} B x {moments} ({optimizer}){over}",
        ),
    ]
    if config.devices.offload:
        held = [
            MemoryTerm(name=term.name, bytes=0, formula=f"{term.formula}: in host memory")
            for term in held
        ]
    scratch = (
        [
            MemoryTerm(
                name="scratch",
                bytes=facts.scratch[kind] * width,
                formula=facts.formulas.get(f"scratch.{kind}", ""),
            )
        ]
        if facts.scratch
        else []
    )
    return [
        *held,
        *(_gathered(config, facts, width) if shards > 1 else []),
        *scratch,
        MemoryTerm(
            name="process",
            bytes=_RESERVED[kind] // together,
            formula="libraries and context"
            + (f", shared by {together} devices" if together > 1 else ""),
        ),
    ]


def _gathered(config: Config, facts: Facts, width: int) -> list[MemoryTerm]:
    """What fsdp holds whole for a while.

    Blocks come and go one after the other, the next gathered ahead; what lies outside of them
    stays.
    """
    narrow = 2 if config.train.precision in {"bf16", "f16"} else width
    outside = max(
        0, facts.params - facts.blocks * facts.block_params
    )  # blocks may be unequal: block_params is the largest
    blocks = min(2, facts.blocks) if config.devices.reshard else facts.blocks
    if config.engine == "jax":  # gathered once a step, kept to the end of its last backward pass
        return [
            MemoryTerm(
                name="gathered",
                bytes=facts.params * width,
                formula=f"{facts.params} x {width} B, whole during a step",
            ),
            MemoryTerm(
                name="reduced",
                bytes=facts.trainable * width,
                formula=f"{facts.trainable} x {width} B, whole gradients",
            ),
        ]
    return [
        MemoryTerm(
            name="gathered",
            bytes=min(facts.params * width, outside * width + blocks * facts.block_params * narrow),
            formula=f"{outside} x {width} B outside of blocks + {blocks} blocks of {facts.block_params} x"
            f" {narrow} B",
        ),
        MemoryTerm(
            name="reduced",
            bytes=2 * max(outside, facts.block_params) * width,
            formula=f"2 x {max(outside, facts.block_params)} x {width} B: the largest group's gradients on"
            " their way",
        ),
    ]


def sample_bytes(config: Config, facts: Facts) -> int | None:
    """Activations of one sample in flight."""
    kept = facts.recompute_bytes.get(config.train.recompute, facts.bytes_per_sample)
    return None if kept is None else max(1, int(kept * _ACTIVATION_SHARE[config.train.precision]))


def activation_term(config: Config, facts: Facts, micro: int) -> MemoryTerm | None:
    each = sample_bytes(config, facts)
    if each is None:
        return None
    again = (
        f", recompute {config.train.recompute}"
        if config.train.recompute in facts.recompute_bytes
        else ""
    )
    return MemoryTerm(
        name="activations",
        bytes=micro * each,
        formula=f"{micro} samples x {each} B{again}; {facts.formulas.get('bytes_per_sample', '')}".rstrip(
            "; "
        ),
    )

"""optimizer.name adamw8bit: adamw whose moments are kept in eight bits a number.

In which blocks they are kept is decided here, for the plan and for the update.
"""

from math import gcd, prod

from samecurve.core.config import Precision
from samecurve.core.config.sections import Optimizer
from samecurve.core.optimizer_spec import OptimizerSpec
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.optimizer import (
    OptimizerState,
    arrays_counted,
    itemsize,
    trained_shapes,
)
from samecurve.errors import UserError

# numbers in a block: smaller ones would take more for scales than they save
_LARGEST_BLOCK, _SMALLEST_BLOCK = 256, 64
_LEAST_SIZE = 4096  # of an array: adamw8bit's authors leave smaller ones as they are


class AdamW8bit(OptimizerSpec):
    """What the plan says of adamw8bit."""

    instead_of_adamw = 1
    why_not_in_jax = "optax has none"
    why_f64 = (
        "its moments are quantized, and a rounding error may change a moment by a whole"
        " quantization step"
    )

    def state(self, _section: Optimizer, precision: Precision, facts: Facts) -> OptimizerState:
        """Two moments of a byte each, and a scale of 4 bytes for each block; arrays without blocks
        have adamw's moments.
        """
        width = itemsize(precision)
        quantized = scales = others = 0
        for shape in trained_shapes(facts).values():
            if block := block_size(shape):
                quantized += prod(shape)
                scales += prod(shape) // block
            else:
                others += prod(shape)
        return OptimizerState(
            optimizer="adamw8bit",
            cut_bytes=2 * (quantized + 4 * scales + others * width),
            formula=(
                f"2 x ({quantized} x 1 B + {scales} scales x 4 B + {others} of the rest x"
                f" {width} B) (adamw8bit)"
            ),
        )

    def reason(self, _section: Optimizer, facts: Facts) -> str:
        """The parameters whose moments are kept in eight bits. UserError: there are none."""
        shapes = trained_shapes(facts)
        names = [name for name, shape in shapes.items() if block_size(shape)]
        if not names:
            raise UserError(
                "optimizer adamw8bit: no parameter has rows of a multiple of 64 numbers and 4096"
                " numbers in all, so nothing would be kept in eight bits",
                "optimizer.name adamw, which is the same then, and faster",
                "optimizer.name",
            )
        return (
            f"adamw8bit keeps the moments of {arrays_counted(names, shapes)} in eight bits, in"
            " blocks within a row, so that no shard cuts one; those of the rest as adamw does"
        )


def block_size(shape: tuple[int, ...]) -> int | None:
    """Numbers of a block of an array's moments, each block with one scale.

    The largest power of two, up to 256, that divides a row (an index of the first dimension), so
    that blocks are the same however many shards a parameter is cut into. None: the array is kept as
    it is.
    """
    if len(shape) < 2 or prod(shape) < _LEAST_SIZE:
        return None
    block = gcd(prod(shape[1:]), _LARGEST_BLOCK)
    return block if block >= _SMALLEST_BLOCK else None


SPEC = AdamW8bit()

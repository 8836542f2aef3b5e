"""optimizer.name adafactor: of each matrix's second moments only the means of rows and columns."""

from collections.abc import Sequence
from math import prod

from samecurve.core.config import Precision
from samecurve.core.config.sections import Optimizer
from samecurve.core.optimizer_spec import OptimizerSpec
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.optimizer import OptimizerState, itemsize, trained_shapes


class Adafactor(OptimizerSpec):
    """What the plan says of adafactor."""

    instead_of_adamw = 2
    why_not_in_jax = (
        "optax's keeps means over the two largest dimensions, from 128 on, and adds its epsilon to"
        " the squares, so its curve would be another"
    )
    why_not_sharded = "adafactor adds up the squares of a column shard by shard"

    def state(self, _section: Optimizer, precision: Precision, facts: Facts) -> OptimizerState:
        width = itemsize(precision)
        rows = columns = whole = others = 0
        for shape in trained_shapes(facts).values():
            if len(shape) < 2:
                others += prod(shape)
                continue
            rows += prod(shape[:-1])
            columns += prod(shape[:-2]) * shape[-1]
            whole += shape[-1] if len(shape) == 2 else 0  # the mean over rows, which shards cut
        return OptimizerState(
            optimizer="adafactor",
            cut_bytes=(rows + columns + others - whole) * width,
            whole_bytes=whole * width,
            formula=(
                f"({rows} means of rows + {columns} of columns + {others} of vectors) x {width} B"
                " (adafactor)"
            ),
        )

    def reason(self, _section: Optimizer, _facts: Facts) -> str:
        return (
            "adafactor: lr is the most that a step moves a parameter by, relative to its own root"
            " mean square; 1 / sqrt(step) where that is less; means are those of whole matrices"
        )

    def warnings(self, section: Optimizer) -> Sequence[str]:
        if "lr" in section.model_fields_set:
            return ()
        return [
            f"optimizer.lr {section.lr:g} is adamw's default; adafactor's authors take 0.01:"
            " --lr 0.01"
        ]


SPEC = Adafactor()

"""OptimizerSpec, the base class of an optimizer of the config beside adamw and sgd.

An optimizer is one package in `features/optimizers/`, whose `__init__.py` has it as SPEC; the
package's name is the optimizer's. The package's `torch_optimizer.py` has the update, a class
`TorchOptimizer` (torch_engine/optimizers/__init__.py).
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

from samecurve.core.config import Precision
from samecurve.core.config.sections import Optimizer
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.optimizer import OptimizerState, state_of_arrays


class OptimizerSpec:
    """What the plan says of an optimizer. Each member has a default.

    num_states: arrays of a parameter's shape that are kept for it
    defaults: values of the config's section that differ from adamw's, where the config gives none
    takes_groups: whether it updates some parameters and adamw the others, so that a group of the
        config may choose between the two
    instead_of_adamw: place among the optimizers that a plan names where adamw's state is too large,
        the nearest to adamw first; 0: none
    newest_share_is_rest: whether `momentum_buffer` is a mean, in which the newest gradient has the
        share 1 - momentum
    why_not_in_jax: why engine jax lacks it
    why_not_sharded: why the bits of its update follow the shards of a parameter; '': they don't
    why_f64: why `verify` compares it in f64 alone; '': it does not
    """

    num_states: ClassVar[int] = 2
    defaults: ClassVar[Mapping[str, Any]] = {}
    takes_groups: ClassVar[bool] = False
    instead_of_adamw: ClassVar[int] = 0
    newest_share_is_rest: ClassVar[bool] = False
    why_not_in_jax: ClassVar[str] = "it has no class there yet"
    why_not_sharded: ClassVar[str] = ""
    why_f64: ClassVar[str] = ""

    @property
    def name(self) -> str:
        return type(self).__module__.rpartition(".")[2]

    def state(self, section: Optimizer, precision: Precision, facts: Facts) -> OptimizerState:
        """The state of all parameters, whose shapes are known."""
        del section
        return state_of_arrays(precision, facts, self.name, self.num_states)

    def reason(self, section: Optimizer, facts: Facts) -> str:
        """What the plan says it does; '': nothing. UserError: it does not serve this model."""
        del section, facts
        return ""

    def warnings(self, section: Optimizer) -> Sequence[str]:
        """What a user should know of these values of the config."""
        del section
        return ()

    def torch_class(self) -> Any:
        """The class of the update in engine torch."""
        return import_module(f"{type(self).__module__}.torch_optimizer").TorchOptimizer

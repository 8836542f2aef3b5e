"""The memory of a device in a step, while the plan still decides how the step is computed."""

from dataclasses import dataclass

from samecurve.core.planning.batch import BatchSplit
from samecurve.core.planning.layout import Layout
from samecurve.core.planning.memory import MemoryTerm


@dataclass(frozen=True)
class StepMemory:
    """The memory of a device at its peak, under a layout and a split."""

    layout: Layout
    split: BatchSplit
    terms: tuple[MemoryTerm, ...]
    is_exact: bool

    @property
    def bytes(self) -> int:
        return sum(term.bytes for term in self.terms)

    @property
    def is_known(self) -> bool:
        """Whether activations are counted."""
        return any(term.name == "activations" for term in self.terms)

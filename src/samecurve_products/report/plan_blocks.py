"""Blocks of a plan, which a run's page, a benchmark and the form of a new run have in common."""

from collections.abc import Mapping, Sequence

from samecurve.core.planning.memory import MemoryTerm
from samecurve.seam import show_bytes
from samecurve_products.report.blocks import COLOURS, Bar, Block, Part, table


def reasons_table(reasons: Mapping[str, object], values: Mapping[str, str]) -> Block:
    """Every decision with its reason; those that have a value come first."""
    names = sorted(reasons, key=lambda name: name not in values)
    rows = [[name, values.get(name, ""), str(reasons[name])] for name in names]
    return table(["decision", "value", "because"], rows)


def memory_table(terms: Sequence[MemoryTerm]) -> Block:
    """The terms of a device's memory, each with its formula."""
    rows = [[term.name, show_bytes(term.bytes), term.formula] for term in terms]
    return table(["term", "bytes", "formula"], rows)


def memory_parts(terms: Sequence[MemoryTerm], *, on_cpu: bool) -> list[Part]:
    """The parts of a memory bar. A GPU's peak is measured without the process itself."""
    shown = [term for term in terms if term.bytes and (on_cpu or term.name != "process")]
    return [(term.name, term.bytes, index % COLOURS) for index, term in enumerate(shown)]


def peak_bar(label: str, peak: float, estimate: float | None) -> Bar:
    """A measured peak of memory, and the plan's estimate of it."""
    mark = ("plan's estimate", estimate) if estimate else None
    return Bar(label, [("measured peak", peak, 0)], mark=mark)

"""train.check_replicas: what several devices hold alike is compared, bit by bit.

`verdict.py` compares the hashes, which each engine's hooks compute.
"""

from pydantic import Field, NonNegativeInt

from samecurve.core.config import Section
from samecurve.core.feature import Feature, Planned
from samecurve.core.planning import Decision
from samecurve.core.planning.layout import Layout
from samecurve.units import counted


class CheckReplicasFields(Section):
    """The keys of `train`."""

    check_replicas: NonNegativeInt = Field(0, json_schema_extra={"unit": "steps"})
    """steps between comparisons of what several devices hold alike (weights, buffers, optimizer
    state), bit by bit; also before each evaluation and save. A difference ends the run; 0: none"""


class CheckReplicas(Feature[CheckReplicasFields, int]):
    """The feature. Its value is the number of steps between comparisons."""

    order = 200
    fields = CheckReplicasFields
    value = int
    plan_key = "every.check_replicas"
    plan_off = 0
    is_in_each_plan = True
    banner = {"replicas": "replicas: "}
    changes_results = False
    hooks = ("torch", "jax", "loop")

    def decide(self, planned: Planned) -> Decision[int | None]:
        """Where several devices hold the same, the config's interval."""
        interval, layout = self.fields_of(planned.config).check_replicas, planned.layout
        reasons = {"replicas": _why(interval, layout)}
        return Decision(interval if layout.num_devices > 1 else None, reasons)

    def steps_between(self, value: int) -> int:
        return value


def _why(interval: int, layout: Layout) -> str:
    """What is compared in this layout, in words."""
    if layout.num_devices == 1:
        return "not compared: one device has one copy of everything"
    when = f"every {counted(interval, 'step')}, and before each evaluation and save"
    if layout.shards == layout.num_devices:
        return (
            f"{layout.strategy} holds each number once; what every device has whole (buffers, small"
            f" vectors) is compared {when}"
        )
    copies = layout.num_devices // layout.shards
    return f"{copies} copies are compared {when}"


FEATURE = CheckReplicas()

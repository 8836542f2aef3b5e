"""train.float8: the linear layers of the blocks multiply in eight bits."""

from samecurve.core.config import Section
from samecurve.core.config.sections import Config
from samecurve.core.feature import Feature, Planned
from samecurve.core.planning import Decision
from samecurve.core.planning.compute import choose_precision
from samecurve.core.planning.layout import Layout
from samecurve.errors import UserError

KEY = "train.float8"


class Float8Fields(Section):
    """The keys of `train`."""

    float8: bool = False
    """with precision bf16, on GPUs that have it: products of the blocks' linear layers in eight
    bits (torchao); changes results"""


class Float8(Feature[Float8Fields, bool]):
    """The feature."""

    order = 50
    fields = Float8Fields
    value = bool
    plan_off = False
    is_in_each_plan = True
    table_only = ("float8",)
    libraries = {"torchao": "fp8"}
    excludes = ("devices.offload_frozen",)
    hooks = ("torch",)

    def check(self, config: Config, layout: Layout | None) -> None:
        """UserError: there are no products in eight bits."""
        if layout is None:
            return
        device = layout.devices[0]
        precision = choose_precision(config.train, config.engine, layout.devices).value
        refused = {
            "it is for engine torch": layout.engine != "torch",
            f"CPU ranks have no products in eight bits ({device.name})": device.kind == "cpu",
            f"{device.name} has no products in eight bits": device.lacks("float8"),
            f"weights and other products are to be bf16, not {precision}": precision != "bf16",
        }
        for why, is_so in refused.items():
            if is_so:
                remedy = "--dtype bf16" if "bf16" in why else "leave it out"
                raise UserError(f"{KEY}: {why}", remedy, KEY)

    def not_same_bits(self, config: Config) -> str:
        del config
        return f"{KEY} rounds products to eight bits"

    def decide(self, planned: Planned) -> Decision[bool | None]:
        """UserError: the model has no layer to convert."""
        if planned.facts.blocks < 2:
            why = "the model has no repeated blocks whose layers it could convert"
            raise UserError(f"{KEY}: {why}", "leave it out", KEY)
        reason = (
            "products of the blocks' linear layers in eight bits, scaled by each tensor's largest"
            " value"
        )
        warnings = [f"{KEY}: results change: products are rounded to eight bits"]
        if not planned.config.compiles_blocks:
            warnings.append(
                f"{KEY} without --compile is slower than bf16: scaling takes more than the"
                " products save"
            )
        return Decision(True, {"float8": reason}, tuple(warnings))


FEATURE = Float8()

"""What makes steps faster and asks for something: train.compile, train.float8.

Refused, or said, by plan().
"""

from samecurve.core.config.sections import Config
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.strategies import Layout
from samecurve.errors import UserError


def check_speed_options(
    config: Config, facts: Facts, layout: Layout, because: dict[str, str], warnings: list[str]
) -> None:
    """UserError: asked for where it can't be."""
    if config.train.compile:
        _check_compile(config)
        each = (
            f"{facts.blocks} blocks, one program for all that are alike"
            if facts.blocks > 1
            else "the model as a whole: it has no repeated blocks"
        )
        because["compile"] = (
            f"{each}; the first steps, and the first of each other shape, take longer"
        )
    if config.train.float8:
        _check_float8(config, facts, layout)
        because["float8"] = (
            "products of the blocks' linear layers in eight bits, scaled by each tensor's largest"
            " value"
        )
        warnings.append("train.float8: results change: products are rounded to eight bits")
        if not config.train.compile:
            warnings.append(
                "train.float8 without --compile is slower than bf16: scaling takes more than the"
                " products save"
            )


def _check_compile(config: Config) -> None:
    if config.engine == "jax":
        raise UserError(
            "train.compile is for engine torch: jax compiles its step anyway",
            "leave --compile out (--set train.compile=false, where a file asks for it)",
            "train.compile",
        )
    if config.train.exact:
        raise UserError(
            "train.exact: a compiled kernel is made, and on a GPU chosen by its time, where it"
            " runs: its bits may differ between devices",
            "leave --compile out (--set train.compile=false, where a file asks for it), or --exact",
            "train.compile",
        )


def _check_float8(config: Config, facts: Facts, layout: Layout) -> None:
    train = config.train
    refused = {
        "it is for engine torch": config.engine != "torch",
        "it rounds, which train.exact is there to rule out": train.exact,
        f"CPU ranks have no products in eight bits ({layout.devices[0].name})": (
            layout.devices[0].kind == "cpu"
        ),
        f"weights and other products are to be bf16, not {train.precision}": (
            train.precision != "bf16"
        ),
        "the model has no repeated blocks whose layers it could convert": facts.blocks < 2,
    }
    for why, is_so in refused.items():
        if is_so:
            raise UserError(
                f"train.float8: {why}",
                "--dtype bf16" if "bf16" in why else "leave it out",
                "train.float8",
            )

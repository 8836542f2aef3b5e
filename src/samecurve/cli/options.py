"""Code that verbs share: how flags and names are read, and options that several verbs have."""

import math
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from samecurve.core.config.loading import LoadedConfig
    from samecurve.core.planning.facts import Facts, Measure

_HOSTS = (
    "over several hosts: samecurve train -f FILE --engine jax --nnodes N --rdzv HOST:PORT"
    " --node-rank I, on each of them"
)
# torchrun's flags, where the verb has none of that name
TORCHRUN_HINTS = {
    "--standalone": "leave it out: ranks of one machine meet by themselves",
    "--nnodes": f"for one host leave it out; {_HOSTS}",
    "--node-rank": _HOSTS,
    "--master-addr": _HOSTS,
    "--rdzv-endpoint": _HOSTS,
    "--rdzv-backend": _HOSTS,
    "--rdzv-id": _HOSTS,
    "--rdzv-conf": _HOSTS,
}


def dashes(name: str) -> str:
    """The name with dashes: underscores and dashes mean the same."""
    return name.replace("_", "-")


class Verb(click.Command):
    """A verb; flags of torchrun are refused with the flag that serves the purpose here."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["arguments"] = list(args)
        own = {name for parameter in self.params for name in parameter.opts}
        for argument in args:
            check_text(argument, ctx)
            flag = dashes(argument.partition("=")[0])
            if flag in TORCHRUN_HINTS.keys() - own:
                raise click.UsageError(f"{flag} is torchrun's: {TORCHRUN_HINTS[flag]}", ctx)
        return super().parse_args(ctx, args)


def check_text(argument: str, ctx: click.Context) -> None:
    """Refuse an argument whose bytes are no text: no file could name it again."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        raise click.UsageError(f"{argument} is not UTF-8 text", ctx) from None


class Finite(click.FloatRange):
    """An option's type: a number in a range, and no nan."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value} is no number", param, ctx)
        return number


def rank_count(*, each_gpu: int | None) -> Callable[[str], int | None]:
    """An option's type: a number of ranks, or torchrun's words for one on each GPU.

    each_gpu: what `gpu` and `auto` mean
    """

    def parse(text: str) -> int | None:
        if text.lower() in {"gpu", "auto"}:
            return each_gpu
        try:
            return int(text)
        except ValueError:
            raise click.BadParameter(f"{text!r} is not a number of ranks") from None

    return parse


class Option(click.Option):
    """An option whose help shows its own name only; the names of other tools work too."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        names = self.opts
        first_long = 0 if names[0].startswith("--") else 1
        self.opts = names[: first_long + 1]
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts = names


init_from_option = click.option(
    "--init-from",
    type=Path,
    metavar="PATH",
    help=(
        "begin with these weights, without state: a run, a checkpoint, safetensors, a .pt; the same"
        " command goes on with the run"
    ),
)

trust_option = click.option(
    "--trust",
    is_flag=True,
    help=(
        "run the code that the RUN's config names, though it came with the run or lies outside of"
        " the working directory"
    ),
)

probe_option = click.option(
    "--probe-batch",
    is_flag=True,
    help="first try, in throw-away processes, how many samples at once fit, and plan from that",
)


def probe_facts(loaded: "LoadedConfig") -> "Facts":
    """The facts for --probe-batch: how many samples at once fitted."""
    from samecurve.experiments.probe_batch import probe_batch

    return probe_batch(loaded.config)


def speed_measure(loaded: "LoadedConfig") -> "Measure | None":
    """The function that measures the devices' speeds; None: the config does not ask for that."""
    if loaded.config.devices.balance != "measured":
        return None
    from samecurve.experiments.balance import measure_speeds

    return measure_speeds


def exit_on_sigterm() -> None:
    """Leave at a SIGTERM, as long as nothing runs that could be left half done."""
    signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, _frame: object) -> None:
    sys.exit(128 + number)

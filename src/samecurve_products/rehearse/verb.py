"""`samecurve rehearse`."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from samecurve.cli.options import CONFIG_OPTIONS, ConfigOption
from samecurve.seam import UserError, Verb, echo

if TYPE_CHECKING:
    from samecurve.seam import Config
    from samecurve_products.rehearse.emulator import Emulation
    from samecurve_products.rehearse.rehearsal import Rehearsal

_MOST_GPUS = 16
_LEAST_MEMORY = 2 << 20  # bytes; torch takes a GPU's memory in pieces of this size
_OWN_KEYS = (
    "devices.use",
    "devices.max_restarts",
    "train.steps",
    "track.",
)  # which rehearse itself sets
# options of `train` that have another name here
_INSTEAD = {
    "--devices": "--gpus N says how many emulated GPUs there are.",
    "--max-steps": "--steps N says how many steps are taken.",
}
_NOT_ON_ONE_DEVICE = ("devices.", "batch.")
_OPTIONS = [
    option
    for option in CONFIG_OPTIONS
    if not option.key.startswith(_OWN_KEYS) and option.name != "distributed_data_loading"
]


def _gpu(_context: click.Context, _option: click.Parameter, name: str) -> str:
    from samecurve_products.rehearse.emulator import gpu_names

    known = gpu_names()
    by_name = {one.lower(): one for one in known}
    if name.lower() not in by_name:
        raise click.BadParameter(f"{name} is not one of {', '.join(known)}")
    return by_name[name.lower()]


def _bytes(_context: click.Context, _option: click.Parameter, text: str | None) -> int | None:
    from samecurve.seam import show_bytes
    from samecurve.units import parse_bytes

    if text is None:
        return None
    try:
        size = parse_bytes(f"{text}B" if text.isdecimal() else text)
    except ValueError as error:
        raise click.BadParameter(f"{text} {error}") from None
    if size < _LEAST_MEMORY:
        least = show_bytes(_LEAST_MEMORY)
        raise click.BadParameter(f"{text} is less than {least}, the least that torch takes at once")
    return size


class RehearseVerb(Verb):
    """The verb with the options of a config; after `--` stands any other command."""

    def __init__(self, *, params: list[click.Parameter], **attributes: Any) -> None:
        super().__init__(params=[*_OPTIONS, *params], **attributes)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        has_command = "--" in args
        ctx.meta["typed"] = args[: args.index("--")] if has_command else list(args)
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name
            if name not in _INSTEAD:
                raise
            raise click.NoSuchOption(
                name, f"{error.message} {_INSTEAD[name]}", ctx=error.ctx
            ) from None
        command, example = ctx.params.get("command"), "samecurve rehearse -- python SCRIPT"
        if command and not has_command and not ctx.resilient_parsing:
            text = f"{command[0]} is no option; a command stands after --, such as: {example}"
            raise click.UsageError(text, ctx)
        if has_command and not command:
            raise click.UsageError(f"no command stands after --, such as: {example}", ctx)
        return rest


@click.command(cls=RehearseVerb, help_group="Measure")
@click.option(
    "--gpus",
    type=click.IntRange(1, _MOST_GPUS),
    default=2,
    show_default=True,
    metavar="N",
    help=f"emulated GPUs, 1 to {_MOST_GPUS}",
)
@click.option(
    "--gpu",
    default="H100",
    show_default=True,
    metavar="NAME",
    callback=_gpu,
    help="which GPU is emulated: its name, its memory, what it can compute",
)
@click.option(
    "--memory",
    metavar="SIZE",
    callback=_bytes,
    help="memory of each GPU, such as 24GB; that of --gpu if not given",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="optimizer steps of a config",
)
@click.option("--json", "as_json", is_flag=True, help="the result as JSON")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def rehearse(
    *,
    command: tuple[str, ...],
    gpus: int,
    gpu: str,
    memory: int | None,
    steps: int,
    as_json: bool,
    **flags: Any,
) -> None:
    """Try a run on emulated GPUs, on a machine that has none. Experimental.

    Some steps of a config (-f FILE), or any command that trains with torch (-- COMMAND). Exit code
    1 if something was found that would fail on GPUs.
    """
    from samecurve.seam import alone
    from samecurve_products.rehearse.emulator import Emulation, check_can_emulate
    from samecurve_products.rehearse.rehearsal_text import as_json as rehearsal_json
    from samecurve_products.rehearse.rehearsal_text import as_text

    alone("rehearse")
    check_can_emulate()
    emulation = Emulation(devices=gpus, gpu=gpu, memory=memory)
    if command:
        rehearsal = _rehearse_command(command, emulation, output=2 if as_json else 1)
    else:
        rehearsal = _rehearse_config(flags, emulation, steps)
    echo(rehearsal_json(rehearsal) if as_json else as_text(rehearsal))
    sys.exit(1 if rehearsal.fails else 0)


def _rehearse_command(words: Sequence[str], emulation: "Emulation", *, output: int) -> "Rehearsal":
    """output: the file descriptor of what the command prints"""
    from samecurve_products.rehearse.emulator import build_emulator, memory_of
    from samecurve_products.rehearse.script_rehearsal import ScriptRequest, rehearse_script

    _refuse_config_flags(click.get_current_context())
    build_emulator(_say)
    limit = emulation.memory or memory_of(emulation.gpu)
    return rehearse_script(
        ScriptRequest(words=words, emulation=emulation, limit=limit, output=output, say=_say)
    )


def _rehearse_config(flags: dict[str, Any], emulation: "Emulation", steps: int) -> "Rehearsal":
    from samecurve_products.rehearse.config_rehearsal import Request, rehearse_config
    from samecurve_products.rehearse.emulator import build_emulator, memory_of

    context, config = click.get_current_context(), _checked_config(flags)
    build_emulator(_say)
    request = Request(
        words=_words(context, _OPTIONS),
        words_on_cpu=_words(context, _options_on_cpu()),
        emulation=emulation,
        limit=emulation.memory or memory_of(emulation.gpu),
        steps=steps,
        compiles=config.compiles_blocks,
        say=_say,
    )
    return rehearse_config(request)


def _say(line: str) -> None:
    echo(f"         {line}", err=True)


def _options_on_cpu() -> list[ConfigOption]:
    return [option for option in _OPTIONS if not option.key.startswith(_NOT_ON_ONE_DEVICE)]


def _checked_config(flags: dict[str, Any]) -> "Config":
    """The config, before anything is started. UserError: the config is wrong, or is not torch's."""
    from samecurve.seam import load_config

    every = {str(option.name): None for option in CONFIG_OPTIONS}
    config = load_config({**every, **flags}, say=False).config
    if config.engine != "torch":
        raise UserError(
            f"rehearse emulates GPUs for engine torch; the config's engine is {config.engine}",
            "`samecurve train --devices cpu:2` tries it without GPUs",
            "engine",
        )
    return config


def _words(context: click.Context, options: list[ConfigOption]) -> tuple[str, ...]:
    """The options of these as they were typed: each by its first long name, with its value."""
    typed, _, _ = context.command.make_parser(context).parse_args(list(context.meta["typed"]))
    words: list[str] = []
    for option in options:
        if option.name not in typed:
            continue
        flag = next(name for name in option.opts if name.startswith("--"))
        value = typed[option.name]
        if option.is_flag:
            words.append(flag)
        else:
            for text in value if option.multiple else [value]:
                words += [flag, str(text)]
    return tuple(words)


def _refuse_config_flags(context: click.Context) -> None:
    """UsageError: flags of a config stand before another command."""
    words = _words(context, _OPTIONS)
    if words:
        raise click.UsageError(f"{words[0]} is for a config; a command after -- has its own flags")

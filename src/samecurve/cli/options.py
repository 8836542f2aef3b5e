"""The options of the command line: how they are read, and those that several verbs have.

CONFIG_OPTIONS is the one table of the options that say what the config says; load_config.py makes a
config of their values.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.types import FuncParamType

from samecurve.core.strategies import strategy_help
from samecurve.errors import UserError
from samecurve.terminal import width_of, wrapped

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from samecurve.storage.url import ObjectUrl

Flags = Mapping[str, Any]  # of a command line: parameter -> value; None: not typed
Typed = Mapping[str, tuple[Any, str]]  # key of the config -> its value, and the flag that sets it
_NARROW = 60  # columns: a terminal with fewer has no room for two columns of help
_UNLIMITED = 1 << 16  # characters of a line
_WHOLE = 1 << 10  # characters of a summary: none is cut
# the titles below which `samecurve --help` lists the verbs, in this order
HELP_GROUPS = (
    "Begin",
    "Train",
    "Look at runs",
    "Measure",
    "Data and configs",
    "Machines and queues",
    "Other programs",
)


def dashes(name: str) -> str:
    """The name with dashes: underscores and dashes mean the same."""
    return name.replace("_", "-")


class NarrowHelp(click.HelpFormatter):
    """Help as click writes it. A narrow terminal shows the text of an option below the option."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        columns = width_of(sys.stdout)
        self._narrow = columns if columns is not None and columns < _NARROW else None
        if self._narrow is not None:
            self.width = _UNLIMITED  # getvalue() breaks the lines

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        if self._narrow is None:
            super().write_dl(rows, col_max, col_spacing)
            return
        indent = " " * self.current_indent
        for name, text in rows:
            self.write(f"{indent}{name.rstrip()}\n{indent}  {text}\n")

    def getvalue(self) -> str:
        text = super().getvalue()
        return text if self._narrow is None else wrapped(text, self._narrow)


class HelpContext(click.Context):
    """The context of a command whose help fits a narrow terminal."""

    formatter_class = NarrowHelp


class GroupedVerb(click.Command):
    """A verb that names the title below which `samecurve --help` lists it, one of HELP_GROUPS."""

    def __init__(self, *arguments: Any, help_group: str = "", **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.help_group = help_group


class VerbGroup(GroupedVerb, click.Group):
    """The verbs of a command; the command alone shows its help, where it has nothing else to do."""

    context_class = HelpContext
    other_verbs = "Commands"  # the title above verbs that name none

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing and not self.invoke_without_command:
            args = ["--help"]
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each verb below its title with its first sentence, on as many lines as it needs."""
        names = self.list_commands(ctx)
        width = max(map(len, names), default=0)  # of all titles alike
        rows: dict[str, list[tuple[str, str]]] = {title: [] for title in HELP_GROUPS}
        for name in names:
            try:
                verb = self.get_command(ctx, name)
            except UserError as error:  # the package that brings it is broken
                rows.setdefault(self.other_verbs, []).append(
                    (name.ljust(width), f"{error.cause}; {error.remedy}")
                )
                continue
            if verb is not None and not verb.hidden:
                title = getattr(verb, "help_group", "") or self.other_verbs
                row = (name.ljust(width), verb.get_short_help_str(_WHOLE))
                rows.setdefault(title, []).append(row)
        for title, verbs in rows.items():
            if verbs:
                with formatter.section(title):
                    formatter.write_dl(verbs)


class Verb(GroupedVerb):
    """A verb; flags of other tools are refused with the flag that serves the purpose here."""

    context_class = HelpContext

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["arguments"] = list(args)
        if ctx.resilient_parsing:  # a line that is being typed
            return super().parse_args(ctx, args)
        for argument in args:
            try:
                argument.encode()
            except UnicodeEncodeError:  # no file could name it again
                raise click.UsageError(f"{argument} is not UTF-8 text", ctx) from None
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from samecurve.cli.unknown_arguments import refuse_flag

            own = {name for parameter in self.params for name in parameter.opts}
            refuse_flag(error.option_name, ctx.meta["arguments"], own, ctx.command_path)
            raise
        if any("s3:" in argument for argument in ctx.meta["arguments"]):
            from samecurve.cli.places import refuse_urls

            refuse_urls(self, ctx.params)
        return rest


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


class PlaceType(FuncParamType):  # type: ignore[type-arg]  # click 8.1 has it without arguments
    """An option's type that a function makes of a text which names a file or a folder."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> "list[CompletionItem]":
        from samecurve.cli.completion import file

        del ctx, param
        return file(incomplete)


PATH = PlaceType(Path)


class ConfigOption(Option):
    """An option of every verb that reads a config. Its value is what the config's key is set to."""

    def __init__(
        self,
        names: str,
        key: str = "",
        help_option: str = "",
        *,
        sets: object = None,
        convert: Callable[[Any], Any] | None = None,
        **attributes: Any,
    ) -> None:
        """An option without a help text is hidden.

        names: with blanks between them; after the first, spellings of other tools
        key: the config's key; '' where load_config.py has code for the option
        sets: the value that a switch sets; None: the user types the value
        convert: makes the key's value from the typed one
        """
        self.key = key
        if sets is not None:  # is_flag=False would have click read `--lr -1` as two flags
            attributes["is_flag"] = True

        def value(_context: click.Context, _option: click.Parameter, typed: Any) -> Any:
            if sets is not None:
                return sets if typed else None
            return typed if typed is None or convert is None else convert(typed)

        super().__init__(
            names.split(), help=help_option, hidden=not help_option, callback=value, **attributes
        )

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem]":
        """The words that the config lists for the key, or what the type completes."""
        from samecurve.cli.completion import complete_key

        items = complete_key(self.key, incomplete) if self.key else []
        return items or super().shell_complete(ctx, incomplete)


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


def _gpus(indices: str) -> str:
    if indices.startswith("cpu"):
        raise UserError(f"--gpus {indices} names no GPU", f"--devices {indices}", "--gpus")
    return indices


def _first_gpus(count: int) -> str:
    if count < 0:
        raise UserError(f"--num-gpus {count}", "a number of GPUs, or 0 for all", "--num-gpus")
    return ",".join(map(str, range(count))) or "all"


def _epochs(count: float) -> str:
    return f"{count:.9f}".rstrip("0").rstrip(".") + "ep"


_option = ConfigOption
_integer = partial(ConfigOption, type=int)
_number = partial(ConfigOption, type=float)
_switch = partial(ConfigOption, sets=True)
CONFIG_OPTIONS = (
    # what is trained, on what, and where
    _option("-f --file --config-path", "", "the config, YAML or JSON", type=PATH),
    _option(
        "-d --data",
        "data.source",
        "data.source: text, a directory, a glob, a .bin of raw tokens, python-stdlib",
    ),
    _option(
        "--gpus --gpu-ids --device-ids",
        "devices.use",
        "GPUs by index, as CUDA_VISIBLE_DEVICES leaves them",
        convert=_gpus,
        metavar="0,1",
    ),
    _option(
        "--num-gpus --nproc --nproc-per-node",
        "devices.use",
        convert=_first_gpus,
        type=rank_count(each_gpu=0),
    ),
    # values
    _option("--devices", "devices.use", "auto, all, cpu, cpu:N, or indices: 0,1"),
    _option("--strategy --multi-gpu", "devices.strategy", strategy_help()),
    _option("--engine", "engine", "torch, jax"),
    _option(
        "--sync-backend --backend --distributed-backend", "devices.sync", "auto, cpu, gloo, nccl"
    ),
    _option("--dtype", "train.precision", "f32, bf16, f16, f64"),
    _integer("--seq-len", "model.max_seq_len", "tokens of a sample"),
    _number("--lr", "optimizer.lr", "peak learning rate"),
    _number("--weight-decay", "optimizer.weight_decay", "on matrices only"),
    _option(
        "--scale-lr", "schedule.scale_lr", "none, linear, sqrt: by batch / schedule.base_batch"
    ),
    _integer("--warmup", "schedule.warmup", "steps"),
    _option(
        "--balance",
        "devices.balance",
        "even, measured, or relative speeds: 2,1; dp and ddp assign microbatches by them; same"
        " results",
    ),
    _option(
        "--compress",
        "devices.compress",
        "none, bf16, fp16, powersgd: what ddp reduces gradients as; changes results",
    ),
    _integer(
        "--num-workers",
        "data.workers",
        "processes a device that read samples; 0: a thread of the rank",
    ),
    _integer("--prefetch", "data.prefetch", "steps prepared ahead"),
    _integer("--max-checkpoints", "train.keep", "newest checkpoints kept, beside the best; 0: all"),
    _integer(
        "--max-restarts", "devices.max_restarts", "starts after a failure, from the last save"
    ),
    _option("--launcher", "devices.launcher", "direct, elastic, spawn"),
    _integer("--port --master-port", "devices.port", "of the rendezvous; 0: any free one"),
    _option("--wandb", "track.wandb", "off, offline, online: W&B too"),
    # fields of some tasks only
    _option("--mode", "data.mode"),
    _option("--arch", "model.arch"),
    _option("--cssm", "model.cssm"),
    # switches
    _switch("--no-amp", "train.precision", "precision f32", sets="f32"),
    _switch("--bf16", "train.precision", sets="bf16"),
    _switch("--exact", "train.exact", "the same bits on any number of devices"),
    _switch("--no-exact", "train.exact", "the order of sums may follow the devices", sets=False),
    _switch(
        "--compile", "train.compile", "compile the model's blocks: faster steps, slower first ones"
    ),
    _switch(
        "--tensorboard",
        "track.tensorboard",
        "TensorBoard too: logs/tensorboard in the run directory",
    ),
    _switch("--mlflow", "track.mlflow", "MLflow too: logs/mlflow, or where its variables say"),
    _switch("--trackio", "track.trackio", "trackio too: logs/trackio, or where its variables say"),
    _switch(
        "--no-preflight",
        "devices.preflight",
        "no first collective with a time limit before training",
        sets=0,
    ),
    _switch("--spawn", "devices.launcher", sets="spawn"),
    _switch("--distributed-data-loading"),
    # how much, how long, and any other value
    _integer("--batch-size", "batch.per_device", "samples per device and accumulation step"),
    _integer(
        "--grad-accum --grad-accum-steps",
        "batch.accumulate",
        "accumulation steps before an optimizer step",
    ),
    _integer(
        "--global-batch",
        "batch.samples",
        "samples of a step over all devices, whatever their number",
    ),
    _number("--epochs", "train.steps", "length of the run in epochs", convert=_epochs),
    _integer(
        "--max-steps", "train.steps", "length of the run in steps; 0 with --epochs: whole epochs"
    ),
    _number("--warmup-epochs", "schedule.warmup", "warm-up in epochs", convert=_epochs),
    _option(
        "--set settings",
        "",
        "any config value: --set optimizer.clip=0.5",
        multiple=True,
        metavar="KEY=VALUE",
    ),
)


class ConfigVerb(Verb):
    """A verb that reads a config: CONFIG_OPTIONS stand before its own options."""

    def __init__(self, *, params: list[click.Parameter], **attributes: Any) -> None:
        super().__init__(params=[*CONFIG_OPTIONS, *params], **attributes)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # words that no flag takes are refused with the line to type
        ctx.allow_extra_args = not ctx.resilient_parsing
        rest = super().parse_args(ctx, args)
        if ctx.args and not ctx.resilient_parsing:
            from samecurve.cli.unknown_arguments import refuse_word

            refuse_word(ctx.args[0], ctx.meta["arguments"], ctx.command_path)
        return rest


def add_typed(typed: dict[str, tuple[Any, str]], key: str, value: object, flag: str) -> None:
    """Note that a flag sets a key of the config. UserError: another flag sets the same key."""
    if key in typed:
        _, other = typed[key]
        raise UserError(
            f"{other} and {flag} contradict each other: both set {key}", "give one of them", other
        )
    typed[key] = value, flag


def run_place(text: str) -> "Path | ObjectUrl":
    """An option's type: a path, or the address of a place in a store (s3://BUCKET/NAME)."""
    if "://" not in text:
        return Path(text)
    from samecurve.storage.url import parse_url

    return parse_url(text, "")


RUN_PLACE = PlaceType(run_place)


def _save_dir(kind: Any, help_option: str) -> Callable[[Any], Any]:
    names = ("--save-dir", "--checkpoint-dir", "save_dir")
    return click.option(*names, cls=Option, type=kind, metavar="PATH", help=help_option)


save_dir_option = _save_dir(PATH, "the run directory; runs/NAME-TIME if not given")
run_place_option = _save_dir(
    RUN_PLACE,
    "the run directory; runs/NAME-TIME if not given. s3://BUCKET/NAME: mirrored to a store",
)

init_from_option = click.option(
    "--init-from",
    type=RUN_PLACE,
    metavar="PATH",
    help=(
        "begin with these weights, without state: a run, a checkpoint, safetensors, a .pt; the same"
        " command goes on with the run"
    ),
)

best_option = click.option(
    "--best",
    is_flag=True,
    help="the RUN's checkpoint whose evaluation was the best, in place of the newest",
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

"""The flags that say what the config says: one table of their names, keys and help.

config_flags.py makes a config of what the flags hold.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from samecurve.cli.options import Option, rank_count
from samecurve.core.strategies import strategy_help

Flags = Mapping[str, Any]  # of a command line: parameter -> value; None: not given


@dataclass(frozen=True)
class ConfigFlag:
    """A flag of every verb that reads a config."""

    names: tuple[str, ...]  # after the first, spellings of other tools, kept out of help
    parameter: str
    key: str  # the config's key; '' where config_flags.py has code for the flag
    sets: object  # what a switch sets its key to; None: the flag has a value
    of_tasks: bool  # the key is a field of some tasks only
    elsewhere: str  # the key in tasks that have such a field
    click: Mapping[str, Any]  # how click reads the flag

    def given_in(self, flags: Flags) -> bool:
        """Whether the flag was typed."""
        return flags[self.parameter] is not None and flags[self.parameter] is not False

    def value_in(self, flags: Flags) -> Any:
        """The value that the flag gives its key."""
        return flags[self.parameter] if self.sets is None else self.sets


def _flag(
    names: str,
    key: str = "",
    help_text: str = "",
    *,
    parameter: str = "",
    sets: object = None,
    of_tasks: bool = False,
    elsewhere: str = "",
    **how: Any,
) -> ConfigFlag:
    """A flag of names with blanks between them; without a help text it is hidden."""
    first = names.split(maxsplit=1)[0].removeprefix("--").replace("-", "_")
    how = {"help": help_text, "hidden": not help_text, **how}
    if sets is not None:  # is_flag=False would have click read `--lr -1` as two flags
        how["is_flag"] = True
    return ConfigFlag(
        names=tuple(names.split()),
        parameter=parameter or first,
        key=key,
        sets=sets,
        of_tasks=of_tasks,
        elsewhere=elsewhere,
        click=how,
    )


CONFIG_FLAGS = (
    # what is trained, on what, and where
    _flag("-f --file --config-path", "", "the config, YAML or JSON", parameter="file", type=Path),
    _flag(
        "-d --data",
        "data.source",
        "data.source: text, a directory, a glob, a .bin of raw tokens, python-stdlib",
        parameter="data",
    ),
    _flag(
        "--gpus --gpu-ids --device-ids",
        "",
        "GPUs by index, as CUDA_VISIBLE_DEVICES leaves them",
        metavar="0,1",
    ),
    _flag("--num-gpus --nproc --nproc-per-node", type=rank_count(each_gpu=0)),
    # values
    _flag("--devices", "devices.use", "auto, all, cpu, cpu:N, or indices: 0,1"),
    _flag("--strategy --multi-gpu", "devices.strategy", strategy_help()),
    _flag("--engine", "engine", "torch, jax"),
    _flag(
        "--sync-backend --backend --distributed-backend", "devices.sync", "auto, cpu, gloo, nccl"
    ),
    _flag("--dtype", "train.precision", "f32, bf16, f16, f64"),
    _flag(
        "--seq-len", "model.max_seq_len", "tokens of a sample", elsewhere="data.seq_len", type=int
    ),
    _flag("--lr", "optimizer.lr", "peak learning rate", type=float),
    _flag("--weight-decay", "optimizer.weight_decay", "on matrices only", type=float),
    _flag("--scale-lr", "schedule.scale_lr", "none, linear, sqrt: by batch / schedule.base_batch"),
    _flag("--warmup", "schedule.warmup", "steps", type=int),
    _flag(
        "--balance",
        "devices.balance",
        "even, measured, or relative speeds: 2,1; dp and ddp assign microbatches by them; same"
        " results",
    ),
    _flag(
        "--compress",
        "devices.compress",
        "none, bf16, fp16, powersgd: what ddp reduces gradients as; changes results",
    ),
    _flag(
        "--num-workers",
        "data.workers",
        "processes a device that read samples; 0: a thread of the rank",
        type=int,
    ),
    _flag("--prefetch", "data.prefetch", "steps prepared ahead", type=int),
    _flag(
        "--max-checkpoints",
        "train.keep",
        "newest checkpoints kept, beside the best; 0: all",
        type=int,
    ),
    _flag(
        "--max-restarts",
        "devices.max_restarts",
        "starts after a failure, from the last save",
        type=int,
    ),
    _flag("--launcher", "devices.launcher", "direct, elastic, spawn"),
    _flag("--port --master-port", "devices.port", "of the rendezvous; 0: any free one", type=int),
    _flag("--wandb", "track.wandb", "off, offline, online: W&B too"),
    _flag("--mode", "data.mode", of_tasks=True),
    _flag("--arch", "model.arch", of_tasks=True),
    _flag("--cssm", "model.cssm", of_tasks=True),
    # switches
    _flag("--no-amp", "train.precision", "precision f32", sets="f32"),
    _flag("--bf16", "train.precision", sets="bf16"),
    _flag("--exact", "train.exact", "the same bits on any number of devices", sets=True),
    _flag(
        "--compile",
        "train.compile",
        "compile the model's blocks: faster steps, slower first ones",
        sets=True,
    ),
    _flag(
        "--tensorboard",
        "track.tensorboard",
        "TensorBoard too: logs/tensorboard in the run directory",
        sets=True,
    ),
    _flag(
        "--no-preflight",
        "devices.preflight",
        "no first collective with a time limit before training",
        sets=0,
    ),
    _flag("--spawn", "devices.launcher", sets="spawn"),
    _flag("--distributed-data-loading", is_flag=True),
    # how much, how long, and any other value
    _flag("--batch-size", "", "samples per device and accumulation step", type=int),
    _flag(
        "--grad-accum --grad-accum-steps",
        "",
        "accumulation steps before an optimizer step",
        type=int,
    ),
    _flag(
        "--global-batch", "", "samples of a step over all devices, whatever their number", type=int
    ),
    _flag("--epochs", "", "length of the run in epochs", type=float),
    _flag("--max-steps", "", "length of the run in steps; 0 with --epochs: whole epochs", type=int),
    _flag("--warmup-epochs", "", "warm-up in epochs", type=float),
    _flag(
        "--set",
        "",
        "any config value: --set optimizer.clip=0.5",
        parameter="settings",
        multiple=True,
        metavar="KEY=VALUE",
    ),
)


def config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add all flags that load_config() reads to a verb's function."""
    for flag in reversed(CONFIG_FLAGS):
        command = click.option(*flag.names, flag.parameter, cls=Option, **flag.click)(command)
    return command

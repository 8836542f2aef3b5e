"""The flags that say what the config says: their names, those of other tools among them, and help.

config_flags.py makes a config of what they hold.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from samecurve.cli.options import Option, rank_count
from samecurve.core.strategies import strategy_help

_Decorator = Callable[[Callable[..., None]], Callable[..., None]]
_option = partial(click.option, cls=Option)


@dataclass(frozen=True)
class ValueFlag:
    """A flag that only names a config value."""

    names: tuple[str, ...]  # after the first those of other tools, kept out of help
    key: str
    help: str  # empty: the flag itself is another tool's, and hidden
    type: type = str
    elsewhere: str = ""  # its key in tasks that have such a one

    @property
    def parameter(self) -> str:
        return self.names[0].removeprefix("--").replace("-", "_")


def _flag(
    *names: str,
    key: str,
    help: str = "",  # noqa: A002 - click's name
    type: type = str,  # noqa: A002
    elsewhere: str = "",
) -> ValueFlag:
    return ValueFlag(names, key, help, type, elsewhere)


VALUE_FLAGS = (
    _flag("--devices", key="devices.use", help="auto, all, cpu, cpu:N, or indices: 0,1"),
    _flag(
        "--strategy",
        "--multi-gpu",
        key="devices.strategy",
        help=strategy_help(),
    ),
    _flag("--engine", key="engine", help="torch, jax"),
    _flag(
        "--sync-backend",
        "--backend",
        "--distributed-backend",
        key="devices.sync",
        help="auto, cpu, gloo, nccl",
    ),
    _flag("--dtype", key="train.precision", help="f32, bf16, f16, f64"),
    _flag(
        "--seq-len",
        key="model.max_seq_len",
        elsewhere="data.seq_len",
        type=int,
        help="tokens of a sample",
    ),
    _flag("--lr", key="optimizer.lr", type=float, help="peak learning rate"),
    _flag("--weight-decay", key="optimizer.weight_decay", type=float, help="on matrices only"),
    _flag(
        "--scale-lr",
        key="schedule.scale_lr",
        help="none, linear, sqrt: by batch / schedule.base_batch",
    ),
    _flag("--warmup", key="schedule.warmup", type=int, help="steps"),
    _flag(
        "--balance",
        key="devices.balance",
        help=(
            "even, measured, or relative speeds: 2,1; dp and ddp assign microbatches by them; same"
            " results"
        ),
    ),
    _flag(
        "--compress",
        key="devices.compress",
        help="none, bf16, fp16, powersgd: what ddp reduces gradients as; changes results",
    ),
    _flag(
        "--num-workers",
        key="data.workers",
        type=int,
        help="processes a device that read samples; 0: a thread of the rank",
    ),
    _flag("--prefetch", key="data.prefetch", type=int, help="steps prepared ahead"),
    _flag(
        "--max-checkpoints",
        key="train.keep",
        type=int,
        help="newest checkpoints kept, beside the best; 0: all",
    ),
    _flag(
        "--max-restarts",
        key="devices.max_restarts",
        type=int,
        help="starts after a failure, from the last save",
    ),
    _flag("--launcher", key="devices.launcher", help="direct, elastic, spawn"),
    _flag(
        "--port",
        "--master-port",
        key="devices.port",
        type=int,
        help="of the rendezvous; 0: any free one",
    ),
    _flag("--wandb", key="track.wandb", help="off, offline, online: W&B too"),
    _flag("--mode", key="data.mode"),
    _flag("--arch", key="model.arch"),
    _flag("--cssm", key="model.cssm"),
)


def config_options(command: Callable[..., None]) -> Callable[..., None]:
    """All flags that load_config() reads, on a verb's function."""
    values: list[_Decorator] = [
        _option(*flag.names, flag.parameter, type=flag.type, help=flag.help, hidden=not flag.help)
        for flag in VALUE_FLAGS
    ]
    for decorate in reversed([*_of_source(), *values, *_of_switches(), *_of_amounts()]):
        command = decorate(command)
    return command


def _of_source() -> list[_Decorator]:
    """What is trained, on what, and where."""
    return [
        _option(
            "-f", "--file", "--config-path", "file", type=Path, help="the config, YAML or JSON"
        ),
        _option(
            "-d",
            "--data",
            "data",
            type=str,
            help="data.source: text, a directory, a glob, a .bin of raw tokens, python-stdlib",
        ),
        _option(
            "--gpus",
            "--gpu-ids",
            "--device-ids",
            "gpus",
            type=str,
            metavar="0,1",
            help="GPUs by index, as CUDA_VISIBLE_DEVICES leaves them",
        ),
        _option(
            "--num-gpus",
            "--nproc",
            "--nproc-per-node",
            "num_gpus",
            type=rank_count(each_gpu=0),
            hidden=True,
        ),
    ]


def _of_switches() -> list[_Decorator]:
    """What is on or off."""
    return [
        _option("--no-amp", is_flag=True, help="precision f32"),
        _option("--bf16", is_flag=True, hidden=True),
        _option("--exact", is_flag=True, help="the same bits on any number of devices"),
        _option(
            "--compile",
            is_flag=True,
            help="compile the model's blocks: faster steps, slower first ones",
        ),
        _option(
            "--tensorboard",
            is_flag=True,
            help="TensorBoard too: logs/tensorboard in the run directory",
        ),
        _option(
            "--no-preflight",
            is_flag=True,
            help="no first collective with a time limit before training",
        ),
        _option("--spawn", is_flag=True, hidden=True),
        _option("--distributed-data-loading", is_flag=True, hidden=True),
    ]


def _of_amounts() -> list[_Decorator]:
    """How much, how long, and any other value."""
    return [
        _option("--batch-size", type=int, help="samples per device and accumulation step"),
        _option(
            "--grad-accum",
            "--grad-accum-steps",
            "grad_accum",
            type=int,
            help="accumulation steps before an optimizer step",
        ),
        _option(
            "--global-batch",
            type=int,
            help="samples of a step over all devices, whatever their number",
        ),
        _option("--epochs", type=float, help="length of the run in epochs"),
        _option(
            "--max-steps",
            type=int,
            help="length of the run in steps; 0 with --epochs: whole epochs",
        ),
        _option("--warmup-epochs", type=float, help="warm-up in epochs"),
        _option(
            "--set",
            "settings",
            multiple=True,
            metavar="KEY=VALUE",
            help="any config value: --set optimizer.clip=0.5",
        ),
    ]

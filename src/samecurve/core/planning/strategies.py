"""Which devices, which strategy, which sync: the part of plan() that chooses, and refuses what it
can't serve by name.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from samecurve.core.config.sections import Config, StrategyName
from samecurve.core.planning.machine import Device, Machine
from samecurve.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model lies on devices.

    processes: ranks, one for each device or one for all of a host. shards: devices that share one
    copy of the model. together: all processes take part in each round.
    """

    strategy: StrategyName
    devices: tuple[Device, ...]
    world_size: int
    shards: int
    every_rank_every_round: bool


def choose_devices(config: Config, machine: Machine, because: dict[str, str]) -> tuple[Device, ...]:
    """Of each host; several hosts are taken to be alike."""
    chosen = _on_this_host(config, machine, because)
    if machine.hosts > 1:
        because["devices"] += f"; on each of {machine.hosts} hosts, taken to be like this one"
    return chosen * machine.hosts


def _on_this_host(config: Config, machine: Machine, because: dict[str, str]) -> tuple[Device, ...]:
    use = config.devices.use.strip()
    gpus = machine.devices
    cpus = re.fullmatch(r"cpu(?::(\d+))?", use)
    if cpus:
        count = int(cpus.group(1) or 1)
        if not 1 <= count <= 256:
            raise UserError(f"{use}: {count} CPU ranks", "between 1 and 256", "devices.use")
        because["devices"] = (
            f"{use}: {count} of any number of CPU"
            f" {'ranks' if config.engine == 'torch' else 'devices'}, sharing {machine.cores} cores"
        )
        return machine.ranks_on_cpu(count)
    if use == "auto" and not gpus:
        because["devices"] = "no GPU found; --devices cpu:2 for more ranks"
        return machine.ranks_on_cpu(1)
    if use in {"auto", "all"}:
        if not gpus:
            raise UserError(
                "no GPU found",
                "--devices cpu, or cpu:4 for four ranks; `nvidia-smi` shows whether the driver"
                " sees one",
                "devices.use",
            )
        because["devices"] = f"{len(gpus)} of {len(gpus)} visible devices"
        return gpus
    return _by_index(use, gpus, because)


def _by_index(use: str, gpus: tuple[Device, ...], because: dict[str, str]) -> tuple[Device, ...]:
    here = (
        ", ".join(f"{gpu.index} ({gpu.name})" for gpu in gpus)
        or "no GPU; --devices cpu:2 runs two CPU ranks"
    )
    if not re.fullmatch(r"\d+(\s*,\s*\d+)*", use):
        raise UserError(
            f"devices {use!r} is neither auto, all, cpu, cpu:N nor a list of indices",
            f"for example --gpus 0,1; here: {here}",
            "devices.use",
        )
    wanted = [int(part) for part in use.split(",")]
    by_index = {gpu.index: gpu for gpu in gpus}
    missing = [index for index in wanted if index not in by_index]
    if missing:
        raise UserError(
            f"GPU {', '.join(map(str, missing))} {'does' if len(missing) == 1 else 'do'} not exist",
            f"here: {here}",
            "devices.use",
        )
    if len(set(wanted)) < len(wanted):
        raise UserError(f"devices {use} names a GPU twice", "each one once", "devices.use")
    because["devices"] = f"{len(wanted)} of {len(gpus)} visible devices, as asked"
    return tuple(by_index[index] for index in wanted)


def choose_layout(
    config: Config,
    devices: tuple[Device, ...],
    started: int,
    fits: Callable[[int], bool],
    because: dict[str, str],
) -> Layout:
    """fits: whether a device's part fits if one copy of the model is shared out among so many.

    started: processes that there are already.
    """
    if config.engine == "jax":
        return _jax_layout(config, devices, started, fits, because)
    strategy, devices = _strategy(config, devices, fits, because)
    world, shards = len(devices), _shards(config, strategy, len(devices), because)
    if config.devices.offload and (shards == 1 or devices[0].kind == "cpu"):
        why = (
            f"strategy {strategy} holds the whole model on each device"
            if shards == 1
            else "these are CPU ranks: their state is in host memory already"
        )
        raise UserError(
            f"devices.offload: {why}", "leave it out, or --strategy fsdp on GPUs", "devices.offload"
        )
    if config.devices.compress != "none":
        _check_compress(config, strategy)
    return Layout(
        strategy=strategy,
        devices=devices,
        world_size=1 if strategy in {"single", "dp"} else world,
        shards=shards,
        every_rank_every_round=shards > 1,
    )


def _jax_layout(
    config: Config,
    devices: tuple[Device, ...],
    started: int,
    fits: Callable[[int], bool],
    because: dict[str, str],
) -> Layout:
    """single, dp (replicated) and fsdp (shared out), all in one process for a host's devices."""
    section = config.devices
    if section.strategy in {"ddp", "hsdp"}:
        instead = (
            "dp is its data parallel: one process drives all devices, one all-reduce a step"
            if section.strategy == "ddp"
            else "fsdp shares the model out among all devices"
        )
        raise UserError(
            f"strategy {section.strategy} is for engine torch",
            f"--strategy {'dp' if section.strategy == 'ddp' else 'fsdp'}: {instead}",
            "devices.strategy",
        )
    for key, given in (
        ("offload", section.offload),
        ("shards", section.shards is not None),
        ("compress", section.compress != "none"),
    ):
        if given:
            raise UserError(
                f"devices.{key} is for engine torch",
                "leave it out, or --engine torch",
                f"devices.{key}",
            )
    if config.train.norm_sync:
        raise UserError(
            "train.norm_sync is for engine torch",
            "a norm that treats each sample by itself (GroupNorm, LayerNorm), or --engine torch",
            "train.norm_sync",
        )
    strategy, devices = _strategy(config, devices, fits, because, "dp")
    if len(devices) % started:
        raise UserError(
            f"{started} processes can't share {len(devices)} devices evenly",
            "a process for each host, or for each device",
            "devices.use",
        )
    shards = len(devices) if strategy == "fsdp" else 1
    return Layout(
        strategy=strategy,
        devices=devices,
        world_size=started,
        shards=shards,
        every_rank_every_round=started > 1,
    )


def _strategy(
    config: Config,
    devices: tuple[Device, ...],
    fits: Callable[[int], bool],
    because: dict[str, str],
    copies: StrategyName = "ddp",
) -> tuple[StrategyName, tuple[Device, ...]]:
    """copies: what `auto` takes where the whole model fits on each device."""
    wanted, world = config.devices.strategy, len(devices)
    if wanted == "auto":
        if world == 1:
            because["strategy"] = "one device"
            return "single", devices
        whole = fits(1)
        because["strategy"] = (
            "several devices; the whole model fits on each"
            if whole
            else f"the whole model does not fit on one device; shared out among {world} it does"
        )
        return (copies if whole or not fits(world) else "fsdp"), devices
    because["strategy"] = "as asked" + (
        "; on one device nothing is shared out"
        if wanted in {"dp", "ddp", "fsdp"} and world == 1
        else ""
    )
    if wanted == "single" and world > 1:
        if config.devices.use not in {"auto", "all"}:
            raise UserError(
                f"strategy single takes one device, not the {world} of {config.devices.use}",
                f"--strategy {copies}, or one device",
                "devices.strategy",
            )
        because["devices"] = f"1 of {world} visible devices: strategy single takes one"
        return wanted, devices[:1]
    return wanted, devices


def _shards(config: Config, strategy: StrategyName, world: int, because: dict[str, str]) -> int:
    """Devices that share one copy of the model."""
    wanted = config.devices.shards
    if strategy != "hsdp":
        if wanted is not None:
            raise UserError(
                f"devices.shards is for strategy hsdp, not {strategy}",
                "--strategy hsdp, or leave it out",
                "devices.shards",
            )
        return world if strategy == "fsdp" else 1
    proper = [count for count in range(2, world) if world % count == 0]
    if not proper:
        raise UserError(
            f"strategy hsdp needs groups of at least 2 devices, repeated at least twice; {world}"
            " can't be cut so",
            "--strategy fsdp, or 4, 6, 8, ... devices",
            "devices.strategy",
        )
    if wanted is not None and wanted not in proper:
        raise UserError(
            f"devices.shards {wanted}: {world} devices can be cut into groups of"
            f" {', '.join(map(str, proper))}",
            "one of these, or leave it out",
            "devices.shards",
        )
    shards = wanted or proper[-1]
    because["strategy"] = (
        f"as asked; {world // shards} copies of the model, each shared out among {shards} devices"
    )
    return shards


def _check_compress(config: Config, strategy: StrategyName) -> None:
    compress = config.devices.compress
    if strategy != "ddp":
        raise UserError(
            f"compress {compress} is for the gradients that ddp sends; strategy {strategy} has none"
            " of them",
            "--strategy ddp, or leave --compress out",
            "devices.compress",
        )
    if config.train.precision == "f64":
        raise UserError(
            f"compress {compress} would throw away what f64 is for",
            "leave --compress out, or --dtype f32",
            "devices.compress",
        )


def choose_sync(config: Config, layout: Layout, because: dict[str, str]) -> str:
    wanted = config.devices.sync
    gpus = layout.devices[0].kind == "cuda"
    if config.engine == "jax":
        if wanted not in {"auto", "nccl" if gpus else "gloo"} and not (
            wanted == "cpu" and not gpus
        ):
            raise UserError(
                f"sync {wanted}: jax reduces"
                f" {'between GPUs with NCCL' if gpus else 'between CPU devices in host memory'},"
                " compiled into its step",
                "--sync-backend auto, or --engine torch",
                "devices.sync",
            )
        because["sync"] = (
            "compiled into the step by XLA" if len(layout.devices) > 1 else "nothing to synchronise"
        )
        return "xla" if len(layout.devices) > 1 else "none"
    if wanted == "nccl" and not gpus:
        raise UserError(
            "sync nccl needs GPUs; these are CPU ranks",
            "--sync-backend cpu (gloo), or auto",
            "devices.sync",
        )
    if layout.strategy in {"single", "dp"}:
        because["sync"] = (
            "nothing to synchronise"
            if layout.strategy == "single"
            else "one process: copies between its devices"
        )
        return "none"
    because["sync"] = (
        "as asked"
        if wanted != "auto"
        else ("every rank has a GPU of its own" if gpus else "CPU ranks")
    )
    backend = {"auto": "nccl" if gpus else "gloo", "nccl": "nccl"}.get(wanted, "gloo")
    if backend == "gloo" and gpus and layout.shards > 1:
        raise UserError(
            f"strategy {layout.strategy} gathers weights between GPUs, which gloo can't",
            "--sync-backend nccl, or --strategy ddp",
            "devices.sync",
        )
    return backend

"""Which devices, which strategy, which sync: the part of plan() that chooses, and refuses what it can't serve by name."""

import re

from lockstep.core.config import Config
from lockstep.core.machine import Device, Machine
from lockstep.errors import UserError

_HERE = ("single", "ddp")  # strategies of this version


def choose_devices(config: Config, machine: Machine, because: dict[str, str]) -> tuple[Device, ...]:
    use = config.devices.use.strip()
    gpus = machine.devices
    cpus = re.fullmatch(r"cpu(?::(\d+))?", use)
    if cpus:
        count = int(cpus.group(1) or 1)
        if not 1 <= count <= 256:
            raise UserError(f"{use}: {count} CPU ranks", "between 1 and 256", "devices.use")
        because["devices"] = f"{use}: {count} of any number of CPU ranks, sharing {machine.cores} cores"
        return machine.ranks_on_cpu(count)
    if use == "auto" and not gpus:
        because["devices"] = "no GPU found; --devices cpu:2 for more ranks"
        return machine.ranks_on_cpu(1)
    if use in {"auto", "all"}:
        if not gpus:
            raise UserError("no GPU found", "--devices cpu, or cpu:4 for four ranks; `nvidia-smi` shows whether the driver sees one", "devices.use")
        because["devices"] = f"{len(gpus)} of {len(gpus)} visible devices"
        return gpus
    return _by_index(use, gpus, because)


def _by_index(use: str, gpus: tuple[Device, ...], because: dict[str, str]) -> tuple[Device, ...]:
    here = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in gpus) or "no GPU; --devices cpu:2 runs two CPU ranks"
    if not re.fullmatch(r"\d+(\s*,\s*\d+)*", use):
        raise UserError(f"devices {use!r} is neither auto, all, cpu, cpu:N nor a list of indices", f"for example --gpus 0,1; here: {here}", "devices.use")
    wanted = [int(part) for part in use.split(",")]
    by_index = {gpu.index: gpu for gpu in gpus}
    missing = [index for index in wanted if index not in by_index]
    if missing:
        raise UserError(f"GPU {', '.join(map(str, missing))} {'does' if len(missing) == 1 else 'do'} not exist", f"here: {here}", "devices.use")
    if len(set(wanted)) < len(wanted):
        raise UserError(f"devices {use} names a GPU twice", "each one once", "devices.use")
    because["devices"] = f"{len(wanted)} of {len(gpus)} visible devices, as asked"
    return tuple(by_index[index] for index in wanted)


def choose_strategy(config: Config, devices: tuple[Device, ...], because: dict[str, str]) -> tuple[str, tuple[Device, ...]]:
    wanted = config.devices.strategy
    if config.engine != "torch":
        raise UserError(f"engine {config.engine} is not in this version", "--engine torch", "engine")
    if wanted == "auto":
        because["strategy"] = "one device" if len(devices) == 1 else "several devices; the whole model fits on each"
        return ("single" if len(devices) == 1 else "ddp"), devices
    if wanted not in _HERE:
        raise UserError(f"strategy {wanted} is not in this version", f"one of {', '.join(_HERE)}, or auto", "devices.strategy")
    because["strategy"] = "as asked"
    if wanted == "single" and len(devices) > 1:
        if config.devices.use not in {"auto", "all"}:
            raise UserError(f"strategy single takes one device, not the {len(devices)} of {config.devices.use}", "--strategy ddp, or one device", "devices.strategy")
        because["devices"] = f"1 of {len(devices)} visible devices: strategy single takes one"
        return wanted, devices[:1]
    return wanted, devices


def choose_sync(config: Config, strategy: str, devices: tuple[Device, ...], because: dict[str, str]) -> str:
    wanted = config.devices.sync
    gpus = devices[0].kind == "cuda"
    if wanted == "nccl" and not gpus:
        raise UserError("sync nccl needs GPUs; these are CPU ranks", "--sync-backend cpu (gloo), or auto", "devices.sync")
    if strategy == "single":
        because["sync"] = "nothing to synchronise"
        return "none"
    because["sync"] = "as asked" if wanted != "auto" else ("every rank has a GPU of its own" if gpus else "CPU ranks")
    return {"auto": "nccl" if gpus else "gloo", "nccl": "nccl"}.get(wanted, "gloo")

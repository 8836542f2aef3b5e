"""Which devices, which strategy, which sync: the part of plan() that chooses, and refuses what it
can't serve by name.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from samecurve.core.config.sections import Config
from samecurve.core.planning.decision import Decision
from samecurve.core.planning.facts import Fixed
from samecurve.core.planning.machine import Device, Machine
from samecurve.core.planning.strategies import STRATEGIES, StrategySpec, auto_strategy
from samecurve.errors import UserError
from samecurve.units import counted

FitCheck = Callable[[StrategySpec, int], bool]  # whether a device's part fits in so many shards

_MOST_CPU_RANKS = 256


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model lies on devices."""

    spec: StrategySpec
    devices: tuple[Device, ...]
    world_size: int  # processes: one for each device, or one for all of a host
    shards: int  # devices that share one copy of the model
    every_rank_every_round: bool  # all processes take part in each round

    @property
    def strategy(self) -> str:
        return self.spec.name

    @property
    def num_devices(self) -> int:
        return len(self.devices)


def choose_devices(config: Config, machine: Machine) -> Decision[tuple[Device, ...]]:
    """Those of every host; several hosts are taken to be alike.

    UserError: there are no such devices, or the engine that is installed can't use them.
    """
    chosen = _choose_on_this_host(config, machine)
    unfit = machine.unfit.get(config.engine)
    if unfit and chosen.value[0].kind == "cuda":
        gpus = f"{counted(len(chosen.value), 'GPU')} ({chosen.value[0].name})"
        raise UserError(
            f"{gpus} for engine {config.engine}, and {unfit.cause}",
            f"{unfit.remedy}; or --devices cpu",
            "devices.use",
        )
    chosen = _say_xla_flags(config, machine, chosen)
    if machine.hosts == 1:
        return chosen
    hosts = f"on each of {machine.hosts} hosts, taken to be like this one"
    reason = f"{chosen.reasons['devices']}; {hosts}"
    return Decision(chosen.value * machine.hosts, {"devices": reason}, chosen.warnings)


def _say_xla_flags(
    config: Config, machine: Machine, chosen: Decision[tuple[Device, ...]]
) -> Decision[tuple[Device, ...]]:
    """XLA_FLAGS asks for another number of CPU devices than are used."""
    count, used = machine.xla_devices, len(chosen.value)
    on_cpu = chosen.value[0].kind == "cpu"
    if config.engine != "jax" or not on_cpu or count in {None, used}:
        return chosen
    warning = (
        f"XLA_FLAGS asks for {counted(count or 0, 'CPU device')}, and devices {config.devices.use}"
        f" for {used}: {used} are used (--devices cpu:{count} for the others)"
    )
    return Decision(chosen.value, chosen.reasons, (*chosen.warnings, warning))


def _choose_on_this_host(config: Config, machine: Machine) -> Decision[tuple[Device, ...]]:
    use = config.devices.use.strip()
    gpus = machine.devices
    cpus = re.fullmatch(r"cpu(?::(\d+))?", use)
    if cpus:
        return _choose_cpu_ranks(config, machine, int(cpus.group(1) or 1))
    if use == "auto" and not gpus and config.engine == "jax" and machine.xla_devices:
        count = machine.xla_devices
        _check_cpu_ranks(use, count)
        reason = f"no GPU found; XLA_FLAGS asks for {counted(count, 'CPU device')}"
        return Decision(machine.ranks_on_cpu(count), {"devices": reason})
    if use == "auto" and not gpus:
        reason = "no GPU found; --devices cpu:2 for more ranks"
        return Decision(machine.ranks_on_cpu(1), {"devices": reason})
    if use not in {"auto", "all"}:
        return _choose_by_index(use, gpus)
    if not gpus:
        raise UserError(
            "no GPU found",
            "--devices cpu, or cpu:4 for four ranks; `nvidia-smi` or `rocm-smi` shows whether the"
            " driver sees one",
            "devices.use",
        )
    return Decision(gpus, {"devices": f"{len(gpus)} of {len(gpus)} visible devices"})


def _choose_cpu_ranks(config: Config, machine: Machine, count: int) -> Decision[tuple[Device, ...]]:
    use = config.devices.use.strip()
    _check_cpu_ranks(use, count)
    unit = "ranks" if config.engine == "torch" else "devices"
    reason = f"{use}: {count} of any number of CPU {unit}, sharing {machine.cores} cores"
    return Decision(machine.ranks_on_cpu(count), {"devices": reason})


def _check_cpu_ranks(use: str, count: int) -> None:
    """UserError: nobody can want so many."""
    if not 1 <= count <= _MOST_CPU_RANKS:
        raise UserError(
            f"{use}: {count} CPU ranks", f"between 1 and {_MOST_CPU_RANKS}", "devices.use"
        )


def _choose_by_index(use: str, gpus: tuple[Device, ...]) -> Decision[tuple[Device, ...]]:
    here = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in gpus)
    here = here or "no GPU; --devices cpu:2 runs two CPU ranks"
    if not re.fullmatch(r"\d+(\s*,\s*\d+)*", use):
        raise UserError(
            f"devices {use!r} is neither auto, all, cpu, cpu:N nor a list of indices",
            f"for example --gpus 0,1; here: {here}",
            "devices.use",
        )
    wanted = [int(part) for part in use.split(",")]
    by_index = {gpu.index: gpu for gpu in gpus}
    missing = [str(index) for index in wanted if index not in by_index]
    if missing:
        verb = "does" if len(missing) == 1 else "do"
        raise UserError(
            f"GPU {', '.join(missing)} {verb} not exist", f"here: {here}", "devices.use"
        )
    if len(set(wanted)) < len(wanted):
        raise UserError(f"devices {use} names a GPU twice", "each one once", "devices.use")
    reason = f"{len(wanted)} of {len(gpus)} visible devices, as asked"
    return Decision(tuple(by_index[index] for index in wanted), {"devices": reason})


def choose_layout(
    config: Config, devices: tuple[Device, ...], *, started: int, fits: FitCheck
) -> Decision[Layout]:
    """The strategy, and how it lies on these devices.

    started: processes that there are already
    fits: whether a device's part fits if one copy of the model is cut into so many shards

    UserError: the strategy is not the engine's, or does not serve what the config asks for.
    """
    chosen = _choose_strategy(config, devices, fits)
    spec, reasons = chosen.value, dict(chosen.reasons)
    if spec.takes_one_device and len(devices) > 1:
        _check_may_leave_out(config, spec, devices)
        reasons["devices"] = f"1 of {len(devices)} visible devices: strategy {spec.name} takes one"
        devices = devices[:1]
    _check_options(config, spec)
    shards = _choose_shards(config, spec, len(devices))
    if spec.sharding == "groups":
        reasons["strategy"] = (
            f"as asked; {len(devices) // shards} copies of the model, each shared out among"
            f" {shards} devices"
        )
    if config.devices.offload:
        _check_offload(spec, devices, shards)
    if config.devices.compress != "none" and config.train.precision == "f64":
        raise UserError(
            f"compress {config.devices.compress} would throw away what f64 is for",
            "leave --compress out, or --dtype f32",
            "devices.compress",
        )
    world_size, meets_every_round = _world_size(spec, len(devices), started), shards > 1
    if spec.processes == "as started":
        meets_every_round = started > 1
    layout = Layout(
        spec=spec,
        devices=devices,
        world_size=world_size,
        shards=shards,
        every_rank_every_round=meets_every_round,
    )
    return Decision(layout, reasons)


def _choose_strategy(
    config: Config, devices: tuple[Device, ...], fits: FitCheck
) -> Decision[StrategySpec]:
    wanted, engine = config.devices.strategy, config.engine
    if wanted == "auto":
        return _choose_automatically(engine, len(devices), fits)
    spec = STRATEGIES.get((engine, wanted))
    if spec is None:
        raise _no_such_strategy(wanted)
    reason = "as asked"
    if len(devices) == 1 and not spec.takes_one_device:
        reason += "; on one device nothing is shared out"
    return Decision(spec, {"strategy": reason})


def _choose_automatically(engine: str, num_devices: int, fits: FitCheck) -> Decision[StrategySpec]:
    if num_devices == 1:
        return Decision(auto_strategy(engine, "one device"), {"strategy": "one device"})
    replicated = auto_strategy(engine, "the model fits")
    sharded = auto_strategy(engine, "only a shard fits")
    if fits(replicated, 1):
        reason = "several devices; the whole model fits on each"
        return Decision(replicated, {"strategy": reason})
    reason = f"the whole model does not fit on one device; shared out among {num_devices} it does"
    # where neither fits, the refusal that follows names what the whole model needs
    spec = sharded if fits(sharded, num_devices) else replicated
    return Decision(spec, {"strategy": reason})


def _no_such_strategy(name: str) -> UserError:
    """A strategy that another engine has."""
    other = next(row for (_, other_name), row in STRATEGIES.items() if other_name == name)
    return UserError(
        f"strategy {name} is for engine {other.engine}",
        other.other_engine or f"--engine {other.engine}, or --strategy auto",
        "devices.strategy",
    )


def _check_may_leave_out(config: Config, spec: StrategySpec, devices: tuple[Device, ...]) -> None:
    """UserError: the config names more devices than a strategy of one device takes."""
    if config.devices.use == "auto":
        return
    several = auto_strategy(spec.engine, "the model fits").name
    raise UserError(
        f"strategy {spec.name} takes one device, not the {len(devices)} of {config.devices.use}",
        f"--strategy {several}, or one device",
        "devices.strategy",
    )


def _check_options(config: Config, spec: StrategySpec) -> None:
    """UserError: the strategy refuses what the config asks for."""
    wanted = {
        "devices.offload": config.devices.offload,
        "devices.shards": config.devices.shards is not None,
        "devices.compress": config.devices.compress != "none",
        "train.norm_sync": config.train.norm_sync,
    }
    for key, is_wanted in wanted.items():
        refusal = spec.refuses.get(key)
        if is_wanted and refusal:
            raise UserError(f"{key} {refusal.why}", refusal.remedy, key)


def _choose_shards(config: Config, spec: StrategySpec, num_devices: int) -> int:
    """Devices that share one copy of the model."""
    if spec.sharding == "none":
        return 1
    if spec.sharding == "all devices":
        return num_devices
    wanted = config.devices.shards
    proper = [count for count in range(2, num_devices) if num_devices % count == 0]
    if not proper:
        raise UserError(
            f"strategy {spec.name} needs groups of at least 2 devices, repeated at least twice;"
            f" {num_devices} can't be cut so",
            "--strategy fsdp, or 4, 6, 8, ... devices",
            "devices.strategy",
        )
    if wanted is not None and wanted not in proper:
        groups = ", ".join(map(str, proper))
        raise UserError(
            f"devices.shards {wanted}: {num_devices} devices can be cut into groups of {groups}",
            "one of these, or leave it out",
            "devices.shards",
        )
    return wanted or proper[-1]


def _check_offload(spec: StrategySpec, devices: tuple[Device, ...], shards: int) -> None:
    """UserError: there is nothing that could lie in host memory instead."""
    if shards == 1:
        why = f"strategy {spec.name} holds the whole model on each device"
    elif devices[0].kind == "cpu":
        why = "these are CPU ranks: their state is in host memory already"
    else:
        return
    raise UserError(
        f"devices.offload: {why}", "leave it out, or --strategy fsdp on GPUs", "devices.offload"
    )


def _world_size(spec: StrategySpec, num_devices: int, started: int) -> int:
    if spec.processes == "one":
        return 1
    if spec.processes == "one per device":
        return num_devices
    if num_devices % started:
        raise UserError(
            f"{started} processes can't share {num_devices} devices evenly",
            "a process for each host, or for each device",
            "devices.use",
        )
    return started


def choose_sync(config: Config, layout: Layout) -> Decision[str]:
    """By what gradients are added up.

    UserError: it can't be had here.
    """
    if config.engine == "jax":
        return _choose_jax_sync(config, layout)
    wanted = config.devices.sync
    gpus = layout.devices[0].kind == "cuda"
    if wanted == "nccl" and not gpus:
        raise UserError(
            "sync nccl needs GPUs; these are CPU ranks",
            "--sync-backend cpu (gloo), or auto",
            "devices.sync",
        )
    if layout.spec.takes_one_device:
        return Decision("none", {"sync": "nothing to synchronise"})
    if layout.spec.processes == "one":
        return Decision("none", {"sync": "one process: copies between its devices"})
    if wanted != "auto":
        backend, reason = wanted, "as asked"
    elif gpus:
        backend, reason = "nccl", "every rank has a GPU of its own"
    else:
        backend, reason = "gloo", "CPU ranks"
    if backend == "cpu":
        backend = "gloo"
    if backend == "gloo" and gpus and layout.shards > 1:
        raise UserError(
            f"strategy {layout.strategy} gathers weights between GPUs, which gloo can't",
            "--sync-backend nccl, or --strategy ddp",
            "devices.sync",
        )
    return Decision(backend, {"sync": reason})


def _choose_jax_sync(config: Config, layout: Layout) -> Decision[str]:
    if layout.devices[0].kind == "cuda":
        served, how = {"auto", "nccl"}, "between GPUs with NCCL"
    else:
        served, how = {"auto", "gloo", "cpu"}, "between CPU devices in host memory"
    if config.devices.sync not in served:
        raise UserError(
            f"sync {config.devices.sync}: jax reduces {how}, compiled into its step",
            "--sync-backend auto, or --engine torch",
            "devices.sync",
        )
    if layout.num_devices == 1:
        return Decision("none", {"sync": "nothing to synchronise"})
    return Decision("xla", {"sync": "compiled into the step by XLA"})


def choose_threads(
    config: Config, machine: Machine, layout: Layout, fixed: Fixed | None
) -> Decision[int]:
    """Threads inside one device's operations.

    Their number changes the order in which a CPU adds, so exact runs keep it.

    UserError: they are asked for where they mean nothing.
    """
    threads, num_devices = config.devices.threads, layout.num_devices
    on_cpu = layout.devices[0].kind == "cpu"
    if threads and (not on_cpu or config.engine == "jax"):
        raise UserError(
            "devices.threads is for CPU ranks of engine torch", "leave it out", "devices.threads"
        )
    if config.train.exact and on_cpu and config.engine == "torch":
        return _choose_exact_threads(threads, fixed)
    if threads:
        return Decision(threads, {"threads": "devices.threads"})
    cores = counted(machine.cores, "core")
    unit = "device" if layout.world_size < num_devices else "rank"
    reason = f"{cores} for {counted(num_devices, unit)}"
    return Decision(max(1, machine.cores // num_devices), {"threads": reason})


def _choose_exact_threads(threads: int | None, fixed: Fixed | None) -> Decision[int]:
    if fixed is None and threads:
        return Decision(threads, {"threads": "devices.threads"})
    if fixed is None:
        reason = (
            "1 for each rank, whatever the machine, so that every rank adds in the same order"
            " (devices.threads gives more)"
        )
        return Decision(1, {"threads": reason})
    warnings: tuple[str, ...] = ()
    if threads and threads != fixed.threads:
        warning = (
            f"devices.threads {threads}: this run began with {fixed.threads} threads a rank, and"
            " train.exact keeps them"
        )
        warnings = (warning,)
    return Decision(fixed.threads, {"threads": "as this run began"}, warnings)

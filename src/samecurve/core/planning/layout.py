"""How the model lies on the devices: the strategy, its processes and shards, and how gradients are
synchronised. What a strategy can't serve is refused by name.
"""

from collections.abc import Callable
from dataclasses import dataclass

from samecurve.core.config.sections import Devices
from samecurve.core.planning import Decision
from samecurve.core.planning.machine import Device, Machine
from samecurve.core.strategies import STRATEGIES, StrategySpec, auto_strategy
from samecurve.errors import UserError
from samecurve.units import show_bytes


@dataclass(frozen=True)
class Fit:
    """What one device's part of the model needs under a strategy, with one sample at once."""

    fits: bool
    needed: int = 0  # bytes
    usable: float = 0.0  # bytes of the smallest device that the plan counts on


# (strategy, number of shards) -> whether the shard of one device fits into its memory
FitCheck = Callable[[StrategySpec, int], Fit]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model lies on devices, and how these exchange what they computed."""

    engine: str
    strategy: str
    backend: str  # that synchronises gradients: nccl, gloo, xla; none
    devices: tuple[Device, ...]  # one for each place of work
    visible: int  # devices of this machine
    world_size: int  # processes: one for each device, or one for all of a host
    shards: int  # devices that share one copy of the model
    # every rank takes part in each round: what a rank computes with is spread over all ranks
    every_rank_every_round: bool
    reshard: bool = True
    preflight: int = 0
    # weights are gathered, and gradients summed over devices, once a step, not in each round
    gathers_once: bool = False

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def spec(self) -> StrategySpec:
        return STRATEGIES[self.engine, self.strategy]

    @property
    def interleaved(self) -> int:
        """Devices that take neighbouring microbatches in each round, where these are fixed:
        those that gather weights and sum gradients together in each round.
        """
        return self.shards if self.is_sharded_by_block and not self.gathers_once else 1

    @property
    def is_sharded_by_block(self) -> bool:
        return self.shards > 1 and self.spec.state == "sharded by block"

    @property
    def reshards_by_block(self) -> bool:
        """Whether a block's gathered weights are let go of after its forward pass."""
        return self.reshard and not self.gathers_once

    @property
    def computed_on(self) -> str:
        """The engine and the kind of device, which decide the bits of a result."""
        return f"{self.engine} on {self.devices[0].name}"

    @property
    def is_one_process(self) -> bool:
        """Whether the launching process trains by itself, with no other process to meet."""
        return self.backend == "none" or (self.engine == "jax" and self.world_size == 1)

    @property
    def can_be_uneven(self) -> bool:
        """Whether some devices could take more microbatches than others."""
        return self.num_devices > 1 and self.spec.can_be_uneven and not self.every_rank_every_round

    def devices_of(self, rank: int) -> range:
        """Indices of the devices that one process computes on."""
        each = self.num_devices // self.world_size
        return range(rank * each, (rank + 1) * each)


def choose_strategy(
    section: Devices, engine: str, devices: tuple[Device, ...], fits: FitCheck
) -> Decision[StrategySpec]:
    """The strategy, and whether it leaves devices out (in the reason "devices").

    UserError: the engine does not have the strategy, or it takes one device of several named ones.
    """
    if section.strategy == "auto":
        return _choose_automatically(engine, devices, fits)
    spec = STRATEGIES.get((engine, section.strategy))
    if spec is None:
        rows = (row for (_, name), row in STRATEGIES.items() if name == section.strategy)
        other = next(rows)  # of another engine
        raise UserError(
            f"strategy {section.strategy} is for engine {other.engine}",
            other.other_engine or f"--engine {other.engine}, or --strategy auto",
            "devices.strategy",
        )
    reasons = {"strategy": "as asked"}
    if len(devices) == 1 and not spec.takes_one_device:
        reasons["strategy"] += "; on one device nothing is shared out"
    if spec.takes_one_device and len(devices) > 1:
        if section.use != "auto":
            several = auto_strategy(engine, "the model fits").name
            raise UserError(
                f"strategy {spec.name} takes one device, not the {len(devices)} of {section.use}",
                f"--strategy {several}, or one device",
                "devices.strategy",
            )
        reasons["devices"] = f"1 of {len(devices)} visible devices: strategy {spec.name} takes one"
    return Decision(spec, reasons)


def _choose_automatically(
    engine: str, devices: tuple[Device, ...], fits: FitCheck
) -> Decision[StrategySpec]:
    num_devices = len(devices)
    if num_devices == 1:
        return Decision(auto_strategy(engine, "one device"), {"strategy": "one device"})
    replicated = auto_strategy(engine, "the model fits")
    sharded = auto_strategy(engine, "only a shard fits")
    whole = fits(replicated, 1)
    if whole.fits:
        reasons = {"strategy": "several devices; the whole model fits on each"}
        if devices[0].kind == "cuda":
            reasons["auto_strategy"] = (
                f"{replicated.name} (auto): each device holds the whole model, which needs"
                f" {show_bytes(whole.needed)} of the {show_bytes(whole.usable)} that the plan"
                " counts on"
            )
        return Decision(replicated, reasons)
    reason = f"the whole model does not fit on one device; shared out among {num_devices} it does"
    part = fits(sharded, num_devices)
    if not part.fits:  # the refusal that follows names what the whole model needs
        return Decision(replicated, {"strategy": reason})
    taken = (
        f"{sharded.name} (auto): under {replicated.name} each device would need"
        f" {show_bytes(whole.needed)}, and the plan counts on {show_bytes(whole.usable)};"
        f" under {sharded.name} each needs {show_bytes(part.needed)}"
    )
    return Decision(sharded, {"strategy": reason, "auto_strategy": taken})


def choose_layout(
    section: Devices,
    strategy: Decision[StrategySpec],
    devices: tuple[Device, ...],
    machine: Machine,
    *,
    syncs_norms: bool,
    fixed_microbatches: bool,
) -> Decision[Layout]:
    """How the strategy lies on these devices.

    syncs_norms: BatchNorm layers of the model are synchronised, so all ranks meet in each round
    fixed_microbatches: they have one size on any devices

    UserError: the strategy does not serve what the config asks for.
    """
    spec, reasons = strategy.value, dict(strategy.reasons)
    if spec.takes_one_device:
        devices = devices[:1]
    _check_options(section, spec)
    shards = _choose_shards(section.shards, spec, len(devices), machine.hosts)
    if spec.sharding == "groups":
        reasons["strategy"] = (
            f"as asked; {len(devices) // shards} copies of the model, each shared out among"
            f" {shards} devices"
        )
    world_size = _world_size(spec, len(devices), machine.started)
    meets_every_round = shards > 1
    if spec.processes == "as started" and not fixed_microbatches:
        meets_every_round = machine.started > 1
    meets_every_round |= syncs_norms and not fixed_microbatches
    sync = choose_sync(section.sync, spec, devices, shards)
    layout = Layout(
        engine=spec.engine,
        strategy=spec.name,
        backend=sync.value,
        devices=devices,
        visible=len(machine.devices) or len(devices),
        world_size=world_size,
        shards=shards,
        every_rank_every_round=meets_every_round,
        reshard=section.reshard and spec.engine == "torch",
        preflight=section.preflight,
    )
    return Decision(layout, {**reasons, **sync.reasons})


def _check_options(section: Devices, spec: StrategySpec) -> None:
    """UserError: the strategy refuses what the config asks for."""
    wanted = {
        "devices.shards": section.shards is not None,
    }
    for key, is_wanted in wanted.items():
        refusal = spec.refuses.get(key)
        if is_wanted and refusal:
            raise UserError(f"{key} {refusal.why}", refusal.remedy, key)


def _choose_shards(wanted: int | None, spec: StrategySpec, num_devices: int, hosts: int) -> int:
    """Devices that share one copy of the model: those of one host, where there are several."""
    if spec.sharding == "none":
        return 1
    if spec.sharding == "all devices":
        return num_devices
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
    on_a_host = num_devices // hosts
    return wanted or (on_a_host if on_a_host in proper else proper[-1])


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


def choose_sync(
    wanted: str, spec: StrategySpec, devices: tuple[Device, ...], shards: int = 1
) -> Decision[str]:
    """The backend that sums gradients over devices.

    wanted: devices.sync. UserError: this backend does not serve these devices.
    """
    gpus = devices[0].kind == "cuda"
    if spec.engine == "jax":
        return _choose_jax_sync(wanted, len(devices), gpus=gpus)
    if wanted == "nccl" and not gpus:
        raise UserError(
            "sync nccl needs GPUs; these are CPU ranks",
            "--sync-backend cpu (gloo), or auto",
            "devices.sync",
        )
    if spec.takes_one_device:
        return Decision("none", {"sync": "nothing to synchronise"})
    if spec.processes == "one":
        return Decision("none", {"sync": "one process: copies between its devices"})
    if wanted != "auto":
        backend, reason = wanted, "as asked"
    elif gpus:
        backend, reason = "nccl", "every rank has a GPU of its own"
    else:
        backend, reason = "gloo", "CPU ranks"
    if backend == "cpu":
        backend = "gloo"
    if backend == "gloo" and gpus and shards > 1:
        raise UserError(
            f"strategy {spec.name} gathers weights between GPUs, which gloo can't",
            "--sync-backend nccl, or --strategy ddp",
            "devices.sync",
        )
    return Decision(backend, {"sync": reason})


def _choose_jax_sync(wanted: str, num_devices: int, *, gpus: bool) -> Decision[str]:
    served, how = {"auto", "gloo", "cpu"}, "between CPU devices in host memory"
    if gpus:
        served, how = {"auto", "nccl"}, "between GPUs with NCCL"
    if wanted not in served:
        raise UserError(
            f"sync {wanted}: jax reduces {how}, compiled into its step",
            "--sync-backend auto, or --engine torch",
            "devices.sync",
        )
    if num_devices == 1:
        return Decision("none", {"sync": "nothing to synchronise"})
    return Decision("xla", {"sync": "compiled into the step by XLA"})


def layout_warnings(
    section: Devices, layout: Layout, optimizer_bytes: int, *, is_even: bool
) -> list[str]:
    """Warnings for users of this strategy on these devices.

    optimizer_bytes: optimizer state of one device
    is_even: whether the config has as much work for each device
    """
    warnings = []
    devices, spec = layout.devices, layout.spec
    if is_even and any(d.name != devices[0].name for d in devices):
        warning = "the devices differ: each step waits for the slowest"
        if spec.can_be_uneven:
            warning += "; --balance measured assigns them microbatches by their speed"
        warnings.append(warning)
    if spec.runs_threads and layout.num_devices > 1:
        warnings.append(
            f"{spec.name}: the first device holds {show_bytes(optimizer_bytes)} more than the"
            " others (the optimizer's state), and adds up all gradients; --strategy ddp is even,"
            " and faster"
        )
    if not section.reshard and layout.shards == 1:
        warnings.append(
            f"devices.reshard has no effect under {layout.strategy}, which gathers no weights"
        )
    if section.gather != "auto" and not layout.is_sharded_by_block:
        warnings.append(
            f"devices.gather has no effect under {layout.strategy}, which does not gather weights"
            " by blocks"
        )
    return warnings

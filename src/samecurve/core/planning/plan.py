"""plan(): what a run will do, and why.

A pure function; every worker obeys its result, nothing after it changes a number.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from samecurve.core.config.sections import Compress, Config, Precision, Recompute, epochs_of
from samecurve.core.determinism.data_order import Anchor, Order
from samecurve.core.determinism.mean import nominal_weight
from samecurve.core.determinism.microbatches import Assignment, assign, microbatches_of, split_batch
from samecurve.core.determinism.microbatches import accumulation_steps as most_slots
from samecurve.core.planning.balance import choose_speeds, choose_uneven_split
from samecurve.core.planning.batch import choose_batch
from samecurve.core.planning.capacity import capacity, memory_room
from samecurve.core.planning.compatibility import check_coupled, check_optimizer, warn_of_layout
from samecurve.core.planning.exact import check_exact, exact_batch, exact_memory
from samecurve.core.planning.facts import Facts, Fixed
from samecurve.core.planning.machine import Device, Machine
from samecurve.core.planning.memory import MemoryTerm, activation_term, sample_bytes
from samecurve.core.planning.schedule import Schedule
from samecurve.core.planning.speed_options import check_speed_options
from samecurve.core.planning.strategies import Layout, choose_devices, choose_layout, choose_sync
from samecurve.errors import UserError

_ON_DISK = {
    "world_size": "processes",
    "every_rank_every_round": "together",
    "global_batch_size": "batch",
    "micro_batch_size": "micro",
    "accumulation_steps": "rounds",
    "nominal_weight": "nominal",
    "keyed_dropout": "keyed",
    "reseeded_dropout": "reseeded",
    "reasons": "because",
    "microbatch_seconds": "slot_times",
}


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """Steps between things; 0: never (what is due at the end is due all the same)."""

    log: int
    evaluate: int
    save: int
    sample: int
    hash: int = 0


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """devices: one for each place of work.

    processes: ranks. shards: devices that share one copy of the model. together: every rank takes
    part in each round (what it computes with is spread over all). micro: samples of a slot. rounds:
    slots of a device in a full step. nominal: see core/determinism/mean.py. reseeded: random masks
    drawn by the device, seeded anew each step. exact: slots are computed one by one, and what they
    give is added along dealing.Sums' tree. slot_times: what a slot takes each device, by which
    slots are dealt; empty: evenly.
    """

    engine: str
    strategy: str
    backend: str
    devices: tuple[Device, ...]
    visible: int
    world_size: int
    shards: int
    every_rank_every_round: bool
    global_batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    nominal_weight: float
    steps: int
    samples: int
    eval_samples: int
    tokens_per_sample: int
    precision: Precision
    threads: int
    recompute: Recompute
    norm_sync: bool
    reshard: bool
    offload: bool
    compress: Compress
    keyed_dropout: bool
    reseeded_dropout: bool
    preflight: int
    schedule: Schedule
    every: Intervals
    keep: int
    non_finite: str
    memory: tuple[MemoryTerm, ...]
    flops_per_step: float | None
    peak_flops: float | None
    reference: Mapping[str, float]
    reasons: Mapping[str, str]
    warnings: tuple[str, ...]
    fixed: Fixed
    exact: bool = False
    microbatch_seconds: tuple[float, ...] = ()
    compile: bool = False
    float8: bool = False

    def __repr__(self) -> str:
        return (
            f"<Plan: {self.engine} {self.strategy} on {self.num_devices}"
            f" device{'s' if self.num_devices > 1 else ''}, batch {self.global_batch_size}, {self.steps} steps>"
        )

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def is_one_process(self) -> bool:
        """Whether the process that launches trains by itself: one process, and nobody to meet."""
        return self.backend == "none" or (self.engine == "jax" and self.world_size == 1)

    def devices_of(self, rank: int) -> range:
        """Which of the devices one process computes on."""
        each = self.num_devices // self.world_size
        return range(rank * each, (rank + 1) * each)

    def microbatches_of(self, count: int, device: int) -> range:
        """Which of a step's `count` slots are one device's."""
        return microbatches_of(count, device, self.num_devices, self.microbatch_seconds)

    def assignment(self, samples: int, device: int) -> Assignment:
        """What one device does in a step of so many samples."""
        return assign(
            samples, self.micro_batch_size, device, self.num_devices, self.microbatch_seconds
        )

    @property
    def microbatches_per_device(self) -> tuple[int, ...]:
        """Slots of each device in a full step."""
        return tuple(
            len(
                self.microbatches_of(
                    len(split_batch(self.global_batch_size, self.micro_batch_size)), device
                )
            )
            for device in range(self.num_devices)
        )

    @property
    def can_be_uneven(self) -> bool:
        """Whether some devices could take more slots than others."""
        return (
            self.engine == "torch"
            and self.num_devices > 1
            and self.shards == 1
            and not self.every_rank_every_round
        )

    @property
    def memory_estimate(self) -> int | None:
        """Bytes of a device's peak, as it is measured: without the process itself on a GPU.

        None: activations are not known.
        """
        counted = [
            term for term in self.memory if term.name != "process" or self.devices[0].kind == "cpu"
        ]
        return (
            sum(term.bytes for term in counted)
            if any(term.name == "activations" for term in self.memory)
            else None
        )

    @property
    def order(self) -> Order:
        return Order(self.samples, self.global_batch_size, self.fixed.seed, self.fixed.anchor)

    def lr_at(self, step: int) -> float:
        return self.schedule.at(step)

    def actions_due(self, done: int) -> set[str]:
        """What is to be done after so many steps; everything at the end."""
        if done >= self.steps:
            return {"evaluate", "sample", "save", *(["hash"] if self.exact else [])}
        every = {
            "evaluate": self.every.evaluate,
            "sample": self.every.sample,
            "save": self.every.save,
            "hash": self.every.hash,
        }
        return {what for what, gap in every.items() if gap and done % gap == 0}

    def to_json(self) -> dict[str, Any]:
        """As plan.json and the journal hold it: their keys are public, and older than our names."""
        value = {_ON_DISK.get(name, name): item for name, item in asdict(self).items()}
        return {**value, "fixed": self.fixed.to_json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Plan":
        names = {key: name for name, key in _ON_DISK.items()}
        return cls(
            **{
                **{names.get(key, key): item for key, item in value.items()},
                "devices": tuple(Device(**device) for device in value["devices"]),
                "schedule": Schedule(**value["schedule"]),
                "every": Intervals(**value["every"]),
                "memory": tuple(MemoryTerm(**term) for term in value["memory"]),
                "warnings": tuple(value["warnings"]),
                "microbatch_seconds": tuple(value.get("slot_times", ())),
                "fixed": Fixed.from_json(value["fixed"]),
            }
        )


def plan(config: Config, machine: Machine, facts: Facts, fixed: Fixed | None = None) -> Plan:
    """UserError: what the config asks for cannot be done on this machine, with the numbers and what
    can.
    """
    because: dict[str, str] = {}
    warnings: list[str] = []
    chosen = choose_devices(config, machine, because)
    layout = choose_layout(
        config,
        chosen,
        machine.started,
        lambda shards: (
            memory_room(config, facts, chosen, shards)[1] >= (sample_bytes(config, facts) or 0)
        ),
        because,
    )
    devices, world = layout.devices, len(layout.devices)
    backend = choose_sync(config, layout, because)
    _check(facts, fixed, config.train.seed)
    cap, memory = capacity(config, facts, layout, because)
    batch, micro, times = _divided(config, facts, layout, cap, fixed, memory, because, warnings)
    count = len(split_batch(batch, micro))
    rounds = most_slots(count, world, times)
    term = activation_term(config, facts, micro)
    seed = fixed.seed if fixed else config.train.seed
    threads = _threads(config, machine, layout, fixed, because, warnings)
    order = Order(facts.samples, batch, seed, fixed.anchor if fixed else Anchor())
    schedule = _schedule(config, order, batch, world, because, warnings)
    check_coupled(config, facts, layout, rounds, count, because, warnings)
    check_optimizer(config, facts, layout, because)
    check_speed_options(config, facts, layout, because, warnings)
    _warn(config, facts, devices, batch, micro, bool(times), because, warnings)
    warn_of_layout(config, facts, layout, memory, warnings)
    made_on = f"{config.engine} on {devices[0].name}"
    if config.train.exact and fixed and fixed.computed_on and fixed.computed_on != made_on:
        warnings.append(
            f"this run began with {fixed.computed_on}; from here its bits are those of {made_on}"
        )
    peaks = [device.peak(config.train.precision) for device in devices]
    return Plan(
        engine=config.engine,
        strategy=layout.strategy,
        backend=backend,
        devices=devices,
        visible=len(machine.devices) or world,
        world_size=layout.world_size,
        shards=layout.shards,
        every_rank_every_round=not config.train.exact
        and (layout.every_rank_every_round or (config.train.norm_sync and bool(facts.coupled))),
        global_batch_size=batch,
        micro_batch_size=micro,
        accumulation_steps=rounds,
        nominal_weight=nominal_weight(batch, facts.tokens_per_sample),
        steps=schedule.steps,
        samples=facts.samples,
        eval_samples=facts.eval_samples,
        tokens_per_sample=facts.tokens_per_sample,
        precision=config.train.precision,
        threads=threads,
        recompute=config.train.recompute,
        norm_sync=config.train.norm_sync and bool(facts.coupled),
        reshard=config.devices.reshard and config.engine == "torch",
        offload=config.devices.offload,
        compress=config.devices.compress,
        keyed_dropout=bool(facts.keyed_dropout),
        reseeded_dropout=bool(facts.unkeyed_dropout),
        preflight=config.devices.preflight,
        schedule=schedule,
        every=Intervals(
            log=config.train.log_every,
            evaluate=_gap(config.train.eval_every, order),
            save=_gap(config.train.save_every, order),
            sample=_gap(config.train.sample_every, order),
            hash=config.train.hash_every if config.train.exact else 0,
        ),
        keep=config.train.keep,
        non_finite=config.train.non_finite,
        memory=(*memory, *([term] if term else [])),
        flops_per_step=facts.flops_per_sample * batch if facts.flops_per_sample else None,
        peak_flops=sum(peak for peak in peaks if peak) if all(peaks) else None,
        reference=facts.reference,
        reasons=because,
        warnings=tuple(warnings),
        fixed=(
            replace(fixed, global_batch_size=batch)
            if fixed
            else Fixed(
                global_batch_size=batch,
                micro_batch_size=micro,
                seed=seed,
                samples=facts.samples,
                fingerprint=facts.fingerprint,
                threads=threads,
                computed_on=made_on,
            )
        ),
        exact=config.train.exact,
        microbatch_seconds=times,
        compile=config.train.compile,
        float8=config.train.float8,
    )


def _divided(
    config: Config,
    facts: Facts,
    layout: Layout,
    cap: int | None,
    fixed: Fixed | None,
    memory: list[MemoryTerm],
    because: dict[str, str],
    warnings: list[str],
) -> tuple[int, int, tuple[float, ...]]:
    """(samples of a step, samples of a slot, what a slot takes each device).

    memory: gets what exact sums hold.
    """
    speeds, exact = choose_speeds(config, facts, layout), config.train.exact
    times: tuple[float, ...] = ()
    if exact:
        check_exact(config, facts, layout)
        batch, micro = exact_batch(config, layout, fixed, because)
    else:
        batch, micro = choose_batch(
            config, facts.largest_tried is not None, len(layout.devices), cap, fixed, because
        )
    if speeds:
        micro, times = choose_uneven_split(speeds, batch, micro, not exact, because, warnings)
    if exact:
        memory.append(
            exact_memory(
                config, facts, layout, len(split_batch(batch, micro)), micro, times, cap, fixed
            )
        )
    return batch, micro, times


def _check(facts: Facts, fixed: Fixed | None, seed: int) -> None:
    if facts.samples < 1:
        raise UserError(
            "the training data has no sample", "give more text, or a shorter --seq-len", "data"
        )
    if fixed and fixed.fingerprint != facts.fingerprint:
        raise UserError(
            "the data has changed since this run began",
            "bring the old data back, or begin a new run with another --save-dir",
            "data",
        )
    if fixed and fixed.seed != seed:
        raise UserError(
            f"this run began with seed {fixed.seed}, not {seed}",
            f"--set train.seed={fixed.seed}, or another --save-dir",
            "train.seed",
        )


def _threads(
    config: Config,
    machine: Machine,
    layout: Layout,
    fixed: Fixed | None,
    because: dict[str, str],
    warnings: list[str],
) -> int:
    """Threads inside one device's operations.

    Their number changes the order in which a CPU adds, so exact runs keep it.
    """
    world, cpu = len(layout.devices), layout.devices[0].kind == "cpu"
    asked = config.devices.threads
    if asked and (not cpu or config.engine == "jax"):
        raise UserError(
            "devices.threads is for CPU ranks of engine torch", "leave it out", "devices.threads"
        )
    if config.train.exact and cpu and config.engine == "torch":
        found = fixed.threads if fixed else asked or 1
        because["threads"] = (
            "as this run began"
            if fixed
            else (
                "devices.threads"
                if asked
                else (
                    "1 for each rank, whatever the machine, so that every rank adds in the same"
                    " order (devices.threads gives more)"
                )
            )
        )
        if asked and asked != found:
            warnings.append(
                f"devices.threads {asked}: this run began with {found} threads a rank, and"
                " train.exact keeps them"
            )
        return found
    if asked:
        because["threads"] = "devices.threads"
        return asked
    because["threads"] = (
        f"{machine.cores} core{'s' if machine.cores > 1 else ''} for {world}"
        f" {'device' if layout.world_size < world else 'rank'}{'s' if world > 1 else ''}"
    )
    return max(1, machine.cores // world)


def _schedule(
    config: Config,
    order: Order,
    batch: int,
    world: int,
    because: dict[str, str],
    warnings: list[str],
) -> Schedule:
    steps = _steps(config.train.steps, order)
    warmup = _steps(config.schedule.warmup, order)
    fields = config.schedule
    peak = config.optimizer.lr
    because["steps"] = f"train.steps {config.train.steps}; {order.steps_per_epoch} steps an epoch"
    if steps < 1:
        raise UserError(
            f"train.steps {config.train.steps} trains nothing",
            "--max-steps N or --epochs N",
            "train.steps",
        )
    if fields.scale_lr == "none":
        because["lr"] = "as configured; not scaled"
    else:
        base = fields.base_batch or (
            (config.batch.per_device or 0) * (config.batch.accumulate or 1)
            if config.batch.samples is None
            else 0
        )
        if not base:
            raise UserError(
                f"schedule.scale_lr {fields.scale_lr} needs the batch that lr {peak:g} was"
                " found for",
                "--set schedule.base_batch=N",
                "schedule.scale_lr",
            )
        factor = batch / base if fields.scale_lr == "linear" else (batch / base) ** 0.5
        because["lr"] = f"{peak:g} x {factor:g} ({fields.scale_lr}: batch {batch} against {base})"
        peak *= factor
        if factor > 1 and not warmup:
            warnings.append(
                f"the learning rate is scaled up {factor:g} times without warm-up: --warmup"
                f" {max(1, steps // 20)} is safer"
            )
    if warmup >= steps:
        warnings.append(f"warm-up takes {warmup} of {steps} steps: the learning rate never decays")
    return Schedule(
        peak=peak,
        steps=steps,
        warmup=warmup,
        decay=fields.decay,
        final=fields.final,
        cooldown=fields.cooldown,
    )


def _warn(
    config: Config,
    facts: Facts,
    devices: tuple[Device, ...],
    batch: int,
    micro: int,
    dealt: bool,
    because: dict[str, str],
    warnings: list[str],
) -> None:
    count = len(split_batch(batch, micro))
    if (
        config.batch.samples
        and config.batch.accumulate
        and -(-count // len(devices)) != config.batch.accumulate
    ):
        warnings.append(
            f"batch.accumulate {config.batch.accumulate} can't be: {batch} samples over"
            f" {len(devices)} devices make {-(-count // len(devices))} rounds of slots of {micro}"
        )
    if batch > facts.samples:
        warnings.append(
            f"a batch of {batch} exceeds the {facts.samples} training samples: every step is an"
            f" epoch of {facts.samples}"
        )
    if count < len(devices) and not dealt:
        warnings.append(
            f"{len(devices) - count} of {len(devices)} devices have nothing to do: a batch of"
            f" {batch} is {count} slots of {micro}"
        )
    if config.train.eval_every and not facts.eval_samples:
        warnings.append(
            "there is nothing to evaluate on: no data is held back (data.validation; eval_data() of"
            " a task of one's own)"
        )
    if facts.keyed_dropout:
        because["dropout"] = (
            f"masks of {len(facts.keyed_dropout)} layer{'s' if len(facts.keyed_dropout) > 1 else ''} follow the"
            " sample, whatever the device"
        )
    because["precision"] = "train.precision"
    if config.train.precision == "f32" and devices[0].peak("bf16"):
        because["precision"] += "; --dtype bf16 is several times faster on this GPU"


def _steps(duration: int | str, order: Order) -> int:
    epochs = epochs_of(duration)
    return int(duration) if epochs is None else order.steps_to(epochs)


def _gap(duration: int | str, order: Order) -> int:
    epochs = epochs_of(duration)
    return int(duration) if epochs is None else max(1, round(epochs * order.steps_per_epoch))

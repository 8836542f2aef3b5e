"""Layouts of `samecurve verify` and `samecurve bench`: how a model lies on devices, as text.

The module also chooses the default layouts.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from samecurve.core.config.document import suggest
from samecurve.core.strategies import (
    STRATEGIES,
    STRATEGY_NAMES,
    StrategySpec,
    auto_strategy,
    strategies_of,
)
from samecurve.errors import UserError

JAX = {"jax": "dp", "jax-fsdp": "fsdp"}  # names of jax layouts -> strategies of engine jax
OF_ONE_DEVICE = {row.name for row in STRATEGIES.values() if row.takes_one_device}
_NAMES = "|".join([*STRATEGY_NAMES, *reversed(JAX)])
_LEG = re.compile(rf"(?P<strategy>{_NAMES})(?::(?P<devices>\d+))?(?:/(?P<accumulation>\d+))?")


@dataclass(frozen=True)
class Layout:
    """A layout: ddp:2; with accumulation steps ddp:2/4; resumed by another layout ddp:2..fsdp:3."""

    strategy: str
    num_devices: int
    accumulation_steps: int | None = None  # None: the plan chooses them
    resumed_by: "Layout | None" = None  # layout that resumes this one half way

    def __str__(self) -> str:
        text = self.strategy
        if not self.spec.takes_one_device:
            text += f":{self.num_devices}"
        if self.accumulation_steps:
            text += f"/{self.accumulation_steps}"
        if self.resumed_by:
            text += f"..{self.resumed_by}"
        return text

    @property
    def engine(self) -> str:
        return "jax" if self.strategy in JAX else "torch"

    @property
    def spec(self) -> StrategySpec:
        """The planner's row of this layout's strategy."""
        return STRATEGIES[self.engine, JAX.get(self.strategy, self.strategy)]

    @property
    def can_be_uneven(self) -> bool:
        """Whether its devices may take unequal numbers of microbatches."""
        several = self.num_devices > 1 and not self.accumulation_steps
        return several and self.spec.can_be_uneven

    @property
    def legs(self) -> "list[Layout]":
        """This layout, and the layouts that resume it one after the other."""
        if self.resumed_by is None:
            return [self]
        return [self, *self.resumed_by.legs]

    @property
    def max_processes(self) -> int:
        """The most processes at once. All jax devices are in one process."""
        return max(1 if leg.engine == "jax" else leg.num_devices for leg in self.legs)


def parse_layout(text: str) -> Layout:
    """Parse 'ddp:2', 'fsdp:3/4' or 'ddp:2..fsdp:3'. UserError: the text has another form."""
    legs = [_parse_leg(part) for part in text.strip().lower().split("..")]
    layout: Layout | None = None
    for leg in reversed(legs):
        if leg is None:
            raise UserError(
                f"--layouts: {text!r} is no layout",
                "for example single, ddp:2, jax:4, jax-fsdp:2, ddp:2/4 (4 accumulation steps),"
                " ddp:2..fsdp:3 (saved by the one, resumed by the other)",
                "--layouts",
            )
        layout = Layout(leg.strategy, leg.num_devices, leg.accumulation_steps, layout)
    assert layout is not None
    return layout


def _parse_leg(text: str) -> Layout | None:
    match = _LEG.fullmatch(text)
    if match is None or match["accumulation"] == "0":
        return None
    strategy, num_devices = match["strategy"], int(match["devices"] or 1)
    if not 1 <= num_devices <= 64 or (strategy in OF_ONE_DEVICE and num_devices != 1):
        return None
    return Layout(strategy, num_devices, int(match["accumulation"] or 0) or None)


def _parallel(engine: str) -> list[StrategySpec]:
    """Strategies for several devices for which two devices are enough."""
    rows = strategies_of(engine)
    return [row for row in rows if not row.takes_one_device and row.min_devices <= 2]


def default_bits(num_devices: int, engines: Sequence[str]) -> list[Layout]:
    """Layouts for bit-for-bit comparison. Each engine is compared with itself on one device.

    Two engines do not give the same bits.
    """
    if num_devices < 4:
        counts = list(range(2, num_devices + 1))
    else:
        counts = [2, 3, *(count for count in (4, 8) if count <= num_devices)]
    with_tree = [row for row in strategies_of("torch") if "tree" in row.reducers]
    torch = [Layout("single", 1)]
    for row in with_tree:
        several = [count for count in counts if count >= row.min_devices]
        torch += [Layout(row.name, count) for count in several if not row.takes_one_device]
    whole, last = auto_strategy("torch", "the model fits").name, counts[-1]
    sharded = auto_strategy("torch", "only a shard fits").name
    torch.append(parse_layout(f"{whole}:2..single..{whole}:{last}"))
    torch.append(parse_layout(f"{sharded}:2..single..{whole}:{last}..{sharded}:{last}"))
    jax = [
        *(Layout("jax", count) for count in (1, 2, 4, 8)),
        *(Layout("jax-fsdp", count) for count in (2, 4)),
        Layout("jax", 2, None, Layout("jax-fsdp", 4, None, Layout("jax", 1))),
    ]
    return [layout for engine in engines for layout in {"torch": torch, "jax": jax}[engine]]


def default_layouts(num_devices: int, engines: Sequence[str], *, accumulates: bool) -> list[Layout]:
    """Layouts for comparison within a tolerance.

    num_devices: the number of available devices
    engines: engines that can train the config, its own first
    accumulates: whether the batch may be split into microbatches
    """
    counts = [2, 3] if num_devices >= 3 else [2]
    by_engine = {
        "torch": _torch_layouts(counts, accumulates=accumulates),
        "jax": _jax_layouts(counts, accumulates=accumulates),
    }
    layouts = [layout for engine in engines for layout in by_engine[engine]]
    if len(engines) > 1:
        through_both = Layout("ddp", 2, None, Layout("jax", counts[-1], None, Layout("fsdp", 2)))
        layouts.append(through_both)
    return layouts


def _jax_layouts(counts: Sequence[int], *, accumulates: bool) -> list[Layout]:
    layouts = [
        Layout("jax", 1),
        *(Layout(strategy, count) for strategy in JAX for count in counts),
    ]
    if accumulates:
        layouts.append(Layout("jax", 2, 4))
    return [*layouts, Layout("jax", 2, None, Layout("jax-fsdp", counts[-1]))]


def _torch_layouts(counts: Sequence[int], *, accumulates: bool) -> list[Layout]:
    layouts = [
        Layout("single", 1),
        *(Layout(row.name, count) for row in _parallel("torch") for count in counts),
    ]
    if accumulates:
        layouts += [Layout("single", 1, 4), Layout("ddp", 2, 4), Layout("fsdp", counts[-1], 4)]
    return [*layouts, Layout("ddp", 2, None, Layout("fsdp", counts[-1]))]


def parse_worlds(text: str) -> list[int]:
    """Parse numbers of devices: '4,1,2' -> [1, 2, 4]. UserError: the text has another form."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[1-9]\d{0,2}", part) and int(part) <= 256 for part in parts):
        raise UserError(
            f"--worlds {text!r} is no list of numbers of devices",
            "for example --worlds 1,2,4, each between 1 and 256",
            "--worlds",
        )
    return sorted(set(map(int, parts)))


def default_worlds(num_devices: int) -> list[int]:
    """Default numbers of devices: 1, 2, 4, ... and all devices."""
    powers = [1 << power for power in range(num_devices.bit_length())]
    return sorted({1, num_devices, *(power for power in powers if power <= num_devices)})


def parse_strategies(text: str) -> list[str]:
    """Parse names of strategies. UserError: a name is unknown."""
    strategies = list(dict.fromkeys(part.strip() for part in text.lower().split(",")))
    known = STRATEGY_NAMES
    for strategy in strategies:
        if strategy not in known:
            raise UserError(
                f"--strategies: {strategy!r} is no strategy",
                suggest(strategy, known) or f"some of {', '.join(known)}",
                "--strategies",
            )
    return strategies


def bench_layouts(
    worlds: Sequence[int], strategies: Sequence[str] | None, engine: str
) -> list[Layout]:
    """The layouts of a benchmark, the smallest number of devices first.

    strategies: None: those that suit the engine. On one device the strategy is always `single`.
    """
    usual = auto_strategy(engine, "the model fits")
    default = sorted(_parallel(engine), key=lambda row: row != usual)
    names = strategies or [row.name for row in default]
    parallel = [name for name in names if name not in OF_ONE_DEVICE]
    layouts = []
    for world in worlds:
        if world == 1:
            layouts.append(Layout("single", 1))
        else:
            layouts += [Layout(name, world) for name in parallel]
    return layouts

"""What `samecurve verify` and `samecurve bench` call layouts: how a model lies on devices, and
which of them they try where nobody says.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from samecurve.core.config.document import suggest
from samecurve.core.config.sections import StrategyName
from samecurve.errors import UserError

JAX = {"jax": "dp", "jax-fsdp": "fsdp"}  # what layouts of engine jax are called -> its strategies
_PART = rf"(?P<strategy>{'|'.join([*get_args(StrategyName), *reversed(JAX)])})(?::(?P<world>\d+))?(?:/(?P<rounds>\d+))?"


@dataclass(frozen=True)
class Layout:
    """strategy:world, /rounds of accumulation; then: another one that goes on from what this one
    saved half way.
    """

    strategy: str
    world: int
    rounds: int | None = None
    then: "Layout | None" = None

    def __str__(self) -> str:
        own = self.strategy if self.strategy == "single" else f"{self.strategy}:{self.world}"
        return (
            own
            + (f"/{self.rounds}" if self.rounds else "")
            + (f"..{self.then}" if self.then else "")
        )

    @property
    def engine(self) -> str:
        return "jax" if self.strategy in JAX else "torch"

    @property
    def deals(self) -> bool:
        """Whether its devices may take unequal numbers of slots."""
        return self.strategy in {"dp", "ddp"} and self.world > 1 and not self.rounds

    @property
    def legs(self) -> "list[Layout]":
        return [self, *(self.then.legs if self.then else [])]

    @property
    def most(self) -> int:
        """Processes at once: jax's devices are all in one."""
        return max(1 if self.engine == "jax" else self.world, self.then.most if self.then else 1)


def parse_layout(text: str) -> Layout:
    """'ddp:2', 'fsdp:3/4', 'ddp:2..fsdp:3'. UserError: none of these."""
    made: Layout | None = None
    for part in reversed(text.strip().split("..")):
        found = re.fullmatch(_PART, part)
        world = int(found["world"] or 1) if found else 0
        if (
            not found
            or not 1 <= world <= 64
            or (found["strategy"] == "single" and world != 1)
            or found["rounds"] == "0"
        ):
            raise UserError(
                f"--layouts: {text!r} is no layout",
                "for example single, ddp:2, jax:4, jax-fsdp:2, ddp:2/4 (4 rounds of accumulation),"
                " ddp:2..fsdp:3 (saved by the one, resumed by the other)",
                "--layouts",
            )
        made = Layout(
            found["strategy"], world, int(found["rounds"]) if found["rounds"] else None, made
        )
    assert made is not None
    return made


def default_bits(devices: int, engines: Sequence[str]) -> list[Layout]:
    """What train.exact serves: each engine beside itself on one device, which has other bits than
    the other's.
    """
    worlds = (
        [*range(2, devices + 1)]
        if devices < 4
        else [2, 3, *(world for world in (4, 8) if world <= devices)]
    )
    torch = [
        Layout("single", 1),
        *(Layout(strategy, world) for strategy in ("dp", "ddp") for world in worlds),
        Layout("ddp", 2, None, Layout("single", 1, None, Layout("ddp", worlds[-1]))),
    ]
    jax = [
        *(Layout("jax", world) for world in (1, 2, 4, 8)),
        Layout("jax", 2, None, Layout("jax", 4, None, Layout("jax", 1))),
    ]
    return [layout for engine in engines for layout in {"torch": torch, "jax": jax}[engine]]


def default_layouts(devices: int, accumulates: bool, engines: Sequence[str]) -> list[Layout]:
    """devices: how many there are to try.

    accumulates: whether the model may be split into rounds. engines: which can train it, the
    config's own first.
    """
    worlds = [2, 3] if devices >= 3 else [2]
    alone, other = [_torch_layouts(worlds, accumulates), _jax_layouts(worlds, accumulates)][
        :: 1 if engines[0] == "torch" else -1
    ]
    if len(engines) == 1:
        return alone
    return [
        *alone,
        *other,
        Layout("ddp", 2, None, Layout("jax", worlds[-1], None, Layout("fsdp", 2))),
    ]


def _jax_layouts(worlds: Sequence[int], accumulates: bool) -> list[Layout]:
    found = [Layout("jax", 1), *(Layout(strategy, world) for strategy in JAX for world in worlds)]
    return [
        *found,
        *([Layout("jax", 2, 4)] if accumulates else []),
        Layout("jax", 2, None, Layout("jax-fsdp", worlds[-1])),
    ]


def _torch_layouts(worlds: Sequence[int], accumulates: bool) -> list[Layout]:
    found = [
        Layout("single", 1),
        *(Layout(strategy, world) for strategy in ("dp", "ddp", "fsdp") for world in worlds),
    ]
    if accumulates:
        found += [Layout("single", 1, 4), Layout("ddp", 2, 4), Layout("fsdp", worlds[-1], 4)]
    return [*found, Layout("ddp", 2, None, Layout("fsdp", worlds[-1]))]


def parse_worlds(text: str) -> list[int]:
    """'4,1,2' -> [1, 2, 4]. UserError: none of these."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[1-9]\d{0,2}", part) and int(part) <= 256 for part in parts):
        raise UserError(
            f"--worlds {text!r} is no list of numbers of devices",
            "for example --worlds 1,2,4, each between 1 and 256",
            "--worlds",
        )
    return sorted(set(map(int, parts)))


def default_worlds(devices: int) -> list[int]:
    """1, 2, 4, ... and all of them."""
    return sorted(
        {
            1,
            devices,
            *(1 << power for power in range(devices.bit_length()) if 1 << power <= devices),
        }
    )


def parse_strategies(text: str) -> list[str]:
    """UserError: one of them is none."""
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in get_args(StrategyName):
            raise UserError(
                f"--strategies: {name!r} is no strategy",
                suggest(name, get_args(StrategyName))
                or f"some of {', '.join(get_args(StrategyName))}",
                "--strategies",
            )
    return names


def bench_layouts(
    worlds: Sequence[int], strategies: Sequence[str] | None, engine: str
) -> list[Layout]:
    """The smallest world first.

    strategies None: what suits the engine. One device has nothing to share, so there it is
    `single`, whatever the strategy.
    """
    names = strategies or {"torch": ["ddp", "dp", "fsdp"], "jax": ["dp", "fsdp"]}[engine]
    several = [name for name in names if name != "single"]
    return [
        layout
        for world in worlds
        for layout in (
            [Layout("single", 1)] if world == 1 else [Layout(name, world) for name in several]
        )
    ]

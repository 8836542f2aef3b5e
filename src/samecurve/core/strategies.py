"""The table of strategies: for each strategy of each engine a row with all that the plan, the
simulation, the command line and the docs must know of it.

Only this file and each engine's dict of strategy classes know a strategy by its name; all other
code asks the row. The config and --help read the rows too, so this file imports nothing of ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Processes = Literal["one", "one per device", "as started"]  # as started: one, or one for each host
Sharding = Literal["none", "all devices", "groups"]  # which devices share one copy of the model
# how weights, gradients and optimizer state lie on devices (core/planning/memory.py counts them)
StatePlacement = Literal["replicated", "sharded by block", "sharded whole"]
# What adds up gradients. tree: along the step's balanced tree, in one order on any devices.
# collective: each device in the order of its microbatches, and over devices by the library's
# all-reduce or reduce-scatter
Reducer = Literal["tree", "collective"]
# bytes of gradients that are summed over processes at once, by the kind of device
BUCKET_BYTES: Mapping[str, int] = {"cpu": 8 << 20, "cuda": 25 << 20}
AutoCase = Literal["one device", "the model fits", "only a shard fits"]
Traffic = Literal["nothing", "gradients", "weights and gradients"]


@dataclass(frozen=True)
class Refusal:
    """Why a strategy can't serve a config value, and what the user can do."""

    why: str  # follows the key's name in a sentence
    remedy: str


@dataclass(frozen=True, kw_only=True)
class StrategySpec:
    """How a model lies on the devices of one engine."""

    name: str
    engine: str
    processes: Processes
    sharding: Sharding
    state: StatePlacement
    auto: AutoCase | None = None  # when --strategy auto takes it; None: never
    traffic: Traffic | None = None  # what the simulation counts; None: plan --machine refuses it
    takes_one_device: bool = False
    min_devices: int = 1
    runs_threads: bool = False  # a thread for each device, the first of which adds and updates
    sums_buckets: bool = False  # gradients are summed in buckets, which a feature may shorten
    reducers: tuple[Reducer, ...] = ("collective",)  # with which it can add up gradients
    even_because: Refusal | None = None  # why each device computes as much; None: it need not
    refuses: Mapping[str, Refusal] = field(default_factory=dict)  # by config key
    # the whole remedy ("--strategy dp: why") when the user asks another engine for this strategy;
    # "": the remedy is --engine with this row's engine
    other_engine: str = ""
    # for readers: --help, and the columns of the tables in docs/strategies.md and docs/jax.md
    summary: str
    holds: str
    sends: str
    suits: str = ""

    @property
    def can_be_uneven(self) -> bool:
        """Whether some devices may take more microbatches than others."""
        return not self.takes_one_device and not self.even_because

    @property
    def docs_line(self) -> str:
        """The row of the table in docs/strategies.md."""
        cells = (f"`{self.name}`", self.summary, self.holds, self.sends, self.suits)
        return f"| {' | '.join(cells)} |"


_BOTH: tuple[Reducer, ...] = ("tree", "collective")
_EVEN_BY_ROUNDS = "gathers weights in each round, in which all devices take part, so a slow one"


def _even_by_sharding(name: str) -> Refusal:
    """Why a strategy that cuts parameters into shards is even."""
    return Refusal(
        f"strategy {name} {_EVEN_BY_ROUNDS} would still be waited for",
        "--balance even, or --strategy ddp",
    )


def _no_groups(name: str) -> dict[str, Refusal]:
    why = f"is for strategy hsdp, not {name}"
    return {"devices.shards": Refusal(why, "--strategy hsdp, or leave it out")}


_FOR_TORCH = Refusal("is for engine torch", "leave it out, or --engine torch")
_REFUSED_BY_JAX = {"devices.shards": _FOR_TORCH}
_EVEN_IN_JAX = Refusal(
    "engine jax runs one program for all devices, with as many microbatches for each",
    "--balance even, or --engine torch",
)

_ROWS = (
    StrategySpec(
        name="single",
        engine="torch",
        processes="one",
        sharding="none",
        state="replicated",
        auto="one device",
        traffic="nothing",
        takes_one_device=True,
        reducers=_BOTH,
        refuses=_no_groups("single"),
        summary="one process",
        holds="everything",
        sends="nothing",
        suits="one device",
    ),
    StrategySpec(
        name="dp",
        engine="torch",
        processes="one",
        sharding="none",
        state="replicated",
        runs_threads=True,
        reducers=_BOTH,
        refuses=_no_groups("dp"),
        summary="one process, a thread for each device",
        holds="the weights and its own gradients; the first device the optimizer's state too",
        sends="each step: gradients to the first device, new weights back to the others",
        suits="a first try on several GPUs without starting processes",
    ),
    StrategySpec(
        name="ddp",
        engine="torch",
        processes="one per device",
        sharding="none",
        state="replicated",
        auto="the model fits",
        traffic="gradients",
        sums_buckets=True,
        reducers=_BOTH,
        refuses=_no_groups("ddp"),
        other_engine=(
            "--strategy dp: dp is its data parallel: one process drives all devices, one all-reduce"
            " a step"
        ),
        summary="a process for each device",
        holds="everything",
        sends="each step: gradients, summed once, while the last backward pass still runs",
        suits="a model that fits on each device",
    ),
    StrategySpec(
        name="fsdp",
        engine="torch",
        processes="one per device",
        sharding="all devices",
        state="sharded by block",
        auto="only a shard fits",
        traffic="weights and gradients",
        reducers=_BOTH,
        even_because=_even_by_sharding("fsdp"),
        refuses=_no_groups("fsdp"),
        summary="a process for each device, the model sharded",
        holds="its share of weights, gradients and optimizer state; for a while the blocks in work",
        sends=(
            "each round: a block's weights before its forward pass and again before its backward"
            " pass, its gradients after it; weights and gradients once a step where memory is there"
        ),
        suits="a model that doesn't fit on one device",
    ),
    StrategySpec(
        name="hsdp",
        engine="torch",
        processes="one per device",
        sharding="groups",
        state="sharded by block",
        traffic="weights and gradients",
        min_devices=4,
        reducers=_BOTH,
        even_because=_even_by_sharding("hsdp"),
        other_engine="--strategy fsdp: fsdp shares the model out among all devices",
        summary="a process for each device, the model sharded in groups",
        holds="its share within its group",
        sends="within a group as fsdp; between groups the gradients, in the last round only",
        suits="fsdp on many devices, in groups that are closely linked",
    ),
    StrategySpec(
        name="single",
        engine="jax",
        processes="as started",
        sharding="none",
        state="replicated",
        auto="one device",
        takes_one_device=True,
        reducers=_BOTH,
        even_because=_EVEN_IN_JAX,
        refuses=_REFUSED_BY_JAX,
        summary="one process",
        holds="everything",
        sends="nothing",
    ),
    StrategySpec(
        name="dp",
        engine="jax",
        processes="as started",
        sharding="none",
        state="replicated",
        auto="the model fits",
        reducers=_BOTH,
        even_because=_EVEN_IN_JAX,
        refuses=_REFUSED_BY_JAX,
        summary="one process for all devices of a host",
        holds="everything",
        sends="gradients, loss, weight: one all-reduce",
    ),
    StrategySpec(
        name="fsdp",
        engine="jax",
        processes="as started",
        sharding="all devices",
        state="sharded whole",
        auto="only a shard fits",
        reducers=_BOTH,
        even_because=_EVEN_IN_JAX,
        refuses=_REFUSED_BY_JAX,
        summary="one process for all devices of a host, the model sharded",
        holds="its share of weights and optimizer state",
        sends="weights gathered once before, gradients summed and shared out once after",
    ),
)

STRATEGIES: Mapping[tuple[str, str], StrategySpec] = {(row.engine, row.name): row for row in _ROWS}
STRATEGY_NAMES = tuple(dict.fromkeys(row.name for row in _ROWS))


def strategies_of(engine: str) -> list[StrategySpec]:
    """The strategies of one engine, in the order of the docs."""
    return [row for row in _ROWS if row.engine == engine]


def auto_strategy(engine: str, case: AutoCase) -> StrategySpec:
    """The strategy that `--strategy auto` takes."""
    return next(row for row in strategies_of(engine) if row.auto == case)


def strategy_help() -> str:
    """The help text of --strategy."""
    first_rows = [next(row for row in _ROWS if row.name == name) for name in STRATEGY_NAMES]
    return "; ".join(["auto", *(f"{row.name}: {row.summary}" for row in first_rows)])

"""What plugs into the loop, and what passes between the rooms."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from samecurve.core.determinism.data_order import Ids
from samecurve.core.determinism.init_values import Initial
from samecurve.core.determinism.mean import Mean
from samecurve.core.eval_sums import EvalSums, Metric, SumSpecs
from samecurve.core.events import Event, Phase, Request
from samecurve.core.planning.facts import Facts

Arrays = Mapping[str, Any]
Picture = NDArray[np.uint8]  # (height, width, 3) or (height, width)
Sample = str | Picture
KeepPictures = Callable[[int, Sequence[Picture]], list[str]]  # (step, pictures) -> file names
Record = Callable[[Event], None]
Heartbeat = Callable[[int, Phase], None]


@dataclass(frozen=True)
class Rank:
    """One process of a run. index: of world; local: on this host, one of `hosts`."""

    index: int
    local: int
    world_size: int
    hosts: int = 1


class Source(Protocol):
    """Training data: a length, and samples by id, each array with one row an id."""

    def __len__(self) -> int: ...
    def __getitem__(self, ids: Ids) -> Mapping[str, NDArray[Any]]: ...


@dataclass(frozen=True)
class MicroBatch:
    """What one device computes at once.

    keys: one number a row, following the sample (core/determinism/sample_keys.py); None where
    nothing is keyed. real False: a copy of a real row, run so that its rank can take part, and
    dropped. number: which of the step's slots.
    """

    arrays: Arrays
    real: bool = True
    keys: Any = None
    number: int = 0


Round = tuple[
    MicroBatch | None, ...
]  # one slot for each device of the process; None: that one idles


@dataclass
class Batch:
    """One process's share of a step.

    rounds: in order, as the engine's stage() made them. samples: of the whole step. wait: seconds
    waited for it.
    """

    rounds: Any
    step: int
    samples: int
    wait_seconds: float = 0.0


class ArrayShard(NamedTuple):
    """A box of one named array of a checkpoint, in host memory.

    dtype: as safetensors names it (F32). shape: of the whole array. offsets: where the box begins
    in it. buffer: the box, C-contiguous.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    buffer: NDArray[Any]


class StoredArrays(Protocol):
    """The arrays of a checkpoint by canonical name, read when asked for."""

    def __getitem__(self, name: str) -> NDArray[Any]: ...
    def __contains__(self, name: object) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...
    def items(self) -> Iterable[tuple[str, NDArray[Any]]]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def part(self, name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> NDArray[Any]: ...


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint opened. loop: counters of the loop."""

    path: str
    step: int
    epoch: int
    consumed: int
    arrays: StoredArrays
    loop: Mapping[str, Any]


class PendingMetrics(Protocol):
    """The figures of a step, summed over all ranks, on their way to the host."""

    def read(self) -> "StepMetrics": ...


@dataclass(frozen=True)
class StepMetrics:
    """loss: sum / weight.

    norm: of the whole gradient before clipping. finite False: the update was masked on every rank.
    asked: requests seen by any rank. waits: seconds by rank; memory: peak bytes by device. at: when
    the step was done (perf_counter). forwards: seconds of each rank's first forward pass, where it
    waits for no other; zeros where that is not known.
    """

    loss: float
    weight: float
    grad_norm: float
    finite: bool
    requests: Mapping[Request, int]
    wait_seconds: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    done_at: float
    scale: float = 1.0
    forward_seconds: tuple[float, ...] = ()


class Task(Protocol):
    """What is trained.

    A class with these methods; no base class.

    initial: None for the value that the model itself gave the parameter.
    eval_sums: what evaluate() gives for a microbatch, by name, the same on every rank.
    summarize: the sums over all held-out samples -> metrics, numbers or arrays.
    sample: texts, or pictures.
    """

    def facts(self) -> Facts: ...
    def fingerprint(self) -> str: ...
    def train_data(self) -> Source: ...
    def eval_data(self) -> Source | None: ...
    def model(self) -> Any: ...
    def initial(self, name: str, shape: tuple[int, ...]) -> Initial | None: ...
    def loss(self, model: Any, batch: Arrays) -> Mean: ...
    def eval_sums(self) -> SumSpecs: ...
    def evaluate(self, model: Any, batch: Arrays) -> Mapping[str, Any]: ...
    def summarize(self, sums: EvalSums, /) -> Mapping[str, Metric]: ...
    def sample(self, model: Any, seed: int) -> Sequence[Sample]: ...
    def assets(self) -> Mapping[str, Path]: ...


class Engine(Protocol):
    """Runs steps of a task on this process's devices.

    All ranks make the same calls in the same order.

    stage: rounds of host arrays, of so many in a whole step -> what step and evaluate take; called
    by the feed's thread. preflight: the sum over all devices of a 1 from each. init: with these
    weights, if they are given (a checkpoint of no more than the model). digests: of every array of
    the state by canonical name (core/determinism/digest.py). peak_memory: bytes that the fullest of
    these devices has held.
    """

    def stage(self, rounds: Sequence[Round], of: int) -> Any: ...
    def preflight(self) -> float: ...
    def init(self, weights: Checkpoint | None = None) -> Any: ...
    def restore(self, saved: Checkpoint) -> Any: ...
    def step(
        self, state: Any, batch: Batch, lr: float, asked: Sequence[int]
    ) -> tuple[Any, PendingMetrics]: ...
    def evaluate(self, state: Any, rounds: Iterable[Any]) -> EvalSums: ...
    def sample(self, state: Any, step: int) -> Sequence[Sample]: ...
    def gather(self, state: Any) -> list[ArrayShard]: ...
    def digests(self, state: Any) -> dict[str, str]: ...
    def peak_memory(self) -> int: ...
    def close(self) -> None: ...


class Feed(Protocol):
    def __iter__(self) -> Iterator[tuple[int, Batch]]: ...
    def evaluation(self) -> Iterator[Any]: ...
    def ids(self, step: int) -> list[int]: ...


class Store(Protocol):
    """Writes checkpoints beside the training."""

    def save(self, step: int, pieces: Sequence[ArrayShard], loop: Mapping[str, Any]) -> None: ...
    def check(self) -> None: ...
    def close(self) -> None: ...


class Requests(Protocol):
    """What this rank has been asked since the last call: how often, in the order of
    events.REQUESTS.
    """

    def pending(self) -> Sequence[int]: ...


@dataclass
class Counters:
    """What the loop carries from step to step and into checkpoints.

    metrics: of the last evaluation, which was at metrics_step.
    """

    best_loss: float | None = None
    best_step: int | None = None
    skipped: int = 0
    metrics: dict[str, float | None] = field(default_factory=dict)
    metrics_step: int | None = None


def arrays_to_write(sizes: Mapping[str, int], world: int, rank: int) -> list[str]:
    """Which named arrays this rank writes: each to the least laden rank so far, largest first; a
    pure function.
    """
    load = np.zeros(world, dtype=np.int64)
    mine = []
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        to = int(load.argmin())
        load[to] += size
        if to == rank:
            mine.append(name)
    return mine

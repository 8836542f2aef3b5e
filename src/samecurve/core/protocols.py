"""The parts that plug into the loop, and the objects that pass between rooms."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeVar

from samecurve.core.determinism import Mean
from samecurve.core.determinism.data_order import Ids
from samecurve.core.evaluation import EvalSums, Metric, SumSpecs
from samecurve.core.events import Activity, Event
from samecurve.core.planning.facts import Facts

State = TypeVar("State", default=Any)  # model and optimizer, as an engine holds them
Staged = TypeVar("Staged", default=Any)  # rounds, as an engine's stage() made them
Array = Any  # numpy's, or, once staged, the engine's own
Arrays = Mapping[str, Array]
Picture = NDArray[np.uint8]  # (height, width, 3) or (height, width)
Sample = str | Picture
KeepPictures = Callable[[int, Sequence[Picture]], list[str]]  # (step, pictures) -> file names
Record = Callable[[Event], None]
Heartbeat = Callable[[int, Activity], None]


class Initial(NamedTuple):
    """How a parameter begins: normal values around `mean`; std 0: all of them `mean`.

    Several means are those of the equal parts of dimension 0, as of gates that lie in one array.
    """

    std: float
    mean: float | tuple[float, ...] = 0.0


@dataclass(frozen=True)
class Rank:
    """A process of a run."""

    index: int  # of world_size
    local: int  # index on this host
    world_size: int
    hosts: int = 1


class Source(Protocol):
    """Training data: a length, and samples by id, each array with one row an id."""

    def __len__(self) -> int: ...
    def __getitem__(self, ids: Ids) -> Mapping[str, NDArray[Any]]: ...


class RowReader(Source, Protocol):
    """A source, as the feed reads it; source[ids] is read(ids, 0).

    by_epoch: an id may give another row in another epoch; what is read at once is of one epoch.
    by_microbatch: the shape of a row follows from those that are read with it; each microbatch is
        read by itself.
    lengths: of all rows, by which those of a step are laid into microbatches; None: they are not.
    """

    @property
    def by_epoch(self) -> bool: ...
    @property
    def by_microbatch(self) -> bool: ...
    @property
    def lengths(self) -> NDArray[np.int64] | None: ...
    def read(self, ids: Ids, epoch: int) -> Mapping[str, NDArray[Any]]: ...


@dataclass(slots=True)  # not frozen: two are made for every microbatch
class MicroBatch:
    """A microbatch: the samples that one device computes at once.

    real: False for a copy of a real row, run so that its rank can take part, and dropped.
    keys: what its random numbers are keyed by (RowKeys, or as an engine's stage() made of it); None
        where nothing may be drawn.
    number: which of the step's microbatches.
    """

    arrays: Arrays
    real: bool = True
    keys: Any = None
    number: int = 0


@dataclass(frozen=True)
class TrialRows:
    """Some samples of the first step to come, the same on every rank.

    pick: rows of them, by their numbers among `ids`.
    """

    ids: Ids
    step: int
    pick: Callable[[Sequence[int]], MicroBatch]


Round = tuple[MicroBatch | None, ...]  # one for each device of the process; None: that one idles


@dataclass
class Batch(Generic[Staged]):
    """The share of one process in a step."""

    rounds: Staged
    progress: "Progress"
    samples: int  # of the whole step, over all processes
    num_microbatches: int  # of the whole step, over all devices
    wait_seconds: float = 0.0  # that the loop waited for it

    def __post_init__(self) -> None:
        self.step = self.progress.step


class ArrayShard(NamedTuple):
    """A box of one named array of a checkpoint, in host memory."""

    name: str
    dtype: str  # as safetensors names it (F32)
    shape: tuple[int, ...]  # of the whole array
    offsets: tuple[int, ...]  # where the box begins in it
    buffer: NDArray[Any]  # the box, C-contiguous


class Progress(NamedTuple):
    """Where in a run a loss is computed. Numbers, or what an engine traces in their place."""

    step: int = 0  # counted from 0; in an evaluation the last one trained
    epoch: int = 0  # that step's, counted from 0


START = Progress()


class Part(NamedTuple):
    """One of several equal parts of some work: items number, number + of, number + 2 * of, ..."""

    number: int
    of: int


WHOLE = Part(0, 1)


Held = Literal["eval", "test"]  # held-out data: the run looks at it, or only its end does


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
    """A checkpoint opened."""

    path: str
    step: int
    epoch: int
    consumed: int  # samples of that epoch
    arrays: StoredArrays
    loop: Mapping[str, Any]  # fields of Counters


class PendingMetrics(Protocol):
    """The metrics of a step, summed over all ranks, on their way to the host.

    on_host: they are there already, so that read() waits for nothing; the same on every rank.
    """

    @property
    def on_host(self) -> bool: ...
    def read(self) -> "StepMetrics": ...


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of a step that is done, the same on every rank.

    forward_seconds: of each rank's first forward pass, where it waits for no other; zeros where
        that is not known.
    """

    loss: float  # sum / weight
    weight: float
    grad_norm: float  # of the whole gradient before clipping
    finite: bool  # False: the update was masked on every rank
    requests: tuple[int, ...]  # of all ranks, how many of each of events.REQUESTS
    wait_seconds: tuple[float, ...]  # for data, by rank
    memory_bytes: tuple[float, ...]  # peak, by device
    done_at: float  # perf_counter
    scale: float = 1.0  # f16's
    forward_seconds: tuple[float, ...] = ()
    means: Mapping[str, float] = field(default_factory=dict)  # that the task gives with its loss


class Task(Protocol):
    """A task: a class with these methods, and no base class.

    brings: the features that the task itself brings, by name: what their hooks take.
    follows_progress: whether the loss asks for the step or the epoch.
    losses: the loss, as "loss", and what is logged beside it, the same names each time;
        phase: of a step, '': the first or only one.
    frozen_base: what is not trained comes from elsewhere: checkpoints leave it out.
    initial: None for the value that the model itself gave the parameter.
    init_module: gives a module of a model, whose own parameters are real and empty, their first
        values, with torch's generators; None: initial() and the model itself do.
    lr_factor: the factor of the learning rate at a step, by the task's own schedule; None: the
        config's schedule holds.
    optimizer: makes the task's own optimizer; None: the config's is used.
    phases: patterns of parameter names by phase of a step; empty: a step is one update.
    prepare: makes a part of the files that rows need, on a device; None: they need none.
    check_rows: refuses rows that change when they are read again; prepare() has made their files.
    loss: of a microbatch. Where it sees the whole batch, features() of a microbatch, one row a
        sample, and batch_loss() of those of a whole batch stand for it.
    eval_sums: what evaluate() gives for a microbatch, by name, the same on every rank.
    summarize: the sums over all held-out samples -> metrics, numbers or arrays.
    samples_in_parts: whether sample() makes one part of the samples, where it is given one.
    sample: texts, or pictures.
    """

    @property
    def frozen_base(self) -> bool: ...
    @property
    def init_module(self) -> Callable[[Any, Any], None] | None: ...
    @property
    def phases(self) -> Mapping[str, Sequence[str]]: ...
    @property
    def optimizer(self) -> Callable[..., Any] | None: ...
    @property
    def brings(self) -> Mapping[str, Any]: ...
    @property
    def follows_progress(self) -> bool: ...
    @property
    def samples_in_parts(self) -> bool: ...
    @property
    def lr_factor(self) -> Callable[[int], float] | None: ...
    @property
    def prepare(self) -> Callable[[Any, Part], Iterator[tuple[int, int]]] | None: ...
    def facts(self) -> Facts: ...
    def fingerprint(self) -> str: ...
    def check_rows(self) -> None: ...
    def train_data(self) -> RowReader: ...
    def eval_data(self) -> RowReader | None: ...
    def test_data(self) -> RowReader | None: ...
    def model(self) -> Any: ...
    def initial(self, name: str, shape: tuple[int, ...]) -> Initial | None: ...
    def loss(self, model: Any, batch: Arrays, progress: Progress = START, /) -> Mean: ...
    def losses(
        self, model: Any, batch: Arrays, progress: Progress = START, phase: str = "", /
    ) -> Mapping[str, Mean]: ...
    def features(
        self, model: Any, batch: Arrays, progress: Progress = START, phase: str = "", /
    ) -> Arrays: ...
    def batch_losses(
        self, features: Arrays, progress: Progress = START, phase: str = "", /
    ) -> Mapping[str, Mean]: ...
    def eval_sums(self) -> SumSpecs: ...
    def evaluate(
        self, model: Any, batch: Arrays, progress: Progress = START, /
    ) -> Mapping[str, Any]: ...
    def summarize(self, sums: EvalSums, /) -> Mapping[str, Metric]: ...
    def sample(
        self, model: Any, seed: int, part: Part = WHOLE, step: int = 0, /
    ) -> Sequence[Sample]: ...
    def assets(self) -> Mapping[str, Path]: ...


class Engine(Protocol[State, Staged]):
    """Runs steps of a task on this process's devices.

    All ranks make the same calls in the same order.

    stage: rounds of host arrays, of so many in a whole step -> what step and evaluate take; called
        by the feed's thread.
    preflight: the sum over all devices of a 1 from each, or of another number from each device of
        this process.
    init: with these weights, if they are given (a checkpoint of no more than the model).
    restore: weights: of a task with a frozen base, what the checkpoint leaves out.
    begin_training: before the first step of a start. as_if_split: refuse what several microbatches
        would not train alike, even where a step has one. UserError: the run must not be trained.
    evaluate: progress: of the last step trained.
    digests: of every array of the state by canonical name (core/weights.py).
    peak_memory: bytes that the fullest of these devices has held.
    device: the first of this process's devices, as the engine's library names it.
    features: the hooks of the run's features, by name.
    notes: lines for the user, and events, that steps have left here; the loop records and removes
        them.
    """

    notes: list[str | Event]

    @property
    def features(self) -> Mapping[str, Any]: ...
    @property
    def device(self) -> Any: ...
    def stage(self, rounds: Sequence[Round], of: int) -> Staged: ...
    def preflight(self, each: float = 1.0) -> float: ...
    def init(self, weights: Checkpoint | None = None) -> State: ...
    def restore(self, saved: Checkpoint, weights: Checkpoint | None = None) -> State: ...
    def begin_training(
        self, state: State, rows: TrialRows, *, as_if_split: bool = False
    ) -> None: ...
    def step(
        self, state: State, batch: Batch[Staged], lr: float, requests: Sequence[int]
    ) -> tuple[State, PendingMetrics]: ...
    def refill(self, state: State, saved: Checkpoint) -> State: ...
    def evaluate(
        self,
        state: State,
        rounds: Iterable[Staged],
        progress: Progress = START,
        samples: int | None = None,
    ) -> EvalSums: ...
    def sample(self, state: State, step: int) -> Sequence[Sample]: ...
    def kept(self) -> Mapping[str, Any]: ...
    def gather(self, state: State) -> list[ArrayShard]: ...
    def digests(self, state: State) -> dict[str, str]: ...
    def peak_memory(self) -> int: ...
    def close(self) -> None: ...


class Feed(Protocol[Staged]):
    """The batches of one process, in the run's order.

    evaluation: the held-out samples, round by round.
    ids: the sample ids of a whole step.
    trial_rows: at most so many samples of the first step to come; 0: as many as show what a loss
        does.
    """

    def __iter__(self) -> Iterator[tuple[int, Batch[Staged]]]: ...
    def evaluation(self, which: Held = "eval") -> Iterator[Staged]: ...
    def ids(self, step: int) -> list[int]: ...
    def trial_rows(self, most: int = 0) -> TrialRows: ...


class Store(Protocol):
    """Writes checkpoints beside the training.

    load: a checkpoint that was published; None: it is not there.
    check: whether a save is still under way. RunError: it has failed.
    abandon: the run has failed, wait for no other rank any more.
    """

    def save(
        self, step: int, pieces: Sequence[ArrayShard], loop: Mapping[str, Any], *, began: float
    ) -> None: ...
    def load(self, step: int) -> Checkpoint | None: ...
    def check(self) -> bool: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...


class Requests(Protocol):
    """The requests to this rank since the last call: how many of each of events.REQUESTS."""

    def pending(self) -> Sequence[int]: ...


TASK_STATE = "task"  # of a checkpoint's loop: what Engine.kept() gave


@dataclass
class Counters:
    """The numbers that the loop carries from step to step and into checkpoints."""

    best_value: float | None = None  # of train.best_metric; older checkpoints: best_loss
    best_step: int | None = None
    # of a metric that may end the run: what is to be bettered, since when, and by how many
    # evaluations it was not
    early_value: float | None = None
    early_step: int | None = None
    early_waited: int = 0
    skipped: int = 0
    metrics: dict[str, float | None] = field(default_factory=dict)  # numbers of the last evaluation
    metrics_step: int | None = None  # of that evaluation

    @classmethod
    def from_loop(cls, loop: Mapping[str, Any]) -> "Counters":
        """The counters of a checkpoint, which an older version may have written."""
        values = {name: value for name, value in loop.items() if name != TASK_STATE}
        if "best_loss" in values:
            values.setdefault("best_value", values.pop("best_loss"))
        return cls(**values)


def arrays_to_write(sizes: Mapping[str, int], world: int, rank: int) -> list[str]:
    """The named arrays that this rank writes: largest first, each goes to the least laden rank so
    far.

    sizes: by name, in any unit.
    """
    load = np.zeros(world, dtype=np.int64)
    names = []
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        writer = int(load.argmin())
        load[writer] += size
        if writer == rank:
            names.append(name)
    return names

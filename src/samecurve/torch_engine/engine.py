"""The training of one process on torch devices: staging, and the state from start to checkpoint.

A step is step/training_step.py, an evaluation evaluation.py.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from samecurve.core.config.sections import Optimizer
from samecurve.core.evaluation import EvalSums
from samecurve.core.feature_list import brought_by, hooks_of
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import (
    START,
    TASK_STATE,
    WHOLE,
    ArrayShard,
    Checkpoint,
    MicroBatch,
    Part,
    Progress,
    Round,
    Sample,
    Task,
    TrialRows,
)
from samecurve.core.sample_numbers import serving
from samecurve.torch_engine import checkpoint as states
from samecurve.torch_engine.evaluation import evaluate
from samecurve.torch_engine.model import coupling_layers
from samecurve.torch_engine.model.model_builder import ModelBuilder, all_given
from samecurve.torch_engine.model.model_setup import IsGiven, run_uncompiled
from samecurve.torch_engine.optimizers import hidden_matrices, optimizer_params
from samecurve.torch_engine.precision import (
    as_weights,
    autocast_for,
    set_deterministic,
)
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.randomness import (
    MicroBatchContext,
    StagedKeys,
    numbers_in_work,
)
from samecurve.torch_engine.randomness.draw_sites import DrawSites
from samecurve.torch_engine.randomness.replaced_functions import KEYED_FUNCTIONS
from samecurve.torch_engine.step import EngineSetup, State
from samecurve.torch_engine.step.feature_hooks import Start
from samecurve.torch_engine.step.step_assembly import make_training_step, make_updates
from samecurve.torch_engine.step.step_metrics import peak_memory_bytes
from samecurve.torch_engine.step.training_step import Step
from samecurve.torch_engine.strategies import make_strategy
from samecurve.torch_engine.users_code import has_users_code

if TYPE_CHECKING:
    from samecurve.core.events import Event
    from samecurve.torch_engine.model import TrainingMode
    from samecurve.torch_engine.model.model_builder import FirstMemory
    from samecurve.torch_engine.strategies import Materialize


class TorchEngine:
    """The engine of one process of a run.

    comm: who trains together
    devices: those of this process

    step: one optimizer step: TrainingStep.run (step/training_step.py), or several in turn. init()
        and restore() put it together for their state.
    """

    step: Step

    def __init__(
        self,
        task: Task,
        plan: Plan,
        optimizer: Optimizer,
        comm: Comm,
        devices: Sequence[torch.device],
    ) -> None:
        self.task, self.plan, self.comm, self.devices = task, plan, comm, devices
        self.notes: list[str | Event] = []
        self.device = devices[0]
        self._exit_stack = ExitStack()
        if plan.compute.deterministic:
            set_deterministic(True, self.device)
            self._exit_stack.callback(set_deterministic, False, self.device)
        self._strategy = make_strategy(plan, comm, devices)
        sites = DrawSites()
        self._setup = EngineSetup(
            task=task,
            plan=plan,
            optimizer=optimizer,
            comm=comm,
            devices=devices,
            strategy=self._strategy,
            contexts=[MicroBatchContext(device, sites) for device in devices],
            draw_sites=sites,
            notes=self.notes,
        )
        always = dict.fromkeys(brought_by(plan.compute.precision))
        self._add_features({**always, **plan.features, **task.brings})
        self._has_keyed_dropout = plan.compute.keyed_dropout
        self._exit_stack.callback(self._strategy.close)
        KEYED_FUNCTIONS.acquire()
        self._exit_stack.callback(KEYED_FUNCTIONS.release)
        self._exit_stack.enter_context(serving(numbers_in_work))
        if torch.distributed.is_initialized():
            from samecurve.torch_engine.model.one_device_view import ONE_DEVICE_VIEW

            ONE_DEVICE_VIEW.acquire()
            self._exit_stack.callback(ONE_DEVICE_VIEW.release)
        self._kept: Mapping[str, Any] = {}  # by features, in the checkpoint that the run began with
        self._unsynced_buffers: list[torch.Tensor] = []
        # of the models, once there are some:
        self._modes: list[TrainingMode] = []
        self._first_memory: list[FirstMemory] = []

    @property
    def features(self) -> Mapping[str, Any]:
        """The hooks of the run's features, by name and in their order."""
        return self._setup.features

    def _add_features(self, found: Mapping[str, Any]) -> None:
        """Add the hooks of features. found: what the run has of each, by name"""
        for name, hooks, value in hooks_of(found, "torch"):
            self._setup.features[name] = hooks(self._setup, value)

    def stage(self, rounds: Sequence[Round], _samples: int) -> list[Round]:
        """Host arrays as tensors, in pinned memory where they go to a GPU."""
        return [
            tuple([microbatch and self._staged(microbatch) for microbatch in microbatches])
            for microbatches in rounds
        ]

    def _staged(self, microbatch: MicroBatch) -> MicroBatch:
        tensor, precision, keys = self._host_tensor, self.plan.compute.precision, None
        if self._has_keyed_dropout or self._setup.draw_sites.any_drawn:  # ahead of the loop
            keys = tensor(microbatch.keys.values)
        return MicroBatch(
            {
                name: tensor(as_weights(array, precision))
                for name, array in microbatch.arrays.items()
            },
            microbatch.real,
            StagedKeys(microbatch.keys, keys),
            microbatch.number,
        )

    def _host_tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        """A host array as a tensor; pinned where it goes to a GPU.

        Where kernels must give the same bits, it is copied into torch's memory: torch aligns it and
        numpy does not, and kernels may add unaligned numbers in another order.
        """
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cuda":
            return tensor.pin_memory()  # contiguous: a strided copy to a GPU would not be pinned
        return tensor.clone() if self.plan.compute.deterministic else tensor

    def preflight(self, each: float = 1.0) -> float:
        """Through the collective that steps use, or by copies between this process's devices."""
        numbers = [torch.tensor(each, device=device).to(self.device) for device in self.devices]
        return float(self.comm.all_reduce(torch.stack(numbers).sum())())

    def init(self, weights: Checkpoint | None = None) -> State:
        state = self._begin(weights)
        if state.average is not None:
            state.average.begin()
        self._begin_steps(state)
        return state

    def restore(self, saved: Checkpoint, weights: Checkpoint | None = None) -> State:
        self._kept = saved.loop.get(TASK_STATE, {})
        state = self.refill(self._begin(weights, saved), saved)
        self._begin_steps(state)
        return state

    def _begin(self, weights: Checkpoint | None, saved: Checkpoint | None = None) -> State:
        """A state with weights, if there are any; what `saved` will fill is left empty."""
        has_base = self.task.frozen_base
        is_given: IsGiven | None = None if weights is saved is None else all_given
        if has_base:
            sources = [source.arrays for source in (weights, saved) if source is not None]
            stored = {name.removeprefix("model/") for source in sources for name in source}
            is_given = stored.__contains__
        state = self._assemble(is_given)
        if weights is not None:
            optional = [param.name for param in state.trained] if has_base else []
            states.load_weights(self._setup, state, weights, optional)
            self._strategy.sync_replicas()
        if has_base:
            states.take_digest(self._setup, state)
        return state

    def begin_training(self, state: State, rows: TrialRows, *, as_if_split: bool = False) -> None:
        self._add_features(
            {name: None for name in brought_by("training") if name not in self.features}
        )
        if has_users_code(self._setup.task, self._strategy.models[0]):
            self._add_features(dict.fromkeys(brought_by("users' code")))
        is_split = self.plan.batch.is_split or as_if_split
        start = Start(
            state=state,
            rows=rows,
            stage=self._staged,
            is_split=is_split,
            kept=self._kept,
            first_memory=self._first_memory,
        )
        for hooks in tuple(self.features.values()):
            self._add_features(hooks.begin_training(start))
        self._begin_steps(state)

    def _begin_steps(self, state: State) -> None:
        """Put the step of this state together."""
        self.step = make_training_step(self._setup, state)

    def _assemble(self, is_given: IsGiven | None) -> State:
        """The state of a run's start, without the values that are given."""
        builder = ModelBuilder(self._setup)
        models = builder.build_all()
        self._modes, self._first_memory = builder.modes, builder.first_memory
        KEYED_FUNCTIONS.break_graphs()  # building it may have imported torch.compile
        model = models[0]
        hidden = hidden_matrices(model)  # before modules are wrapped
        features = self.features.values()
        on_host = [name for hooks in features for name in hooks.names_on_host]
        materialize: Materialize = builder.first_values.materializer(
            model, self.device, is_given, on_host
        )
        for hooks in features:
            materialize = hooks.before_layout(materialize)
        self._strategy.distribute(models, materialize)
        for hooks in features:
            hooks.after_layout()
        if coupling_layers(model) and not self.plan.syncs_norms:
            self._unsynced_buffers = [
                buffer for buffer in model.buffers() if buffer.is_floating_point()
            ]
        trained = optimizer_params(model)
        updates, optimizer = make_updates(self._setup, trained, hidden)
        state = State(
            model,
            trained,
            optimizer,
            unbounded=frozenset(
                name for name, buffer in model.named_buffers() if not buffer.isfinite().all()
            ),
            updates=updates,
        )
        for hooks in features:
            hooks.begin(state)
        return state

    def evaluate(
        self,
        state: State,
        rounds: Iterable[Sequence[Round]],
        progress: Progress = START,
        samples: int | None = None,
    ) -> EvalSums:
        with self._evaluating(state):
            return evaluate(self._setup, rounds, progress, samples or self.plan.data.eval_samples)

    def refill(self, state: State, saved: Checkpoint) -> State:
        states.restore(self._setup, state, saved)
        self._strategy.sync_replicas()
        return state

    @torch.no_grad()
    def sample(self, state: State, step: int) -> Sequence[Sample]:
        part = Part(self.comm.rank, self.comm.world_size) if self.task.samples_in_parts else WHOLE
        with (
            self._evaluating(state),
            run_uncompiled(self.plan),
            autocast_for(self.plan.compute.precision, self.device),
        ):
            own = self._strategy.call(0, self.task.sample, self.plan.fixed.seed + step, part, step)
        if part.of == 1:
            return own
        from samecurve.torch_engine.shared_samples import samples_of_all

        return samples_of_all(self.comm, own, self.device)

    def kept(self) -> Mapping[str, Any]:
        self._sync_buffers()  # which are compared over ranks
        kept: dict[str, Any] = {}
        for hooks in self.features.values():
            kept |= hooks.kept()
        return kept

    def gather(self, state: State) -> list[ArrayShard]:
        self._sync_buffers()
        return states.gather(self._setup, state)

    def digests(self, state: State) -> dict[str, str]:
        self._sync_buffers()
        return states.digests(self._setup, state)

    def peak_memory(self) -> int:
        """Bytes that the fullest of this process's devices has held at most."""
        return max(map(peak_memory_bytes, self.devices))

    def close(self) -> None:
        self._exit_stack.close()

    @contextmanager
    def _evaluating(self, state: State) -> Iterator[None]:
        self._sync_buffers()
        self._set_mode(train=False)
        with state.average.in_use() if state.average else nullcontext():
            yield
        self._set_mode(train=True)

    def _set_mode(self, *, train: bool) -> None:
        for mode in self._modes:
            mode.set(train=train)

    def _sync_buffers(self) -> None:
        """Give every rank the first one's buffers, before what all ranks must see alike: those that
        each rank keeps for itself (train.allow_coupled) and those that each moves by itself.
        """
        names = self._setup.moved_buffers
        named = self._strategy.models[0].named_buffers()
        moved = [buffer for name, buffer in named if name in names]
        self.comm.broadcast([*self._unsynced_buffers, *moved], self.device)

"""The objects that the training of one process consists of, shared by the parts of the engine."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from samecurve.core.config.sections import Optimizer
from samecurve.core.determinism.microbatches import count_microbatches
from samecurve.core.planning.plan import Plan
from samecurve.core.protocols import MicroBatch, Task
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.randomness.draw_sites import DrawSites
from samecurve.torch_engine.randomness.microbatch_context import MicroBatchContext
from samecurve.torch_engine.strategies.base import Strategy


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    task: Task
    plan: Plan
    optimizer: Optimizer  # the config's section
    comm: Comm
    devices: Sequence[torch.device]  # of this process
    strategy: Strategy
    contexts: Sequence[MicroBatchContext]  # one for each of the devices
    draw_sites: DrawSites  # of all of them

    @property
    def device(self) -> torch.device:
        """The first device, which holds the weights that are trained."""
        return self.devices[0]

    def num_microbatches(self, samples: int) -> int:
        """Microbatches of an evaluation of so many samples, over all devices."""
        return count_microbatches(samples, self.plan.batch.micro_batch_size)

    def num_sum_rows(self, samples: int) -> int:
        """Rows for what is added up over devices: one; or, in an exact run, one for each
        microbatch, which only its own device fills.
        """
        return self.num_microbatches(samples) if self.plan.compute.exact else 1

    def sum_row(self, microbatch: MicroBatch | None) -> int:
        return microbatch.number if microbatch and self.plan.compute.exact else 0

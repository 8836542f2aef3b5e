"""Step buffers in engine torch: each microbatch begins with what the step began with, and what the
last one leaves is the step's. A device without a microbatch of its own takes over what another
device's left.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import torch

from samecurve.core.protocols import Batch, Round
from samecurve.errors import UserError
from samecurve.torch_engine.step import EngineSetup
from samecurve.torch_engine.step.feature_hooks import TorchHooks
from samecurve.torch_engine.step.training_step import TrainingStep
from samecurve.torch_engine.users_code import equal
from samecurve.units import first_and_count


class Hooks(TorchHooks):
    """Keeps the buffers in each update of a step."""

    value: AbstractSet[str]  # the buffers' names

    def __init__(self, setup: EngineSetup, value: AbstractSet[str]) -> None:
        super().__init__(setup, value)
        self.moved_buffers = value

    def add_to(self, steps: Sequence[TrainingStep]) -> None:
        for step in steps:
            buffers = StepBuffers(step.setup, self.value)
            step.before_step.append(buffers.begin_step)
            step.before_forward.append(buffers.begin_microbatch)
            step.after_forward.append(buffers.after_forward)
            step.after_backward.append(buffers.after_backward)
            step.after_reduction.append(buffers.end_step)


class StepBuffers:
    """The hooks of a training step that keep such buffers.

    names: of those buffers, in the model.

    UserError: blocks are run again in backward, which would move them a second time.
    """

    def __init__(self, setup: EngineSetup, names: AbstractSet[str]) -> None:
        if setup.plan.reruns_blocks:
            raise UserError(
                f"buffer {first_and_count(sorted(names))} moves in each forward pass, and blocks"
                " that are computed again would move it twice",
                "leave train.recompute out",
                "train.recompute",
            )
        self._names, self._setup, self._plan = names, setup, setup.plan
        self._num_microbatches = 0
        # by device of this process: values as the step began, and after a forward pass
        self._kept: list[dict[str, torch.Tensor]] = [{} for _ in setup.devices]
        self._after: list[dict[str, torch.Tensor]] = [{} for _ in setup.devices]
        self._checked: set[int] = set()  # devices whose first backward pass moved no buffer

    def begin_step(self, batch: Batch[list[Round]]) -> None:
        self._num_microbatches = batch.num_microbatches  # over all devices

    def begin_microbatch(self, device_index: int, is_first: bool, /) -> None:  # noqa: FBT001 - hook
        """Put back what the step began with, before a forward pass."""
        buffers = self._named(device_index)
        kept = self._kept[device_index]
        for name, buffer in buffers.items():
            if is_first:
                kept[name] = buffer.clone()
            else:
                buffer.copy_(kept[name])

    def after_forward(self, device_index: int, _is_first: bool, /) -> None:  # noqa: FBT001 - hook
        if device_index not in self._checked:
            buffers = self._named(device_index)
            self._after[device_index] = {name: b.clone() for name, b in buffers.items()}

    def after_backward(self, device_index: int, _is_first: bool, /) -> None:  # noqa: FBT001 - hook
        """UserError: the buffers moved once more, in backward.

        Only the first backward pass is looked at, since comparing values waits for the device.
        """
        if device_index in self._checked:
            return
        self._checked.add(device_index)
        after = self._after[device_index]
        buffers = self._named(device_index)
        if not all(equal(buffer, after[name]) for name, buffer in buffers.items()):
            raise UserError(
                f"buffer {first_and_count(sorted(self._names))} moves in each forward pass, and the"
                " model computes parts of it again in backward (a checkpoint of its own)",
                "leave the layer that has it out of what is computed again",
                "model",
            )

    def end_step(self) -> bool:
        """Give every device the buffers of the first device that had a microbatch. Returns True:
        the hook comes again.
        """
        plan = self._plan
        counts = [
            len(plan.batch.microbatches_of(self._num_microbatches, device))
            for device in range(plan.layout.num_devices)
        ]
        if all(counts):
            return True
        comm = self._setup.comm
        own = plan.layout.devices_of(comm.rank)
        source = next(device for device, count in enumerate(counts) if count)
        at = source - own.start if source in own else 0
        comm.broadcast(self._named(at).values(), self._setup.device, root=source // len(own))
        moved = self._named(at)
        for index in range(len(self._setup.strategy.models)):
            for name, buffer in self._named(index).items():
                if index != at:
                    buffer.copy_(moved[name])
        return True

    def _named(self, device_index: int) -> dict[str, torch.Tensor]:
        """The buffers of a replica as they are now: a module may put another tensor in a buffer's
        place.
        """
        model = self._setup.strategy.models[device_index]
        return {name: buffer for name, buffer in model.named_buffers() if name in self._names}

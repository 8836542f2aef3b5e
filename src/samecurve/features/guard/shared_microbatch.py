"""One microbatch of a step, sent to every rank."""

import json
from collections.abc import Sequence

import numpy as np
import torch

from samecurve.core.determinism.sample_keys import RowKeys
from samecurve.core.protocols import Batch, MicroBatch, Round
from samecurve.errors import RunError
from samecurve.features.guard import Choice
from samecurve.torch_engine.process_group import texts_of_all
from samecurve.torch_engine.randomness import StagedKeys
from samecurve.torch_engine.step.training_step import TrainingStep

_ALIGNMENT = 64  # bytes: what follows from where a tensor's memory begins follows from the rest


def shared(
    step: TrainingStep, batch: Batch[list[Round]], choice: Choice, own: MicroBatch | None
) -> MicroBatch:
    """The microbatch, on every rank. All ranks call it together.

    own: on the one rank that has it; None: another rank has it

    A tensor lies where it lies for its own rank, as far as kernels look at its address: they may
    add up numbers in another order where the first ones are not aligned.
    """
    comm, device = step.comm, step.setup.device
    texts = list(filter(None, texts_of_all(comm, _described(own) if own else b"", device)))
    if len(texts) != 1:
        raise RunError(
            f"{len(texts)} ranks have microbatch {choice.number + 1} of step {batch.step + 1}: they"
            " hold other plans, or data",
            "look at what each host has: the version, the config, the data (samecurve check)",
        )
    described = json.loads(texts[0])
    sizes = [number_of_bytes for *_, number_of_bytes in described["arrays"].values()]
    packed = torch.empty(sum(sizes), dtype=torch.uint8)
    if own:
        packed = torch.cat([_bytes_of(tensor) for tensor in own.arrays.values()])
    root = choice.device // len(step.plan.layout.devices_of(comm.rank))
    comm.broadcast([packed], device, root=root)
    if own:
        return own
    arrays = {}
    parts = torch.split(packed, sizes)
    for (name, form), part in zip(described["arrays"].items(), parts, strict=True):
        dtype, shape, beyond, _ = form
        arrays[name] = _unpacked(part, getattr(torch, dtype), shape, beyond)
    seed, ids = step.plan.fixed.seed, np.array(described["ids"], np.int64)
    keys = StagedKeys(RowKeys(seed, batch.progress.epoch, batch.step, ids))
    return MicroBatch(arrays, keys=keys, number=choice.number)


def _described(microbatch: MicroBatch) -> bytes:
    """The form of a microbatch's arrays, and its samples, for other ranks."""
    arrays = {
        name: (
            str(tensor.dtype).removeprefix("torch."),
            list(tensor.shape),
            tensor.data_ptr() % _ALIGNMENT,
            tensor.nbytes,
        )
        for name, tensor in microbatch.arrays.items()
    }
    return json.dumps({"arrays": arrays, "ids": microbatch.keys.rows.ids.tolist()}).encode()


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory that begins as far beyond an aligned address."""
    beyond = tensor.data_ptr() % _ALIGNMENT
    return _unpacked(_bytes_of(tensor), tensor.dtype, tensor.shape, beyond)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _unpacked(
    packed: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], beyond: int
) -> torch.Tensor:
    """A tensor of these bytes, which begins so many bytes beyond an aligned address."""
    memory = torch.empty(len(packed) + _ALIGNMENT, dtype=torch.uint8)
    begin = (beyond - memory.data_ptr()) % _ALIGNMENT
    part = memory[begin : begin + len(packed)]
    part.copy_(packed)
    return part.view(dtype).view(*shape)

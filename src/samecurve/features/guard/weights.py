"""What a task's code does to weights, which only an update, or after_step(), may change; and to
buffers.

torch counts the writes in place into a tensor: its version. Writes through `.data` are not counted;
they show in the weights' bits. A weight that was frozen when the run began has no optimizer: to
thaw it would train nothing.

A view shows a weight while both lie in one memory. Shards, or another number format, give a weight
other memory: then a view that was kept since model() holds the first values, and a loss that reads
it is wrong from the first update on. What a forward pass makes anew is no such view: torch's old
spectral norm keeps one until its layer is first used.

The hash of an array: its bits, as integers, are multiplied by odd factors that follow from their
places, and added up modulo 2^64. So 8 bytes an array leave a device.
"""

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from samecurve.core.planning.plan import Plan
from samecurve.errors import UserError
from samecurve.torch_engine.model.model_builder import FirstMemory
from samecurve.torch_engine.optimizers import local_view
from samecurve.torch_engine.step import EngineSetup, Update
from samecurve.torch_engine.strategies import Strategy
from samecurve.torch_engine.users_code import place_of_method
from samecurve.torch_engine.users_code.holders import holders, names_in, tensors_within

VERSION = attrgetter("_version")
_FEW = 1 << 12  # of weights that are hashed at once: the trials' memory is counted
_CHUNK = 1 << 14  # numbers that a CPU hashes at once: they stay in its cache
_LARGE_CHUNK = 1 << 22  # those that other devices do
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_FIRST = 0x9E3779B97F4A7C15 - (1 << 64)  # odd factors of 64 bits, as signed numbers
_SECOND = 0xBF58476D1CE4E5B9 - (1 << 64)
_MOST_HASHED = 1 << 14  # numbers hashed of a weight: all of a large model take a step's time
_DEPTH = 2  # of lists and dicts within an attribute that may keep a view


class Versions:
    """How often named tensors have been written into, in place."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        pairs = list(named)
        self._names = [name for name, _ in pairs]
        self.tensors = [tensor for _, tensor in pairs]
        self.note()

    def note(self) -> None:
        self.before = self._read()

    def written(self) -> list[str]:
        """The names of those that have changed since note()."""
        pairs = zip(self._names, self.before, self._read(), strict=True)
        return [name for name, one, other in pairs if one != other]

    def _read(self) -> list[int]:
        return list(map(VERSION, self.tensors))


class Bits(Versions):
    """The bits of some numbers of named tensors; of shards, of this process's own."""

    def _read(self) -> list[int]:
        bit_sums = BitSums(_FEW)
        sums = [bit_sums.of(_spread(local_view(tensor.detach()))) for tensor in self.tensors]
        return [int(one) for one in torch.stack([one.cpu() for one in sums])] if sums else []


def weights_of(strategy: Strategy) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights as they are trained, on this process's devices."""
    for model in strategy.models:
        yield from model.named_parameters()


def moments(update: Update) -> Iterator[tuple[str, torch.Tensor]]:
    """What an optimizer keeps."""
    for param in update.trained:
        for name, tensor in update.optimizer.state_of(param).items():
            yield f"the optimizer's {name} of {param.name}", tensor


def read_weights(strategy: Strategy) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that passes read, on this process's devices."""
    for index, model in enumerate(strategy.models):
        yield from {**dict(model.named_parameters()), **strategy.leaves(index)}.items()


def buffers_of_no_norm(strategy: Strategy) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers on this process's devices, without BatchNorm's."""
    for model in strategy.models:
        for path, module in model.named_modules():
            if not isinstance(module, _BatchNorm):
                yield from module.named_buffers(path, recurse=False)


class FrozenWeights:
    """The weights that are frozen when it is made, and the names of all."""

    def __init__(self, strategy: Strategy) -> None:
        self._model = strategy.models[0]
        named = dict(self._model.named_parameters())
        self._names = named.keys()
        self._weights = [(name, w) for name, w in named.items() if not w.requires_grad]

    def made(self) -> str:
        """The first weight that was not there then, by name; '': none."""
        names = (name for name, _ in self._model.named_parameters())
        return next((name for name in names if name not in self._names), "")

    def thawed(self) -> str:
        """The first one that is frozen no longer, by name; '': none."""
        return next((name for name, weight in self._weights if weight.requires_grad), "")


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """At most 16,384 numbers of a tensor, spread over it."""
    flat = tensor.reshape(-1)
    return flat[:: -(-len(flat) // _MOST_HASHED) or 1]


# --- views


def refuse_stale_views(first: Sequence[FirstMemory], setup: EngineSetup) -> None:
    """Call it once forward passes of a step have run.

    UserError: an attribute or a buffer is a view of memory that a weight no longer has.
    """
    strategy, task = setup.strategy, setup.task
    left = {each.memory.cdata: each.name for each in first if each.is_held}
    if not strategy.gathers_weights:  # there all weights have other memory
        for weight in (weight for model in strategy.models for weight in model.parameters()):
            if type(weight) is nn.Parameter:
                left.pop(_storage_of(weight), None)
    if not left:
        return
    for path, tensor in _kept_tensors(strategy.models, getattr(task, "task", task)):
        if name := left.get(_storage_of(tensor)):
            where = place_of_method(task, "model")
            raise UserError(*_cause_and_remedy(path, name, setup.plan), where)


def _storage_of(tensor: torch.Tensor) -> int:
    """The identity of a tensor's memory."""
    cdata: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - torch has no other name for it
    return cdata


def _kept_tensors(models: Sequence[nn.Module], task: object) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors with memory of their own in attributes and buffers, by path; without those that
    a hook of the module makes anew before its forward pass.
    """
    for model in models:
        named = [(f"buffer {name}", buffer) for name, buffer in model.named_buffers()]
        for path, holder in holders(model, task).items():
            hooks = holder.get("_forward_pre_hooks", {}).values()
            made_anew = {getattr(hook, "name", None) for hook in hooks}
            for name in names_in(holder):
                if name not in made_anew:
                    named += tensors_within(f"{path}.{name}", holder[name], _DEPTH)
        for path, tensor in named:
            if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
                yield path, tensor


def _cause_and_remedy(path: str, name: str, plan: Plan) -> tuple[str, str]:
    where = f"under {plan.layout.strategy}, in {plan.compute.precision},"
    other = "; or --strategy ddp" if plan.layout.shards > 1 else ""
    return (
        f"{path} is a view of the weight {name}, kept since model() made it; {where} the weight"
        " lies in other memory, and the view keeps the first values",
        f"make the view where it is used: in forward(), or in the loss{other}",
    )


class BitSums:
    """Hashes of arrays' bits. Keeps the factors, which are the same for all arrays of a device.

    chunk: numbers that a CPU hashes at once; fewer take less memory, and another hash
    """

    def __init__(self, chunk: int = _CHUNK) -> None:
        self._chunk = chunk
        self._factors: dict[torch.device, torch.Tensor] = {}

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """The hash of an array; int64, on its device. It differs if a single number differs."""
        device = values.device
        chunk = self._chunk if device.type == "cpu" else _LARGE_CHUNK
        flat = values.detach().reshape(-1)
        bits = flat.view(_INTEGERS[flat.element_size()])
        factors = self._factors_of(min(len(bits), chunk), device)
        total = torch.zeros((), dtype=torch.int64, device=device)
        for part in torch.split(bits, chunk):
            total = total * _FIRST + (part * factors[: len(part)]).sum()
        return total

    def _factors_of(self, count: int, device: torch.device) -> torch.Tensor:
        """At least `count` factors: no more memory than the largest array so far needs."""
        if device not in self._factors or len(self._factors[device]) < count:
            self._factors.pop(device, None)
            self._factors[device] = _factors(count, device)
        return self._factors[device]


def _factors(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers that look like random ones, each a function of its place."""
    mixed = torch.arange(1, count + 1, device=device).mul_(_FIRST)
    mixed.bitwise_xor_(mixed >> 32).mul_(_SECOND)
    return mixed.bitwise_xor_(mixed >> 29).bitwise_or_(1)

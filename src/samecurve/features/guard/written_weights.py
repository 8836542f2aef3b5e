"""What a task's code does to weights, which only an update, or after_step(), may change.

torch counts the writes in place into a tensor: its version. Writes through `.data` are not counted;
they show in the weights' bits. A weight that was frozen when the run began has no optimizer: to
thaw it would train nothing.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter

import torch

from samecurve.errors import UserError
from samecurve.torch_engine.bit_sums import BitSums
from samecurve.torch_engine.optimizers import local_view
from samecurve.torch_engine.step import EngineSetup
from samecurve.torch_engine.strategies import Strategy

VERSION = attrgetter("_version")
_STRETCHED = 3.0  # by which a weight is multiplied, once the run is at its end
_CHUNK = 1 << 12  # of weights that are hashed at once: the trials' memory is counted
_MOST_HASHED = (
    1 << 14
)  # numbers of a weight, spread over it: all of a large model take a step's time


class WeightVersions:
    """The versions of the weights that passes read, on this process's devices."""

    def __init__(self, strategy: Strategy) -> None:
        weights: list[tuple[str, torch.Tensor]] = []
        for index, model in enumerate(strategy.models):
            weights += {**dict(model.named_parameters()), **strategy.leaves(index)}.items()
        self._names = [name for name, _ in weights]
        self.tensors = [weight for _, weight in weights]
        self.note()

    def note(self) -> None:
        self.before = list(map(VERSION, self.tensors))

    def written(self) -> str:
        """The first weight that was written into since note(), by name; '': none."""
        now = list(map(VERSION, self.tensors))
        return _first_changed(self._names, self.before, now) if now != self.before else ""


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


class WeightBits:
    """The bits of some numbers of each weight, on this process's devices; of shards, of its own."""

    def __init__(self, strategy: Strategy) -> None:
        named = [pair for model in strategy.models for pair in model.named_parameters()]
        self._names = [name for name, _ in named]
        self._tensors = [weight.detach() for _, weight in named]
        self._before = self._hashes()

    def written(self) -> str:
        """The first weight whose bits are others than when this was made, by name; '': none."""
        return _first_changed(self._names, self._before, self._hashes())

    def _hashes(self) -> list[int]:
        bit_sums = BitSums(_CHUNK)
        sums = [bit_sums.of(_spread(local_view(tensor))) for tensor in self._tensors]
        return [int(one) for one in torch.stack([one.cpu() for one in sums])] if sums else []


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """At most 16,384 numbers of a tensor, spread over it."""
    flat = tensor.reshape(-1)
    return flat[:: -(-len(flat) // _MOST_HASHED) or 1]


def _first_changed(names: Sequence[str], before: Sequence[int], now: Sequence[int]) -> str:
    changed = zip(names, before, now, strict=True)
    return next((name for name, one, other in changed if one != other), "")


def thaw_error(setup: EngineSetup, name: str) -> UserError:
    """The error of a weight that the loss thaws."""
    from samecurve.features.guard.split_errors import explain_thawed
    from samecurve.torch_engine.users_code import place_of_method

    method = "features" if setup.plan.sees_whole_batch else "loss"
    return explain_thawed(name, place_of_method(setup.task, method))


def write_error(setup: EngineSetup, name: str, again: Callable[[], object]) -> UserError:
    """The error of a weight that the loss writes into, with the line that does.

    again: computes the loss once more
    """
    from samecurve.features.guard.split_errors import explain_written
    from samecurve.features.guard.watched_lines import watch
    from samecurve.torch_engine.users_code import place_of_method
    from samecurve.torch_engine.users_code.side_effects import GeneratorStates

    where = place_of_method(setup.task, "features" if setup.plan.sees_whole_batch else "loss")
    if not setup.strategy.gathers_weights:
        weight = dict(setup.strategy.models[0].named_parameters())[name]
        with torch.no_grad():  # what has been clamped once would stay as it is
            weight.mul_(_STRETCHED)
        reads = {name: lambda: (weight._version, weight.detach().clone())}  # noqa: SLF001
        where = watch(again, GeneratorStates(setup.device), reads).changes.get(name, where)
    return explain_written(name, where)

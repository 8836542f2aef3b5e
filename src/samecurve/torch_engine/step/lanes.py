"""The microbatches of a rank, given out to the lanes of its devices (core/planning/lanes.py)."""

from collections.abc import Sequence

from samecurve.core.protocols import MicroBatch, Round
from samecurve.torch_engine.step.setup import EngineSetup


def side_by_side(rounds: Sequence[Round], setup: EngineSetup) -> list[Round]:
    """The rounds of a process's devices, as those of a process with a device for each lane.

    Each lane takes neighbouring microbatches, so that it adds most of them up itself; the first
    lanes of a device take its first ones. One takes all, where the task draws from a generator that
    all threads share, or gives the same model to all lanes. A dummy needs no lane.
    """
    sites, lanes = setup.draw_sites, setup.plan.compute.lanes
    num_models = len(setup.strategy.models)
    is_shared = sites.reseeds_host or sites.reseeds_torch or num_models < len(setup.devices)
    in_turn: list[Sequence[MicroBatch]] = []  # of each lane
    for of_device in zip(*rounds, strict=True):
        own = [one for one in of_device if one is not None and one.real]
        each = len(own) if is_shared else -(-len(own) // lanes)
        in_turn += [own[lane * each : (lane + 1) * each] for lane in range(lanes)]
    return [
        tuple(of_lane[number] if number < len(of_lane) else None for of_lane in in_turn)
        for number in range(max(map(len, in_turn), default=0))
    ]

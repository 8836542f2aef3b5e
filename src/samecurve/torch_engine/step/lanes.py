"""The microbatches of a rank, given out to its lanes (core/planning/lanes.py)."""

from collections.abc import Sequence

from samecurve.core.protocols import Round
from samecurve.torch_engine.step.setup import EngineSetup


def side_by_side(rounds: Sequence[Round], setup: EngineSetup) -> list[Round]:
    """The rounds of a process with one device, as those of a process with a device for each lane.

    Each lane takes neighbouring microbatches, so that it adds most of them up itself; the first
    lanes take the first ones. One takes all, where the task draws from a generator that all threads
    share, or gives the same model to all lanes.
    """
    lanes, sites = len(setup.devices), setup.draw_sites
    is_shared = sites.reseeds_host or sites.reseeds_torch or len(setup.strategy.models) < lanes
    own = [microbatch for (microbatch,) in rounds if microbatch is not None]
    each = len(own) if is_shared else -(-len(own) // lanes)
    of_lanes = [own[lane * each : (lane + 1) * each] for lane in range(lanes)]
    return [
        tuple(of_lane[number] if number < len(of_lane) else None for of_lane in of_lanes)
        for number in range(each)
    ]

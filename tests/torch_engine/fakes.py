"""Bytes that the real engine hands to torch's collectives in one step, rank 0 of a world that is
not there: run as a program, for fake process groups and real ones don't mix.

Argument: cases as JSON: [{"machine", "strategy", ...}]. Prints JSON: for each case, counted and
predicted bytes that a device sends.
"""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from samecurve.data.feed import Feed
from samecurve.tasks import open_task
from samecurve.torch_engine.engine import TorchEngine
from samecurve.torch_engine.process_group import Comm
from samecurve.torch_engine.strategies.sharded import passes
from samecurve.torch_engine.strategies.sharded.order import GatherOrder
from samecurve_products.lab.simulation.cluster import read_cluster
from samecurve_products.lab.simulation.collectives import traffic
from samecurve_products.lab.simulation.forecast import plan_on_cluster
from tiny import config_of, tiny_values

# operation -> (which argument is the whole buffer, its kind)
_WHOLE = {
    "allreduce_": (0, "all-reduce"),
    "_allgather_base_": (0, "all-gather"),
    "_reduce_scatter_base_": (1, "reduce-scatter"),
}


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """sent: bytes that a ring has each device send, by kind."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        if function.namespace in {"c10d", "_c10d_functional"}:
            place, kind = _WHOLE[function._opname]
            whole = arguments[place] if isinstance(arguments[place], list) else [arguments[place]]
            members = next(
                dist.ProcessGroup.unbox(a).size()
                for a in arguments
                if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())
            )
            self.sent[kind] += round(
                sum(tensor.nbytes for tensor in whole)
                * (members - 1)
                / members
                * (2 if kind == "all-reduce" else 1)
            )
        return function(*arguments, **(keywords or {}))


@contextmanager
def world(size: int) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    assert dist.group.WORLD is not None
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def counted(
    corpus: Path,
    cache: Path,
    machine: str,
    strategy: str,
    *,
    task: str = "",
    rounds: int = 1,
    **sections: Any,
) -> dict[str, Any]:
    """task: of a file beside this one; the language task if none is named."""
    setup = read_cluster(machine)
    values = {
        "model": {"hidden_size": 64, "intermediate_size": 96, **sections.pop("model", {})},
        "batch": {"samples": None, "per_device": 1, "accumulate": rounds},
        "devices": {"use": "auto", "strategy": strategy, **sections.pop("devices", {})},
        "train": {"precision": "f32", "steps": 3, **sections},
    }
    config = config_of(
        {"task": str(Path(__file__).with_name(task)), **values, "model": {"frozen": True}}
        if task
        else tiny_values(corpus, **values)
    )
    opened: Any = open_task(config, str(cache))
    facts = opened.facts()
    made = plan_on_cluster(config, facts, setup)
    with world(setup.num_devices) as group:
        engine = TorchEngine(opened, made, config.optimizer, Comm(group), [torch.device("cpu")])
        state = engine.init()
        counting = Counting()
        for step, batch in Feed(
            made, made.layout.devices_of(0), opened.train_data(), None, engine.stage, prefetch=0
        ):
            if step == 2:  # the second one begins with buckets made anew
                counting.__enter__()  # type: ignore[no-untyped-call]
            engine.step(state, batch, 1e-3, [0] * 4)
        counting.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        engine.close()
    found = traffic(made, facts, setup)
    return {
        "counted": counting.sent,
        "predicted": Counter(
            {
                kind: sum(part.sent for part in found.all if part.kind == kind)
                for kind in {part.kind for part in found.all}
            }
        ),
    }


def _this_rank_s(_order: GatherOrder, own: torch.Tensor) -> torch.Tensor:
    """The other ranks are not there, so nobody disagrees."""
    return own[None]


def main(cases: str) -> None:
    torch.set_num_threads(1)
    vars(passes)["_disable_current_modes"] = nullcontext  # Counting is one
    GatherOrder._rows_of_all = _this_rank_s  # type: ignore[method-assign, assignment]
    with tempfile.TemporaryDirectory() as home:
        corpus = Path(home) / "text.txt"
        corpus.write_text(
            "".join(f"{i} squared is {i * i}\n" for i in range(8_000))
        )  # three whole steps of the largest batch
        print(
            json.dumps(
                [counted(corpus, Path(home) / "cache", **case) for case in json.loads(cases)]
            )
        )


if __name__ == "__main__":
    main(*sys.argv[1:])

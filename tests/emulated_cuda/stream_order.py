"""Which work of a step under fsdp a GPU may do at the same time: what its streams wait for.

test_stream_order.py starts it as `python -m stream_order ANSWERS CORPUS PLANTED`. Each rank notes
the gathers, the sums and the computation of blocks in its third step. For each piece of work it
keeps what must have ended before it, by the waits of streams for each other.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_runs import leg

from samecurve.core.config.document import Document
from samecurve.core.config.loading import load_document
from samecurve.core.planning.planner import plan
from samecurve.data.feed import Feed
from samecurve.launch.pool import pool
from samecurve.probe import probe
from samecurve.tasks import Tasks, open_task
from samecurve.torch_engine.strategies.sharded.group import WeightGroup
from samecurve.torch_engine.strategies.sharded.link import ShardLink
from samecurve.torch_engine.strategies.sharded.sums import RoundSums
from samecurve.worker.join import join_warm

LAYERS = 4
_COLLECTIVES = "collectives"  # the stream of NCCL itself
Clock = dict[Any, int]  # by stream: how much of its work must have ended


class Streams:
    """work: by name, when it is done on its stream, and what must have ended before it."""

    def __init__(self) -> None:
        self.work: dict[str, tuple[Any, int, Clock]] = {}
        self._clocks: dict[Any, Clock] = {}
        self._events: dict[int, Clock] = {}

    @property
    def current(self) -> Any:
        return torch.cuda.current_stream().stream_id

    def note(self, name: str, stream: Any) -> None:
        clock = self._clocks.setdefault(stream, {})
        clock[stream] = clock.get(stream, 0) + 1
        self.work[name] = (stream, clock[stream], dict(clock))

    def wait(self, stream: Any, clock: Clock) -> None:
        own = self._clocks.setdefault(stream, {})
        own |= {other: max(own.get(other, 0), count) for other, count in clock.items()}

    def record(self, event: Any, stream: Any) -> None:
        self._events[id(event)] = self.clock(self.current if stream is None else stream.stream_id)

    def wait_for_event(self, stream: Any, event: Any) -> None:
        self.wait(stream, self._events.get(id(event), {}))

    def clock(self, stream: Any) -> Clock:
        return dict(self._clocks.get(stream, {}))

    def are_together(self, one: str, other: str) -> bool:
        """Whether neither waits for the other."""
        (stream, at, clock), (other_stream, other_at, other_clock) = (
            self.work[one],
            self.work[other],
        )
        return clock.get(other_stream, 0) < other_at and other_clock.get(stream, 0) < at


class NotedWork:
    """A collective on its way."""

    def __init__(self, streams: Streams, work: Any) -> None:
        self._streams, self._work = streams, work
        self._clock = streams.clock(_COLLECTIVES)

    def wait(self) -> None:
        self._work.wait()
        self._streams.wait(self._streams.current, self._clock)


class Notes:
    """What is put in place of methods, to note their calls.

    planted: each gather is waited for at once
    """

    def __init__(self, streams: Streams, *, planted: bool) -> None:
        self._streams, self._planted = streams, planted
        self._name = ""  # of the group whose collective begins

    def start(self, inner: Any) -> Any:
        def noting(group: WeightGroup) -> None:
            if group._pending is not None:
                return
            self._name = f"gather {group.title}"
            if self._name in self._streams.work:
                self._name += " again"
            inner(group)
            if self._planted:
                pending: Any = group._pending
                pending.work.wait()

        return noting

    def send(self, inner: Any) -> Any:
        def noting(sums: RoundSums, group: WeightGroup) -> None:
            self._name = f"sum {group.title}"
            inner(sums, group)

        return noting

    def collective(self, inner: Any) -> Any:
        def noting(link: ShardLink, *tensors: torch.Tensor) -> NotedWork:
            streams = self._streams
            streams.wait(_COLLECTIVES, streams.clock(streams.current))
            streams.note(self._name, _COLLECTIVES)
            return NotedWork(streams, inner(link, *tensors))

        return noting

    def record(self, inner: Any) -> Any:
        def noting(event: Any, stream: Any = None) -> None:
            inner(event, stream)
            self._streams.record(event, stream)

        return noting

    def wait_event(self, inner: Any) -> Any:
        def noting(stream: Any, event: Any) -> None:
            inner(stream, event)
            self._streams.wait_for_event(stream.stream_id, event)

        return noting


@contextmanager
def noted(notes: Notes) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for kind, name, noting in (
            (WeightGroup, "start", notes.start),
            (RoundSums, "send", notes.send),
            (ShardLink, "all_gather", notes.collective),
            (ShardLink, "all_to_all", notes.collective),
            (ShardLink, "reduce_scatter", notes.collective),
            (torch.cuda.Event, "record", notes.record),
            (torch.cuda.Stream, "wait_event", notes.wait_event),
        ):
            patch.setattr(kind, name, noting(getattr(kind, name)))
        yield


def note_computation(model: Any, streams: Streams) -> None:
    """Note the middle of each block's forward and backward pass."""

    def noted_pass(number: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
            streams.note(f"forward layers.{number}", streams.current)
            output.register_hook(  # type: ignore[no-untyped-call]
                lambda _: streams.note(f"backward layers.{number}", streams.current)
            )

        return hook

    for number, layer in enumerate(model.layers):
        layer.mlp.up_proj.register_forward_hook(noted_pass(number))


def third_step(
    index: int, group: Any, values: dict[str, Any], *, planted: bool
) -> dict[str, list[str]]:
    """What this rank's GPU may do beside the computation of each block, by its pass."""
    config = load_document(Document(values), Tasks()).config
    task: Any = open_task(config, "")
    made = plan(config, probe(), task.facts())
    engine: Any = join_warm(made, index, group).make_engine(task, config.optimizer)
    state, streams = engine.init(), Streams()
    feed = Feed(made, made.layout.devices_of(index), task.train_data(), None, engine.stage)
    note_computation(state.model, streams)
    with noted(Notes(streams, planted=planted)):
        for step, batch in feed:
            streams.work.clear()
            engine.step(state, batch, 1e-3, [0] * 4)
            if step == 2:
                break
    feed.close()
    engine.close()
    passes = [name for name in streams.work if name.startswith(("forward", "backward"))]
    others = [name for name in streams.work if name not in passes]
    return {
        name: [other for other in others if streams.are_together(name, other)] for name in passes
    }


def main(answers: Path, corpus: Path, planted: str) -> None:
    found = {}
    with pool(2, answers.with_suffix(".log"), patience=120) as ranks:
        for kind, exact in (("collective", False), ("tree", True)):
            values = leg(
                corpus,
                "0,1",
                "fsdp",
                model={"num_layers": LAYERS},
                batch={"samples": 4},
                train={"exact": exact, "precision": "f32"},
                devices={"gather": "round"},
            )["values"]
            found[kind] = ranks.run(2, planted_step if planted else right_step, values)
    answers.write_text(json.dumps(found))


def right_step(index: int, group: Any, values: dict[str, Any]) -> dict[str, list[str]]:
    return third_step(index, group, values, planted=False)


def planted_step(index: int, group: Any, values: dict[str, Any]) -> dict[str, list[str]]:
    return third_step(index, group, values, planted=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])

"""`profile` tells where a step's time goes: what is planted is found where it was planted, and the
parts add up to the step.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import slow

from commands import refused, samecurve, write_config
from samecurve.core.measurement.profile_types import ProfileSchedule
from samecurve.errors import RunError
from samecurve.experiments.profile.profile import plan_profile, run_profile
from samecurve.experiments.profile.profile_text import as_json, as_text
from samecurve.jax_engine.profiler import exclusive_times
from samecurve.run.describe import describe
from samecurve.torch_engine.profiling.timeline import DeviceSpans, seconds_by_part
from samecurve.worker.jobs.profile_job import watch_rank
from tiny import MACHINE, config_of, tiny_values
from worlds import Pool

SCHEDULE = ProfileSchedule(timed=4)
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def profiled(pool: Pool, corpus: Path, tmp_path: Path) -> Run:
    """Runs a plan on warm ranks, and gives what --json prints; whatever the plan, the parts of a
    step must add up to it.
    """

    def run(
        strategy: str,
        world: int,
        job: Callable[..., Any] = watch_rank,
        engine: str = "torch",
        ranks: Pool = pool,
    ) -> dict[str, Any]:
        # threads spin where others want the cores
        threads = {"threads": 1} if engine == "torch" else {}
        values = tiny_values(
            corpus,
            data={"source": str(corpus), "prefetch": 0},
            devices={"use": f"cpu:{world}", "strategy": strategy, **threads},
            train={"steps": 5, "precision": "f32"},
        )
        config = config_of({**values, "engine": engine})
        plan = plan_profile(config, MACHINE, describe(config), SCHEDULE)
        profile = run_profile(config, plan, SCHEDULE, ranks=ranks, home=tmp_path, job=job)
        assert "costly" in as_text(profile, 3)
        measured: dict[str, Any] = json.loads(as_json(profile, "tiny", 400))
        for rank in measured["ranks"]:
            parts = rank["parts"].values()
            assert sum(part["share"] for part in parts) == pytest.approx(1)
            assert sum(part["seconds"] for part in parts) == pytest.approx(rank["seconds"])
            assert all(part["seconds"] >= -1e-6 for part in parts), rank["parts"]
        return measured

    return run


def _seconds(profile: dict[str, Any], part: str) -> float:
    return float(profile["parts"][part]["seconds"])


def test_a_slow_source_is_waiting_for_data(profiled: Run) -> None:
    profile = profiled("single", 1, slow.source)
    assert max(profile["parts"], key=lambda part: _seconds(profile, part)) == "data"
    assert (
        slow.SECONDS
        <= _seconds(profile, "data")
        < profile["seconds"]["mean"] - _seconds(profile, "forward") - _seconds(profile, "backward")
    )
    assert _seconds(profile, "sync") == 0
    assert {term["name"]: term["measured_bytes"] for term in profile["memory"]["terms"]}[
        "weights"
    ] == {term["name"]: term["plan_bytes"] for term in profile["memory"]["terms"]}["weights"]


def test_a_costly_forward_pass_is_named_by_its_operation(profiled: Run) -> None:
    profile = profiled("ddp", 2, slow.forward)
    first = profile["operations"][0]
    assert (first["name"], first["shapes"], first["calls"]) == (
        "aten::mm",
        f"{slow.SIZE}x{slow.SIZE} {slow.SIZE}x{slow.SIZE}",
        1,
    )
    assert max(profile["parts"], key=lambda part: _seconds(profile, part)) == "forward"
    assert any(operation["collective"] for operation in profile["operations"])


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_the_others_wait_for_the_slowest_rank(strategy: str, profiled: Run) -> None:
    """What the second rank computes longer, the first waits for: exposed, and not in its backward
    pass.
    """
    profile = profiled(strategy, 2, slow.second_rank)
    assert profile["slowest"]["rank"] == 1
    first, second = profile["ranks"]
    assert _seconds(second, "forward") > slow.SECONDS
    assert _seconds(first, "sync") > 0.5 * slow.SECONDS
    assert _seconds(first, "sync") > _seconds(second, "sync")


def test_threads_of_dp_are_seen_each(profiled: Run) -> None:
    profile = profiled("dp", 2)
    assert len(profile["ranks"][0]["devices_computing_seconds"]) == 2
    assert _seconds(profile, "sync") > 0
    mm = [operation for operation in profile["operations"] if operation["name"] == "aten::mm"]
    assert sum(operation["calls"] for operation in mm) % 2 == 0


@pytest.mark.long
def test_a_compiled_step_is_not_divided_by_guessing(profiled: Run) -> None:
    profile = profiled("dp", 2, slow.source, "jax")
    assert set(profile["parts"]) == {"data", "device", "other"}
    assert _seconds(profile, "data") >= slow.SECONDS
    assert any(operation["collective"] for operation in profile["operations"])
    assert {"weights", "optimizer", "temporary"} <= profile["ranks"][0]["held_bytes"].keys()


@pytest.mark.long
def test_a_rank_that_ends_is_told_with_its_last_words(profiled: Run, tmp_path: Path) -> None:
    pair = Pool(2, tmp_path / "ranks.log")
    try:
        with pytest.raises(RunError, match=r"rank 1 of 2 ended[\s\S]*the last word of a rank"):
            profiled("ddp", 2, slow.dies, ranks=pair)
    finally:
        pair.close()


def test_what_is_inside_is_counted_once() -> None:
    ticks = iter(range(100))
    spans = DeviceSpans(lambda: float(next(ticks)))
    outer = spans.enter("backward")  # 0
    spans.leave(spans.enter("sync"))  # 1 to 2
    spans.enter("sync")  # 3, to the end of backward
    spans.leave(outer)  # 4
    assert seconds_by_part(spans.spans) == {"backward": 2.0, "sync": 2.0}
    assert exclusive_times(
        [(0, 10, "while"), (1, 4, "dot"), (4, 9, "call"), (5, 6, "dot"), (10, 12, "copy")]
    ) == [("while", 2), ("dot", 3), ("call", 4), ("dot", 1), ("copy", 2)]


def test_the_command_writes_a_trace_and_leaves_nothing_else(
    corpus: Path, tmp_path: Path, cache: Path
) -> None:
    done = samecurve(
        "profile",
        "-f",
        write_config(tmp_path, corpus),
        "--devices",
        "cpu:2",
        "--steps",
        "2",
        "--trace",
        "traces",
        "--json",
        cwd=tmp_path,
    )
    profile = json.loads(done.stdout)
    assert [Path(trace["path"]).name for trace in profile["traces"]] == [
        "rank-0.json.gz",
        "rank-1.json.gz",
    ]
    assert not list((cache / "profile").iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.yaml", "traces"}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--trace", "tiny.yaml"), "is there already"),
        (("--trace", "tiny.yaml/below"), "nothing can be written into"),
        (("--steps", "0"), "is not in the range"),
        (("--strategy", "hsdp", "--devices", "cpu:3"), "hsdp"),
    ],
)
def test_the_command_refuses_before_anything_runs(
    flags: tuple[str, ...],
    says: str,
    *,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    corpus: Path,
    tmp_path: Path,
) -> None:
    assert says in refused(
        monkeypatch, capsys, "profile", "-f", write_config(tmp_path, corpus), *flags, cwd=tmp_path
    )
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.yaml"}


@pytest.mark.gpu
def test_a_gpus_own_clock(corpus: Path, tmp_path: Path) -> None:
    profile = json.loads(
        samecurve(
            "profile",
            "-f",
            write_config(tmp_path, corpus),
            "--gpus",
            "0",
            "--dtype",
            "bf16",
            "--steps",
            "4",
            "--json",
            cwd=tmp_path,
        ).stdout
    )
    assert sum(part["share"] for part in profile["parts"].values()) == pytest.approx(1)
    assert min(_seconds(profile, part) for part in ("forward", "backward", "optimizer")) > 0
    assert any(operation["name"] == "aten::mm" for operation in profile["operations"])

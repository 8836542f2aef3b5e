"""`bench` measures what `profile` measures, works out what follows from it, says what was refused
or failed, and leaves whole files or none.
"""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import slow
import torch.distributed as dist

from commands import refused, samecurve, write_config
from frozen_page import FrozenPage, read_page
from samecurve.core.config.loading import LoadedConfig
from samecurve.core.config.sections import Config
from samecurve.core.measurement.profile_types import ProfileSchedule, RankProfile, Step
from samecurve.core.planning.machine import Device, Machine
from samecurve.errors import RunError, UserError
from samecurve.experiments.layouts import Layout, bench_layouts, default_worlds, parse_worlds
from samecurve.experiments.output_directory import OutputDirectory
from samecurve.experiments.profile.profile import plan_profile, run_profile
from samecurve.experiments.profile.profile_text import Profile
from samecurve.experiments.profile.profile_text import as_json as profile_json
from samecurve.run.describe import describe
from samecurve.torch_engine.profiling.collective_bench import time_collective
from samecurve_products.lab.bench import bench
from samecurve_products.lab.bench.bench_collectives import (
    COLLECTIVES,
    RankGroup,
    fit,
    measure_curves,
)
from samecurve_products.lab.bench.bench_page import bench_files
from samecurve_products.lab.bench.bench_results import Bench, LayoutPlan, LayoutResult, row_of
from samecurve_products.lab.bench.bench_text import as_json, line, notes, table
from samecurve_products.lab.collectives_job import bus_factor
from samecurve_products.report.bench_blocks import Row, bench_blocks
from tiny import MACHINE, config_of, tiny_values
from worlds import Pool

SCHEDULE = ProfileSchedule(warm=1, timed=4, traced=0)


def tiny(corpus: Path, **sections: Any) -> Config:
    """One thread a rank, so that the cores of a busy machine are enough."""
    values = tiny_values(
        corpus,
        data={"source": str(corpus), "prefetch": 0},
        train={"steps": 5, "precision": "f32"},
        devices={"use": "cpu", "threads": 1},
    )
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return config_of(values)


def run_bench(
    config: Config, layouts: list[Layout], pool: Pool, job: Callable[..., Any]
) -> tuple[Bench, list[Row]]:
    facts = describe(config)
    plans = [bench.plan_layout(config, MACHINE, facts, layout, SCHEDULE) for layout in layouts]
    loaded = LoadedConfig(config, "tiny", {})
    about = bench.describe_bench(loaded, MACHINE, facts, plans, SCHEDULE)
    return about, list(bench.measure_layouts(plans, SCHEDULE, pool, job))


def profile_of(rank: int, steps: tuple[Step, ...], peaks: tuple[int, ...]) -> RankProfile:
    return RankProfile(
        rank=rank, steps=steps, traced=0.0, operations=(), memory={}, peaks=peaks, first=1.0
    )


def test_every_number_follows_from_what_was_measured(pool: Pool, corpus: Path) -> None:
    """The second rank's forward pass takes longer: under ddp the first one waits for it, and that
    is exposed sync. hsdp on two devices can't be.
    """
    about, rows = run_bench(
        tiny(corpus), bench_layouts([1, 2], ["ddp", "dp", "hsdp"], "torch"), pool, slow.second_rank
    )
    single, ddp, dp, hsdp = rows
    assert [row["status"] for row in rows] == ["measured", "measured", "measured", "refused"]
    assert "needs groups" in hsdp["why"]
    assert (single["speedup"], single["efficiency"]) == (1, 1)
    for row in (single, ddp, dp):
        assert row["samples_per_second"] == pytest.approx(10 / row["seconds"]["median"])
        assert row["tokens_per_second"] == pytest.approx(160 / row["seconds"]["median"])
        assert row["speedup"] == pytest.approx(
            single["seconds"]["median"] / row["seconds"]["median"]
        )
        assert row["efficiency"] == pytest.approx(row["speedup"] / row["world"])
        assert sum(row["shares"].values()) == pytest.approx(1)
        assert len(row["memory_bytes_by_device"]) == row["world"]
        assert min(row["memory_bytes_by_device"]) > 1 << 20
        assert (row["steps"], len(row["seconds"]["each"])) == (
            {"warm_up": 1, "timed": 4, "profiled": 0},
            4,
        )
        assert row["flops_per_second"] == pytest.approx(
            as_json(about, rows)["flops_per_sample"] * row["samples_per_second"]
        )
    assert single["shares"]["sync"] == 0
    assert ddp["seconds"]["median"] > slow.SECONDS
    assert (
        ddp["parts"]["sync"]["seconds"] > 0.15 * slow.SECONDS
    )  # the mean of one that waits and one that does not
    assert re.search(
        rf"ddp:2 +2 x 1 .* {ddp['speedup']:.2f} +{ddp['efficiency']:.1%}"
        rf" +{ddp['shares']['compute']:.1%} +{ddp['shares']['sync']:.1%} ",
        table(about, rows),
    )
    as_they_come = "\n".join(line(about, row) for row in rows)
    assert f"ddp:2  {ddp['seconds']['median'] * 1e3:.4g} ms a step, " in as_they_come
    assert "hsdp:2  refused: strategy hsdp needs groups" in as_they_come
    assert any(
        "threads in all: 1 (single), 2 (ddp:2, dp:2): a speed-up is bounded by cores, here by 2"
        in note
        for note in notes(about, rows)
    )


@pytest.mark.long
def test_profile_and_bench_say_the_same(pool: Pool, corpus: Path, tmp_path: Path) -> None:
    """Of the same steps the same numbers; of steps of their own, each finds the wait that was
    planted.
    """
    config = tiny(corpus)
    facts, schedule = describe(config), ProfileSchedule(timed=4)
    plan = plan_profile(config, MACHINE, facts, schedule)
    measured = run_profile(config, plan, schedule, ranks=pool, home=tmp_path, job=slow.source)
    profile = json.loads(profile_json(measured, "tiny", 3))
    layout_plan = bench.plan_layout(config, MACHINE, facts, Layout("single", 1), schedule)
    row = row_of(LayoutResult(layout_plan, measured), measured)
    for key in ("seconds", "parts", "samples_per_second", "steps"):
        assert row[key] == profile[key]
    assert row["shares"]["data"] == profile["parts"]["data"]["share"]
    assert row["shares"]["compute"] == pytest.approx(
        sum(profile["parts"][name]["share"] for name in ("forward", "backward", "optimizer"))
    )
    _, (again,) = run_bench(config, [Layout("single", 1)], pool, slow.source)
    for values in (again, profile):
        assert values["parts"]["data"]["seconds"] >= slow.SECONDS
        assert values["samples_per_second"] < 10 / slow.SECONDS


def _gpus(count: int) -> Machine:
    return Machine(
        devices=tuple(
            Device(kind="cuda", index=index, name="NVIDIA H200", memory=139 << 30)
            for index in range(count)
        ),
        links=(),
        host_bytes=128 << 30,
        cores=16,
    )


def test_gpus_that_are_not_here(corpus: Path) -> None:
    """Plans and arithmetic alone: MFU against the data sheet, dp's first GPU, a batch that grows,
    more GPUs than there are, what other strategies don't have.
    """
    config = tiny(
        corpus,
        batch={"samples": None, "per_device": 5},
        train={"precision": "bf16"},
        devices={"use": "auto", "threads": None, "compress": "bf16"},
    )
    facts, machine = describe(config), _gpus(2)
    layouts = bench.choose_layouts(config, machine, "1,2,4", "ddp,dp")
    assert list(map(str, layouts)) == ["single", "ddp:2", "dp:2", "ddp:4", "dp:4"]
    single, ddp, dp, more, _ = (
        bench.plan_layout(config, machine, facts, layout, SCHEDULE) for layout in layouts
    )
    assert more.refusal is not None
    assert "4 GPUs are asked for, 2 are there" in more.refusal.cause
    assert single.without
    assert not ddp.without
    assert ddp.plan is not None
    assert ddp.plan.features["compress"] == "bf16"

    def profile(layout_plan: LayoutPlan, seconds: float, *peaks: int) -> Profile:
        plan = layout_plan.plan
        assert plan is not None
        parts = {"forward": seconds / 2, "sync": seconds / 4}
        steps = (Step(seconds, plan.batch.global_batch_size, parts),) * 4
        ranks = [profile_of(rank, steps, peaks) for rank in range(plan.layout.world_size)]
        return Profile(plan, SCHEDULE, tuple(ranks))

    base = profile(single, 0.010, 3 << 30)
    rows = [
        row_of(LayoutResult(single, base), base),
        row_of(LayoutResult(dp, profile(dp, 0.0125, 9 << 30, 2 << 30)), base),
        row_of(LayoutResult(more), base),
    ]
    about = bench.describe_bench(
        LoadedConfig(config, "tiny", {}), machine, facts, [single, ddp, dp, more], SCHEDULE
    )
    assert (rows[1]["batch"], rows[1]["speedup"], rows[1]["efficiency"]) == (
        10,
        pytest.approx(1.6),
        pytest.approx(0.8),
    )
    assert rows[1]["mfu"] == pytest.approx(
        facts.flops_per_sample * 10 / 0.0125 / (2 * 989e12) if facts.flops_per_sample else None
    )
    assert rows[1]["shares"] == pytest.approx(
        {"data": 0, "compute": 0.5, "sync": 0.25, "other": 0.25}
    )
    assert "9.0 GiB the first, 2.0 GiB the other" in table(about, rows)
    assert any(note.startswith("MFU ") and "989T" in note for note in notes(about, rows))
    assert as_json(about, rows)["scaling"] == "weak"


def test_a_page_is_made_from_bench_json_alone(corpus: Path) -> None:
    config = tiny(corpus)
    facts = describe(config)
    layout_plan = bench.plan_layout(config, MACHINE, facts, Layout("single", 1), SCHEDULE)
    assert layout_plan.plan is not None
    rank = profile_of(0, (Step(0.01, 10, {}),) * 4, (1 << 28,))
    profile = Profile(layout_plan.plan, SCHEDULE, (rank,))
    loaded = LoadedConfig(config, "<b>", {})
    about = bench.describe_bench(loaded, MACHINE, facts, [layout_plan], SCHEDULE)
    content = as_json(about, [row_of(LayoutResult(layout_plan, profile), profile)])
    with patch.dict(sys.modules, matplotlib=None):
        files = bench_files(content)
    page = FrozenPage(files["bench.html"].decode())
    assert set(files) == {"bench.json", "bench.html"}
    assert "256.0 MiB" in page.text
    assert page.blocks[0]["title"] == "<b>"
    again = bench_blocks(json.loads(files["bench.json"]))
    assert json.loads(json.dumps(again)) == page.page["blocks"]
    with pytest.raises(ValueError, match=r"no bench\.json"):
        bench_blocks({"layouts": [{"status": "measured"}]})


def test_the_command_writes_what_it_prints(corpus: Path, tmp_path: Path, cache: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install -e '.[report]'")
    flags = (
        "--devices",
        "cpu",
        "--dtype",
        "f32",
        "--worlds",
        "2",
        "--strategies",
        "hsdp,ddp",
        "--steps",
        "2",
        "--warm",
        "1",
        "--to",
        "out",
        "--png",
    )
    printed = samecurve("bench", "-f", write_config(tmp_path, corpus), *flags, cwd=tmp_path).stdout
    values = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert [(row["layout"], row["status"]) for row in values["layouts"]] == [
        ("hsdp:2", "refused"),
        ("ddp:2", "measured"),
    ]
    assert (values["baseline"], values["scaling"], values["steps"]) == (
        "ddp:2",
        "strong",
        {"warm_up": 1, "timed": 2},
    )
    row = values["layouts"][1]
    assert re.search(
        rf"^ +ddp:2 .* 1.00 +100.0% +{row['shares']['compute']:.1%} +{row['shares']['sync']:.1%} ",
        printed,
        re.MULTILINE,
    ), printed
    page = read_page(tmp_path / "out" / "bench.html")
    assert page.named("chart").keys() | page.named("bars").keys() == {"scaling", "shares", "memory"}
    assert "hsdp:2 refused:" in page.text
    assert (tmp_path / "out" / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.yaml", "out"}
    assert not list((cache / "bench").iterdir())


@pytest.mark.long
def test_jax_too(corpus: Path, tmp_path: Path) -> None:
    values = json.loads(
        samecurve(
            "bench",
            "-f",
            write_config(tmp_path, corpus),
            "--engine",
            "jax",
            "--worlds",
            "1,2",
            "--steps",
            "2",
            "--warm",
            "1",
            "--json",
            cwd=tmp_path,
            timeout=300,
        ).stdout
    )
    assert [(row["layout"], row["status"], row["shares"].keys()) for row in values["layouts"]] == [
        (name, "measured", {"data", "compute", "other"}) for name in ("single", "dp:2", "fsdp:2")
    ]
    assert len(values["layouts"][1]["memory_bytes_by_device"]) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.yaml"}


@pytest.mark.long
def test_a_layout_that_fails_is_said_and_the_others_go_on(corpus: Path) -> None:
    config = tiny(corpus)
    facts = describe(config)
    plans = [
        bench.plan_layout(config, MACHINE, facts, layout, SCHEDULE)
        for layout in (Layout("ddp", 2), Layout("single", 1))
    ]
    ddp, single = bench.measure_layouts(plans, SCHEDULE, job=slow.dies)
    assert (ddp["status"], single["status"], single["speedup"]) == ("failed", "measured", 1)
    assert re.search(r"rank 1 of 2 ended[\s\S]*the last word of a rank", ddp["why"])


def test_layouts_where_nobody_says(corpus: Path) -> None:
    assert default_worlds(6) == [1, 2, 4, 6]
    assert parse_worlds("4, 1,2,2") == [1, 2, 4]
    assert list(
        map(str, bench.choose_layouts(tiny(corpus), replace(MACHINE, cores=2), None, None))
    ) == ["single", "ddp:2", "dp:2", "fsdp:2"]
    assert list(
        map(
            str,
            bench.choose_layouts(
                tiny(corpus, engine="jax", devices={"use": "cpu:3", "threads": None}),
                MACHINE,
                None,
                None,
            ),
        )
    )[-4:] == ["dp:2", "fsdp:2", "dp:3", "fsdp:3"]
    assert list(
        map(
            str,
            bench.choose_layouts(
                tiny(corpus, devices={"use": "0,1", "strategy": "fsdp"}), _gpus(4), None, None
            ),
        )
    ) == ["single", "fsdp:2"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--worlds", "1,zero"), "is no list of numbers"),
        (("--strategies", "dpp"), "did you mean"),
        (("--to", "tiny.yaml"), "is there already"),
        (("--to", "tiny.yaml/below"), "nothing can be written into"),
        (("--worlds", "2", "--strategies", "single"), "strategy single takes one device"),
        (("--worlds", "2", "--strategies", "hsdp"), "hsdp needs groups"),
        (("--steps", "0"), "is not in the range"),
        (("--collectives",), "so -f says nothing to it"),
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
        monkeypatch, capsys, "bench", "-f", write_config(tmp_path, corpus), *flags, cwd=tmp_path
    )
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.yaml"}


def test_collectives_are_timed_and_their_line_is_found(pool: Pool) -> None:
    group = RankGroup(devices=MACHINE.ranks_on_cpu(3), backend="gloo", threads=1, ranks=pool)
    curves = list(measure_curves(group, sizes=(4096, 1 << 20), times=3))
    assert [curve.name for curve in curves] == list(COLLECTIVES)
    for curve in curves:
        assert not curve.failed
        assert curve.bus_factor == pytest.approx({"all-reduce": 4 / 3}.get(curve.name, 2 / 3))
        for timing in curve.sizes:
            assert timing.bytes % 12 == 0
            assert timing.bus_bytes_per_second == pytest.approx(
                curve.bus_factor * timing.bytes / timing.seconds
            )
        assert curve.alpha_seconds is not None
        assert curve.alpha_seconds >= 0
    pair = RankGroup(devices=MACHINE.ranks_on_cpu(2), backend="gloo", threads=1, ranks=pool)
    small = next(measure_curves(pair, sizes=(4096, 1 << 40), times=1))
    assert len(small.sizes) == 1
    assert "memory" in small.cut


def unreduced(_index: int, group: Any) -> str:
    """A collective that does nothing."""
    import torch

    with (
        patch.object(dist, "all_reduce", lambda *_arguments, **_named: None),
        pytest.raises(RuntimeError) as raised,
    ):
        time_collective("all-reduce", group, torch.device("cpu"), 4096, 1)
    return str(raised.value)


def test_a_collective_that_does_nothing_is_not_timed(pool: Pool) -> None:
    assert pool.run(2, unreduced) == ["all-reduce of 4096 bytes: 1018 of 1024 values are wrong"] * 2


def test_a_line_is_recovered() -> None:
    sizes = [bus_factor("all-reduce", 4) * size for size in (4096, 65536, 1 << 20, 1 << 24)]
    assert fit(sizes, [20e-6 + size / 5e9 for size in sizes]) == pytest.approx((20e-6, 1 / 5e9))
    assert fit([1, 2, 4], [1e-3, 4e-3, 16e-3])[0] == 0  # a negative latency would be nonsense


def test_files_are_all_there_or_none(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="can't be written"):
        OutputDirectory.at(tmp_path / "new", "bench", "x").publish(
            {"first": b"1", "not/there": b"2"}
        )
    assert not list(tmp_path.iterdir())
    (tmp_path / "empty").mkdir()
    assert [
        path.read_bytes()
        for path in OutputDirectory.at(tmp_path / "empty", "bench", "x").publish({"first": b"1"})
    ] == [b"1"]
    assert [path.name for path in (tmp_path / "empty").iterdir()] == ["first"]


@pytest.mark.gpu
def test_a_gpu_has_its_own_memory_and_clock(corpus: Path, tmp_path: Path) -> None:
    (row,) = json.loads(
        samecurve(
            "bench",
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
    )["layouts"]
    assert (row["status"], sum(row["shares"].values())) == ("measured", pytest.approx(1))
    assert 0 < row["memory_bytes"] < 1 << 30
    assert row["mfu"] is None or 0 < row["mfu"] < 1


def test_collectives_need_two(corpus: Path) -> None:
    from samecurve_products.lab.bench.bench_collectives import bench_collectives

    with pytest.raises(UserError, match="nobody to pass values on to"):
        bench_collectives(tiny(corpus), worlds="1", to=None, as_json=True)

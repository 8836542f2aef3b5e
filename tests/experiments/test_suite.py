"""`bench --suite`: a file for each model and strategy, what has a result is not measured again, and
one that fails is named and takes no other with it.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import slow

from commands import refused, samecurve
from samecurve.core.config.loading import LoadedConfig
from samecurve.core.measurement.profile_types import ProfileSchedule
from samecurve.worker.jobs.profile_job import watch_rank
from samecurve_products.lab.bench import suite_text
from samecurve_products.lab.bench.suite import SUITES, SuiteRun, run_suite
from tiny import MACHINE, config_of, tiny_values
from worlds import Pool

ROOT = Path(__file__).parents[2]
PROMISED = {
    *("platform", "devices", "world", "backend", "config", "steps_per_second", "precision"),
    *("tokens_per_second", "tokens_per_second_per_device", "step_seconds", "losses"),
    *("learning_rates", "first_step_seconds", "memory_bytes", "memory_bytes_by_device"),
}


@pytest.fixture
def loaded(corpus: Path) -> LoadedConfig:
    values = tiny_values(
        corpus,
        data={"source": str(corpus), "prefetch": 0},
        train={"steps": 6, "precision": "f64"},
        devices={"use": "cpu:2", "threads": 1},
    )
    return LoadedConfig(config_of(values), "little", {})


def read(home: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(home.glob("little-*.json"))}


def test_what_failed_is_named_and_alone_is_measured_again(
    loaded: LoadedConfig, pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = SuiteRun(
        name="cpu",
        schedule=ProfileSchedule(warm=1, timed=3, traced=0),
        machine=MACHINE,
        home=tmp_path / "suite",
        load=0.25,
        strategies="ddp,fsdp,hsdp",
        ranks=pool,
        job=slow.fails_under_fsdp,
    )
    assert run_suite(suite, [loaded], as_json=False) == 1
    printed = capsys.readouterr().out
    assert "failed little fsdp:2: " in printed
    assert "this one was planted" in printed
    assert "little hsdp:2: refused: strategy hsdp needs groups" in printed
    first = read(suite.home)
    assert {name: entry["status"] for name, entry in first.items()} == {
        "little-single-1": "measured",
        "little-ddp-2": "measured",
        "little-fsdp-2": "failed",
        "little-hsdp-2": "refused",
    }
    ddp = first["little-ddp-2"]
    assert ddp.keys() >= PROMISED
    assert (len(ddp["step_seconds"]), len(ddp["losses"]), len(ddp["learning_rates"])) == (3, 4, 4)
    assert ddp["losses"] == pytest.approx(first["little-single-1"]["losses"], rel=1e-12)
    assert ddp["tokens_per_second_per_device"] * 2 == pytest.approx(ddp["tokens_per_second"])

    (suite.home / "little-ddp-2.json").write_text('{"status": "measured", "ke')  # cut off by a kill
    again = replace(suite, job=watch_rank, strategies="ddp,fsdp")
    assert run_suite(again, [loaded], as_json=True) == 0
    second = read(suite.home)
    assert second["little-single-1"] == first["little-single-1"]
    assert second["little-ddp-2"]["step_seconds"] != ddp["step_seconds"]
    entries = json.loads(capsys.readouterr().out)
    assert [(entry["layout"], entry.get("kept", False)) for entry in entries] == [
        ("single", True),
        ("ddp:2", False),
        ("fsdp:2", False),
    ]
    assert max(entry["apart"] for entry in entries) < 1e-12
    assert {(entry["load"], entry["cores"]) for entry in entries} == {(0.25, MACHINE.cores)}
    assert (suite.home / "suite.md").read_text().count("| little |") == 3


def test_a_result_of_another_config_is_none(
    loaded: LoadedConfig, pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor one of other steps."""
    suite = SuiteRun(
        name="cpu",
        schedule=ProfileSchedule(warm=1, timed=2, traced=0),
        machine=MACHINE,
        home=tmp_path,
        worlds="1",
        ranks=pool,
    )
    optimizer = loaded.config.optimizer.model_copy(update={"lr": 0.25})
    other = replace(loaded, config=loaded.config.model_copy(update={"optimizer": optimizer}))
    longer = replace(suite, schedule=ProfileSchedule(warm=1, timed=3, traced=0))
    for run, config, kept in (
        (suite, loaded, False),
        (suite, loaded, True),
        (suite, other, False),
        (longer, other, False),
    ):
        assert run_suite(run, [config], as_json=False) == 0
        assert ("kept from before" in capsys.readouterr().err) == kept


def test_a_busy_machine_and_speed_ups_beyond_its_cores_are_named() -> None:
    def entry(layout: str, speedup: float, **values: Any) -> dict[str, Any]:
        world = int(layout.partition(":")[2] or 1)
        measured = {"model": "little", "status": "measured", "load": 4.4, "cores": 2}
        sizes = {"layout": layout, "world": world, "threads": 2 // world, "engine": "torch"}
        return {**measured, **sizes, "speedup": speedup, **values}

    entries = [entry("single", 1.0), entry("ddp:2", 2.5), entry("fsdp:2", 1.05)]
    lines = suite_text.notes("cpu", entries)[1:]
    assert lines[0].startswith("odd    little ddp:2: faster than cores explain, so single was held")
    assert lines[1].startswith(
        "busy   other programs wanted the cores when this began (load 4.4 on 2)"
    )
    quiet = [{**one, "load": 0.3} for one in entries]
    assert [line[:4] for line in suite_text.notes("cpu", quiet)[1:]] == ["odd "]
    on_gpus = [{**one, "cores": None, "speedup": min(one["speedup"], 2.1)} for one in entries]
    assert suite_text.notes("nvidia", on_gpus)[1:] == []
    of_before = [{name: one[name] for name in one if name != "load"} for one in entries]
    assert suite_text.notes("cpu", of_before)[1:] == []


def test_the_suites_name_models_that_are_there() -> None:
    for suite in SUITES.values():
        assert all((ROOT / "models" / f"{model}.yaml").is_file() for model in suite.models)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--suite", "nvidia"), "--suite nvidia: no NVIDIA GPU found"),
        (("--suite", "amd"), "--suite amd: no AMD GPU found"),
        (("--suite", "cpu", "-f", "a.yaml"), "--suite has models of its own: leave out -f"),
        (("--suite", "cpu", "--collectives"), "leave out --collectives"),
        (("--suite", "tpu"), "is not one of"),
    ],
)
def test_refused_before_anything_runs(
    flags: tuple[str, ...],
    says: str,
    *,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.setenv(variable, "")
    assert says in refused(monkeypatch, capsys, "bench", *flags, cwd=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_the_cpu_suite_as_it_is_typed(tmp_path: Path) -> None:
    (tmp_path / "models").symlink_to(ROOT / "models")
    line = ("bench", "--suite", "cpu", "--steps", "2", "--warm", "1", "--json")
    entries = json.loads(samecurve(*line, cwd=tmp_path, timeout=900, afresh=True).stdout)
    assert {entry["status"] for entry in entries} == {"measured"}
    assert {entry["model"] for entry in entries} == set(SUITES["cpu"].models)
    assert max(entry["apart"] for entry in entries) < 1e-4  # f32

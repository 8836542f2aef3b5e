"""Runs begun through the program's own prepare(), their ranks warm ones of the pool."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commands import losses
from samecurve.core.config.loading import LoadedConfig
from samecurve.run.directory import Run
from samecurve.run.prepare import StartRequest, prepare
from samecurve.run.resume import Options
from samecurve.run.start_files import PreparedRun
from samecurve.tasks import entry_of
from samecurve.worker.jobs.train_job import rehearse
from tiny import MACHINE, config_of, tiny_values
from worlds import Pool


def start(
    home: Path,
    values: Mapping[str, Any],
    cache: Path,
    init_from: Path | None = None,
    resume: str = "auto",
) -> PreparedRun:
    """Prepared, and its lock let go of. home: the run directory."""
    config = config_of(values)
    origins = {f"model.{name}": "here" for name in values.get("model", {})}
    request = StartRequest(
        loaded=LoadedConfig(config, "tiny", origins),
        options=Options(save_dir=home, resume=resume, init_from=init_from),
        facts=entry_of(config.task).facts(config, str(cache)),
        machine=MACHINE,
    )
    prepared = prepare(request)
    prepared.lock.release()
    return prepared


def train(pool: Pool, prepared: PreparedRun) -> list[float]:
    """All of it. Returns the losses."""
    pool.run(prepared.plan.layout.world_size, rehearse, prepared.attempt.to_json())
    return losses(prepared.run.home)


def values(corpus: Path, layout: str = "single:1", **sections: Mapping[str, Any]) -> dict[str, Any]:
    """Tiny values, 1 step of 10 samples. layout: strategy:devices, or jax-strategy:devices."""
    strategy, _, count = layout.partition(":")
    engine = "jax" if strategy.startswith("jax-") else "torch"
    devices = {"use": f"cpu:{count}", "strategy": strategy.removeprefix("jax-"), "preflight": 0}
    return {
        **tiny_values(corpus, **{"train": {"steps": 1, "precision": "f64"}, **sections}),
        "devices": devices,
        "engine": engine,
    }


def begun_from(run: Path) -> str:
    path = Run(run).weights_path()
    assert path is not None
    return path

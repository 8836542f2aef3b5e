"""`samecurve bench --suite`: measure every strategy for every model of a suite.

Each combination has a result file, and is not measured again. So an interrupted suite continues
where it stopped. A combination that fails does not affect the others.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from samecurve.core.measurement.profile_types import ProfileSchedule
from samecurve.core.planning.machine import AMD, NVIDIA
from samecurve.experiments.layouts import Layout, bench_layouts, parse_strategies, parse_worlds
from samecurve.launch.pool import Pool
from samecurve.run.directory.attempt import surroundings
from samecurve.seam import (
    Config,
    LoadedConfig,
    Machine,
    Run,
    RunError,
    SamecurveError,
    UserError,
    checkout,
    describe,
    echo,
    keeping,
    read_events,
    scratch,
    strategies_of,
    write_json,
)
from samecurve.worker.jobs.profile_job import watch_rank
from samecurve_products.lab.bench.bench import measure_layout, plan_layout, usable_devices
from samecurve_products.lab.bench.bench_results import LayoutPlan, LayoutResult, reason_of, row_of
from samecurve_products.lab.bench.suite_text import (
    Entry,
    as_text,
    failures,
    head,
    line,
    markdown,
)

_LARGE = ("llama-3.1-8b", "qwen2.5-7b")
_SUMMARY, _TABLE = "suite.json", "suite.md"


@dataclass(frozen=True)
class Suite:
    """A list of models to measure."""

    name: str
    models: tuple[str, ...]  # files of models/, without .yaml
    vendor: str  # vendor of the suite's GPUs; '': CPU ranks
    schedule: ProfileSchedule

    @property
    def devices(self) -> str:
        """The value of devices.use, if no flag sets it."""
        return "auto" if self.vendor else "cpu:2"

    def files(self) -> list[Path]:
        """Configs from the working directory or the checkout. UserError: a file is missing."""
        roots = [Path(), checkout() or Path()]
        home = next((root / "models" for root in roots if (root / "models").is_dir()), None)
        if home is None:
            raise UserError(
                f"--suite {self.name}: there is no directory models/ here",
                "start it in a checkout of Samecurve, which has the models of the suites",
                "--suite",
            )
        return [home / f"{model}.yaml" for model in self.models]

    def check_vendor(self, there: str) -> None:
        """Check the GPUs. there: vendor of the GPUs here. UserError: another vendor's, or none."""
        if self.vendor and there != self.vendor:
            other = f"--suite {there.lower()}, or " if there else ""
            raise UserError(
                f"--suite {self.name}: no {self.vendor} GPU found"
                f" ({f'{there} is here' if there else 'no GPU at all'})",
                f"{other}--suite cpu, which runs anywhere",
                "--suite",
            )


_ON_GPUS, _ON_CPU = ProfileSchedule(5, 20, 0), ProfileSchedule(2, 8, 0)
SUITES = {
    suite.name: suite
    for suite in (
        Suite("nvidia", _LARGE, NVIDIA, _ON_GPUS),
        Suite("amd", _LARGE, AMD, _ON_GPUS),
        Suite("cpu", ("tiny-llama", "tiny-moe", "tiny-hybrid"), "", _ON_CPU),
    )
}


@dataclass(frozen=True, kw_only=True)
class SuiteRun:
    """A suite on this machine.

    worlds, strategies: values of the flags; None: one device and all, and every strategy
    home: directory of the result files and the summary
    load: load average when the suite begins
    ranks, job: processes to use in place of new ones, and their work; for tests
    """

    name: str
    schedule: ProfileSchedule
    machine: Machine
    home: Path
    load: float = field(default_factory=lambda: psutil.getloadavg()[0])
    worlds: str | None = None
    strategies: str | None = None
    ranks: Pool | None = None
    job: Callable[..., Any] = watch_rank

    def layouts(self, config: Config) -> list[Layout]:
        """The layouts to measure. UserError: a flag is wrong."""
        count = len(usable_devices(config, self.machine))
        if self.worlds is not None:
            worlds = parse_worlds(self.worlds)
        else:
            worlds = sorted({1, count})
        if self.strategies is not None:
            names = parse_strategies(self.strategies)
        else:
            names = [
                row.name for row in strategies_of(config.engine) if row.min_devices <= max(worlds)
            ]
        return bench_layouts(worlds, names, config.engine)

    def entries(self, loaded: LoadedConfig) -> list[Entry]:
        """The entries of a model: measured, kept, refused or failed. Each is printed at once."""
        config = loaded.config
        try:
            layouts, facts = self.layouts(config), describe(config)
        except SamecurveError as error:
            return [self._show(_lost(loaded.name, error))]
        entries = []
        for layout in layouts:
            layout_plan = plan_layout(config, self.machine, facts, layout, self.schedule)
            entries.append(self._show(self._entry(loaded.name, layout_plan)))
        return entries

    def _show(self, entry: Entry) -> Entry:
        echo(line(entry), err=True)
        return entry

    def _entry(self, model: str, layout_plan: LayoutPlan) -> Entry:
        environment = surroundings(layout_plan.config.engine, self.machine)
        key = self._key(layout_plan, environment["versions"])
        layout = layout_plan.layout
        file = self.home / f"{model}-{layout.strategy}-{layout.num_devices}.json"
        before = _read(file)
        if before and before["status"] == "measured" and before["key"] == key:
            return {**before, "kept": True}
        with scratch("suite") as home:
            result = measure_layout(
                layout_plan, self.schedule, home / "entry", ranks=self.ranks, job=self.job
            )
            steps = _steps(home / "entry") if result.profile else {}
        entry = {
            "suite": self.name,
            "model": model,
            **_numbers(result),
            **steps,
            "load": self.load,
            "cores": self._cores(layout_plan),
            "platform": environment,
            "config": layout_plan.config.model_dump(mode="json"),
            "key": key,
        }
        write_json(file, entry)
        return entry

    def _cores(self, layout_plan: LayoutPlan) -> int | None:
        """The cores that CPU ranks share; None: the devices are GPUs."""
        plan = layout_plan.plan
        on_cpu = plan is not None and plan.layout.devices[0].kind == "cpu"
        return self.machine.cores if on_cpu else None

    def _key(self, layout_plan: LayoutPlan, versions: object) -> str:
        """A key of everything that a result depends on."""
        plan = layout_plan.plan
        parts = {
            "config": layout_plan.config.model_dump(mode="json"),
            "devices": [device.name for device in plan.layout.devices] if plan else [],
            "microbatches": list(plan.batch.microbatches_per_device) if plan else [],
            "steps": [self.schedule.warm, self.schedule.timed],
            "versions": versions,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def run_suite(suite: SuiteRun, configs: Sequence[LoadedConfig], *, as_json: bool) -> int:
    """Run and print a suite; return the exit code: 1 if a combination failed, or none was measured.

    RunError: the directory can't be written.
    """
    try:
        suite.home.mkdir(parents=True, exist_ok=True)
        echo(head(suite.name, suite.home, suite.schedule), err=True)
        with keeping(f"{suite.home} has what was measured; the same command goes on from it"):
            entries = [entry for loaded in configs for entry in suite.entries(loaded)]
        entries = _compared(entries)
        write_json(suite.home / _SUMMARY, entries)
        (suite.home / _TABLE).write_text(markdown(suite.name, entries))
    except OSError as error:
        raise RunError(
            f"{suite.home} can't be written: {error.strerror}",
            "--to DIR, a directory in which you may write",
            "--to",
        ) from None
    if as_json:
        echo(json.dumps(entries, indent=1))
    else:
        written = (f"wrote  {suite.home / name}" for name in (_SUMMARY, _TABLE))
        echo("\n".join([as_text(suite.name, entries), *failures(entries), *written]))
    status = {entry["status"] for entry in entries}
    return 0 if "failed" not in status and "measured" in status else 1


def _lost(model: str, error: SamecurveError) -> Entry:
    """The entry of a model for which nothing can be measured."""
    return {"model": model, "layout": "-", "status": "failed", **reason_of(error)}


def _read(file: Path) -> Entry | None:
    """Read a result file. None: it is missing or incomplete."""
    try:
        entry = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return entry if isinstance(entry, dict) and {"status", "key"} <= entry.keys() else None


def _steps(home: Path) -> dict[str, Any]:
    """Read the journal's numbers of all steps, the first one included."""
    events = [event for event in read_events(Run(home / "run").journal) if event.kind == "step"]
    return {
        "losses": [event.values["loss"] for event in events],
        "learning_rates": [event.values["lr"] for event in events],
    }


def _numbers(result: LayoutResult) -> dict[str, Any]:
    """Numbers of a combination: its row of a benchmark, and the rates under their usual names."""
    row = row_of(result, None)
    if result.profile is None:
        return row
    for name in ("speedup", "efficiency"):  # to itself
        row.pop(name)
    plan, seconds = result.profile.plan, row["seconds"]
    tokens = row["tokens_per_second"]
    return {
        **row,
        "devices": [device.name for device in plan.layout.devices],
        "precision": plan.compute.precision,
        "steps_per_second": 1 / seconds["median"],
        "samples_per_second_per_device": row["samples_per_second"] / plan.layout.num_devices,
        "tokens_per_second_per_device": tokens / plan.layout.num_devices if tokens else None,
        "first_step_seconds": seconds["first"],
        "step_seconds": seconds["each"],  # without the warm-up
    }


def _compared(entries: Sequence[Entry]) -> list[Entry]:
    """Add speed-ups, and the distance of losses to those of the model's first layout."""
    bases: dict[str, Entry] = {}
    compared = []
    for entry in entries:
        if entry["status"] != "measured":
            compared.append(entry)
            continue
        base = bases.setdefault(entry["model"], entry)
        pairs = zip(entry["losses"], base["losses"], strict=True)
        apart = max(abs(loss - other) / max(abs(other), 1e-300) for loss, other in pairs)
        speedup = entry["samples_per_second"] / base["samples_per_second"]
        compared.append({**entry, "speedup": speedup, "base": base["layout"], "apart": apart})
    return compared


def default_home(suite: Suite) -> Path:
    """The default directory. It is the same each time, so that an interrupted suite continues."""
    return Path("bench") / f"suite-{suite.name}"


def schedule_of(suite: Suite, warm: int | None, timed: int | None) -> ProfileSchedule:
    """The steps to measure. None: the suite's own numbers."""
    schedule = suite.schedule
    return replace(schedule, warm=warm or schedule.warm, timed=timed or schedule.timed)

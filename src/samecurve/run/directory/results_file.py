"""results.json: the results of a run, for programs and tables, made from its journal."""

from collections.abc import Mapping, Sequence
from typing import Any

from samecurve.core.config import flatten
from samecurve.core.config.sections import Config
from samecurve.core.evaluation import class_names, class_scores, is_confusion
from samecurve.core.events import BESIDE_METRICS, Event
from samecurve.core.planning.plan import Plan
from samecurve.core.system import write_json
from samecurve.observe import read_events
from samecurve.run.directory import Run


def write_results(run: Run, plan: Plan, config: Config) -> None:
    """Write results.json into the run's directory, at the end of the run."""
    write_json(run.results, results(read_events(run.journal), plan, config))


def results(events: Sequence[Event], plan: Plan, config: Config) -> dict[str, Any]:
    """The content of results.json.

    events: of all starts. Seconds and throughput are those of the steps after the first.
    """
    steps = [event.values for event in events if event.kind == "step"]
    # somebody may have edited the journal
    timed = [step for step in steps[1:] if _is_number(step, "seconds", "samples_per_second")]
    seconds = sum(step["seconds"] for step in timed)
    samples = sum(step["samples_per_second"] * step["seconds"] for step in timed)
    end = events[-1].values
    return {
        "engine": plan.layout.engine,
        "strategy": plan.layout.strategy,
        "sync": plan.layout.backend,
        "devices": [device.name for device in plan.layout.devices],
        "world_size": plan.layout.world_size,
        "precision": plan.compute.precision,
        "batch": {
            "samples": plan.batch.global_batch_size,
            "micro_batch_size": plan.batch.micro_batch_size,
            "accumulation_steps": plan.batch.accumulation_steps,
        },
        "training": {
            "samples": plan.data.samples,
            "steps": len(steps),
            "epochs": len(steps) / plan.order.steps_per_epoch,
            "loss": steps[-1].get("loss") if steps else None,
            "step_seconds": seconds,
            "samples_per_second": samples / seconds if seconds else None,
            "peak_memory_bytes_by_device": end.get("memory_bytes_by_device"),
            "stopped_early": end.get("early_stop"),
        },
        "best": _best(events, plan),
        "evaluation": _measured(events, "evaluated", plan),
        "test": _measured(events, "tested", plan),
        "config": flatten(config),
    }


def _is_number(values: Mapping[str, Any], *names: str) -> bool:
    """Whether these values are there, and are numbers."""
    return all(isinstance(values.get(name), int | float) for name in names)


def _best(events: Sequence[Event], plan: Plan) -> dict[str, Any] | None:
    """The best evaluation; None: there was none."""
    last = [event for event in events if event.kind == "evaluated"][-1:]
    if not last or last[0].values.get("best_step") is None:
        return None
    values = last[0].values
    step = values["best_step"]
    value = values.get("best_loss", values.get("best_value"))
    return {
        "metric": plan.best.metric,
        "value": value,
        "step": step,
        "epoch": step / plan.order.steps_per_epoch,
    }


def _measured(events: Sequence[Event], kind: str, plan: Plan) -> dict[str, Any] | None:
    """The metrics of the last journal line of this kind; None: there is none."""
    last = [event for event in events if event.kind == kind][-1:]
    if not last:
        return None
    metrics = {name: value for name, value in last[0].values.items() if name not in BESIDE_METRICS}
    confusion = metrics.get("confusion")
    if is_confusion(confusion):
        assert isinstance(confusion, list)
        scores = class_scores(confusion, class_names(plan.data.reference, len(confusion)))
        metrics["by_class"] = [score.to_json() for score in scores]
    return {"step": last[0].step, "epoch": last[0].step / plan.order.steps_per_epoch, **metrics}

"""Results of a benchmark. Each number is computed once, in a row; all output shows rows."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samecurve.core.measurement.profile_types import ProfileSchedule
from samecurve.experiments.layouts import Layout
from samecurve.experiments.profile.profile_text import Profile, measured_json
from samecurve.seam import Config, Plan, RunError, SamecurveError, UserError, arithmetic

# part of a step -> the share that includes it; other parts are shares of their own
_SHARES = {
    "forward": "compute",
    "backward": "compute",
    "optimizer": "compute",
    "device": "compute",
}


@dataclass(frozen=True)
class LayoutPlan:
    """A layout, and what plan() makes of it."""

    layout: Layout
    config: Config
    plan: Plan | None = None  # None: the layout is refused
    refusal: UserError | None = None
    without: tuple[str, ...] = ()  # options of the config that this strategy lacks


@dataclass(frozen=True)
class LayoutResult:
    """The result of a layout: measured, failed, or neither if it was refused."""

    layout_plan: LayoutPlan
    profile: Profile | None = None
    failure: SamecurveError | None = None

    @property
    def status(self) -> str:
        if self.profile:
            return "measured"
        return "failed" if self.failure else "refused"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Everything about a benchmark except its rows."""

    name: str
    config: Config
    schedule: ProfileSchedule
    plans: tuple[Plan, ...]  # of the layouts that are possible
    cores: int
    load: float  # load average at the beginning
    formulas: Mapping[str, str]  # how the task counts FLOPs
    environment: Mapping[str, Any]  # versions, host
    time: float

    @property
    def cpu(self) -> bool:
        return self.plans[0].layout.devices[0].kind == "cpu"

    @property
    def weak(self) -> bool:
        """Weak scaling: the batch grows with the devices."""
        return self.config.batch.samples is None


def row_of(result: LayoutResult, base: Profile | None) -> dict[str, Any]:
    """The row of a layout. base: the baseline of the speed-up, the first measured layout."""
    layout_plan = result.layout_plan
    layout, plan = layout_plan.layout, layout_plan.plan
    row: dict[str, Any] = {
        "layout": str(layout),
        "status": result.status,
        "strategy": layout.strategy,
        "world": layout.num_devices,
    }
    if plan:
        row |= {
            "engine": plan.layout.engine,
            "processes": plan.layout.world_size,
            "backend": plan.layout.backend,
            "threads": plan.compute.threads,
            "batch": plan.batch.global_batch_size,
            "micro": plan.batch.micro_batch_size,
            "rounds": plan.batch.accumulation_steps,
            "slots": list(plan.batch.microbatches_per_device),
            "arithmetic": arithmetic(plan),
            "without": list(layout_plan.without),
            "warnings": list(plan.warnings),
        }
    error = result.failure or layout_plan.refusal
    if error:
        row |= reason_of(error)
    if result.profile:
        row |= _measured(result.profile, base or result.profile)
    return row


def reason_of(error: SamecurveError) -> dict[str, str]:
    """Why a layout was not measured: the cause with the lines of its trace, and the remedy."""
    trace = error.trace.splitlines() if isinstance(error, RunError) else []
    return {"why": "\n".join([error.cause, *trace]), "remedy": error.remedy}


def _measured(profile: Profile, base: Profile) -> dict[str, Any]:
    plan, values = profile.plan, measured_json(profile)
    samples_per_second = values["samples_per_second"]
    speedup = samples_per_second / measured_json(base)["samples_per_second"]
    tokens = plan.data.tokens_per_sample
    flops = None
    if plan.flops.flops_per_step:
        flops = plan.flops.flops_per_step / plan.batch.global_batch_size * samples_per_second
    return {
        **values,
        "seconds_per_step": values["seconds"]["median"],
        "tokens_per_second": samples_per_second * tokens if tokens > 1 else None,
        "speedup": speedup,
        "efficiency": speedup * base.plan.layout.num_devices / plan.layout.num_devices,
        "shares": _shares(values["parts"]),
        "flops_per_second": flops,
        "flops_per_second_per_device": flops / plan.layout.num_devices if flops else None,
        "peak_flops": plan.flops.peak_flops,
        "mfu": flops / plan.flops.peak_flops if flops and plan.flops.peak_flops else None,
        "memory_bytes_by_device": profile.peaks,
        "memory_bytes": max(profile.peaks),
        "memory_estimate_bytes": plan.memory_estimate,
    }


def _shares(parts: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    shares: Counter[str] = Counter()
    for name, part in parts.items():
        shares[_SHARES.get(name, name)] += part["share"]  # type: ignore[assignment]
    return dict(shares)

"""`samecurve plan --machine`: the plan and the step time of a run on a machine one doesn't have.

Only the subprocess that counts the model is started.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samecurve.core.planning.compute import choose_precision
from samecurve.seam import Facts, LoadedConfig, Plan, UserError, describe
from samecurve_products.lab.predicted import (
    as_json,
    cost_lines,
    curve_lines,
    machine_lines,
    row_lines,
)
from samecurve_products.lab.simulation.cluster import Cluster, read_cluster
from samecurve_products.lab.simulation.forecast import (
    Curve,
    StrategyForecast,
    check_predictable,
    compare_strategies,
    plan_on_cluster,
    scaling_curves,
)
from samecurve_products.lab.simulation.step_time import ASSUMED, Utilization
from samecurve_products.report.blocks import Block, Line, Page, chart
from samecurve_products.report.png import need_matplotlib, png


@dataclass(frozen=True, kw_only=True)
class PredictionRequest:
    """The values of --machine and its flags."""

    machine: str  # a name such as 8xH100, or a file
    mfu: float | None = None  # the assumed MFU; at most one of mfu and bench is given
    bench: Path | None = None
    chart: Path | None = None  # a PNG to write

    def predict(self, loaded: LoadedConfig) -> "Prediction":
        """Predict. UserError: that is not possible, or nothing fits there."""
        return predict(loaded, self)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A prediction for a machine."""

    cluster: Cluster
    copies: str  # devices that hold one copy of the model under hsdp
    utilization: Utilization
    facts: Facts
    plan: Plan | None  # plan of the config as it is
    refused: UserError | None  # why there is no plan, though another strategy is possible
    rows: list[StrategyForecast]
    curves: list[Curve]

    @property
    def plan_or_refuse(self) -> Plan:
        """The plan. UserError: the config would be refused on that machine."""
        if self.refused:
            raise self.refused
        assert self.plan is not None
        return self.plan

    def lines(self) -> list[str]:
        tokens = self.facts.data.tokens_per_sample
        about = machine_lines(self.cluster, self.utilization)
        blocks = [about, row_lines(self.rows, tokens)]
        row = self._row_of_plan()
        if row and row.cost:
            blocks.append(cost_lines(f"{row.name}, recompute {row.recompute},", row.cost))
        blocks.append(curve_lines(self.curves, self.batch))
        return "\n\n".join("\n".join(block) for block in blocks if block).splitlines()

    def _row_of_plan(self) -> StrategyForecast | None:
        """The row with the strategy and settings of the config's own plan."""
        for row in self.rows:
            if self.plan is None or row.plan is None:
                continue
            if row.recompute != self.plan.features.get("recompute", "none"):
                continue
            same_strategy = row.plan.layout.strategy == self.plan.layout.strategy
            if same_strategy and row.plan.layout.shards == self.plan.layout.shards and row.cost:
                return row
        return None

    @property
    def batch(self) -> str:
        """The batch that the curves hold fixed, in words."""
        first = next((row.plan for row in self.rows if row.plan), None)
        if first is None:
            return ""
        if "grows" in first.reasons["batch"]:
            each = first.batch.micro_batch_size * first.batch.accumulation_steps
            return f"{each} samples a step on each device"
        return f"{first.batch.global_batch_size} samples a step on any devices"

    def json(self) -> dict[str, Any]:
        tokens = self.facts.data.tokens_per_sample
        return as_json(self.cluster, self.utilization, self.rows, self.curves, tokens)


def read_request(
    machine: str, mfu: float | None, bench: Path | None, chart: Path | None
) -> PredictionRequest:
    """Read the flags of --machine. UserError: the chart can't be written."""
    if chart is not None:
        need_matplotlib("--chart")
        if chart.suffix.lower() != ".png" or chart.is_dir():
            raise UserError(f"{chart} is no name of a PNG", "--chart NAME.png", "--chart")
    return PredictionRequest(machine=machine, mfu=mfu, bench=bench, chart=chart)


def predict(loaded: LoadedConfig, request: PredictionRequest) -> Prediction:
    """Predict for another machine. UserError: not predictable, or nothing fits there."""
    cluster = read_cluster(request.machine)
    train, engine = loaded.config.train, loaded.config.engine
    precision = choose_precision(train, engine, cluster.machine.devices).value
    config = loaded.config.with_values(train={"precision": precision})
    check_predictable(config, cluster)
    utilization = _utilization(request, config.train.precision)
    facts = describe(config)
    plan, refused = None, None
    try:
        plan = plan_on_cluster(config, facts, cluster)
    except UserError as error:
        refused = error
    rows = compare_strategies(config, facts, cluster, utilization)
    if refused and all(row.refused == refused.cause for row in rows):
        raise refused  # another strategy would not help
    if request.chart and not any(row.cost for row in rows):
        raise UserError(
            "there is nothing to draw: no strategy has a predicted time here",
            "leave --chart out; the table says why",
            "--chart",
        )
    copies = "host (two within one)"
    if config.devices.shards:
        copies = f"group of {config.devices.shards}"
    prediction = Prediction(
        cluster=cluster,
        copies=copies,
        utilization=utilization,
        facts=facts,
        plan=plan,
        refused=refused,
        rows=rows,
        curves=scaling_curves(config, facts, cluster, utilization),
    )
    if request.chart:
        _draw(prediction, request.chart)
    return prediction


def scaling_chart(curves: Sequence[Curve], title: str, note: str) -> Block:
    """Efficiency over the number of devices, a line a strategy. note: the assumptions."""
    sizes = sorted({size for curve in curves for size, _ in curve.points})
    lines: list[Line] = [
        {
            "label": _legend(curve, sizes),
            "x": [float(size) for size, _ in curve.points],
            "y": [efficiency for _, efficiency in curve.points],
            "colour": index,
            "points": True,
        }
        for index, curve in enumerate(curves)
    ]
    x_axis = {"kind": "own", "label": "devices", "log2": True, "ticks": sizes}
    y_axis = {"format": "percent", "from_zero": True}
    return chart("scaling", title, lines, y=y_axis, x=x_axis, note=note)


def _legend(curve: Curve, sizes: Sequence[int]) -> str:
    if not curve.points:
        return f"{curve.name}: nowhere"
    largest = curve.points[-1][0]
    if len(curve.points) == len(sizes) or largest == sizes[-1]:
        return curve.name
    return f"{curve.name}, to {largest}"


def _draw(prediction: Prediction, path: Path) -> None:
    cluster = prediction.cluster
    machine = f"hosts of {cluster.devices_per_host} x {cluster.device.name}"
    drawn_for = f"{prediction.batch}; MFU {prediction.utilization.value:.3g}"
    block = scaling_chart(
        prediction.curves,
        f"Predicted efficiency on {machine}",
        f"{drawn_for}; hsdp: one copy of the model a {prediction.copies}",
    )
    page: Page = {"title": block["title"], "blocks": [block], "runs": []}
    picture = png([block], page, made_by="samecurve plan")
    try:
        path.write_bytes(picture)
    except OSError as error:
        raise UserError(
            f"{path} can't be written: {error.strerror}",
            "choose another path for the picture",
            "--chart",
        ) from None


def _utilization(request: PredictionRequest, precision: str) -> Utilization:
    if request.mfu is not None and request.bench is not None:
        raise UserError(
            "--mfu and --from both set the MFU of a device", "give only one of them", "--mfu"
        )
    if request.mfu is not None:
        return Utilization(request.mfu, "as --mfu says")
    return ASSUMED if request.bench is None else _measured(request.bench, precision)


def _measured(path: Path, precision: str) -> Utilization:
    """Read the MFU of a bench.json: `mfu` of the entry of `layouts` with world 1.

    The keys device, config and precision say what was measured.
    """
    bench = _read_bench(path)
    layouts = bench.get("layouts")
    if not isinstance(layouts, list):
        layouts = []
    alone = [row for row in layouts if isinstance(row, dict) and row.get("world") == 1]
    shares = [row["mfu"] for row in alone if _is_number(row.get("mfu"))]
    if not shares:
        lacks = "no layout of one device (layouts[].world 1)"
        if alone:
            lacks = (
                "no mfu in its layout of one device, as on a CPU or a GPU whose peak is not on file"
            )
        raise UserError(
            f"{path} has {lacks}",
            "bench on one GPU first (`samecurve bench`), or --mfu N",
            "--from",
        )
    if not 0 < shares[0] <= 1:
        raise UserError(f"{path}: an MFU of {shares[0]}", "between 0 and 1", "--from")
    if bench.get("precision", precision) != precision:
        raise UserError(
            f"{path} was measured in {bench['precision']}, this is {precision}",
            f"--dtype {bench['precision']}, or a bench of the same precision",
            "--from",
        )
    named = ", ".join(str(bench[key]) for key in ("config", "device") if key in bench)
    origin = f"{path}: {named}" if named else str(path)
    return Utilization(float(shares[0]), f"measured on one device, its update included ({origin})")


def _read_bench(path: Path) -> dict[str, Any]:
    remedy = "a bench.json that `samecurve bench` wrote"
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}", remedy, "--from") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}", remedy, "--from") from None
    return content if isinstance(content, dict) else {}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

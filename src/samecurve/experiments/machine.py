"""`samecurve plan --machine`: what a run would do, and how long it would take, on a machine one
doesn't have. Starts nothing but the subprocess that counts the model.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samecurve.core.config.sections import LoadedConfig
from samecurve.core.planning.facts import Facts
from samecurve.core.planning.plan import Plan
from samecurve.core.simulation.cluster import Cluster, read_cluster
from samecurve.core.simulation.compare import (
    Curve,
    StrategyForecast,
    check_predictable,
    compare_strategies,
    plan_on_cluster,
    scaling_curves,
)
from samecurve.core.simulation.step_time import ASSUMED, Utilization
from samecurve.errors import UserError
from samecurve.observe.predicted import as_json, cost_lines, curve_lines, machine_lines, row_lines
from samecurve.observe.report.canvas import need_matplotlib
from samecurve.observe.report.scaling import scaling_png
from samecurve.run.describe import describe


@dataclass(frozen=True, kw_only=True)
class PredictionRequest:
    """machine: words or a file.

    mfu, bench: whose figure is taken, at most one. chart: a PNG to write.
    """

    machine: str
    mfu: float | None = None
    bench: Path | None = None
    chart: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """copies: what holds one copy of the model under hsdp.

    plan: of the config as it is; refused: why there is none, though something else would be served.
    """

    cluster: Cluster
    copies: str
    share: Utilization
    facts: Facts
    plan: Plan | None
    refused: UserError | None
    rows: list[StrategyForecast]
    curves: list[Curve]

    @property
    def plan_or_refuse(self) -> Plan:
        """UserError: the config as it is would be refused there."""
        if self.refused:
            raise self.refused
        assert self.plan is not None
        return self.plan

    def lines(self) -> list[str]:
        tokens = self.facts.tokens_per_sample
        mine = next(
            (
                row
                for row in self.rows
                if self.plan
                and row.plan
                and row.cost
                and row.recompute == self.plan.recompute
                and (row.plan.strategy, row.plan.shards) == (self.plan.strategy, self.plan.shards)
            ),
            None,
        )
        blocks = [machine_lines(self.cluster, self.share), row_lines(self.rows, tokens)]
        if mine and mine.cost:
            blocks.append(cost_lines(f"{mine.name}, recompute {mine.recompute},", mine.cost))
        blocks.append(curve_lines(self.curves, self.batch))
        return "\n\n".join("\n".join(block) for block in blocks if block).splitlines()

    @property
    def batch(self) -> str:
        """What the curves hold fixed."""
        grows = next((row.plan.reasons["batch"] for row in self.rows if row.plan), "")
        fixed = next(
            (
                f"{row.plan.global_batch_size} samples a step on any devices"
                for row in self.rows
                if row.plan
            ),
            "",
        )
        each = next(
            (
                f"{row.plan.micro_batch_size * row.plan.accumulation_steps} samples a step on each device"
                for row in self.rows
                if row.plan
            ),
            "",
        )
        return each if "grows" in grows else fixed

    def json(self) -> dict[str, Any]:
        return as_json(
            self.cluster, self.share, self.rows, self.curves, self.facts.tokens_per_sample
        )


def read_request(
    machine: str | None,
    mfu: float | None = None,
    bench: Path | None = None,
    chart: Path | None = None,
) -> PredictionRequest | None:
    """None: for this machine.

    UserError: a flag of --machine without it, or what can't be written.
    """
    alone = [
        flag
        for flag, given in (("--mfu", mfu), ("--from", bench), ("--chart", chart))
        if given is not None
    ]
    if machine is None and alone:
        raise UserError(f"{alone[0]} is for another machine", "name it: --machine 8xH100", alone[0])
    if chart is not None:
        need_matplotlib()
        if chart.suffix.lower() != ".png" or chart.is_dir():
            raise UserError(f"{chart} is no name of a PNG", "--chart NAME.png", "--chart")
    return (
        None
        if machine is None
        else PredictionRequest(machine=machine, mfu=mfu, bench=bench, chart=chart)
    )


def predict(loaded: LoadedConfig, asked: PredictionRequest) -> Prediction:
    """UserError: what is asked for is not predicted, or nothing fits there."""
    setup = read_cluster(asked.machine)
    check_predictable(loaded.config, setup)
    share = _share(asked, loaded.config.train.precision)
    facts = describe(loaded.config)
    made, refused = None, None
    try:
        made = plan_on_cluster(loaded.config, facts, setup)
    except UserError as error:
        refused = error
    found = compare_strategies(loaded.config, facts, setup, share)
    if refused and all(row.refused == refused.cause for row in found):
        raise refused  # nothing about strategies
    if asked.chart and not any(row.cost for row in found):
        raise UserError(
            "there is nothing to draw: no strategy has a predicted time here",
            "leave --chart out; the table says why",
            "--chart",
        )
    copies = (
        f"group of {loaded.config.devices.shards}"
        if loaded.config.devices.shards
        else "host (two within one)"
    )
    result = Prediction(
        cluster=setup,
        copies=copies,
        share=share,
        facts=facts,
        plan=made,
        refused=refused,
        rows=found,
        curves=scaling_curves(loaded.config, facts, setup, share),
    )
    if asked.chart:
        _draw(result, asked.chart)
    return result


def _draw(found: Prediction, path: Path) -> None:
    drawn_for = f"{found.batch}; MFU {found.share.value:.3g}"
    picture = scaling_png(
        found.curves,
        machine=f"hosts of {found.cluster.devices_per_host} x {found.cluster.device.name}",
        note=f"{drawn_for}; hsdp: one copy of the model a {found.copies}",
    )
    try:
        path.write_bytes(picture)
    except OSError as error:
        raise UserError(
            f"{path} can't be written: {error.strerror}", "another place for the picture", "--chart"
        ) from None


def _share(asked: PredictionRequest, precision: str) -> Utilization:
    if asked.mfu is not None and asked.bench is not None:
        raise UserError(
            "--mfu and --from both say what a device attains", "give one of them", "--mfu"
        )
    if asked.mfu is not None:
        return Utilization(asked.mfu, "as --mfu says")
    return ASSUMED if asked.bench is None else _measured(asked.bench, precision)


def _measured(path: Path, precision: str) -> Utilization:
    """The layout of one device in a bench.json: layouts[].world 1, its mfu; device, config and
    precision at the top say of what.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise UserError(
            f"{path} can't be read: {error.strerror}",
            "a bench.json that `samecurve bench` wrote",
            "--from",
        ) from None
    except ValueError as error:
        raise UserError(
            f"{path} is not JSON: {error}", "a bench.json that `samecurve bench` wrote", "--from"
        ) from None
    told = content if isinstance(content, dict) else {}
    found = told.get("layouts")
    alone = [
        row
        for row in (found if isinstance(found, list) else ())
        if isinstance(row, dict) and row.get("world") == 1
    ]
    shares = [
        row["mfu"]
        for row in alone
        if isinstance(row.get("mfu"), int | float) and not isinstance(row["mfu"], bool)
    ]
    if not shares:
        lacks = (
            "no layout of one device (layouts[].world 1)"
            if not alone
            else (
                "no mfu in its layout of one device, as on a CPU or a GPU whose peak is not on file"
            )
        )
        raise UserError(
            f"{path} has {lacks}",
            "bench on one GPU first (`samecurve bench`), or --mfu N",
            "--from",
        )
    if not 0 < shares[0] <= 1:
        raise UserError(f"{path}: an MFU of {shares[0]}", "between 0 and 1", "--from")
    if told.get("precision", precision) != precision:
        raise UserError(
            f"{path} was measured in {told['precision']}, this is {precision}",
            f"--dtype {told['precision']}, or a bench of the same precision",
            "--from",
        )
    of = ", ".join(str(told[key]) for key in ("config", "device") if key in told)
    return Utilization(
        float(shares[0]),
        f"measured on one device, its update included ({path}{f': {of}' if of else ''})",
    )

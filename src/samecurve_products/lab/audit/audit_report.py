"""An audit in words and as JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from samecurve.run.directory.attempt import surroundings
from samecurve.seam import Column, Machine, Plan, counted, read_events, show_seconds, table_text
from samecurve_products.lab.audit.audit import Audit, Audited
from samecurve_products.lab.audit.check_journal import JournalCheck

COLUMNS = [
    Column("step", right=True, width=8),
    Column("trained anew from", width=20),
    Column("difference", right=True),
    Column("verdict"),
]


def head(under: Audit, here: Plan) -> str:
    how = "bit for bit" if under.plan.same_bits else f"tolerance {under.tolerance:g}"
    what = (
        f"audit  {under.run.home}: {counted(len(under.picks), 'step')} of its journal, trained anew"
        f" on {_devices(here)}; loss and norm {how}"
    )
    return f"{what}\n{table_text(COLUMNS, [])}".rstrip()


def _devices(here: Plan) -> str:
    layout = here.layout
    return f"{layout.num_devices} x {layout.devices[0].name} ({layout.strategy})"


def row(one: Audited) -> str:
    start = f"step {one.start}" if one.start else "the beginning"
    difference = f"{one.difference:.1e}" if one.difference else "none"
    cells = (str(one.step), start, difference, f"{one.verdict} ({show_seconds(one.seconds)})")
    line = table_text(COLUMNS, [cells]).splitlines()[-1]
    return f"{line}\n    {one.culprit}" if one.culprit else line


def conclusion(under: Audit, results: Sequence[Audited]) -> str:
    bad = [one for one in results if one.verdict != "PASS"]
    if bad:
        return f"FAIL   {len(bad)} of {counted(len(results), 'step')} did not come out again"
    if under.plan.same_bits:
        return f"PASS   replayable: {counted(len(results), 'step')} came out again to the last bit"
    return (
        f"PASS   replayable to {under.tolerance:g}: {counted(len(results), 'step')} came out again;"
        " without --exact a smaller change would not be seen"
    )


def other_surroundings(under: Audit, here: Plan, machine: Machine) -> Iterator[str]:
    """What is different here from where the run was last started: a line each."""
    planned = [event for event in read_events(under.run.journal) if event.kind == "planned"]
    environment = planned[-1].values.get("environment") if planned else None
    before = _flat(environment if isinstance(environment, dict) else {}, under.plan)
    now = _flat(surroundings(here.layout.engine, machine), here)
    for name, value in now.items():
        if name in before and before[name] != value:
            yield f"here   {name}: {value}, and {before[name]} in the run"


def _flat(environment: Mapping[str, Any], plan: Plan) -> dict[str, object]:
    versions = environment.get("versions")
    layout = plan.layout
    return {
        **(versions if isinstance(versions, dict) else {}),
        **{name: environment[name] for name in ("cpu", "commit") if name in environment},
        "engine": layout.engine,
        "strategy": layout.strategy,
        "devices": f"{layout.num_devices} x {layout.devices[0].name}",
        "threads": plan.compute.threads,
        "precision": plan.compute.precision,
    }


def as_json(
    under: Audit | None,
    results: Sequence[Audited],
    journal: JournalCheck,
    different: Sequence[str],
) -> str:
    values: dict[str, Any] = {}
    if under:
        values = {
            "run": str(under.run.home),
            "exact": under.plan.same_bits,
            "tolerance": under.tolerance,
            "here": list(different),
            "steps": [
                {
                    "step": one.step,
                    "from": one.start,
                    "difference": one.difference if one.difference < float("inf") else None,
                    "verdict": one.verdict,
                    "culprit": one.culprit,
                    "arrays": one.comparison.arrays if one.comparison else [],
                    "seconds": one.seconds,
                }
                for one in results
            ],
        }
    values["journal"] = {
        "lines": journal.lines,
        "hashes": journal.points,
        "checkpoints": journal.saved,
        "uncovered": journal.unsealed,
        "faults": journal.faults,
    }
    return json.dumps(values, indent=1)

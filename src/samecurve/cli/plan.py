"""`samecurve plan`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from samecurve.cli.load_config import load_config, measure_before, probe_facts
from samecurve.cli.options import (
    PATH,
    ConfigVerb,
    init_from_option,
    probe_option,
)
from samecurve.cli.other_machine import request_of
from samecurve.terminal import echo

if TYPE_CHECKING:
    from samecurve.cli.other_machine import PredictionRequest
    from samecurve.core.config.loading import LoadedConfig
    from samecurve.core.planning.facts import Facts
    from samecurve.storage.url import ObjectUrl


@click.command(cls=ConfigVerb, help_group="Train")
@click.option("--json", "as_json", is_flag=True, help="the plan as JSON")
@click.option("--keys", is_flag=True, help="also each config key: its value, and where that is set")
@click.option(
    "--machine",
    metavar="WORDS|FILE",
    help=(
        "on a machine that this is not: 8xH100, 4x8xH200 (hosts x devices), a JSON file; with"
        " predicted times"
    ),
)
@click.option(
    "--mfu",
    type=click.FloatRange(0, 1, min_open=True),
    help="--machine: share of a device's peak while it computes; 0.4 is assumed if not given",
)
@click.option(
    "--from",
    "bench",
    type=PATH,
    metavar="BENCH.json",
    help="--machine: the share that `samecurve bench` measured on one device",
)
@click.option(
    "--chart",
    type=PATH,
    metavar="FILE.png",
    help="--machine: efficiency over 1 to 1,024 devices, drawn",
)
@init_from_option
@probe_option
def plan(
    *,
    as_json: bool,
    keys: bool,
    machine: str | None,
    mfu: float | None,
    bench: Path | None,
    chart: Path | None,
    init_from: "Path | ObjectUrl | None",
    probe_batch: bool,
    **flags: Any,
) -> None:
    """Show what train would do, and why. Trains nothing."""
    if machine is not None and probe_batch:
        raise click.UsageError("--probe-batch tries this machine; --machine plans for another")
    if machine is not None and init_from:
        raise click.UsageError("--init-from looks at weights here; --machine plans for another")
    if keys and as_json:
        raise click.UsageError("--keys is a table, and --json has no tables: leave one out")
    other_machine = request_of(machine, mfu, bench, chart)
    loaded = load_config(flags, say=not as_json)
    if other_machine:
        _plan_machine(loaded, other_machine, as_json=as_json, keys=keys)
        return
    from samecurve.observe.plan_table import table
    from samecurve.probe import network_note
    from samecurve.run.prepare import make_plan

    if init_from is not None and not isinstance(init_from, Path):
        from samecurve.run.remote.local_copy import local_weights

        init_from = local_weights(init_from, "--init-from")
    facts = probe_facts(loaded) if probe_batch else None
    plan, facts = make_plan(loaded, facts, measure_before())
    weights = _notes_of_weights(loaded, facts, init_from)
    if as_json:
        values: dict[str, Any] = {
            "plan": plan.to_json(),
            "origins": loaded.origins,
            "formulas": facts.formulas,
        }
        values |= {"weights": weights} if weights else {}
        echo(json.dumps(values, indent=1))
    else:
        notes = [f"note   {note}" for note in (*loaded.notes, *weights)]
        network = network_note(Path(loaded.run_directory or "runs"))
        notes += [f"warn   {network[0]}. Remedy: {network[1]}"] if network else []
        echo("\n".join([*notes, table(plan, facts.formulas), "", _keys(loaded, shown=keys)]))


def _keys(loaded: "LoadedConfig", *, shown: bool) -> str:
    """Where each config value came from, or the flag that shows it."""
    from samecurve.core.config import flatten
    from samecurve.observe.plan_table import table_of_keys

    values = flatten(loaded.config)
    if shown:
        return table_of_keys(values, loaded.origins)
    return f"--keys: where each of the {len(values)} config keys comes from"


def _notes_of_weights(
    loaded: "LoadedConfig", facts: "Facts", init_from: Path | None
) -> tuple[str, ...]:
    """What is to be said of the first weights and of an adapter. UserError: they don't fit."""
    from samecurve.run.weights.first_adapter import read_first_adapter
    from samecurve.run.weights.initial_weights import placed, read_initial_weights
    from samecurve.tasks import entry_of

    notes: tuple[str, ...] = ()
    adapter = read_first_adapter(init_from, loaded.config, facts) if init_from else None
    if adapter is not None:
        notes, init_from = adapter.notes, None
    init_from = init_from or entry_of(loaded.config.task).first_weights(loaded.config)
    if init_from is None:
        return notes
    with placed(loaded.config, init_from):
        source = read_initial_weights(init_from, loaded.config, facts)
    return (*source.notes, *notes)


def _plan_machine(
    loaded: "LoadedConfig", request: "PredictionRequest", *, as_json: bool, keys: bool
) -> None:
    """Plan for a machine that one doesn't have.

    A plan that is refused ends the verb as it would end train, once all that would be served is
    shown.
    """
    from samecurve.observe.plan_table import table

    prediction = request.predict(loaded)
    plan, formulas = prediction.plan, prediction.facts.formulas
    if as_json:
        values = {
            "plan": plan and plan.to_json(),
            "origins": loaded.origins,
            "formulas": formulas,
            "predicted": prediction.json(),
        }
        echo(json.dumps(values, indent=1))
    else:
        from samecurve.features.balance import balance_of

        lines = [f"note   {note}" for note in loaded.notes]
        if balance_of(loaded.config) == "measured":
            lines.append(
                "note   devices.balance measured: the devices there are alike, and microbatches are"
                " assigned evenly"
            )
        if plan:
            lines += [table(plan, formulas), ""]
        echo("\n".join([*lines, *prediction.lines(), "", _keys(loaded, shown=keys)]))
    if prediction.refused:
        raise prediction.refused

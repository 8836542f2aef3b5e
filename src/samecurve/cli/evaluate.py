"""`samecurve eval`."""

from typing import TYPE_CHECKING, Any

import click

from samecurve.cli.completion import words_of_key
from samecurve.cli.options import RUN_PLACE, Verb, add_typed, best_option, trust_option
from samecurve.cli.places import at_hand
from samecurve.core.strategies import strategy_help
from samecurve.terminal import echo

if TYPE_CHECKING:
    from pathlib import Path

    from samecurve.launch.evaluate_run import Evaluated
    from samecurve.storage.url import ObjectUrl


@click.command("eval", cls=Verb, help_group="Look at runs")
@click.argument("run", type=RUN_PLACE)
@click.option(
    "-d",
    "--data",
    type=str,
    help="evaluate on all of this instead of what the run held back: data.source",
)
@click.option(
    "--on",
    type=click.Choice(["held-out", "train", "test"], case_sensitive=False),
    default="held-out",
    show_default=True,
    help="what was held back, or what the run trained on",
)
@click.option(
    "--devices",
    type=str,
    shell_complete=words_of_key("devices.use"),
    help="auto, all, cpu, cpu:N, or indices: 0,1; the run's own if not given",
)
@click.option("--gpus", type=str, metavar="0,1", help="GPUs by index")
@click.option(
    "--strategy", type=str, shell_complete=words_of_key("devices.strategy"), help=strategy_help()
)
@click.option("--engine", type=str, shell_complete=words_of_key("engine"), help="torch, jax")
@click.option(
    "--dtype",
    type=str,
    shell_complete=words_of_key("train.precision"),
    help="f32, bf16, f16, f64",
)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="any config value")
@click.option(
    "--json", "as_json", is_flag=True, help="the metrics as JSON, and nothing else on stdout"
)
@best_option
@trust_option
def evaluate(
    run: "Path | ObjectUrl",
    *,
    data: str | None,
    on: Any,
    as_json: bool,
    best: bool,
    trust: bool,
    **flags: Any,
) -> None:
    """The metrics of a RUN's newest checkpoint, on any devices. RUN may be a checkpoint, too."""
    import json

    from samecurve.launch.evaluate_run import evaluate as evaluate_run

    path = at_hand(run, "best" if best else "newest")
    if best:
        from samecurve.run.weights.opened_checkpoint import best_checkpoint

        path = best_checkpoint(path)
    evaluated = evaluate_run(
        path,
        changed_settings(flags),
        data,
        on,
        lambda line: echo(line, err=True),
        trust=trust,
    )
    if as_json:
        values = {
            "step": evaluated.step,
            "samples": evaluated.samples,
            **evaluated.metrics,
            "seconds": evaluated.seconds,
        }
        echo(json.dumps(values))
    else:
        echo(_line(evaluated))


def changed_settings(flags: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """The settings that replace the run's own: config key -> (value, the flag that gave it).

    UserError: two flags set the same key
    """
    from samecurve.core.config.document import parse_setting

    values = {
        "--devices": ("devices.use", flags["devices"]),
        "--gpus": ("devices.use", flags["gpus"] or None),
        "--strategy": ("devices.strategy", flags["strategy"]),
        "--engine": ("engine", flags["engine"]),
        "--dtype": ("train.precision", flags["dtype"]),
    }
    settings: dict[str, tuple[Any, str]] = {}
    for flag, (key, value) in values.items():
        if value is not None:
            add_typed(settings, key, value, flag)
    for text in flags["settings"]:
        key, value = parse_setting(text)
        settings[key] = (value, f"--set {key}")
    return settings


def _line(evaluated: "Evaluated") -> str:
    from samecurve.units import show_seconds

    plan = evaluated.plan
    metrics = "  ".join(
        f"{name} {'not finite' if value is None else format(value, '.4f')}"
        for name, value in evaluated.metrics.items()
        if not isinstance(value, list)  # --json has a confusion matrix and its like
    )
    return (
        f"eval   step {evaluated.step}  {metrics}  ({evaluated.samples} samples,"
        f" {plan.layout.num_devices} x {plan.layout.devices[0].kind} {plan.layout.strategy},"
        f" {show_seconds(evaluated.seconds)})"
    )

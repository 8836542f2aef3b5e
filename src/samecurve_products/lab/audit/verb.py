"""`samecurve audit`."""

import sys
from typing import TYPE_CHECKING, Any

import click

from samecurve.cli.evaluate import changed_settings
from samecurve.cli.options import run_place, trust_option
from samecurve.core.strategies import strategy_help
from samecurve.seam import Verb, at_hand, echo

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from samecurve.seam import Plan
    from samecurve.storage.url import ObjectUrl
    from samecurve_products.lab.audit.audit import Audit, Audited


@click.command(cls=Verb, help_group="Look at runs")
@click.argument("run", type=run_place)
@click.option("--step", type=click.IntRange(min=1), help="train this step anew")
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="without --step: how many, chosen at random",
)
@click.option("--seed", type=int, default=0, show_default=True, help="of this choice")
@click.option(
    "--journal",
    "only_journal",
    is_flag=True,
    help="only compare the journal and the checkpoints with their hashes; train nothing",
)
@click.option(
    "--devices", type=str, help="auto, all, cpu, cpu:N, or indices: 0,1; the run's own if not given"
)
@click.option("--gpus", type=str, metavar="0,1", help="GPUs by index")
@click.option("--strategy", type=str, help=strategy_help())
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="any config value")
@click.option("--json", "as_json", is_flag=True, help="what was found as JSON")
@trust_option
def audit(
    run: "Path | ObjectUrl",
    *,
    step: int | None,
    steps: int,
    seed: int,
    only_journal: bool,
    as_json: bool,
    trust: bool,
    **flags: Any,
) -> None:
    """Train some steps of a past RUN again: is the result the same?

    They begin at its checkpoints. Exit code 1 where a result differs.
    """
    from samecurve.seam import Run
    from samecurve_products.lab.audit.check_journal import check_journal

    home = at_hand(run, "newest")
    show = _silent if as_json else echo
    of_run = Run(home)
    of_run.check("RUN")
    under = None
    if not only_journal:
        from samecurve.run.trust import check_trusted
        from samecurve_products.lab.audit.audit import begin_audit

        under = begin_audit(home, step=step, steps=steps, seed=seed)
        check_trusted(of_run, trust=trust, where="RUN")
    check = check_journal(of_run)
    show("\n".join(check.to_lines()))
    settings = changed_settings({**flags, "engine": None, "dtype": None})
    results, different = _replay(under, settings, show) if under else ([], [])
    if as_json:
        from samecurve_products.lab.audit.audit_report import as_json as report_json

        echo(report_json(under, results, check, different))
    passed = not check.faults and all(one.verdict == "PASS" for one in results)
    sys.exit(0 if passed else 1)


def _silent(_line: str) -> None:
    pass


def _replay(
    under: "Audit", settings: dict[str, tuple[Any, str]], show: "Callable[[str], None]"
) -> "tuple[list[Audited], list[str]]":
    """Train the picked steps anew and show each verdict. Also returns what is different here."""
    from samecurve.seam import probe
    from samecurve_products.lab.audit.audit import audit as audit_steps
    from samecurve_products.lab.audit.audit_report import conclusion, head, other_surroundings, row

    different: list[str] = []

    def begun(plan: "Plan") -> None:
        different.extend(other_surroundings(under, plan, probe()))
        show("\n".join([*different, head(under, plan)]))

    results = audit_steps(
        under,
        settings,
        say=lambda line: echo(line, err=True),
        begun=begun,
        judged=lambda one: show(row(one)),
    )
    show(conclusion(under, results))
    return results, different

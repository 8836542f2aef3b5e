"""The fault campaign, `make chaos`: real processes, real faults, each of them counted.

    python tests/campaign/chaos.py [--seed N] [--only FAMILY,...]

It prints the table of its faults, and writes benchmarks/results/chaos-MACHINE.json where all
families ran; exit code 1: something was lost. A family is a function that injects some faults and
judges what became of them; a new one is an entry in FAMILIES. The same seed injects the same faults
in the same order.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import chaos_commands as commands
import chaos_disks
import chaos_machines
import chaos_ranks as ranks
from chaos_bare import bare_restarts
from chaos_jobs import SAVE, Lab, Outcome

from chaos_table import rows_of, show
from samecurve.terminal import echo

SEED = 33
Family = Callable[[Lab], list[Outcome]]


def _ranks(name: str, faults: Callable[[], list[ranks.RankFault]], *flags: object) -> Family:
    def family(lab: Lab) -> list[Outcome]:
        ordered = ranks.in_order(faults(), lab.chance(name))
        return ranks.run_rank_faults(lab, ordered, *flags)

    return family


def _hangs(lab: Lab) -> list[Outcome]:
    return ranks.run_rank_faults(lab, ranks.hangs(), floor=2)


def _machines(family: Family) -> Family:
    def possible(lab: Lab) -> list[Outcome]:
        reason = chaos_machines.are_possible()
        if reason:
            echo(f"left out: {reason}")
            return []
        return family(lab)

    return possible


FAMILIES: Mapping[str, Family] = {
    "kills under ddp": _ranks("ddp", ranks.kills),
    "kills under fsdp": _ranks("fsdp", ranks.kills, "--strategy", "fsdp"),
    "kills under --exact": _ranks("exact", ranks.kills, "--exact"),
    "signals": _ranks("signals", ranks.signals),
    "damages": _ranks("damages", ranks.damages),
    "hangs": _hangs,
    "random kills": lambda lab: commands.kill_ranks_at_any_moment(lab, 15),
    "launcher killed": lambda lab: commands.kill_launchers(lab, 12),
    "launcher stopped": commands.signal_launchers,
    "two runs": commands.run_twice,
    "slow": commands.slow_ranks,
    "nan": commands.spoil_batches,
    "data cut": commands.cut_data,
    "fruitless": commands.crash_again_and_again,
    "clock": commands.jump_clocks,
    "full disk": chaos_disks.fill_disks,
    "read-only": chaos_disks.make_read_only,
    "machines": _machines(chaos_machines.disturb_machines),
    "machines lost": _machines(chaos_machines.lose_machines),
    "machines refused": _machines(chaos_machines.refuse_machines),
}


def run_families(lab: Lab, names: Collection[str]) -> list[Outcome]:
    """Inject the faults of these families, one after another."""
    outcomes = []
    for name in names:
        began = time.monotonic()
        of_family = FAMILIES[name](lab)
        outcomes += of_family
        good = sum(outcome.recovered for outcome in of_family)
        seconds = time.monotonic() - began
        echo(f"{name}: {good} of {len(of_family)} recovered  ({seconds:.0f} s)")
        for note in {outcome.note: None for outcome in of_family if outcome.note}:
            echo(f"  {note}")
    return outcomes


def result_of(outcomes: Sequence[Outcome], seed: int, seconds: float) -> dict[str, Any]:
    """What the result file says."""
    return {
        "seed": seed,
        "save_every": SAVE,
        "seconds": round(seconds),
        "load": round(os.getloadavg()[0], 1),
        "injected": len(outcomes),
        "recovered": sum(outcome.recovered for outcome in outcomes),
        "rows": rows_of(outcomes),
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="chaos")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", default=",".join(FAMILIES), help="names of families")
    options = parser.parse_args(arguments)
    names = options.only.split(",")
    home = Path(tempfile.mkdtemp(prefix="chaos-"))
    os.environ["SAMECURVE_CACHE"] = str(home / "cache")
    began = time.monotonic()
    outcomes = run_families(Lab(home, options.seed), names)
    result = result_of(outcomes, options.seed, time.monotonic() - began)
    if set(names) == set(FAMILIES):
        from benchmarks.common import write

        result["bare_restart_seconds"] = bare_restarts(home)
        echo(f"written: {write('chaos', result)}")
    echo(show(result))
    lost = [outcome for outcome in outcomes if not outcome.recovered]
    for outcome in lost:
        echo(f"not recovered: {outcome.kind}: {outcome.what}")
    if lost:
        echo(f"the runs are in {home}")
        return 1
    shutil.rmtree(home)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Loss curves of one small model on 1, 2 and 4 CPU ranks under Accelerate, Lightning, the Hugging
Face Trainer and Samecurve, each used as its documentation advises: benchmarks/curves_sides.py.

Dropout 0.1, lines of unequal length, 230 samples in batches of 24: an epoch's last step has 14. The
spread of a trainer is the largest difference between its three lines at any step, in nats. So that
its causes are known, each is trained alone, too:

- none of them: the three lines must agree, else the comparison itself would be wrong;
- one batch: all data in each step, so that the order does not matter: all twelve must agree;
- ragged lines: a mean for each microbatch, averaged, is not the mean over tokens (Lightning);
- a short tail: samples are repeated until the ranks have as many (all but ours); Lightning also
  divides the last, incomplete accumulation by its full number of microbatches;
- dropout: masks come from each rank's own generator (all but ours, whose masks follow the sample).

Beside the losses that a trainer says, the weights that it ends with are measured alike: one exact
loss on 200 held-out lines. Writes benchmarks/results/curves-<cpu>.json, docs/curves.png and
docs/curves-dark.png. Run: python -m benchmarks.curves (the extra `bench`); --draw: the pictures
alone, from the result file.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import samecurve
from benchmarks.common import RESULTS, installed, run_ranks, spread, write
from benchmarks.curve_panels import WIDTHS, CurvePanels
from benchmarks.curves_sides import BATCH, BETAS, CLIP, LR, MICRO, SIDES, STEPS, Case
from benchmarks.curves_task import Lines, loss_of

WORLDS = (1, 2, 4)
SHOWN = "all"
CASES = {
    SHOWN: Case(samples=230, ragged=True, dropout=0.1),
    "none of them": Case(samples=240, ragged=False, dropout=0.0),
    "one batch": Case(samples=24, ragged=False, dropout=0.0),
    "ragged lines": Case(samples=240, ragged=True, dropout=0.0),
    "short tail": Case(samples=230, ragged=False, dropout=0.0),
    "dropout": Case(samples=240, ragged=False, dropout=0.1),
}
NAMES = {
    "samecurve": "Samecurve",
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "transformers": "HF Trainer",
}
AGREE = 1e-4  # nats: float32 over 60 steps, in other orders of addition
DOCS = Path(__file__).parent.parent / "docs"
Found = dict[str, dict[str, dict[str, Any]]]  # case -> trainer -> world -> results


def ours(case: Case, world: int, home: Path) -> dict[str, Any]:
    config = {
        "task": f"{Path(__file__).parent / 'curves_task.py'}:Curves",
        "model": {"dropout": case.dropout},
        "data": {"samples": case.samples, "ragged": case.ragged},
        "batch": {"samples": BATCH, "per_device": MICRO},
        "optimizer": {"lr": LR, "betas": list(BETAS), "weight_decay": 0.0, "clip": CLIP},
        "schedule": {"decay": "constant"},
        "train": {"steps": f"{case.epochs}ep"},
        "devices": {"use": f"cpu:{world}", "threads": 1},
    }
    run = samecurve.train(config, quiet=True, save_dir=str(home / "run"))
    return {"losses": run.losses, "held_out": held_out(samecurve.load(run), case)}


def others(side: str, world: int, home: Path) -> dict[str, dict[str, Any]]:
    """Train every case in `world` processes, started by torch's launcher."""
    run_ranks(world, "benchmarks.curves", "--rank-of", side, "--home", str(home))
    ranks = [json.loads((home / f"rank-{rank}.json").read_text()) for rank in range(world)]
    result = {}
    for name in CASES:
        parts = [rank[name] for rank in ranks]
        of_ranks = zip(*(part["samples"] for part in parts), strict=True)
        samples = [list(chain.from_iterable(step)) for step in of_ranks]
        result[name] = {**parts[0], "samples": samples}
    return result


def one_rank(side: str, home: Path) -> None:
    """Train every case under one trainer, as one rank."""
    warnings.simplefilter("ignore")  # the trainers warn of loaders without workers
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    found = {}
    for name, case in CASES.items():
        curve = SIDES[side](case, home)
        found[name] = {
            "losses": curve.losses,
            "samples": curve.samples,
            "held_out": held_out(curve.model, case),
        }
    rank = os.environ.get("RANK", "0")
    (home / f"rank-{rank}.json").write_text(json.dumps(found))


def held_out(model: nn.Module, case: Case) -> float:
    """The exact mean loss of a character over 200 lines that no side trained on."""
    rows = Lines(10_000, 200, ragged=case.ragged)[np.arange(200)]
    labels = torch.from_numpy(rows["labels"])
    model.eval()
    with torch.no_grad():
        total = loss_of(model(torch.from_numpy(rows["text"])), labels, "sum")
    return float(total / (labels != -100).sum())


def measure(home: Path) -> Found:
    found: Found = {name: {side: {} for side in NAMES} for name in CASES}
    for world in WORLDS:
        for side in SIDES:
            place = home / f"{side}-{world}"
            place.mkdir()
            for name, result in others(side, world, place).items():
                found[name][side][str(world)] = result
            print(f"{NAMES[side]} on {world}", flush=True)
        for name, case in CASES.items():
            place = home / f"ours-{world}-{name.replace(' ', '-')}"
            found[name]["samecurve"][str(world)] = ours(case, world, place)
        print(f"{NAMES['samecurve']} on {world}", flush=True)
    return found


def check_fair(found: Found) -> None:
    """Exit if curves differ that must agree, since the comparison would say nothing then."""
    for side, of_worlds in found["none of them"].items():
        apart = spread([of["losses"] for of in of_worlds.values()])
        if apart > AGREE:
            sys.exit(f"{NAMES[side]} with none of the causes: lines {apart:.1e} apart")
    every = [of["losses"] for sides in found["one batch"].values() for of in sides.values()]
    if spread(every) > AGREE:
        sys.exit(f"one batch without any cause: all lines are {spread(every):.1e} apart")


def other_samples(of_worlds: Mapping[str, Mapping[str, Any]]) -> int | None:
    """The number of steps whose samples depend on the number of ranks. None: not recorded."""
    steps = [of.get("samples") for of in of_worlds.values()]
    if None in steps:
        return None
    together = zip(*steps, strict=True)
    return sum(len({tuple(sorted(step)) for step in each}) > 1 for each in together)


def summary(found: Found) -> dict[str, Any]:
    """By case and trainer: the spread of losses, of final held-out losses, and of samples."""
    result: dict[str, Any] = {}
    for name, sides in found.items():
        result[name] = {}
        for side, of_worlds in sides.items():
            ends = [of["held_out"] for of in of_worlds.values()]
            result[name][side] = {
                "spread": spread([of["losses"] for of in of_worlds.values()]),
                "held_out_spread": max(ends) - min(ends),
                "steps_with_other_samples": other_samples(of_worlds),
            }
    return result


def draw(result: Mapping[str, Any], place: Path, *, dark: bool) -> None:
    """Draw each trainer's losses on each number of ranks, and below the difference to one rank."""
    panels = CurvePanels(len(NAMES), height=5.6, font=14, dark=dark)
    for (above, below), (side, title) in zip(panels.columns, NAMES.items(), strict=True):
        lines = {world: np.asarray(result["losses"][side][str(world)]) for world in WORLDS}
        for (world, losses), colour, width in zip(
            lines.items(), panels.colours, WIDTHS, strict=True
        ):
            steps = np.arange(1, len(losses) + 1)
            label = f"{world} rank{'s' if world > 1 else ''}"
            above.plot(steps, losses, color=colour, lw=width, label=label)
            below.plot(steps, losses - lines[1], color=colour, lw=0.5 * width + 0.6)
        apart = result["summary"][SHOWN][side]["spread"]
        above.set_title(f"{title} {result['trainers'][side]}", color=panels.ink, fontsize=15)
        below.set_title(f"largest difference {apart:.1g}", color=panels.ink, fontsize=14)
        below.set_xlabel("step")
    panels.columns[0, 0].set_ylabel("training loss")
    panels.columns[0, 1].set_ylabel("difference to 1")
    panels.columns[0, 0].legend(frameon=False, labelcolor=panels.ink)
    panels.save(place, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank-of", choices=list(SIDES), help="used by itself: one rank's part")
    parser.add_argument("--home", type=Path)
    parser.add_argument("--draw", action="store_true", help="the pictures, from the result file")
    given = parser.parse_args()
    if given.rank_of:
        one_rank(given.rank_of, given.home)
        return
    if not given.draw:
        with tempfile.TemporaryDirectory() as scratch:
            found = measure(Path(scratch))
        check_fair(found)
        print(write("curves", result_of(found)))
    for path in RESULTS.glob("curves-*.json"):
        result = json.loads(path.read_text())
        for dark, name in ((False, "curves.png"), (True, "curves-dark.png")):
            draw(result, DOCS / name, dark=dark)


def result_of(found: Found) -> dict[str, Any]:
    versions = {"samecurve": samecurve.__version__, **installed(SIDES)}
    shown = {
        side: {world: of["losses"] for world, of in of_worlds.items()}
        for side, of_worlds in found[SHOWN].items()
    }
    cases = {name: asdict(case) for name, case in CASES.items()}
    fixed = {"batch": BATCH, "microbatch": MICRO, "steps": STEPS, "lr": LR, "clip": CLIP}
    return {
        "trainers": versions,
        "cases": cases,
        **fixed,
        "summary": summary(found),
        "losses": shown,
    }


if __name__ == "__main__":
    main()

"""Does the number of devices change an image generator's loss curve? A small UNet on drawn shapes
under Samecurve on 1, 2 and 3 CPU ranks, and under a plain loop on 1 and 2 that seeds noise as
today's trainers do: benchmarks/noise_seeding_side.py.

All runs begin with the same weights and have the same global batch and learning rate, in float32.
Under the plain loop even the pictures of each step are the same, so that its curves part by their
noise alone. The held-out loss is measured by one function with fixed noise, on the weights that
each run has after every 10th step.

Writes benchmarks/results/noise-seeding-<cpu>.json, docs/noise-seeding.png and
docs/noise-seeding-dark.png. Run: python -m benchmarks.noise_seeding; --draw: the pictures alone,
from the result file.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import samecurve
from benchmarks.common import RESULTS, installed, run_ranks, write
from benchmarks.curve_panels import WIDTHS, CurvePanels
from benchmarks.noise_seeding_side import (
    BATCH,
    COUNT,
    EVERY,
    LR,
    SIDES,
    STEPS,
    WAYS,
    Curve,
    config,
    first_model,
    first_weights,
    held_out_loss,
    open_task,
    write_pictures,
)
from samecurve.checkpoint.format import load

OURS = "samecurve"
WORLDS = {OURS: (1, 2, 3), **dict.fromkeys(WAYS, (1, 2))}
TITLES = {
    OURS: "Samecurve: noise of (seed, epoch, picture)",
    "step and rank": "plain loop: seed step x ranks + rank",
    "rank": "plain loop: seed + rank, once",
}
DOCS = Path(__file__).parent.parent / "docs"
Found = dict[str, dict[str, Curve]]  # side -> number of ranks -> its curve


def ours(world: int, home: Path) -> Curve:
    values = config(home / "set")
    values["train"] |= {"save_every": EVERY, "keep": 0}
    values["devices"]["use"] = f"cpu:{world}"
    run = samecurve.train(
        values, quiet=True, save_dir=str(home / f"ours-{world}"), init_from=str(first_weights(home))
    )
    task = open_task(home / "set", home / "cache")
    model = first_model(task, home)
    held_out = {0: held_out_loss(task, model)}
    for step in range(EVERY, STEPS + 1, EVERY):
        arrays = load(run.directory / "checkpoints" / f"step-{step:08d}").arrays
        model.load_state_dict(
            {name: torch.from_numpy(arrays[f"model/{name}"]) for name in model.state_dict()}
        )
        held_out[step] = held_out_loss(task, model)
    return Curve([loss for loss in run.losses if loss is not None], held_out, 0)


def others(way: str, world: int, home: Path) -> Curve:
    place = home / f"{way}-{world}.json"
    run_ranks(
        world,
        "benchmarks.noise_seeding",
        *("--rank-of", way, "--home", str(home), "--into", str(place)),
    )
    left = json.loads(place.read_text())
    held_out = {int(step): loss for step, loss in left["held_out"].items()}
    return Curve(left["train"], held_out, left["dropped"])


def measure(home: Path) -> Found:
    torch.set_num_threads(1)
    write_pictures(home / "set")
    first_model(open_task(home / "set", home / "cache"), home)
    found: Found = {}
    for side, worlds in WORLDS.items():
        found[side] = {}
        for world in worlds:
            run = ours(world, home) if side == OURS else others(side, world, home)
            found[side][str(world)] = run
            print(f"{side} on {world}: {run.held_out[STEPS]:.6f}", flush=True)
    return found


def largest_difference(curves: Sequence[Sequence[float]]) -> float:
    """Of any curve from the first one, as a share of it, at any step."""
    values = np.asarray(curves)
    return float(np.abs(values / values[0] - 1).max())


def result_of(found: Found) -> dict[str, Any]:
    summary = {}
    for side, by_world in found.items():
        measured = [list(curve.held_out.values()) for curve in by_world.values()]
        summary[side] = {
            "held_out": largest_difference(measured),
            "train": largest_difference([curve.train for curve in by_world.values()]),
            "pictures_dropped": next(iter(by_world.values())).dropped,
        }
    fixed = {"batch": BATCH, "steps": STEPS, "pictures": COUNT, "lr": LR}
    curves = {side: {w: asdict(c) for w, c in of.items()} for side, of in found.items()}
    versions = {"samecurve": samecurve.__version__, **installed(["diffusers"])}
    return {"trainers": versions, **fixed, "summary": summary, "curves": curves}


def draw(result: Mapping[str, Any], place: Path, *, dark: bool) -> None:
    """Draw each side's held-out losses on each number of ranks, and below how far each step's loss
    is from that of one rank.
    """
    panels = CurvePanels(len(WORLDS), height=5.8, font=13, dark=dark)
    for (above, below), (side, worlds) in zip(panels.columns, WORLDS.items(), strict=True):
        for world, colour, width in zip(worlds, panels.colours, WIDTHS, strict=False):
            curve = result["curves"][side][str(world)]
            steps = [int(step) for step in curve["held_out"]]
            label = f"{world} rank{'s' if world > 1 else ''}"
            wide = width if side == OURS else 1.8
            above.plot(steps, list(curve["held_out"].values()), color=colour, lw=wide, label=label)
            alone = np.asarray(result["curves"][side]["1"]["train"])
            share = 100 * (np.asarray(curve["train"]) / alone - 1)
            below.plot(np.arange(1, len(share) + 1), share, color=colour, lw=0.5 * wide + 0.6)
        apart = result["summary"][side]
        above.set_title(
            f"{TITLES[side]}\nlargest difference {_share(apart['held_out'])}", fontsize=13
        )
        below.set_title(f"largest difference {_share(apart['train'])}", fontsize=13)
        below.set_xlabel("step")
        above.legend(frameon=False, labelcolor=panels.ink)
    panels.columns[0, 0].set_ylabel("held-out loss, fixed noise")
    panels.columns[0, 1].set_ylabel("each step's loss,\n% from 1 rank's")
    panels.save(place, dpi=100)


def _share(difference: float) -> str:
    return f"{difference:.1%}" if difference >= 0.001 else f"{difference:.1g}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank-of", choices=list(SIDES), help="used by itself: one rank's part")
    parser.add_argument("--home", type=Path)
    parser.add_argument("--into", type=Path)
    parser.add_argument("--draw", action="store_true", help="the pictures, from the result file")
    given = parser.parse_args()
    if given.rank_of:
        curve = SIDES[given.rank_of](given.home)
        given.into.write_text(json.dumps(asdict(curve)))  # every rank has the same
        return
    if not given.draw:
        with tempfile.TemporaryDirectory() as scratch:
            print(write("noise-seeding", result_of(measure(Path(scratch)))))
    for path in RESULTS.glob("noise-seeding-*.json"):
        result = json.loads(path.read_text())
        for dark, name in ((False, "noise-seeding.png"), (True, "noise-seeding-dark.png")):
            draw(result, DOCS / name, dark=dark)


if __name__ == "__main__":
    main()

"""The same batch on 1, 2 and 4 CPU ranks: a tiny model of the transformers library under Samecurve,
HF Trainer and Accelerate, each started by plain torchrun (ours by its own verb) and used as its
documentation advises: benchmarks/same_batch_sides.py.

The spread of a trainer is the largest difference between its three curves at any step, in nats. All
causes at once, then each alone:

- none of them: a trainer's three curves must agree, else the comparison would be wrong;
- one batch: all documents in each step, of unlike length, so that the order does not matter: all
  curves of the trainers that count tokens must agree;
- same order (one rank): each trainer reads the documents in our order: they must agree, too;
- ragged documents, short tail, dropout, router balance (a mixture of experts).

Writes benchmarks/results/same-batch-<cpu>.json. Run: python -m benchmarks.same_batch (the extra
`bench`). --write DIR: the config, the documents and the model of one case, for a run by hand.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml

import samecurve
from benchmarks.common import installed, run_ranks, spread, write
from benchmarks.same_batch_sides import (
    BATCH,
    BETAS,
    CASES,
    CLIP,
    LR,
    ORDERED,
    SEED,
    SIDES,
    STEPS,
    Case,
    cases_of,
    documents,
    held_out,
    write_model,
)

WORLDS = (1, 2, 4)
COUNTING = ("samecurve", "trainer", "accelerate")  # tokens, not means
AGREE = 1e-4  # nats: float32, in other orders of addition
Found = dict[str, dict[str, dict[str, Any]]]  # case -> trainer -> world -> what it left


def write_case(case: Case, home: Path) -> dict[str, Any]:
    """Documents, model and config in a directory. Returns the config."""
    home.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": text}) for text in documents(case)]
    (home / "documents.jsonl").write_text("\n".join(lines) + "\n")
    write_model(home / "model", case)
    config = {
        "task": "huggingface",
        "model": {"path": str(home / "model")},
        "data": {
            "source": str(home / "documents.jsonl"),
            "tokenizer": "bytes",
            "seq_len": 256,
            "packing": False,
            "validation": 0,
        },
        "batch": {"samples": BATCH, "per_device": case.micro},
        "optimizer": {"lr": LR, "betas": list(BETAS), "weight_decay": 0.0, "clip": CLIP},
        "schedule": {"decay": "constant"},
        "train": {"steps": f"{case.epochs}ep", "seed": SEED, "exact": False},
        "devices": {"threads": 1},
    }
    (home / "same.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return config


def ours(case: Case, world: int, home: Path) -> dict[str, Any]:
    config = write_case(case, home)
    config["devices"]["use"] = f"cpu:{world}"
    run = samecurve.train(config, quiet=True, save_dir=str(home / "run"))
    return {"losses": run.losses, "held_out": held_out(samecurve.load(run), case)}


def others(side: str, world: int, home: Path) -> dict[str, Any]:
    """Every case, in as many processes, started as torch's launcher does it."""
    home.mkdir()
    run_ranks(world, "benchmarks.same_batch_sides", side, "--into", str(home))
    curves: dict[str, Any] = json.loads((home / "rank-0.json").read_text())
    return curves


def measure(home: Path) -> Found:
    found: Found = {name: {side: {} for side in ("samecurve", *SIDES)} for name in CASES}
    for world in WORLDS:
        for side in SIDES:
            for name, curve in others(side, world, home / f"{side}-{world}").items():
                found[name][side][str(world)] = curve
            print(f"{side} on {world}", flush=True)
        for name in cases_of(world):
            place = home / f"ours-{world}-{name.replace(' ', '-')}"
            found[name]["samecurve"][str(world)] = ours(CASES[name], world, place)
        print(f"samecurve on {world}", flush=True)
    return found


def check_fair(found: Found) -> None:
    """SystemExit: curves that must agree don't, so the comparison says nothing."""
    for side, of_worlds in found["none of them"].items():
        apart = spread([of["losses"] for of in of_worlds.values()])
        if apart > AGREE:
            sys.exit(f"{side} with none of the causes: curves {apart:.1e} apart")
    for name in ("one batch", ORDERED):
        apart = spread([of["losses"] for side in COUNTING for of in found[name][side].values()])
        if apart > AGREE:
            sys.exit(f"{name}: those that count tokens are {apart:.1e} apart")


def between(sides: Sequence[str], of_case: dict[str, dict[str, Any]]) -> dict[str, float]:
    """On one rank: the largest difference of each pair's losses at any step."""
    return {
        f"{a} and {b}": spread([of_case[a]["1"]["losses"], of_case[b]["1"]["losses"]])
        for a, b in combinations(sides, 2)
    }


def summary(found: Found) -> dict[str, Any]:
    """By case and trainer: the spread over worlds of what it says and of what it ends with."""
    result: dict[str, Any] = {}
    for name, sides in found.items():
        result[name] = {}
        for side, of_worlds in sides.items():
            ends = [of["held_out"] for of in of_worlds.values()]
            result[name][side] = {
                "spread": spread([of["losses"] for of in of_worlds.values()]),
                "last_losses": {world: of["losses"][-1] for world, of in of_worlds.items()},
                "held_out": {world: of["held_out"] for world, of in of_worlds.items()},
                "held_out_spread": max(ends) - min(ends),
            }
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path, metavar="DIR")
    parser.add_argument("--case", choices=list(CASES), default="all", help="the one to write")
    arguments = parser.parse_args()
    if arguments.write:
        write_case(CASES[arguments.case], arguments.write)
        print(f"samecurve train -f {arguments.write}/same.yaml --devices cpu:2")
        return
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(Path(scratch))
    check_fair(found)
    result = {
        "trainers": {
            "samecurve": samecurve.__version__,
            **installed(("transformers", "accelerate")),
        },
        "cases": {name: asdict(case) for name, case in CASES.items()},
        **{"batch": BATCH, "steps": STEPS, "lr": LR, "clip": CLIP},
        "summary": summary(found),
        "same_order": between(COUNTING, found[ORDERED]),
        "one_batch": spread(
            [of["losses"] for side in COUNTING for of in found["one batch"][side].values()]
        ),
        "losses": {
            side: {world: of["losses"] for world, of in of_worlds.items()}
            for side, of_worlds in found["all"].items()
        },
    }
    print(write("same-batch", result))


if __name__ == "__main__":
    main()
